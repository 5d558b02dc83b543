/* SPDX-License-Identifier: Apache-2.0 */
/* Combine for small batches: weighted sums cross once as packed lines and are added here.
 */
#include "moe/device_row.cuh"
#include "moe/device_step.cuh"

/*
 * Some blocks work for this rank as a holder: for the tokens of every rank, a group of
 * warps for each rank. Others work for it as an owner, for its own tokens (struct
 * moe_gpu_plan). A holder's sum never touches local memory: it goes from registers to the
 * owner's place for it.
 *
 *   holder  acc = fmaf(w, x, acc) in f32 from +0, experts ascending, rounded once
 *   owner   the holders' rows in f32, ranks ascending, from +0; biases; old output; round
 *
 * Nothing is shared between the groups, and no barrier lies between sending and
 * receiving. Every warp puts its sums together in a ring in shared memory, from where the
 * copy engine takes them. What waits for the link there still holds up later loads of the
 * multiprocessor.
 */
enum { THREADS = MOE_GPU_COMBINE_THREADS, WARPS = THREADS / WARP, AT_ONCE = 4 };

/* [warps][RING] parts of contributions, then [turns] ranks that the block's own tokens
 * lack. */
extern __shared__ __align__(128) unsigned char shared_memory[];

MOE_DEVICE uint32_t *lost_ranks(const moe_gpu_args &a)
{
    return (uint32_t *)(shared_memory +
                        WARPS * MOE_GPU_RING * a.give_part * MOE_GPU_ACCESS);
}

/* A lane's parts of one row of the input; nothing for a negative row. */
template <bool WIDE, int N>
MOE_DEVICE void load_parts(const moe_gpu_args &a, int32_t row, const uint32_t *at,
                           uint4 *out)
{
    const uint32_t bytes = a.geo.give.data_bytes;
    if (row < 0)
        return;
    const unsigned char *from =
        (const unsigned char *)a.expert_out + (uint64_t)(uint32_t)row * bytes;
#pragma unroll
    for (int u = 0; u < N; u++)
        out[u] = load_vector<WIDE>(from, at[u], bytes);
}

/* The weighted sums of the parts that a lane has in several accesses of a row. */
template <int TYPE, bool WIDE, int N>
MOE_DEVICE void sum_rows(const moe_gpu_args &a, const moe_gpu_entry *entries,
                         moe_gpu_entry first, const uint32_t *at, uint4 *out)
{
    typedef element<TYPE> e;
    const uint32_t k = a.geo.top_k;
    float acc[N][e::COUNT];
#pragma unroll
    for (int u = 0; u < N; u++)
#pragma unroll
        for (int i = 0; i < e::COUNT; i++)
            acc[u][i] = 0.0f;
    /* The next row is on its way while this one is added. */
    uint4 v[N], next[N];
    load_parts<WIDE, N>(a, first.row, at, v);
#pragma unroll 1
    for (uint32_t r = 0; first.row >= 0;) {
        moe_gpu_entry then = {MOE_GPU_NO_ROW, 0};
        if (++r < k)
            then = entries[r];
        load_parts<WIDE, N>(a, then.row, at, next);
#pragma unroll
        for (int u = 0; u < N; u++) {
            float x[e::COUNT];
            e::unpack(v[u], x);
#pragma unroll
            for (int i = 0; i < e::COUNT; i++)
                acc[u][i] = __fmaf_rn(first.weight, x[i], acc[u][i]);
            v[u] = next[u];
        }
        first = then;
    }
#pragma unroll
    for (int u = 0; u < N; u++)
        out[u] = e::pack(acc[u]);
}

/* Puts accesses [begin, last) of a contribution together, N of them at a time. */
template <int TYPE, bool WIDE, int N>
MOE_DEVICE void fill_part(const moe_gpu_args &a, line_tag tag,
                          const moe_gpu_entry *entries, moe_gpu_entry head,
                          uint32_t begin, uint32_t last, unsigned char *buffer)
{
    const uint32_t lane = threadIdx.x & 31;
    const pair_lane place = place_in_pair(lane);
    const uint32_t inside = lane_offset(lane, place) & ~15u;
#pragma unroll 1
    for (uint32_t first = begin; first < last; first += N) {
        uint32_t at[N];
        uint4 sum[N];
#pragma unroll
        for (int u = 0; u < N; u++) /* beyond the end of the row: nothing is loaded */
            at[u] = first + u < last ? (first + u) * MOE_GPU_ACCESS_DATA + inside
                                     : 0xffffffff;
        if (a.order == MOE_GPU_RANK_MAJOR)
            load_parts<WIDE, N>(a, head.row, at, sum);
        else
            sum_rows<TYPE, WIDE, N>(a, entries, head, at, sum);
#pragma unroll
        for (int u = 0; u < N; u++)
            if (first + u < last)
                *(uint4 *)(buffer + (first + u - begin) * MOE_GPU_ACCESS + lane * 16) =
                    tagged(sum[u], place, tag);
    }
}

/*
 * A warp sends accesses [from, end) of what this rank has for token `token` of rank `to`,
 * if it has anything. `used` counts the parts that the warp has put into its ring.
 */
template <int TYPE, bool WIDE>
MOE_DEVICE void send_sum(const moe_gpu_args &a, step_view v, uint32_t to, uint32_t token,
                         uint32_t from, uint32_t end, uint32_t *used)
{
    const uint32_t part = a.give_part;
    const moe_gpu_entry *entries =
        a.lane.entries + ((uint64_t)to * a.geo.max_tokens + token) * a.geo.top_k;
    const moe_gpu_entry head = entries[0];
    unsigned char *out =
        (unsigned char *)a.base[to] + v.half + moe_gpu_take(&a.geo, token, a.rank);
    unsigned char *ring =
        shared_memory + threadIdx.x / WARP * MOE_GPU_RING * part * MOE_GPU_ACCESS;
    if (head.row == MOE_GPU_NO_ROW)
        return;
    v.tag.kind |= head.row == MOE_GPU_DROPPED_ROW;
#pragma unroll 1
    for (uint32_t begin = from; begin < end; begin += part) {
        const uint32_t last = min(begin + part, end);
        unsigned char *buffer = ring + *used % MOE_GPU_RING * part * MOE_GPU_ACCESS;
        if (++*used > MOE_GPU_RING) {
            bulk_wait<MOE_GPU_RING - 1>();
            __syncwarp();
        }
        if (part == 1)
            fill_part<TYPE, WIDE, 1>(a, v.tag, entries, head, begin, last, buffer);
        else
            fill_part<TYPE, WIDE, MOE_GPU_PART_MOST>(a, v.tag, entries, head, begin, last,
                                                     buffer);
        bulk_fence();
        __syncwarp();
        if ((threadIdx.x & 31) == 0)
            bulk_store(out + begin * MOE_GPU_ACCESS, buffer,
                       (min(last * 2, a.geo.give.pairs) - begin * 2) * MOE_GPU_PAIR);
        bulk_commit();
    }
}

/* Sources that were given up wait for nothing from here. */
MOE_DEVICE void send_drops(const moe_gpu_args &a, step_view v)
{
    const uint32_t to = threadIdx.x & 31;
    const moe_gpu_state *state = a.lane.state;
    if (to < a.geo.ranks && to != a.rank && state->dropped[to] == v.step &&
        state->tokens[to] == 0 && (state->active >> to & 1))
        store_packet((unsigned char *)a.base[to] + v.half + a.geo.drop_at +
                         (uint64_t)a.rank * MOE_GPU_LINE,
                     make_uint4(v.step, v.tag.kind | 1, 0, 0));
}

template <int TYPE, bool WIDE>
MOE_DEVICE void send_all(const moe_gpu_args &a, step_view v, uint32_t *used)
{
    const uint32_t warp = threadIdx.x / WARP, group = warp / a.per_group;
    const uint32_t number = sender_number(a), first = number / a.plan.give_slices;
    const uint32_t part =
        number % a.plan.give_slices * a.per_group + warp - group * a.per_group;
    const uint32_t from = part * a.give_share,
                   end = min(from + a.give_share, a.give_accesses);
    if (number == a.plan.senders - 1 && warp == WARPS - 1)
        send_drops(a, v);
    if (group >= a.groups || first >= a.plan.give_classes)
        return;
#pragma unroll 1
    for (uint32_t i = group; i < a.geo.ranks; i += a.groups) {
        /* The own rank comes last: its lines do not cross the link. */
        uint32_t to = a.rank + 1 + i;
        to -= to >= a.geo.ranks ? a.geo.ranks : 0;
        const uint32_t tokens = a.lane.state->tokens[to];
#pragma unroll 1
        for (uint32_t t = first; t < tokens; t += a.plan.give_classes) {
            if (part == 0)
                a.lane.sent_sums[to * a.geo.max_tokens + t] = v.step;
            send_sum<TYPE, WIDE>(a, v, to, t, from, end, used);
        }
    }
}

/*
 * A warp that waits long sends what blocks that have not been scheduled yet would send.
 * What is stored twice is stored with the same bytes.
 */
template <int TYPE, bool WIDE>
MOE_COLD void send_unsent(const moe_gpu_args &a, step_view v)
{
    uint32_t used = 0;
    bulk_wait<0>();
    __syncwarp();
    for (uint32_t to = 0; to < a.geo.ranks; to++)
        for (uint32_t t = 0; t < a.lane.state->tokens[to]; t++) {
            uint32_t *sent = &a.lane.sent_sums[to * a.geo.max_tokens + t];
            if (__all_sync(ALL_LANES, load_word(sent) == v.step))
                continue;
            if ((threadIdx.x & 31) == 0)
                *sent = v.step;
            send_sum<TYPE, WIDE>(a, v, to, t, 0, a.give_accesses, &used);
        }
    bulk_wait<0>();
}

/* ---------------------------------------------------------------------- receiving */

/*
 * What a wait does once in a while; returns the ranks that will not come, out of those
 * whose lines are not complete.
 */
template <int TYPE, bool WIDE>
MOE_COLD uint32_t look_around(const moe_gpu_args &a, step_view v, uint32_t waiting,
                              uint32_t polls)
{
    uint32_t from = __ffs(waiting) - 1;
    uint4 drop =
        load_packet(own_half(a, v.half) + a.geo.drop_at + (uint64_t)from * MOE_GPU_LINE);
    bool lost = drop.x == v.step && drop.y == (v.tag.kind | 1);
    if (wait_is_over(v.deadline, &a.lane.state->active, from))
        lost = true;
    lost = __any_sync(ALL_LANES, lost);
    if (lost && (threadIdx.x & 31) == 0)
        a.lane.state->late[from] = v.step;
    if ((polls & 0xff) == 0 && (a.phase & MOE_GPU_SEND))
        send_unsent<TYPE, WIDE>(a, v);
    return lost ? 1u << from : 0;
}

/* Up to AT_ONCE ranks; places beyond `count` repeat the first. */
struct few_ranks {
    uint32_t count;
    uint32_t rank[AT_ONCE];
};

/*
 * Waits for the lines of some contributors and returns the ranks among them that will not
 * come.
 */
template <int TYPE, bool WIDE>
MOE_DEVICE uint32_t await_lines(const moe_gpu_args &a, step_view v,
                                const unsigned char *at, const few_ranks &from,
                                bool checks, uint4 *data)
{
    uint32_t lost = 0, polls = 0;
    for (;;) {
        bool whole = true, drops = false;
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++)
            data[u] = load_packet(at + (uint64_t)from.rank[u] * a.geo.give.stride);
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            bool ok = tag_ok(data[u], v.tag, checks);
            drops |= ok && tag_drops(data[u], checks);
            whole &= ok || (lost >> from.rank[u] & 1);
        }
        if (__all_sync(ALL_LANES, whole)) {
            if (!__any_sync(ALL_LANES, drops))
                return lost;
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++)
                if (__any_sync(ALL_LANES, tag_ok(data[u], v.tag, checks) &&
                                              tag_drops(data[u], checks)))
                    lost |= 1u << from.rank[u];
            return lost;
        }
        if ((++polls & 63) != 0)
            continue;
        uint32_t waiting = 0;
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++)
            if (!__all_sync(ALL_LANES, tag_ok(data[u], v.tag, checks)))
                waiting |= 1u << from.rank[u];
        lost |= look_around<TYPE, WIDE>(a, v, waiting & ~lost, polls);
    }
}

/* What is added to the sum of the contributions: biases, then the old output. */
template <int TYPE, bool WIDE>
MOE_DEVICE void add_rest(const moe_gpu_args &a, uint32_t token, uint32_t vector_at,
                         bool upper, float *acc)
{
    typedef element<TYPE> e;
    const uint32_t bytes = a.geo.give.data_bytes;
#pragma unroll 1
    for (int i = 0; i < 3; i++) {
        const void *rest = i == 0         ? a.bias[0]
                           : i == 1       ? a.bias[1]
                           : a.accumulate ? a.result
                                          : NULL;
        if (!rest)
            continue;
        const unsigned char *from =
            (const unsigned char *)rest + (uint64_t)token * bytes + vector_at;
        uint4 v =
            WIDE ? *(const uint4 *)from : load_narrow(from, (int)bytes - (int)vector_at);
        float x[e::COUNT];
        if (upper) {
            v.x = v.z;
            v.y = v.w;
        }
        e::unpack(v, x);
#pragma unroll
        for (int j = 0; j < e::COUNT; j++)
            acc[j] += x[j];
    }
}

/* One warp-wide access of an own token; returns the contributors that it lacks. */
template <int TYPE, bool WIDE>
MOE_DEVICE uint32_t take_access(const moe_gpu_args &a, step_view v, uint32_t token,
                                uint32_t access, uint32_t ranks)
{
    typedef element<TYPE> e;
    const uint32_t lane = threadIdx.x & 31;
    const pair_lane place = place_in_pair(lane);
    const bool ignore = access * 2 + (lane >> 4) >= a.geo.give.pairs;
    const unsigned char *at = own_half(a, v.half) + moe_gpu_take(&a.geo, token, 0) +
                              (access * WARP + lane) * 16;
    float acc[e::COUNT];
    uint32_t lost = 0;
#pragma unroll
    for (int i = 0; i < e::COUNT; i++)
        acc[i] = 0.0f;
#pragma unroll 1
    while (ranks) {
        few_ranks from;
        from.count = min(__popc(ranks), (int)AT_ONCE);
        from.rank[0] = __ffs(ranks) - 1;
        ranks &= ranks - 1;
#pragma unroll
        for (int u = 1; u < AT_ONCE; u++) {
            from.rank[u] = ranks ? __ffs(ranks) - 1 : from.rank[0];
            ranks &= ranks - 1;
        }
        uint4 data[AT_ONCE];
        uint32_t bad =
            await_lines<TYPE, WIDE>(a, v, at, from, place.split && !ignore, data);
        lost |= bad;
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            float x[e::COUNT];
            e::unpack(data[u], x);
            if (u < (int)from.count && (bad >> from.rank[u] & 1) == 0) {
#pragma unroll
                for (int i = 0; i < e::COUNT; i++)
                    acc[i] += x[i];
            }
        }
    }
    const uint32_t part = access * 2 * MOE_GPU_PAIR_DATA + lane_offset(lane, place);
    if (ignore || part >= a.geo.give.data_bytes)
        return lost;
    if (a.bias[0] || a.bias[1] || a.accumulate)
        add_rest<TYPE, WIDE>(a, token, part & ~15u, place.upper, acc);
    /* What is added to the old output cannot be done again without this column's loss. */
    if (!lost || a.accumulate)
        store_part<WIDE>((unsigned char *)a.result +
                             (uint64_t)token * a.geo.give.data_bytes,
                         part, a.geo.give.data_bytes, e::pack(acc), place.split);
    return lost;
}

/* The ranks that a contribution for an own token is expected from. */
MOE_DEVICE uint32_t wanted_ranks(const moe_gpu_args &a, uint32_t token)
{
    return a.lane.own_ranks[token] & a.lane.state->sent & counted_ranks(a);
}

/*
 * Own tokens of which a contribution is missing are done again without it, so that all
 * columns of a row lack the same. What has not come by now does not come.
 */
template <int TYPE, bool WIDE>
MOE_COLD void redo_tokens(const moe_gpu_args &a, step_view v, uint32_t turns)
{
    const uint32_t warp = threadIdx.x / WARP;
    bool again = true;
    while (__syncthreads_or(again)) {
        again = false;
        for (uint32_t i = 0; i < turns; i++) {
            uint32_t t = take_class(a) + i * a.plan.take_classes,
                     without = lost_ranks(a)[i];
            __syncthreads();
            for (uint32_t c = take_slice(a) * WARPS + warp;
                 without && c < a.give_accesses; c += WARPS * a.plan.take_slices) {
                uint32_t more =
                    take_access<TYPE, WIDE>(a, v, t, c, wanted_ranks(a, t) & ~without);
                if (more && (threadIdx.x & 31) == 0)
                    atomicOr(&lost_ranks(a)[i], more);
                again |= more != 0;
            }
            __syncthreads();
        }
    }
}

template <int TYPE, bool WIDE>
MOE_DEVICE void receive_all(const moe_gpu_args &a, step_view v)
{
    const uint32_t warp = threadIdx.x / WARP, tokens = a.lane.state->tokens[a.rank];
    bool incomplete = false;
    uint32_t turns = 0;
#pragma unroll 1
    for (uint32_t t = take_class(a); t < tokens; t += a.plan.take_classes, turns++) {
        if (a.missing && threadIdx.x == 0 && take_slice(a) == 0)
            a.missing[t] = 0;
        uint32_t wanted = wanted_ranks(a, t);
        uint32_t gone = a.lane.own_ranks[t] & ~wanted;
#pragma unroll 1
        for (uint32_t c = take_slice(a) * WARPS + warp; c < a.give_accesses;
             c += WARPS * a.plan.take_slices)
            gone |= take_access<TYPE, WIDE>(a, v, t, c, wanted);
        if (gone && (threadIdx.x & 31) == 0)
            atomicOr(&lost_ranks(a)[turns], gone);
        incomplete |= gone != 0;
    }
    trace(a, 6);
    if (!__syncthreads_or(incomplete))
        return;
    if (threadIdx.x == 0)
        note_incomplete(a, v, 1);
    if (!a.accumulate)
        redo_tokens<TYPE, WIDE>(a, v, turns);
    for (uint32_t i = threadIdx.x; a.missing && i < turns; i += THREADS)
        if (lost_ranks(a)[i])
            a.missing[take_class(a) + i * a.plan.take_classes] = 1;
}

template <int TYPE, bool WIDE> MOE_DEVICE void combine(const moe_gpu_args &a)
{
    const uint64_t begin = a.timeout_ns ? time_ns() : 0;
    trace(a, TRACE_BEGIN);
    const step_view v = view_of(a, a.lane.state->step[blockIdx.x] - 1, begin);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < moe_gpu_turns(&a.geo, a.plan.take_classes);
         i += THREADS)
        lost_ranks(a)[i] = 0;
    __syncthreads();
    trace(a, 2);
    uint32_t used = 0;
    if (is_sender(a))
        send_all<TYPE, WIDE>(a, v, &used);
    trace(a, 5);
    if (is_receiver(a))
        receive_all<TYPE, WIDE>(a, v);
    bulk_wait<0>();
    if (a.trace)
        __syncthreads();
    trace(a, TRACE_END);
}

#define COMBINE_KERNEL(name, type, wide)                                                 \
    extern "C" __global__ void __launch_bounds__(MOE_GPU_COMBINE_THREADS, 1)             \
        name(const __grid_constant__ moe_gpu_args a)                                     \
    {                                                                                    \
        combine<type, wide>(a);                                                          \
    }

COMBINE_KERNEL(moe_combine_bf16, MOE_GPU_BF16, false)
COMBINE_KERNEL(moe_combine_f16, MOE_GPU_F16, false)
COMBINE_KERNEL(moe_combine_f32, MOE_GPU_F32, false)
COMBINE_KERNEL(moe_combine_bf16_wide, MOE_GPU_BF16, true)
COMBINE_KERNEL(moe_combine_f16_wide, MOE_GPU_F16, true)
COMBINE_KERNEL(moe_combine_f32_wide, MOE_GPU_F32, true)
