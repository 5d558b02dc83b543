/* SPDX-License-Identifier: Apache-2.0 */
/* Contributions of combine in parts: in another type than rows have (F32, or FP8 with
 * scales), or with a flag for each part. */
#ifndef MOE_DEVICE_WIRE_CUH
#define MOE_DEVICE_WIRE_CUH

#include "moe/device_give.cuh"

/*
 * A contribution is divided into parts of geo.part_elements elements, each in lines of
 * its own. FP8 has 128 elements for one scale, which comes behind the part's elements:
 *
 *   part  | 8-bit elements, up to 7 x 128 | 7 scales |      F32  | 240 elements |
 *
 * A warp puts a part together in shared memory, 8 elements a lane at a time, and hands it
 * to the copy engine. The owner waits for the lines that 256 elements need, then reads
 * them again by lanes of 8 elements.
 *
 * PLAIN: a part lies as it is, and the tag of its last line is its flag. A warp writes
 * some parts, lets them arrive, and raises their flags; never does it wait for a peer
 * with flags that are not raised.
 */
enum {
    UNIT = 256, /* elements that a warp handles at once */
    WIRE_RING = RINGS_BYTES / PART_BYTES
};

/* The parts of a warp on their way out. If they are plain, lane i has the flag of part i
 * of the `waiting` whose flags are not raised. */
struct wire_ring {
    uint32_t used, waiting;
    uint64_t *flag;
    uint64_t word;
};

struct wire_part {
    uint32_t first, count; /* elements of the row */
    uint32_t scale_at, pairs;
    uint32_t bytes; /* if it is plain */
};

/* Of the place of each part but the last. */
MOE_DEVICE uint32_t part_bytes(const moe_gpu_args &a)
{
    return a.geo.part_pairs * MOE_GPU_PAIR;
}

template <int TYPE> MOE_DEVICE wire_part part_of(const moe_gpu_args &a, uint32_t number)
{
    wire_part p;
    p.first = number * a.geo.part_elements;
    p.count = min(a.geo.part_elements, a.hidden - p.first);
    p.scale_at = (p.count + 127) & ~127u;
    p.pairs = min(a.geo.part_pairs, a.geo.give.pairs - number * a.geo.part_pairs);
    const uint32_t size = a.wire == MOE_GPU_WIRE_F32 ? 4 : (uint32_t)element<TYPE>::BYTES;
    p.bytes =
        a.wire == MOE_GPU_WIRE_FP8 ? p.scale_at + (p.scale_at >> 5) : p.count * size;
    p.bytes = moe_gpu_round_up(p.bytes, 16);
    return p;
}

/* Where the scale of a part's element `at` is. */
template <bool PLAIN> MOE_DEVICE uint32_t scale_offset(const wire_part &p, uint32_t at)
{
    const uint32_t group = at >> 7;
    return wire_offset<PLAIN>((p.scale_at + group * 4) & ~7u) + (group & 1) * 4;
}

/* 8 elements of a row as it is; those beyond its end are 0. */
template <int TYPE> struct eight_of {
    uint4 v[8 / element<TYPE>::COUNT];
};

template <int TYPE, bool WIDE>
MOE_DEVICE eight_of<TYPE> load_eight(const moe_gpu_args &a, const void *row,
                                     uint32_t first)
{
    typedef element<TYPE> e;
    const uint32_t bytes = a.geo.give.data_bytes;
    eight_of<TYPE> x;
#pragma unroll
    for (int i = 0; i < 8 / e::COUNT; i++) {
        const uint32_t at = (first + i * e::COUNT) * e::BYTES;
        x.v[i] = load_vector<WIDE>(row, at, bytes);
    }
    return x;
}

template <int TYPE> MOE_DEVICE void unpack_eight(const eight_of<TYPE> &eight, float *x)
{
#pragma unroll
    for (int i = 0; i < 8 / element<TYPE>::COUNT; i++)
        element<TYPE>::unpack(eight.v[i], x + i * element<TYPE>::COUNT);
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
    const bool ends = (threadIdx.x & 31) != 0 && item.entry.row < 0;
    uint32_t n = min((uint32_t)__ffs(__ballot_sync(ALL_LANES, ends)) - 1, (uint32_t)WARP);
    while (n >= WARP && n < a.geo.top_k && entry_beyond(a, v, item, n).row >= 0)
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
template <int TYPE, bool PLAIN>
MOE_DEVICE void stage_wire(const moe_gpu_args &a, const wire_part &p, uint32_t at,
                           float *x, unsigned char *stage)
{
    if (PLAIN && a.wire == MOE_GPU_WIRE_ROW) {
        typedef element<TYPE> e;
#pragma unroll
        for (int i = 0; i < 8; i += e::COUNT)
            if (at + i < p.count)
                *(uint4 *)(stage + (at + i) * e::BYTES) = e::pack(x + i);
        return;
    }
    if (a.wire == MOE_GPU_WIRE_F32) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (at < p.count)
                *(uint2 *)(stage + wire_offset<PLAIN>(at * 4 + i * 8)) =
                    make_uint2(__float_as_uint(x[2 * i]), __float_as_uint(x[2 * i + 1]));
        return;
    }
    const fp8_scale s = wire_scale(x);
    if (at >= p.count)
        return;
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] = __fmul_rn(x[i], s.inverse);
    *(uint2 *)(stage + wire_offset<PLAIN>(at)) =
        make_uint2(four_e4m3(x[0], x[1], x[2], x[3]), four_e4m3(x[4], x[5], x[6], x[7]));
    if ((at & 127) == 0)
        *(uint32_t *)(stage + scale_offset<PLAIN>(p, at)) = s.bits;
}

/* The parts that a warp has written have arrived: says so to their owners. */
MOE_DEVICE void raise_parts(wire_ring *ring)
{
    bulk_arrived<0>();
    __syncwarp();
    if ((threadIdx.x & 31) < ring->waiting) {
        fence_system();
        store_long(ring->flag, ring->word);
    }
    ring->waiting = 0;
}

/* A part leaves the stage, with its flag not raised yet. */
MOE_DEVICE void send_plain_part(const moe_gpu_args &a, const wire_part &p, line_tag tag,
                                unsigned char *out, const unsigned char *stage,
                                uint32_t bytes, wire_ring *ring)
{
    const uint32_t lane = threadIdx.x & 31;
    if (a.geo.give_protocol == MOE_GPU_CHUNK)
        plain_store(out, stage, bytes, lane, WARP);
    else if (lane == 0 && bytes)
        bulk_store(out, shared_address(stage), bytes);
    bulk_commit();
    if (lane == ring->waiting) {
        ring->flag = (uint64_t *)(out + tag_offset(p.pairs * 2 - 1));
        ring->word = tag_word(tag);
    }
    if (++ring->waiting == MOE_GPU_CHUNK_ROWS)
        raise_parts(ring);
}

/* Adds N units of a row, 8 elements a lane in each. */
template <int TYPE, int N>
MOE_DEVICE void add_units(const eight_of<TYPE> *row, float weight, float (*acc)[8])
{
#pragma unroll
    for (int n = 0; n < N; n++) {
        float x[8];
        unpack_eight<TYPE>(row[n], x);
#pragma unroll
        for (int j = 0; j < 8; j++)
            acc[n][j] = __fmaf_rn(weight, x[j], acc[n][j]);
    }
}

/*
 * The weighted sums of N units of some rows, if these are aligned and lanes hold their
 * entries. Nothing is called in here, so that all of it stays in registers.
 */
template <int TYPE, int N>
MOE_DEVICE void sum_aligned(const moe_gpu_args &a, const give_item &item, uint32_t begin,
                            uint32_t end, uint32_t first, float (*acc)[8])
{
    enum { AHEAD = 4 };
#pragma unroll 1
    for (uint32_t i = begin; i < end; i += AHEAD) {
        eight_of<TYPE> row[AHEAD][N];
        float weight[AHEAD];
#pragma unroll
        for (uint32_t u = 0; u < AHEAD; u++) {
            const uint32_t entry = min(i + u, end - 1);
            const int32_t number = __shfl_sync(ALL_LANES, item.entry.row, entry);
            const void *from = (const unsigned char *)a.expert_out +
                               (uint64_t)(uint32_t)number * a.geo.give.data_bytes;
            weight[u] = __shfl_sync(ALL_LANES, item.entry.weight, entry);
#pragma unroll
            for (int n = 0; n < N; n++)
                if (i + u < end)
                    row[u][n] = load_eight<TYPE, true>(a, from, first + n * UNIT);
        }
#pragma unroll
        for (uint32_t u = 0; u < AHEAD; u++)
            if (i + u < end)
                add_units<TYPE, N>(row[u], weight[u], acc);
    }
}

/* The same of any rows and entries, and in any form. */
template <int TYPE, int N>
MOE_COLD void sum_any(const moe_gpu_args &a, step_view v, give_item item, uint32_t begin,
                      uint32_t end, enum wire_form form, uint32_t first, float (*acc)[8])
{
#pragma unroll 1
    for (uint32_t i = begin; i < end; i++) {
        const moe_gpu_entry e = entry_of(a, v, item, i);
        const void *from = (const unsigned char *)a.expert_out +
                           (uint64_t)(uint32_t)e.row * a.geo.give.data_bytes;
#pragma unroll 1
        for (int n = 0; n < N; n++) {
            float x[8];
            unpack_eight<TYPE>(a.wide
                                   ? load_eight<TYPE, true>(a, from, first + n * UNIT)
                                   : load_eight<TYPE, false>(a, from, first + n * UNIT),
                               x);
            if (form == WIRE_ROUNDED)
                round_wire(x);
            for (int j = 0; j < 8; j++)
                acc[n][j] =
                    form == WIRE_RAW ? x[j] : __fmaf_rn(e.weight, x[j], acc[n][j]);
        }
    }
}

/* Sends a part: the weighted sum of entries `begin` to `end`, or of one as it is. */
template <int TYPE, bool PLAIN>
MOE_DEVICE void give_part(const moe_gpu_args &a, step_view v, const give_item &item,
                          uint32_t begin, uint32_t end, enum wire_form form,
                          const wire_part &p, line_tag tag, unsigned char *out,
                          wire_ring *ring)
{
    enum { UNITS = TYPE == MOE_GPU_F32 ? 1 : 2 };
    const uint32_t lane = threadIdx.x & 31;
    unsigned char *stage = own_rings() + ring->used % WIRE_RING * PART_BYTES;
    if (++ring->used > WIRE_RING) {
        bulk_wait<WIRE_RING - 1>();
        __syncwarp();
    }
#pragma unroll 1
    for (uint32_t base = 0; begin < end && base < p.count; base += UNITS * UNIT) {
        const uint32_t at = p.first + base + lane * 8;
        float acc[UNITS][8] = {};
        if (a.wide && end <= WARP && form == WIRE_SUM) {
            sum_aligned<TYPE, UNITS>(a, item, begin, end, at, acc);
        } else {
            float all[UNITS][8] = {}; /* in memory, unlike acc */
            sum_any<TYPE, UNITS>(a, v, item, begin, end, form, at, all);
            memcpy(acc, all, sizeof(acc));
        }
#pragma unroll
        for (int n = 0; n < UNITS; n++)
            stage_wire<TYPE, PLAIN>(a, p, base + n * UNIT + lane * 8, acc[n], stage);
    }
    if (PLAIN) {
        bulk_fence();
        __syncwarp();
        send_plain_part(a, p, tag, out, stage, begin < end ? p.bytes : 0, ring);
        return;
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
template <int TYPE, bool PLAIN>
MOE_DEVICE uint32_t give_wire_item(const moe_gpu_args &a, step_view v, uint32_t to,
                                   uint32_t token, uint32_t first, uint32_t stride,
                                   wire_ring *ring)
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
        if (!apart && !dropped && (unweighted >> to & 1)) {
            if (PLAIN && ring->waiting)
                raise_parts(ring);
            dropped = !await_weights(a, v, &item);
        }
    }
    const enum wire_form form = apart || rows_are_sums(a) ? WIRE_RAW
                                : rounds_rows(a, item.to) ? WIRE_ROUNDED
                                                          : WIRE_SUM;
    const uint32_t n = rows_are_sums(a) ? 1 : count_entries(a, v, item);
    line_tag tag = v.tag;
    tag.kind |= (dropped ? TAG_DROPPED : 0) | (apart ? TAG_APART : 0);
#pragma unroll 1
    for (uint32_t number = first; number < a.geo.parts; number += stride) {
        const wire_part p = part_of<TYPE>(a, number);
        unsigned char *at =
            (unsigned char *)a.base[to] + v.half + (uint64_t)number * part_bytes(a);
#pragma unroll 1
        for (uint32_t i = 0; i < (apart ? n : 1); i++) {
            const uint32_t end = dropped ? i : apart ? i + 1 : n;
            uint32_t place = a.rank;
            if (apart)
                place =
                    first_apart(a, to) + __float_as_uint(entry_of(a, v, item, i).weight);
            give_part<TYPE, PLAIN>(a, v, item, i, end, form, p, tag,
                                   at + moe_gpu_take(&a.geo, token, place), ring);
        }
    }
    return apart ? n : 0;
}

/* All of it, at once. */
template <int TYPE, bool PLAIN>
MOE_DEVICE void send_wire_item(const moe_gpu_args &a, step_view v, uint32_t to,
                               uint32_t token)
{
    wire_ring ring = {0, 0, NULL, 0};
    give_wire_item<TYPE, PLAIN>(a, v, to, token, 0, 1, &ring);
    if (PLAIN)
        raise_parts(&ring);
    bulk_wait<0>();
    __syncwarp();
}

/* The share of a sending block: its warps take the parts of its tokens in turn. */
template <int TYPE, bool PLAIN>
MOE_DEVICE void give_wire(const moe_gpu_args &a, step_view v, uint32_t tokens)
{
    const uint32_t warp = threadIdx.x / WARP, group = warp >> log_of(a.per_group);
    const uint32_t number = sender_number(a),
                   first = number >> log_of(a.plan.give_slices);
    const uint32_t part =
        (number & (a.plan.give_slices - 1)) * a.per_group + (warp & (a.per_group - 1));
    const uint32_t warps = a.plan.give_slices * a.per_group;
    wire_ring ring = {0, 0, NULL, 0};
    for (uint32_t i = first < a.plan.give_classes ? group : a.geo.ranks; i < a.geo.ranks;
         i += a.groups) {
        const uint32_t to = rank_after(a, i), n = __shfl_sync(ALL_LANES, tokens, to);
        uint32_t apart = 0;
        uint32_t number = part;
        for (uint32_t t = first;; number += warps) {
            for (; number >= a.geo.parts; number -= a.geo.parts)
                t += a.plan.give_classes;
            if (t >= n)
                break;
            const uint32_t went =
                give_wire_item<TYPE, PLAIN>(a, v, to, t, number, a.geo.parts, &ring);
            apart += number == 0 ? went : 0;
        }
        count_for(a.lane.counters->given, to == (threadIdx.x & 31) ? apart : 0);
    }
    if (PLAIN)
        raise_parts(&ring);
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

/* Waits a while for the flags of a part, a lane for each contribution. */
template <bool APART>
MOE_DEVICE bool await_flags(const moe_gpu_args &a, const unsigned char *part,
                            const wire_part &p, line_tag tag, const expectation<APART> &x,
                            typename place_set<APART>::type places, uint32_t most)
{
    const uint32_t lane = threadIdx.x & 31;
#pragma unroll 1
    for (uint32_t first = 0; first < (APART ? 64 : 32); first += WARP) {
        const uint32_t place = place_of(x, first + lane);
        const bool mine = places >> (first + lane) & 1;
        const unsigned char *flag =
            part + place * (uint64_t)a.geo.give.stride + tag_offset(p.pairs * 2 - 1);
        uint32_t polls = 0;
        while (!__all_sync(ALL_LANES, !mine || load_acquire(flag) == tag_word(tag)))
            if (++polls == most)
                return false;
    }
    return true;
}

/* 8 elements on the wire, and their scale. */
struct wire_eight {
    uint64_t two[4];
    float scale;
};

/* What they are in rows: sent as they are. */
template <int TYPE> MOE_DEVICE uint32_t words_of(const moe_gpu_args &a)
{
    return a.wire == MOE_GPU_WIRE_FP8                          ? 1
           : a.wire == MOE_GPU_WIRE_F32 || TYPE == MOE_GPU_F32 ? 4
                                                               : 2;
}

template <int TYPE>
MOE_DEVICE wire_eight read_wire(const moe_gpu_args &a, const unsigned char *part,
                                const wire_part &p, uint32_t at)
{
    const uint32_t words = words_of<TYPE>(a);
    wire_eight e;
    e.scale = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        if (i < words)
            e.two[i] = load_long((const uint64_t *)(part + at * words + i * 8));
    if (a.wire == MOE_GPU_WIRE_FP8)
        e.scale = __uint_as_float(
            load_word((const uint32_t *)(part + scale_offset<true>(p, at))));
    return e;
}

/* As f32, exactly. */
template <int TYPE>
MOE_DEVICE void convert_wire(const moe_gpu_args &a, const wire_eight &e, float *x)
{
    if (a.wire == MOE_GPU_WIRE_FP8) {
        from_e4m3((uint32_t)e.two[0], e.scale, x);
        from_e4m3((uint32_t)(e.two[0] >> 32), e.scale, x + 4);
    } else if (TYPE == MOE_GPU_F32 || a.wire == MOE_GPU_WIRE_F32) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[2 * i] = __uint_as_float((uint32_t)e.two[i]);
            x[2 * i + 1] = __uint_as_float((uint32_t)(e.two[i] >> 32));
        }
    } else {
        element<TYPE>::unpack(make_uint4((uint32_t)e.two[0], (uint32_t)(e.two[0] >> 32),
                                         (uint32_t)e.two[1], (uint32_t)(e.two[1] >> 32)),
                              x);
    }
}

/* The lane that has a part's first scales, and which of the warp's accesses they are in:
 * they begin at a multiple of 128 B, so those from the fifth on are the next lane's. */
struct scale_place {
    uint32_t access, lane;
};

MOE_DEVICE scale_place scales_of(const wire_part &p)
{
    const uint32_t at = packed_offset(p.scale_at);
    const scale_place s = {at / MOE_GPU_ACCESS, at % MOE_GPU_ACCESS / 16};
    return s;
}

/* The scale of a lane's elements, `at` the first of them; asked by a whole warp. */
MOE_DEVICE float scale_at(uint4 scales, const scale_place &s, uint32_t at)
{
    const uint32_t group = at >> 7, lane = s.lane + (group >> 2);
    const uint32_t x = __shfl_sync(ALL_LANES, scales.x, lane),
                   y = __shfl_sync(ALL_LANES, scales.y, lane),
                   z = __shfl_sync(ALL_LANES, scales.z, lane),
                   w = __shfl_sync(ALL_LANES, scales.w, lane);
    return __uint_as_float(group & 2 ? (group & 1 ? w : z) : (group & 1 ? y : x));
}

#endif
