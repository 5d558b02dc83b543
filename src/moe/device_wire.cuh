/* SPDX-License-Identifier: Apache-2.0 */
/* Contributions of combine in another type than rows have: F32, or FP8 with scales. */
#ifndef MOE_DEVICE_WIRE_CUH
#define MOE_DEVICE_WIRE_CUH

#include "moe/device_give.cuh"

/*
 * A contribution is divided into parts of geo.part_elements elements, each in lines of
 * its own. FP8 has 128 elements for one scale, which comes behind the part's elements:
 *
 *   part  | 8-bit elements, up to 14 x 128 | 14 scales |      F32  | 480 elements |
 *
 * A warp puts a part together in shared memory, 8 elements a lane at a time, and hands it
 * to the copy engine. The owner waits for the lines that 256 elements need, then reads
 * them again by lanes of 8 elements.
 */
enum { UNIT = 256 }; /* elements that a warp handles at once */

struct wire_part {
    uint32_t first, count; /* elements of the row */
    uint32_t scale_at, pairs;
};

MOE_DEVICE wire_part part_of(const moe_gpu_args &a, uint32_t number)
{
    wire_part p;
    p.first = number * a.geo.part_elements;
    p.count = min(a.geo.part_elements, a.hidden - p.first);
    p.scale_at = (p.count + 127) & ~127u;
    p.pairs =
        min(2u * MOE_GPU_PART_MOST, a.geo.give.pairs - number * 2u * MOE_GPU_PART_MOST);
    return p;
}

/* Where the scale of a part's element `at` is. */
MOE_DEVICE uint32_t scale_offset(const wire_part &p, uint32_t at)
{
    const uint32_t group = at >> 7;
    return packed_offset((p.scale_at + group * 4) & ~7u) + (group & 1) * 4;
}

/* 8 elements of a row as it is; those beyond its end are 0. */
template <int TYPE>
MOE_DEVICE void load_eight(const moe_gpu_args &a, const void *row, uint32_t first,
                           float *x)
{
    typedef element<TYPE> e;
    const uint32_t bytes = a.geo.give.data_bytes;
#pragma unroll
    for (int i = 0; i < 8 / e::COUNT; i++) {
        const uint32_t at = (first + i * e::COUNT) * e::BYTES;
        e::unpack(a.wide ? load_vector<true>(row, at, bytes)
                         : load_vector<false>(row, at, bytes),
                  x + i * e::COUNT);
    }
}

/* ------------------------------------------------------------------------ sending */

MOE_DEVICE moe_gpu_entry entry_of(const moe_gpu_args &a, step_view v,
                                  const give_item &item, uint32_t i)
{
    moe_gpu_entry e = {__shfl_sync(ALL_LANES, item.entry.row, i & 31),
                       __shfl_sync(ALL_LANES, item.entry.weight, i & 31)};
    if (i >= WARP)
        e = entry_beyond(a, v, item, i);
    return e;
}

/* The entries of an item; the first counts whatever it says. */
MOE_DEVICE uint32_t count_entries(const moe_gpu_args &a, step_view v,
                                  const give_item &item)
{
    uint32_t n = 1;
    while (n < a.geo.top_k && entry_of(a, v, item, n).row >= 0)
        n++;
    return n;
}

/* How rows become a contribution: as one is, their sum, or their sum after each went
 * through the wire. */
enum wire_form { WIRE_RAW, WIRE_SUM, WIRE_ROUNDED };

/* Four values of e4m3 as f32. */
MOE_DEVICE void from_e4m3(uint32_t four, float scale, float *x)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t halves;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;"
            : "=r"(halves)
            : "h"((uint16_t)(four >> (16 * i))));
        const float2 f = __half22float2(*reinterpret_cast<__half2 *>(&halves));
        x[2 * i] = __fmul_rn(f.x, scale);
        x[2 * i + 1] = __fmul_rn(f.y, scale);
    }
}

/* The scale of 8 elements, which 16 lanes share. */
MOE_DEVICE fp8_scale wire_scale(const float *x)
{
    float amax = finite_amax(x, 8);
#pragma unroll
    for (int d = 8; d > 0; d >>= 1)
        amax = fmaxf(amax, __shfl_xor_sync(ALL_LANES, amax, d));
    return scale_of(amax, MOE_GPU_FP8);
}

/* 8 elements as FP8 and back. */
MOE_DEVICE void round_wire(float *x)
{
    const fp8_scale s = wire_scale(x);
    const float scale = __uint_as_float(s.bits);
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] = __fmul_rn(x[i], s.inverse);
    const uint32_t low = four_e4m3(x[0], x[1], x[2], x[3]),
                   high = four_e4m3(x[4], x[5], x[6], x[7]);
    from_e4m3(low, scale, x);
    from_e4m3(high, scale, x + 4);
}

/* A member of a DP group that is not counted on may want the experts apart, so a holder
 * rounds as if it did; with FP8 that shows. */
MOE_DEVICE bool rounds_rows(const moe_gpu_args &a, uint32_t to)
{
    const uint32_t group = ((2u << (a.dp - 1)) - 1) << to / a.dp * a.dp;
    return a.wire == MOE_GPU_WIRE_FP8 && a.dp > 1 && a.geo.weight_packets &&
           (~a.lane.state->own_mask & group);
}

/* Puts 8 elements of a part into the stage; lanes exchange maxima. */
MOE_DEVICE void stage_wire(const moe_gpu_args &a, const wire_part &p, uint32_t at,
                           float *x, unsigned char *stage)
{
    if (a.wire == MOE_GPU_WIRE_F32) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (at < p.count)
                *(uint2 *)(stage + packed_offset(at * 4 + i * 8)) =
                    make_uint2(__float_as_uint(x[2 * i]), __float_as_uint(x[2 * i + 1]));
        return;
    }
    const fp8_scale s = wire_scale(x);
    if (at >= p.count)
        return;
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] = __fmul_rn(x[i], s.inverse);
    *(uint2 *)(stage + packed_offset(at)) =
        make_uint2(four_e4m3(x[0], x[1], x[2], x[3]), four_e4m3(x[4], x[5], x[6], x[7]));
    if ((at & 127) == 0)
        *(uint32_t *)(stage + scale_offset(p, at)) = s.bits;
}

/* Sends a part: the weighted sum of entries `begin` to `end`, or of one as it is. */
template <int TYPE>
MOE_DEVICE void give_part(const moe_gpu_args &a, step_view v, const give_item &item,
                          uint32_t begin, uint32_t end, enum wire_form form,
                          const wire_part &p, line_tag tag, unsigned char *out,
                          uint32_t *used)
{
    const uint32_t lane = threadIdx.x & 31;
    unsigned char *stage = own_rings() + PIECES_BYTES + *used % MOE_GPU_RING * PART_BYTES;
    if (++*used > MOE_GPU_RING) {
        bulk_wait<MOE_GPU_RING - 1>();
        __syncwarp();
    }
#pragma unroll 1
    for (uint32_t base = 0; begin < end && base < p.count; base += UNIT) {
        const uint32_t at = base + lane * 8;
        float acc[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 1
        for (uint32_t i = begin; i < end; i++) {
            const moe_gpu_entry e = entry_of(a, v, item, i);
            float x[8];
            load_eight<TYPE>(a,
                             (const unsigned char *)a.expert_out +
                                 (uint64_t)(uint32_t)e.row * a.geo.give.data_bytes,
                             p.first + at, x);
            if (form == WIRE_ROUNDED)
                round_wire(x);
#pragma unroll
            for (int j = 0; j < 8; j++)
                acc[j] = form == WIRE_RAW ? x[j] : __fmaf_rn(e.weight, x[j], acc[j]);
        }
        stage_wire(a, p, at, acc, stage);
    }
    if (lane < p.pairs * 2)
        *(uint2 *)(stage + tag_offset(lane)) = make_uint2(tag.step, tag.kind);
    bulk_fence();
    __syncwarp();
    if (lane == 0)
        bulk_store(out, shared_address(stage), p.pairs * MOE_GPU_PAIR);
    bulk_commit();
}

/* Sends every `stride`-th part from `first` on of what this rank has for a token; of how
 * many experts apart. */
template <int TYPE>
MOE_DEVICE uint32_t give_wire_item(const moe_gpu_args &a, step_view v, uint32_t to,
                                   uint32_t token, uint32_t first, uint32_t stride,
                                   uint32_t *used)
{
    const uint32_t lane = threadIdx.x & 31;
    give_item item = {to, token, false, {MOE_GPU_NO_ROW, 0}};
    if (lane < a.geo.top_k)
        item.entry = entries_of(a, item)[lane];
    const int32_t head = __shfl_sync(ALL_LANES, item.entry.row, 0);
    if (head == MOE_GPU_NO_ROW)
        return 0;
    bool dropped = head == MOE_GPU_DROPPED_ROW, apart = false;
    if (a.geo.keeps) {
        const uint32_t unweighted = a.lane.state->unweighted;
        apart = wants_apart(a, to, unweighted);
        if (!apart && !dropped && (unweighted >> to & 1))
            dropped = !await_weights(a, v, &item);
    }
    const enum wire_form form = apart || rows_are_sums(a) ? WIRE_RAW
                                : rounds_rows(a, item.to) ? WIRE_ROUNDED
                                                          : WIRE_SUM;
    const uint32_t n = rows_are_sums(a) ? 1 : count_entries(a, v, item);
    line_tag tag = v.tag;
    tag.kind |= (dropped ? TAG_DROPPED : 0) | (apart ? TAG_APART : 0);
#pragma unroll 1
    for (uint32_t number = first; number < a.geo.parts; number += stride) {
        const wire_part p = part_of(a, number);
        unsigned char *at =
            (unsigned char *)a.base[to] + v.half + (uint64_t)number * PART_BYTES;
        if (!apart)
            give_part<TYPE>(a, v, item, 0, dropped ? 0 : n, form, p, tag,
                            at + moe_gpu_take(&a.geo, token, a.rank), used);
#pragma unroll 1
        for (uint32_t i = 0; apart && i < n; i++) {
            const uint32_t place = __float_as_uint(entry_of(a, v, item, i).weight);
            give_part<TYPE>(a, v, item, i, dropped ? i : i + 1, form, p, tag,
                            at + moe_gpu_take(&a.geo, token, first_apart(a, to) + place),
                            used);
        }
    }
    return apart ? n : 0;
}

/* The share of a sending block. */
template <int TYPE>
MOE_DEVICE void give_wire(const moe_gpu_args &a, step_view v, uint32_t tokens,
                          uint32_t *used)
{
    const uint32_t warp = threadIdx.x / WARP, group = warp >> log_of(a.per_group);
    const uint32_t number = sender_number(a),
                   first = number >> log_of(a.plan.give_slices);
    const uint32_t part =
        (number & (a.plan.give_slices - 1)) * a.per_group + (warp & (a.per_group - 1));
    const uint32_t parts = a.plan.give_slices * a.per_group;
    for (uint32_t i = first < a.plan.give_classes ? group : a.geo.ranks; i < a.geo.ranks;
         i += a.groups) {
        const uint32_t to = rank_after(a, i), n = __shfl_sync(ALL_LANES, tokens, to);
        uint32_t apart = 0;
        for (uint32_t t = first; t < n; t += a.plan.give_classes)
            apart += give_wire_item<TYPE>(a, v, to, t, part, parts, used);
        count_for(a.lane.counters->given,
                  part == 0 && to == (threadIdx.x & 31) ? apart : 0);
    }
}

/* ---------------------------------------------------------------------- receiving */

/* A set of places, by the numbers of ranks, or of routing entries if experts come apart.
 */
template <bool APART> struct place_set {
    typedef uint32_t type;
};
template <> struct place_set<true> {
    typedef uint64_t type;
};

MOE_DEVICE uint32_t first_place(uint32_t set)
{
    return __ffs(set) - 1;
}

MOE_DEVICE uint32_t first_place(uint64_t set)
{
    return __ffsll((long long)set) - 1;
}

/* What comes for an own token: a contribution for each of some places. */
template <bool APART> struct expectation {
    typename place_set<APART>::type places;
};
template <> struct expectation<true> {
    uint64_t places;
    by_entry<float> weight;
    by_entry<uint32_t> entry; /* what is kept of it */
    by_entry<uint32_t> first; /* of its holder's places */
};

/* Where the contribution of a number lies, whose it is, and what it is weighed by. */
MOE_DEVICE uint32_t place_of(const expectation<false> &, uint32_t number)
{
    return number;
}

MOE_DEVICE uint32_t place_of(const expectation<true> &x, uint32_t number)
{
    return number + entry_at(x.first, number);
}

MOE_DEVICE uint32_t giver_of(const expectation<false> &, uint32_t number)
{
    return number;
}

MOE_DEVICE uint32_t giver_of(const expectation<true> &x, uint32_t number)
{
    return entry_at(x.entry, number) & 0xff;
}

MOE_DEVICE float weight_of(const expectation<false> &, uint32_t)
{
    return 0.0f;
}

MOE_DEVICE float weight_of(const expectation<true> &x, uint32_t number)
{
    return entry_at(x.weight, number);
}

/* The lines of a part that one unit needs: those of its elements, then of its scales. */
struct unit_lines {
    uint32_t first, elements, count;
    uint32_t scales; /* the first line of theirs */
};

MOE_DEVICE unit_lines lines_of(const moe_gpu_args &a, const wire_part &p, uint32_t base)
{
    const bool fp8 = a.wire == MOE_GPU_WIRE_FP8;
    const uint32_t size = fp8 ? 1 : 4, end = min(base + UNIT, p.count) * size - 1;
    unit_lines u;
    u.first = base * size / MOE_GPU_PAIR_DATA * 2;
    u.elements = end / MOE_GPU_PAIR_DATA * 2 + 2 - u.first;
    u.scales = (p.scale_at + (base >> 5)) / MOE_GPU_PAIR_DATA * 2;
    u.count = u.elements + (fp8 ? 2 : 0);
    return u;
}

/* Waits a while for these lines of the contributions of `places`, four of them at once.
 */
template <bool APART>
MOE_DEVICE bool await_lines(const moe_gpu_args &a, const unsigned char *part,
                            const unit_lines &u, line_tag tag,
                            const expectation<APART> &x,
                            typename place_set<APART>::type places, uint32_t most)
{
    const uint32_t lane = threadIdx.x & 31;
    const uint64_t want = (uint64_t)tag.kind << 32 | tag.step;
#pragma unroll 1
    while (places) {
        typename place_set<APART>::type mine = places;
        uint32_t polls = 0;
        for (uint32_t i = 0; i < lane >> 3; i++)
            mine &= mine - 1;
        const unsigned char *at = part + place_of(x, mine ? first_place(mine) : 0) *
                                             (uint64_t)a.geo.give.stride;
        for (;;) {
            bool whole = true;
            for (uint32_t i = lane & 7; mine && i < u.count; i += 8) {
                const uint32_t line =
                    i < u.elements ? u.first + i : u.scales + i - u.elements;
                whole &= load_long((const uint64_t *)(at + tag_offset(line))) == want;
            }
            if (__all_sync(ALL_LANES, whole))
                break;
            if (++polls == most)
                return false;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            places &= places - 1;
    }
    return true;
}

/* 8 elements as f32, exactly. */
MOE_DEVICE void read_wire(const moe_gpu_args &a, const unsigned char *part,
                          const wire_part &p, uint32_t at, float *x)
{
    if (a.wire == MOE_GPU_WIRE_F32) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint64_t two =
                load_long((const uint64_t *)(part + packed_offset(at * 4 + i * 8)));
            x[2 * i] = __uint_as_float((uint32_t)two);
            x[2 * i + 1] = __uint_as_float((uint32_t)(two >> 32));
        }
        return;
    }
    const uint64_t eight = load_long((const uint64_t *)(part + packed_offset(at)));
    const float scale =
        __uint_as_float(load_word((const uint32_t *)(part + scale_offset(p, at))));
    from_e4m3((uint32_t)eight, scale, x);
    from_e4m3((uint32_t)(eight >> 32), scale, x + 4);
}

#endif
