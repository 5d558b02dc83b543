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

MOE_DEVICE moe_gpu_entry entry_of(const moe_gpu_args &a, const give_item &item,
                                  uint32_t i)
{
    moe_gpu_entry e = {__shfl_sync(ALL_LANES, item.entry.row, i & 31),
                       __shfl_sync(ALL_LANES, item.entry.weight, i & 31)};
    if (i >= WARP) /* beyond what the lanes hold */
        e = entries_of(a, item)[i];
    return e;
}

/* The entries of an item; the first counts whatever it says. */
MOE_DEVICE uint32_t count_entries(const moe_gpu_args &a, const give_item &item)
{
    uint32_t n = 1;
    while (n < a.geo.top_k && entry_of(a, item, n).row >= 0)
        n++;
    return n;
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
    float amax = finite_amax(x, 8);
#pragma unroll
    for (int d = 8; d > 0; d >>= 1)
        amax = fmaxf(amax, __shfl_xor_sync(ALL_LANES, amax, d));
    const fp8_scale s = scale_of(amax, MOE_GPU_FP8);
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
MOE_DEVICE void give_part(const moe_gpu_args &a, const give_item &item, uint32_t begin,
                          uint32_t end, bool raw, const wire_part &p, line_tag tag,
                          unsigned char *out, uint32_t *used)
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
            const moe_gpu_entry e = entry_of(a, item, i);
            float x[8];
            load_eight<TYPE>(a,
                             (const unsigned char *)a.expert_out +
                                 (uint64_t)(uint32_t)e.row * a.geo.give.data_bytes,
                             p.first + at, x);
#pragma unroll
            for (int j = 0; j < 8; j++)
                acc[j] = raw ? x[j] : __fmaf_rn(e.weight, x[j], acc[j]);
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

/* Sends every `stride`-th part from `first` on of what this rank has for a token. */
template <int TYPE>
MOE_DEVICE void give_wire_item(const moe_gpu_args &a, step_view v, uint32_t to,
                               uint32_t token, uint32_t first, uint32_t stride,
                               uint32_t *used)
{
    const uint32_t lane = threadIdx.x & 31;
    give_item item = {to, token, {MOE_GPU_NO_ROW, 0}};
    if (lane < a.geo.top_k)
        item.entry = entries_of(a, item)[lane];
    const int32_t head = __shfl_sync(ALL_LANES, item.entry.row, 0);
    if (head == MOE_GPU_NO_ROW)
        return;
    bool dropped = head == MOE_GPU_DROPPED_ROW, apart = false;
    if (a.geo.keeps) {
        const uint32_t unweighted = a.lane.state->unweighted;
        apart = wants_apart(a, to, unweighted);
        if (!apart && !dropped && (unweighted >> to & 1))
            dropped = !await_weights<TYPE, false>(a, v, &item);
    }
    const bool raw = apart || rows_are_sums(a);
    const uint32_t n = rows_are_sums(a) ? 1 : count_entries(a, item);
    line_tag tag = v.tag;
    tag.kind |= (dropped ? TAG_DROPPED : 0) | (apart ? TAG_APART : 0);
#pragma unroll 1
    for (uint32_t number = first; number < a.geo.parts; number += stride) {
        const wire_part p = part_of(a, number);
        unsigned char *at =
            (unsigned char *)a.base[to] + v.half + (uint64_t)number * PART_BYTES;
        if (!apart)
            give_part<TYPE>(a, item, 0, dropped ? 0 : n, raw, p, tag,
                            at + moe_gpu_take(&a.geo, token, a.rank), used);
#pragma unroll 1
        for (uint32_t i = 0; apart && i < n; i++) {
            const uint32_t place = __float_as_uint(entry_of(a, item, i).weight);
            give_part<TYPE>(a, item, i, dropped ? i : i + 1, raw, p, tag,
                            at + moe_gpu_take(&a.geo, token, place), used);
        }
    }
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
        for (uint32_t t = first; t < n; t += a.plan.give_classes)
            give_wire_item<TYPE>(a, v, to, t, part, parts, used);
    }
}

/* ---------------------------------------------------------------------- receiving */

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
MOE_DEVICE bool await_lines(const moe_gpu_args &a, const unsigned char *part,
                            const unit_lines &u, line_tag tag, uint32_t places,
                            uint32_t most)
{
    const uint32_t lane = threadIdx.x & 31;
    const uint64_t want = (uint64_t)tag.kind << 32 | tag.step;
#pragma unroll 1
    while (places) {
        uint32_t mine = places, polls = 0;
        for (uint32_t i = 0; i < lane >> 3; i++)
            mine &= mine - 1;
        const unsigned char *at =
            part + (mine ? __ffs(mine) - 1 : 0) * (uint64_t)a.geo.give.stride;
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
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t halves;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;"
            : "=r"(halves)
            : "h"((uint16_t)(eight >> (16 * i))));
        const float2 f = __half22float2(*reinterpret_cast<__half2 *>(&halves));
        x[2 * i] = __fmul_rn(f.x, scale);
        x[2 * i + 1] = __fmul_rn(f.y, scale);
    }
}

#endif
