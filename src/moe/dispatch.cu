/* SPDX-License-Identifier: Apache-2.0 */
/* Dispatch: every row crosses once, as packed lines or with a flag, and is expanded here.
 */
#include "moe/device_place.cuh"

/*
 * Some blocks send this rank's tokens, others receive those of all sources: struct
 * moe_gpu_plan says which. Where a row goes is computed by every receiving block from the
 * headers: bit (source, token) of an expert's bit set says that the row exists, so its
 * position is the number of set bits before it.
 *
 *   senders    headers out | quantise | rows out
 *   receivers              headers in | places, counts | rows in
 *
 * Places and counts are computed while rows are on their way. A step of few tokens is a
 * chain of instructions, each waiting for the one before: what runs in every step is
 * therefore kept short, the rest is out of line. struct moe_gpu_shared draws the shared
 * memory.
 */

/* The weight of a position of a row, for combine. */
MOE_DEVICE void keep_weight(const moe_gpu_args &a, item_rows *item, uint32_t j,
                            float weight)
{
    const uint64_t pair = (uint64_t)item->source * a.geo.max_tokens + item->token;
    item->weight[j] = weight;
    if (item->order[j] != 0xff && item->weighs)
        a.lane.entries[pair * a.geo.top_k + item->order[j]].weight = weight;
}

/* All of them: a lane for each takes its from the lane that has loaded it, `at` bytes
 * into the access `v`. */
MOE_DEVICE void keep_weights(const moe_gpu_args &a, item_rows *item, uint32_t at, uint4 v)
{
#pragma unroll 1
    for (uint32_t j = threadIdx.x & 31; (j & ~31u) < a.geo.top_k; j += WARP) {
        const uint32_t byte = packed_offset((at + j * 4) & ~7u);
        const uint32_t from = byte >> 4, word = (byte >> 2 & 2) + (j & 1);
        const uint32_t x = __shfl_sync(ALL_LANES, v.x, from),
                       y = __shfl_sync(ALL_LANES, v.y, from),
                       z = __shfl_sync(ALL_LANES, v.z, from),
                       w = __shfl_sync(ALL_LANES, v.w, from);
        const float weight = __uint_as_float(word == 0   ? x
                                             : word == 1 ? y
                                             : word == 2 ? z
                                                         : w);
        if (j < a.geo.top_k)
            keep_weight(a, item, j, weight);
    }
}

/*
 * What needs all weights of a row, by a warp: an expert that was named twice has their
 * sum, and callers that sum themselves get it at the expert's first position.
 */
MOE_COLD void finish_weights(const moe_gpu_args &a, const item_rows *item)
{
    const uint32_t k = a.geo.top_k;
    const uint64_t pair = (uint64_t)item->source * a.geo.max_tokens + item->token;
    for (uint32_t j = threadIdx.x & 31; j < k; j += WARP) {
        uint32_t order = item->order[j];
        bool mine = order != 0xff;
        float sum = item->weight[j];
        for (uint32_t i = 0; i < k; i++) {
            if (i == j || item->order[i] != order)
                continue;
            mine = mine && i > j;
            sum += item->weight[i];
        }
        if (mine && item->weighs && a.order != MOE_GPU_RANK_MAJOR)
            a.lane.entries[pair * k + order].weight = sum;
        if (a.out_weights && a.order >= MOE_GPU_RANK_MAJOR)
            a.out_weights[(uint64_t)item->row[0] * k + j] = mine ? sum : 0.0f;
    }
}

/* One lane's part of a row that is not only elements: scales too. */
template <bool WIDE>
MOE_DEVICE void write_mixed(const moe_gpu_args &a, item_rows *item, uint32_t at, uint4 v,
                            bool split)
{
    const moe_gpu_row &w = a.geo.row;
    const bool scales = w.scale_bytes && at >= w.scale_at;
    unsigned char *to = (unsigned char *)(scales ? a.out_scales : a.out_rows);
    const uint32_t bytes = scales ? w.scale_bytes : w.data_bytes;
    at -= scales ? w.scale_at : 0;
    for (uint32_t i = 0; i < item->n; i++)
        store_part<WIDE>(to + (uint64_t)(uint32_t)item->row[i] * bytes, at, bytes, v,
                         split);
}

/* An access that has more than elements, or none. */
template <bool WIDE>
MOE_DEVICE void write_rest(const moe_gpu_args &a, item_rows *item, uint32_t access,
                           uint4 v)
{
    const uint32_t lane = threadIdx.x & 31, at = access * MOE_GPU_ACCESS_DATA;
    const pair_lane place = place_in_pair(lane);
    const uint32_t inside = lane_offset(lane, place);
    if (at + inside < a.geo.row.weight_at && access * 2 + (lane >> 4) < a.geo.row.pairs)
        write_mixed<WIDE>(a, item, at + inside, v, place.split);
    if (a.geo.row.weight_at - at < MOE_GPU_ACCESS_DATA)
        keep_weights(a, item, a.geo.row.weight_at - at, v);
}

/* The warps of a group bring their accesses to one row from its place to where it is
 * wanted; false = a part does not come. */
template <int IN, bool WIDE>
MOE_DEVICE bool receive_row(const moe_gpu_args &a, step_view v, item_rows *item,
                            uint32_t warp)
{
    enum { AHEAD = 4 };
    const uint32_t lane = threadIdx.x & 31, pairs = a.geo.row.pairs;
    const uint32_t stride = a.per_group * a.plan.take_slices,
                   bytes = a.geo.row.data_bytes;
    const pair_lane place = place_in_pair(lane);
    const uint32_t inside = lane_offset(lane, place);
    const unsigned char *slot =
        own_half(a, v.half) + moe_gpu_slot(&a.geo, item->source, item->token) + lane * 16;
    patience p = {v.deadline, 0};
#pragma unroll 1
    for (uint32_t first = take_slice(a) * a.per_group + warp; first < a.row_accesses;
         first += stride * AHEAD) {
        uint4 data[AHEAD];
        for (;;) {
            bool whole = true;
#pragma unroll
            for (uint32_t u = 0; u < AHEAD; u++) {
                uint32_t i = min(first + u * stride, a.row_accesses - 1);
                data[u] = load_packet(slot + i * MOE_GPU_ACCESS);
            }
#pragma unroll
            for (uint32_t u = 0; u < AHEAD; u++) {
                uint32_t i = min(first + u * stride, a.row_accesses - 1);
                whole &=
                    tag_ok(data[u], v.tag, place.split && i * 2 + (lane >> 4) < pairs);
            }
            if (__all_sync(ALL_LANES, whole))
                break;
            if (out_of_patience(&p, a.lane.state, item->source)) {
                item->failed = 1;
                return false;
            }
            if ((p.polls & 0xff) == 0xff && (a.phase & MOE_GPU_SEND))
                send_unsent<IN, WIDE, false>(a, v);
        }
        /* Accesses that have only elements, then the others. */
        for (uint32_t r = 0; r < item->n; r++) {
            unsigned char *to = (unsigned char *)a.out_rows +
                                (uint64_t)(uint32_t)item->row[r] * bytes + inside;
#pragma unroll
            for (uint32_t u = 0; u < AHEAD; u++) {
                uint32_t at = (first + u * stride) * MOE_GPU_ACCESS_DATA;
                if (at + MOE_GPU_ACCESS_DATA <= bytes)
                    store_part<WIDE>(to + at, 0, 16, data[u], place.split);
            }
        }
#pragma unroll 1
        for (uint32_t u = 0; u < AHEAD; u++) {
            const uint32_t i = first + u * stride;
            if ((i + 1) * MOE_GPU_ACCESS_DATA > bytes && i < a.row_accesses)
                write_rest<WIDE>(a, item, i,
                                 u == 0   ? data[0]
                                 : u == 1 ? data[1]
                                 : u == 2 ? data[2]
                                          : data[3]);
        }
    }
    return true;
}

/* ------------------------------------------------------- rows that lie as they are */

MOE_DEVICE const unsigned char *slot_of_item(const moe_gpu_args &a, step_view v,
                                             const item_rows *item)
{
    return own_half(a, v.half) + moe_gpu_slot(&a.geo, item->source, item->token);
}

/* A warp waits for the flag of a row; false = it does not come. */
template <int IN, bool WIDE>
MOE_DEVICE bool await_row(const moe_gpu_args &a, step_view v, item_rows *item)
{
    const unsigned char *flag =
        slot_of_item(a, v, item) + tag_offset(a.geo.row.pairs * 2 - 1);
    patience p = {v.deadline, 0};
    while (!__all_sync(ALL_LANES, load_acquire(flag) == tag_word(v.tag))) {
        if (out_of_patience(&p, a.lane.state, item->source)) {
            item->failed = 1;
            return false;
        }
        if ((p.polls & 0xff) == 0xff && (a.phase & MOE_GPU_SEND))
            send_unsent<IN, WIDE, true>(a, v);
    }
    return true;
}

/* The share of a warp, as receive_row. */
template <int IN, bool WIDE>
MOE_DEVICE bool receive_plain_row(const moe_gpu_args &a, step_view v, item_rows *item,
                                  uint32_t warp)
{
    enum { AHEAD = 4 };
    const uint32_t lane = threadIdx.x & 31, part = take_slice(a) * a.per_group + warp;
    const uint32_t stride = a.per_group * a.plan.take_slices * WARP * 16,
                   bytes = a.geo.row.data_bytes, end = a.geo.row.weight_at;
    const unsigned char *slot = slot_of_item(a, v, item);
    if (!await_row<IN, WIDE>(a, v, item))
        return false;
#pragma unroll 1
    for (uint32_t first = (part * WARP + lane) * 16; first < end;
         first += stride * AHEAD) {
        uint4 data[AHEAD];
#pragma unroll
        for (uint32_t u = 0; u < AHEAD; u++)
            data[u] = load_packet(slot + min(first + u * stride, end - 16));
        for (uint32_t r = 0; r < item->n; r++) {
            unsigned char *to = (unsigned char *)a.out_rows +
                                (uint64_t)(uint32_t)item->row[r] * bytes + first;
#pragma unroll
            for (uint32_t u = 0; u < AHEAD; u++)
                if (first + u * stride + 16 <= bytes)
                    store_part<WIDE>(to + u * stride, 0, 16, data[u], false);
        }
#pragma unroll
        for (uint32_t u = 0; u < AHEAD; u++)
            if (first + u * stride < end && first + u * stride + 16 > bytes)
                write_mixed<WIDE>(a, item, first + u * stride, data[u], false);
    }
    for (uint32_t j = lane; part == 0 && j < a.geo.top_k; j += WARP)
        keep_weight(a, item, j,
                    __uint_as_float(load_word((const uint32_t *)(slot + end) + j)));
    return true;
}

/*
 * A warp moves a row to where it is wanted through a stage of the block, all by the copy
 * engine; `moved` counts its rows.
 */
template <int IN>
MOE_DEVICE bool move_row(const moe_gpu_args &a, step_view v, item_rows *item,
                         uint32_t mover, uint32_t *moved)
{
    const moe_gpu_row &w = a.geo.row;
    const uint32_t lane = threadIdx.x & 31;
    const unsigned char *stage = shared_memory + mover * w.stride;
    const uint32_t shared = shared_address(stage),
                   arrived = shared_address(b.moved + mover);
    if (!await_row<IN, true>(a, v, item))
        return false;
    bulk_wait<0>(); /* the stage has been read */
    __syncwarp();
    if (lane == 0)
        bulk_load(shared, slot_of_item(a, v, item), w.bytes, arrived);
    bulk_load_wait(arrived, (*moved)++);
    for (uint32_t i = lane; i < item->n; i += WARP) {
        const uint64_t row = (uint32_t)item->row[i];
        bulk_store((unsigned char *)a.out_rows + row * w.data_bytes, shared,
                   w.data_bytes);
        if (w.scale_bytes)
            bulk_store((unsigned char *)a.out_scales + row * w.scale_bytes,
                       shared + w.scale_at, w.scale_bytes);
    }
    bulk_commit();
    for (uint32_t j = lane; j < a.geo.top_k; j += WARP)
        keep_weight(a, item, j, ((const float *)(stage + w.weight_at))[j]);
    return true;
}

/* Zeros a delivered row and its scales. */
MOE_COLD void zero_row(const moe_gpu_args &a, uint64_t row, uint32_t tid, uint32_t n)
{
    const moe_gpu_row &w = a.geo.row;
    for (uint32_t i = tid; i < w.data_bytes; i += n)
        ((unsigned char *)a.out_rows)[row * w.data_bytes + i] = 0;
    for (uint32_t i = tid; i < w.scale_bytes; i += n)
        ((unsigned char *)a.out_scales)[row * w.scale_bytes + i] = 0;
}

/* A row that did not come keeps its places: zeros, no source token, nothing for combine.
 */
MOE_COLD void drop_row(const moe_gpu_args &a, step_view v, item_rows *item, uint32_t tid,
                       uint32_t n)
{
    const uint64_t pair = (uint64_t)item->source * a.geo.max_tokens + item->token;
    for (uint32_t i = 0; i < item->n; i++) {
        zero_row(a, (uint32_t)item->row[i], tid, n);
        if (tid == 0 && a.source_token)
            a.source_token[item->row[i]] = -1;
    }
    for (uint32_t j = tid; j < a.geo.top_k; j += n)
        if (a.out_weights && a.order >= MOE_GPU_RANK_MAJOR)
            a.out_weights[(uint64_t)item->row[0] * a.geo.top_k + j] = 0.0f;
    if (tid == 0) {
        a.lane.entries[pair * a.geo.top_k].row = MOE_GPU_DROPPED_ROW;
        a.lane.state->dropped[item->source] = v.step;
        note_incomplete(a, v, 0);
    }
}

/* Adds an expert's rows to its counter; what was counted before in this step holds no
 * longer. */
MOE_DEVICE void count_expert(const moe_gpu_args &a, uint32_t step, uint32_t e, uint32_t n)
{
    moe_gpu_expert_count *count = &a.lane.counters->expert[e], c = *count;
    c.rows += n - (c.step == step ? c.newest : 0);
    c.step = step;
    c.newest = n;
    *count = c;
}

/*
 * Counts and ranges of some experts, by one warp: 2^log lanes for each expert, of which
 * each counts one source. Padding rows are zeroed if that is wanted.
 */
MOE_DEVICE void report_experts(const moe_gpu_args &a, uint32_t step, uint32_t first,
                               uint32_t log)
{
    const uint32_t lanes = 1u << log, lane = threadIdx.x & 31, r = lane & (lanes - 1),
                   words = a.geo.token_words;
    const uint32_t e = first + (lane >> log), L = b.map.local_experts;
    const bool valid = e < L && r < a.geo.sources;
    const uint32_t *set =
        set_of(a, valid ? e : 0) + (valid ? source_rank(a, r) : 0) * words;
    uint32_t n = 0;
#pragma unroll 2
    for (uint32_t w = 0; valid && w < words; w++)
        n += __popc(set[w]);
    uint32_t sum = n;
#pragma unroll 1
    for (uint32_t d = 1; d < lanes; d <<= 1) {
        uint32_t other = __shfl_up_sync(ALL_LANES, sum, d, lanes);
        sum += r >= d ? other : 0;
    }
    if (!valid)
        return;
    const int64_t begin = expert_row(a, e, 0);
    if (a.ranges)
        a.ranges[(uint64_t)e * a.geo.sources + r] = (begin + sum - n) << 32 | n;
    if (r != a.geo.sources - 1)
        return;
    if (a.counts)
        a.counts[e] = (int32_t)sum;
    count_expert(a, step, e, sum);
    if (a.offsets && (a.order == MOE_GPU_FLAT || a.order == MOE_GPU_INDEXED)) {
        const uint32_t *offsets = shared_words(a.shared.offsets_at);
        a.offsets[e] = offsets[e];
        if (e == L - 1)
            a.offsets[L] = offsets[L];
    }
}

/* Zeros the padding of the experts, by the warps of all blocks that receive. */
MOE_COLD void zero_padding(const moe_gpu_args &a)
{
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x & 31;
    const uint32_t *offsets = shared_words(a.shared.offsets_at);
    const uint32_t *counts = shared_words(a.shared.counts_at);
    const uint32_t others = (a.phase & MOE_GPU_SEND) ? a.plan.senders % gridDim.x : 0;
    uint32_t number = 0;
    for (uint32_t e = 0; e < b.map.local_experts; e++)
        for (uint32_t row = offsets[e] + counts[e]; row < offsets[e + 1]; row++, number++)
            if (number % ((gridDim.x - others) * WARPS) == blockIdx.x * WARPS + warp)
                zero_row(a, row, lane, WARP);
}

MOE_COLD void report_totals(const moe_gpu_args &a)
{
    const uint32_t lane = threadIdx.x & 31, L = b.map.local_experts;
    const uint32_t *any = any_set(a);
    uint32_t rows = 0, pairs = 0;
    for (uint32_t r = 0; r < a.geo.sources; r++) {
        uint32_t n = count_rows(any + source_rank(a, r) * a.geo.token_words,
                                a.geo.token_words, lane);
        if (lane == 0 && a.source_counts)
            a.source_counts[r] = (int32_t)n;
        rows += n;
    }
    if (L == 0 && lane == 0 && a.offsets && needs_offsets(a) &&
        a.order != MOE_GPU_RANK_MAJOR)
        a.offsets[0] = 0;
    if (!a.totals)
        return;
    for (uint32_t i = lane; i < L * a.shared.words; i += WARP)
        pairs += __popc(set_of(a, 0)[i]);
    pairs = __reduce_add_sync(ALL_LANES, pairs);
    if (lane == 0) {
        a.totals[0] = a.order == MOE_GPU_FLAT ? shared_words(a.shared.offsets_at)[L]
                      : a.order == MOE_GPU_3D ? pairs
                                              : rows;
        a.totals[1] = pairs;
    }
}

/* Counts for the caller: by the blocks that receive no rows, or by all if there are none.
 */
MOE_DEVICE void report(const moe_gpu_args &a, step_view v)
{
    const uint32_t takers = a.plan.take_classes * a.plan.take_slices;
    const uint32_t spare =
        gridDim.x - takers - ((a.phase & MOE_GPU_SEND) ? a.plan.senders : 0);
    const bool all = spare - 1 >= gridDim.x; /* none, or the ranges overlap */
    const uint32_t number = blockIdx.x - (all ? 0 : takers),
                   blocks = all ? takers : spare;
    const uint32_t warp = threadIdx.x / WARP;
    if (number >= blocks)
        return;
    /* Lanes for an expert, and experts of a warp, as powers of two. */
    const uint32_t log = 32 - __clz(a.geo.sources - 1), experts = log_of(WARP) - log;
    if (number == 0 && warp == WARPS - 1)
        report_totals(a);
#pragma unroll 1
    for (uint32_t first = (number * WARPS + warp) << experts; first < b.map.local_experts;
         first += blocks * WARPS << experts)
        report_experts(a, v.step, first, log);
}

/* A block that saw a header which the rank has given up on forgets it again. */
MOE_COLD void forget_missing(const moe_gpu_args &a, step_view v)
{
    for (uint32_t r = 0; r < a.geo.ranks; r++) {
        if (r == a.rank || (load_long(&a.lane.state->decided[r]) >> 2) != v.step ||
            decide(a, v, r) != SOURCE_MISSING)
            continue;
        for (uint32_t i = threadIdx.x; i < (b.map.local_experts + 1) * a.geo.token_words;
             i += THREADS)
            any_set(a)[i / a.geo.token_words * a.shared.words + r * a.geo.token_words +
                       i % a.geo.token_words] = 0;
        b.tokens[r] = 0;
    }
    __syncthreads();
    if (needs_offsets(a))
        find_offsets(a);
    __syncthreads();
}

/* A warp begins with the token of `source` that the block receives in `turn`. */
MOE_DEVICE void begin_item(const moe_gpu_args &a, item_rows *item, uint32_t turn,
                           uint32_t source)
{
    uint32_t token = turn * a.plan.take_classes + take_class(a);
    item->failed = 0;
    item->valid = false;
    item->weighs = !a.geo.keeps || (!a.exact && (b.unweighted >> source & 1) == 0);
    item->source = source;
    item->token = token;
    __syncwarp();
    if (token < b.tokens[source])
        place_item(a, item, turn);
}

/* Counts the headers of a lane's rank that came after they had been given up on, as far
 * as nothing has been written over them; the older one first. */
MOE_COLD void count_late_headers(const moe_gpu_args &a, step_view v, uint32_t seen,
                                 uint32_t missed)
{
    const uint32_t r = threadIdx.x & 31;
    uint32_t late = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < 2; i++) {
        const uint4 sign = load_packet(sign_of(a, a.half_at[(v.step + i) & 1], r));
        if ((sign.y & ~3u) != v.tag.kind || sign.x <= seen || sign.x > missed)
            continue;
        seen = sign.x;
        late++;
    }
    a.lane.state->seen[r] = seen;
    count_for(a.lane.counters->stale, late);
}

/* Block 0 leaves to the next kernels of the lane what came from whom; a lane for each. */
MOE_DEVICE void settle(const moe_gpu_args &a, step_view v, uint64_t decided)
{
    const uint32_t r = threadIdx.x & 31;
    moe_gpu_state *state = a.lane.state;
    if (r >= a.geo.ranks)
        return;
    const uint32_t seen = state->seen[r], missed = state->missed[r];
    const uint32_t from = a.dp == 1 ? r : source_rank(a, r / a.dp);
    const bool counted = counted_ranks(a) >> r & 1;
    const bool came = counted && (decided >> 2 != v.step || (decided & 3) == SOURCE_CAME);
    const uint32_t all = __activemask();
    const uint32_t unweighted = __ballot_sync(all, b.unweighted >> from & 1);
    const uint32_t served = __ballot_sync(all, came) & listened_ranks(a);
    const uint32_t unserved = __ballot_sync(all, (served >> from & 1) == 0);
    state->tokens[r] = b.tokens[from];
    if (r == a.rank) /* in a DP group rows may be taken from nobody */
        state->own_tokens =
            a.dp == 1 ? b.tokens[r] : load_packet(sign_of(a, v.half, r)).z;
    state->rows_from[r] = from;
    state->unweighted = unweighted;
    state->unserved = unserved;
    state->same_routes = ~0u;
    state->own_mask = counted_ranks(a);
    state->says_source = b.map.says_source;
    if (b.map.says_source)
        state->mask_of[r] = load_packet(sign_of(a, v.half, from)).w;
    const uint32_t *any = any_set(a) + from * a.geo.token_words;
    uint32_t rows = 0;
#pragma unroll 1
    for (uint32_t w = 0; w < a.geo.token_words; w++)
        rows += __popc(any[w]);
    state->here[r] = rows;
    count_for(a.lane.counters->rows_received, r == from ? rows : 0);
    count_for(a.lane.counters->tokens, b.tokens[r]);
    if (missed > seen)
        count_late_headers(a, v, seen, missed);
    if (counted && came)
        state->seen[r] = v.step;
    else
        state->dropped[r] = v.step;
    if (counted && !came) {
        state->missed[r] = v.step;
        note_incomplete(a, v, 0);
    }
}

/* Is the access with the weights one of this block's? They are in one access. */
MOE_DEVICE bool has_weights(const moe_gpu_args &a)
{
    uint32_t access =
        a.geo.row_protocol == MOE_GPU_LL ? a.geo.row.weight_at / MOE_GPU_ACCESS_DATA : 0;
    return (access >> log_of(a.per_group) & (a.plan.take_slices - 1)) == take_slice(a);
}

/* What a received row needs besides its bytes, if anything. */
MOE_COLD void finish_item(const moe_gpu_args &a, step_view v, item_rows *item,
                          uint32_t warp)
{
    if (item->valid && item->failed)
        drop_row(a, v, item, warp * WARP + (threadIdx.x & 31), a.per_group * WARP);
    else if (item->valid && warp == 0 && has_weights(a))
        finish_weights(a, item);
}

/* What was decided about a source, a lane for each. */
MOE_DEVICE uint64_t decisions(const moe_gpu_args &a)
{
    const uint32_t r = threadIdx.x & 31;
    return r < a.geo.ranks ? load_long(&a.lane.state->decided[r]) : 0;
}

/* Some turns of one source for each group of warps. */
struct item_round {
    uint32_t turn, turns;
    uint32_t source, group, warp;
    bool has;       /* this group has something to do */
    uint32_t moved; /* rows, by this warp with the copy engine */
};

/* Some warps move the rows of all groups by the copy engine; true = something is odd. */
template <int IN>
MOE_DEVICE bool move_round(const moe_gpu_args &a, step_view v, item_round *r)
{
    const uint32_t mover = threadIdx.x / WARP, base = r->source - r->group;
    const uint32_t movers = min(a.shared.stages - 1, WARPS);
    bool odd = false;
    for (uint32_t i = mover; mover < movers && i < r->turns * a.groups; i += movers) {
        const uint32_t group = i & (a.groups - 1);
        item_rows *item = &b.item[i >> log_of(a.groups)][group];
        if (base + group >= a.geo.ranks || !item->valid)
            continue;
        odd |= !move_row<IN>(a, v, item, mover, &r->moved) || item->twins;
        __syncwarp();
    }
    return odd;
}

/* Finds the rows of a round; `conflict` = a source that was seen may be given up. */
MOE_DEVICE void place_round(const moe_gpu_args &a, step_view v, const item_round &r,
                            bool first, bool conflict)
{
    for (;;) {
#pragma unroll 1
        for (uint32_t i = r.warp; r.has && i < r.turns; i += a.per_group)
            begin_item(a, &b.item[i][r.group], r.turn + i, r.source);
        if (first)
            report(a, v);
        trace(a, 6);
        if (first && a.zero_padding && a.order == MOE_GPU_FLAT)
            zero_padding(a);
        if (!__syncthreads_or(conflict))
            return;
        forget_missing(a, v);
        if (blockIdx.x == 0 && threadIdx.x / WARP == 1)
            settle(a, v, decisions(a));
        conflict = false;
    }
}

template <int IN, bool WIDE, bool PLAIN>
MOE_DEVICE void receive_round(const moe_gpu_args &a, step_view v, item_round &r)
{
    const bool moves = PLAIN && WIDE && a.geo.row_protocol == MOE_GPU_BULK;
    bool odd = false;
    if (moves)
        odd = move_round<IN>(a, v, &r);
#pragma unroll 1
    for (uint32_t i = 0; r.has && !moves && i < r.turns; i++) {
        item_rows *item = &b.item[i][r.group];
        if (!item->valid)
            continue;
        const bool came = PLAIN ? receive_plain_row<IN, WIDE>(a, v, item, r.warp)
                                : receive_row<IN, WIDE>(a, v, item, r.warp);
        odd |= !came || item->twins; /* other warps may be writing item->failed */
    }
    trace(a, 7);
    if (!__syncthreads_or(odd || a.out_weights))
        return;
#pragma unroll 1
    for (uint32_t i = 0; r.has && i < r.turns; i++)
        finish_item(a, v, &b.item[i][r.group], r.warp);
    __syncthreads();
}

/* Receives the rows of the block, and reports what all blocks together received. */
template <int IN, bool WIDE, bool PLAIN>
MOE_DEVICE void receive_rows(const moe_gpu_args &a, step_view v)
{
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x & 31;
    const uint32_t groups = a.groups, mine = take_class(a), classes = a.plan.take_classes;
    const uint32_t most =
        __reduce_max_sync(ALL_LANES, lane < a.geo.ranks ? b.tokens[lane] : 0);
    const uint32_t end = mine < classes ? most : 0;
    bool conflict = false;
    item_round r;
    r.moved = 0;
    r.group = warp >> log_of(a.per_group);
    r.warp = warp & (a.per_group - 1);
    if (warp == 1) {
        uint64_t decided = decisions(a);
        conflict = lane != a.rank && decided >> 2 == v.step;
        if (blockIdx.x == 0 && !__any_sync(ALL_LANES, conflict))
            settle(a, v, decided);
    }
#pragma unroll 1
    for (r.turn = 0; r.turn * classes + mine < end || r.turn == 0;
         r.turn += MOE_GPU_PLACED) {
        r.turns = 0;
#pragma unroll
        for (uint32_t i = 0; i < MOE_GPU_PLACED; i++)
            r.turns += (r.turn + i) * classes + mine < end;
#pragma unroll 1
        for (uint32_t base = 0; base < a.geo.ranks; base += groups) {
            r.source = base + r.group;
            r.has = r.group < groups && r.source < a.geo.ranks;
            place_round(a, v, r, r.turn + base == 0, conflict);
            conflict = false;
            receive_round<IN, WIDE, PLAIN>(a, v, r);
        }
    }
    trace(a, 8);
}

template <int IN, bool WIDE, bool PLAIN>
MOE_DEVICE void receive_all(const moe_gpu_args &a, step_view v)
{
    if (a.dp > 1) {
        if (threadIdx.x < WARP)
            receive_signs<IN, WIDE, PLAIN>(a, v);
        __syncthreads();
    }
    const uint32_t parts = a.header_parts * a.geo.ranks;
    if (parts * 2 <= WARPS) /* few instructions for few tokens */
        receive_headers<IN, WIDE, PLAIN, 1, true>(a, v);
    else if (parts <= WARPS)
        receive_headers<IN, WIDE, PLAIN, 1, false>(a, v);
    else
        receive_headers<IN, WIDE, PLAIN, 2, false>(a, v);
    trace(a, 4);
    __syncthreads();
    trace(a, 5);
    if (needs_offsets(a))
        find_offsets(a);
    receive_rows<IN, WIDE, PLAIN>(a, v);
}

/* The next step of the lane begins with this number; all threads have read the old one.
 */
MOE_DEVICE void end_step(const moe_gpu_args &a, step_view v)
{
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = blockIdx.x + gridDim.x * threadIdx.x; i < MOE_GPU_MAX_CTAS;
         i += gridDim.x * THREADS)
        a.lane.state->step[i] = v.step + 1;
}

template <int IN, bool WIDE, bool PLAIN = false>
MOE_DEVICE void dispatch(const moe_gpu_args &a)
{
    await_kernel();
    const uint64_t begin = a.timeout_ns ? time_ns() : 0;
    const uint32_t tid = threadIdx.x;
    trace(a, TRACE_BEGIN);
    const uint32_t step = a.lane.state->step[blockIdx.x];
    const uint4 map = *(const uint4 *)a.map;
    const bool sends = is_sender(a);
    send_begin<IN> first;
    if (sends)
        begin_send<IN, WIDE>(a, &first);
    const step_view v = view_of(a, step, begin);
    note_begun(a, v, 0);
    /* A block that only sends receives nothing, not even headers. */
    const bool receives = (a.phase & MOE_GPU_RECV) && (!sends || is_receiver(a));
    if (PLAIN && tid < MOE_GPU_MOVERS)
        bulk_load_begin(shared_address(b.moved + tid));
    if (tid == 0) {
        b.stage_lock = b.unweighted = 0;
        b.map = {map.x, map.y, map.z, map.w};
    }
    if (tid / WARP == 0) {
        b.tokens[tid] = 0;
        __syncwarp();
    }
    if (receives) {
#pragma unroll 1
        for (uint32_t i = tid; i < (map.x + 1) * a.shared.words; i += THREADS)
            any_set(a)[i] = 0;
    }
    if (sends)
        send_all<IN, WIDE, PLAIN>(a, v, map.z, &first);
    trace(a, 3);
    if (receives) {
        __syncthreads();
        receive_all<IN, WIDE, PLAIN>(a, v);
    }
    let_next_begin();
    if (a.phase & MOE_GPU_RECV)
        end_step(a, v);
    /* Shared memory must outlive the copy engine's reading. */
    if (PLAIN || (tid < WARP && sends))
        bulk_wait<0>();
    if (a.trace)
        __syncthreads();
    trace(a, TRACE_END);
}

MOE_KERNEL(moe_dispatch_bytes, MOE_GPU_DISPATCH_THREADS, dispatch<MOE_GPU_BYTES, false>)
MOE_KERNEL(moe_dispatch_bf16, MOE_GPU_DISPATCH_THREADS, dispatch<MOE_GPU_BF16, false>)
MOE_KERNEL(moe_dispatch_f16, MOE_GPU_DISPATCH_THREADS, dispatch<MOE_GPU_F16, false>)
MOE_KERNEL(moe_dispatch_f32, MOE_GPU_DISPATCH_THREADS, dispatch<MOE_GPU_F32, false>)
MOE_KERNEL(moe_dispatch_bytes_wide, MOE_GPU_DISPATCH_THREADS,
           dispatch<MOE_GPU_BYTES, true>)
MOE_KERNEL(moe_dispatch_bf16_wide, MOE_GPU_DISPATCH_THREADS, dispatch<MOE_GPU_BF16, true>)
MOE_KERNEL(moe_dispatch_f16_wide, MOE_GPU_DISPATCH_THREADS, dispatch<MOE_GPU_F16, true>)
MOE_KERNEL(moe_dispatch_f32_wide, MOE_GPU_DISPATCH_THREADS, dispatch<MOE_GPU_F32, true>)
MOE_KERNEL(moe_dispatch_bytes_plain, MOE_GPU_DISPATCH_THREADS,
           dispatch<MOE_GPU_BYTES, false, true>)
MOE_KERNEL(moe_dispatch_bf16_plain, MOE_GPU_DISPATCH_THREADS,
           dispatch<MOE_GPU_BF16, false, true>)
MOE_KERNEL(moe_dispatch_f16_plain, MOE_GPU_DISPATCH_THREADS,
           dispatch<MOE_GPU_F16, false, true>)
MOE_KERNEL(moe_dispatch_f32_plain, MOE_GPU_DISPATCH_THREADS,
           dispatch<MOE_GPU_F32, false, true>)
MOE_KERNEL(moe_dispatch_bytes_plain_wide, MOE_GPU_DISPATCH_THREADS,
           dispatch<MOE_GPU_BYTES, true, true>)
MOE_KERNEL(moe_dispatch_bf16_plain_wide, MOE_GPU_DISPATCH_THREADS,
           dispatch<MOE_GPU_BF16, true, true>)
MOE_KERNEL(moe_dispatch_f16_plain_wide, MOE_GPU_DISPATCH_THREADS,
           dispatch<MOE_GPU_F16, true, true>)
MOE_KERNEL(moe_dispatch_f32_plain_wide, MOE_GPU_DISPATCH_THREADS,
           dispatch<MOE_GPU_F32, true, true>)
