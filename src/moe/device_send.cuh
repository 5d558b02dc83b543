/* SPDX-License-Identifier: Apache-2.0 */
/* The sending half of dispatch: headers, quantised rows, the copy engine, flags. */
#ifndef MOE_DEVICE_SEND_CUH
#define MOE_DEVICE_SEND_CUH

#include "moe/device_block.cuh"

/* What an owner must know of an own token in combine, if positions matter: of the entries
 * from `from` on, a lane for each; `before` are the slots of the 32 before these. */
MOE_COLD void keep_places(const moe_gpu_args &a, uint32_t token, uint32_t from,
                          uint32_t slot, uint32_t rank, uint32_t before)
{
    const uint32_t j = from + (threadIdx.x & 31), k = a.geo.top_k;
    uint32_t first = j;
    for (uint32_t i = 0; i < k && i < from + WARP; i++) {
        uint32_t other = __shfl_sync(ALL_LANES, i < from ? before : slot, i & 31);
        first = other == slot && i < first ? i : first;
    }
    if (j >= k)
        return;
    a.lane.own_places[token * k + j] = slot == MOE_GPU_NO_SLOT
                                           ? (uint16_t)MOE_GPU_NO_SLOT
                                           : (uint16_t)(rank | first << 8);
    if (a.in_weights)
        a.lane.own_weights[token * k + j] = a.in_weights[token * k + j];
}

/* A warp sends the header packets of one token to all ranks; returns the ranks of its
 * rows. */
MOE_DEVICE uint32_t send_header(const moe_gpu_args &a, step_view v, uint32_t even,
                                uint32_t token, uint32_t sendable, int64_t id)
{
    const uint32_t lane = threadIdx.x & 31, k = a.geo.top_k;
    uint32_t ranks = 0, before = 0;
#pragma unroll 1
    for (uint32_t first = 0; first < k; first += WARP) {
        uint32_t j = first + lane, rank = 0;
        if (first && j < k)
            id = id_at(a, token * k + j);
        uint32_t slot =
            j < k ? slot_of(a, even, id, token * k + j, token, &rank) : MOE_GPU_NO_SLOT;
        ranks |= slot != MOE_GPU_NO_SLOT ? 1u << rank : 0;
        if (a.geo.keeps)
            keep_places(a, token, first, slot, rank, before);
        before = slot;
        /* Lane l has packet l mod 8 of this part; lanes share the ranks among them. */
        uint4 packet;
        uint32_t from = (lane & 7) * 4;
        packet.x = __shfl_sync(ALL_LANES, slot, from) |
                   __shfl_sync(ALL_LANES, slot, from + 1) << 16;
        packet.y = __shfl_sync(ALL_LANES, slot, from + 2) |
                   __shfl_sync(ALL_LANES, slot, from + 3) << 16;
        packet.z = v.tag.step;
        packet.w = v.tag.kind;
        uint32_t number = first / 4 + (lane & 7);
        uint64_t at =
            v.half + moe_gpu_header(&a.geo, a.rank, token) + number * MOE_GPU_PACKET;
#pragma unroll 1
        for (uint32_t to = lane >> 3; to < a.geo.ranks; to += 4)
            if (number < a.geo.packets && (sendable >> to & 1))
                store_packet((unsigned char *)a.base[to] + at, packet);
    }
    ranks = __reduce_or_sync(ALL_LANES, ranks);
    if (lane == 0)
        a.lane.own_ranks[token] = ranks;
    if (a.dp > 1) /* else these are the rows that are sent */
        count_for(a.lane.counters->taken, (ranks & sendable) >> lane & 1);
    return ranks & sendable & destinations(a);
}

/* Says to every rank that this one takes part, with how many tokens, whether their
 * weights come later, and on whom it counts; or that it refuses its call. */
MOE_DEVICE void send_sign(const moe_gpu_args &a, step_view v, uint32_t sendable,
                          uint32_t tokens)
{
    const uint32_t to = threadIdx.x & 31, asked = tokens ? tokens : asked_tokens(a);
    uint4 sign = make_uint4(v.step, v.tag.kind, tokens, counted_ranks(a));
    sign.y |= a.in_weights ? 0 : SIGN_UNWEIGHTED;
    if (asked != tokens) {
        sign.y |= SIGN_REFUSED;
        sign.w = asked;
    }
    if (to < a.geo.ranks && (sendable >> to & 1))
        store_packet((unsigned char *)a.base[to] + v.half + a.geo.sign_at +
                         (uint64_t)a.rank * MOE_GPU_LINE,
                     sign);
    if (to == 0)
        a.lane.state->sent = sendable | ~destinations(a);
    if (to == 0 && asked != tokens && a.num_tokens_at) /* else the host has told */
        report_tokens(a, a.rank, asked);
}

/* The warp that sends the header of a block's token: the last first, which has least to
 * do with rows. */
MOE_DEVICE uint32_t header_warp(uint32_t turn)
{
    return (WARPS - 1) - (turn & (WARPS - 1));
}

/* The first entries of a token, one for each lane, long before they are needed. */
MOE_DEVICE void load_routing(const moe_gpu_args &a, uint32_t token, uint32_t tokens,
                             int64_t *id, float *weight)
{
    const uint32_t lane = threadIdx.x & 31, at = token * a.geo.top_k + lane;
    const bool exists = token < tokens && lane < a.geo.top_k;
    *id = exists ? id_at(a, at) : -1;
    *weight = exists && a.in_weights ? a.in_weights[at] : 0.0f;
}

/* What a warp of a sending block needs first: asked for before the step is known. */
struct first_header {
    uint32_t token;
    bool signs; /* tells all ranks that this one takes part */
    int64_t id;
    float weight;
    rank_view rank;
};

MOE_DEVICE first_header begin_headers(const moe_gpu_args &a, uint32_t tokens)
{
    const uint32_t warp = header_warp(threadIdx.x / WARP), number = sender_number(a);
    first_header h;
    h.token = number + warp * a.plan.senders;
    h.signs = number == a.plan.senders - 1 && warp == 0;
    if (h.token >= tokens && !h.signs)
        return h;
    load_routing(a, h.token, tokens, &h.id, &h.weight);
    h.rank = view_rank(a);
    return h;
}

/* Headers of all tokens of the block, each by one warp. */
MOE_DEVICE void send_headers(const moe_gpu_args &a, step_view v, uint32_t even,
                             const first_header &h, uint32_t tokens)
{
    const uint32_t warp = header_warp(threadIdx.x / WARP);
    const bool signs = h.signs;
    uint32_t token = h.token;
    if (token >= tokens && !signs)
        return;
    int64_t id = h.id;
    float weight = h.weight;
    uint32_t sendable = sendable_ranks(a, v, h.rank);
    if (signs)
        send_sign(a, v, sendable, tokens);
#pragma unroll 1
    for (uint32_t turn = warp; token < tokens; turn += WARPS) {
        const uint32_t lane = threadIdx.x & 31, k = a.geo.top_k;
        uint32_t ranks = send_header(a, v, even, token, sendable, id);
        if (lane == 0)
            shared_words(a.shared.ranks_at)[turn] = ranks;
        float *weights = (float *)shared_words(a.shared.weights_at) + turn * k;
#pragma unroll 1
        for (uint32_t j = lane; j < k; j += WARP) {
            weights[j] = weight;
            weight =
                a.in_weights && j + WARP < k ? a.in_weights[token * k + j + WARP] : 0;
        }
        token += WARPS * a.plan.senders;
        load_routing(a, token, tokens, &id, &weight);
    }
}

enum { NO_TOKEN = 0xffffffff };

/* The element type for code that rows without one do not use. */
template <int IN> struct fp8_source {
    enum { TYPE = IN == MOE_GPU_BYTES ? (int)MOE_GPU_BF16 : IN };
};

/* Rows that are sent as they are given. */
template <bool WIDE, bool PLAIN>
MOE_DEVICE void stage_plain_row(const moe_gpu_args &a, uint32_t token,
                                unsigned char *stage, uint32_t tid, uint32_t n)
{
    const moe_gpu_row &w = a.geo.row;
    const unsigned char *row =
        (const unsigned char *)a.in_rows + (uint64_t)token * w.data_bytes;
#pragma unroll 2
    for (uint32_t at = tid * 16; at < w.data_bytes; at += n * 16) {
        uint4 v = load_vector<WIDE>(row, at, w.data_bytes);
        *(uint2 *)(stage + wire_offset<PLAIN>(at)) = make_uint2(v.x, v.y);
        *(uint2 *)(stage + wire_offset<PLAIN>(at + 8)) = make_uint2(v.z, v.w);
    }
    const unsigned char *scales =
        (const unsigned char *)a.in_scales + (uint64_t)token * a.in_scale_bytes;
#pragma unroll 1
    for (uint32_t i = tid * 4; i < w.scale_bytes; i += n * 4)
        *(uint32_t *)(stage + wire_offset<PLAIN>((w.scale_at + i) & ~7u) + (i & 4)) =
            *(const uint32_t *)(scales + i);
}

/* 8 elements of a row as they are given; elements beyond the row are 0. */
template <int IN, bool WIDE>
MOE_DEVICE void load_eight(const moe_gpu_args &a, const void *row, uint32_t first,
                           uint4 *v)
{
    typedef element<IN> e;
#pragma unroll
    for (int i = 0; i < 8 / e::COUNT; i++)
        v[i] = load_vector<WIDE>(row, (first + i * e::COUNT) * e::BYTES,
                                 a.hidden * e::BYTES);
}

/*
 * Quantises 8 elements of each of N groups that 16 lanes share, n * 8 elements apart, and
 * puts them into the stage. Two groups side by side take little longer than one.
 */
template <int IN, int N, bool PLAIN>
MOE_DEVICE void stage_eights(const moe_gpu_args &a,
                             const uint4 (*v)[8 / element<IN>::COUNT], uint32_t first,
                             uint32_t n, unsigned char *stage)
{
    typedef element<IN> e;
    const uint32_t scale_at = a.geo.row.scale_at;
    float f[N][8], amax[N];
    fp8_scale s[N];
#pragma unroll
    for (int u = 0; u < N; u++) {
#pragma unroll
        for (int i = 0; i < 8 / e::COUNT; i++)
            e::unpack(v[u][i], f[u] + i * e::COUNT);
        amax[u] = finite_amax(f[u], 8);
    }
#pragma unroll
    for (int d = 8; d > 0; d >>= 1)
#pragma unroll
        for (int u = 0; u < N; u++)
            amax[u] = fmaxf(amax[u], __shfl_xor_sync(ALL_LANES, amax[u], d));
#pragma unroll
    for (int u = 0; u < N; u++)
        s[u] = scale_of(amax[u], a.format);
#pragma unroll
    for (int u = 0; u < N; u++) {
        const uint32_t at = first + u * n * 8, group = at >> 7;
        if (at >= a.hidden)
            continue;
#pragma unroll
        for (int i = 0; i < 8; i++)
            f[u][i] = __fmul_rn(f[u][i], s[u].inverse);
        *(uint2 *)(stage + wire_offset<PLAIN>(at)) =
            make_uint2(four_e4m3(f[u][0], f[u][1], f[u][2], f[u][3]),
                       four_e4m3(f[u][4], f[u][5], f[u][6], f[u][7]));
        if ((at & 127) != 0)
            continue;
        if (a.format == MOE_GPU_UE8M0)
            stage[wire_offset<PLAIN>((scale_at + group) & ~7u) + (group & 7)] =
                (unsigned char)s[u].bits;
        else
            *(uint32_t *)(stage + wire_offset<PLAIN>((scale_at + group * 4) & ~7u) +
                          (group & 1) * 4) = s[u].bits;
    }
}

/* The first vectors of a thread in a row: those of the next row are loaded before a row
 * is handed to the link, which would hold them up. */
template <int IN> struct ahead_of {
    enum { GROUPS = IN == MOE_GPU_F32 ? 2 : 4 };
    uint4 eight[GROUPS][8 / element<IN>::COUNT];
};

template <int IN, bool WIDE>
MOE_DEVICE void load_ahead(const moe_gpu_args &a, uint32_t token, uint32_t first,
                           uint32_t n, ahead_of<IN> *ahead)
{
    const unsigned char *row = (const unsigned char *)a.in_rows +
                               (uint64_t)token * a.hidden * element<IN>::BYTES;
    if (token == NO_TOKEN)
        return;
#pragma unroll
    for (uint32_t u = 0; u < ahead_of<IN>::GROUPS; u++)
        if (u < 2 || (first & ~255u) + n * 16 < a.hidden)
            load_eight<IN, WIDE>(a, row, first + u * n * 8, ahead->eight[u]);
}

/* Quantises a row into the stage: 16 lanes for each group of 128 elements. */
template <int IN, bool WIDE, bool PLAIN>
MOE_DEVICE void stage_fp8_row(const moe_gpu_args &a, uint32_t token, ahead_of<IN> *ahead,
                              uint32_t next, unsigned char *stage, uint32_t tid,
                              uint32_t n)
{
    const uint32_t groups = (a.hidden + 127) / 128, bytes = a.geo.row.scale_bytes;
    ahead_of<IN> now = *ahead;
    load_ahead<IN, WIDE>(a, next, tid * 8, n, ahead);
    /* Bounds are those of whole warps: lanes exchange their maxima. */
#pragma unroll 1
    for (uint32_t first = tid * 8; (first & ~255u) < a.hidden;
         first += n * 8 * ahead_of<IN>::GROUPS) {
        if (first >= n * 8 * ahead_of<IN>::GROUPS)
            load_ahead<IN, WIDE>(a, token, first, n, &now);
        if (ahead_of<IN>::GROUPS > 2 && (first & ~255u) + n * 16 < a.hidden)
            stage_eights<IN, ahead_of<IN>::GROUPS, PLAIN>(a, now.eight, first, n, stage);
        else
            stage_eights<IN, 2, PLAIN>(a, now.eight, first, n, stage);
    }
    if (a.format == MOE_GPU_UE8M0 && tid < bytes - groups) {
        uint32_t at = a.geo.row.scale_at + groups + tid;
        stage[wire_offset<PLAIN>(at & ~7u) + (at & 7)] = 0;
    }
}

/* Puts a row together in shared memory, as it goes over the wire; n threads, tid of them.
 */
template <int IN, bool WIDE, bool PLAIN>
MOE_DEVICE void stage_row(const moe_gpu_args &a, step_view v, uint32_t token,
                          ahead_of<fp8_source<IN>::TYPE> *ahead, uint32_t next,
                          unsigned char *stage, uint32_t tid, uint32_t n)
{
    const uint32_t last = n - 1 - tid;
    if (IN == MOE_GPU_BYTES)
        stage_plain_row<WIDE, PLAIN>(a, token, stage, tid, n);
    else
        stage_fp8_row<fp8_source<IN>::TYPE, WIDE, PLAIN>(a, token, ahead, next, stage,
                                                         tid, n);
#pragma unroll 1
    for (uint32_t line = last; !PLAIN && line < a.geo.row.pairs * 2; line += n)
        *(uint2 *)(stage + tag_offset(line)) = make_uint2(v.tag.step, v.tag.kind);
    bulk_fence();
}

/* A warp puts the weights of a token behind its row; 0 if they come with combine. */
template <bool PLAIN>
MOE_DEVICE void stage_weights(const moe_gpu_args &a, const float *weights,
                              unsigned char *stage)
{
#pragma unroll 1
    for (uint32_t j = threadIdx.x & 31; j < a.geo.top_k; j += WARP)
        *(float *)(stage + wire_offset<PLAIN>((a.geo.row.weight_at + j * 4) & ~7u) +
                   (j & 1) * 4) = weights ? weights[j] : 0.0f;
    bulk_fence();
}

/* One warp hands the staged row to the copy engine, for each of its ranks; own rank last.
 */
MOE_DEVICE void store_row(const moe_gpu_args &a, step_view v, uint32_t token,
                          uint32_t ranks, const unsigned char *stage, uint32_t bytes)
{
    const uint32_t R = a.geo.ranks;
    const uint64_t slot = v.half + moe_gpu_slot(&a.geo, a.rank, token);
    uint32_t to = a.rank + 1 + (threadIdx.x & 31);
    to -= to >= R ? R : 0;
    if ((threadIdx.x & 31) < R && (ranks >> to & 1))
        bulk_store((unsigned char *)a.base[to] + slot, shared_address(stage), bytes);
    bulk_commit();
}

/* The same by the stores of n threads, a rank after the other. */
MOE_DEVICE void store_row_plainly(const moe_gpu_args &a, step_view v, uint32_t token,
                                  uint32_t ranks, const unsigned char *stage,
                                  uint32_t tid, uint32_t n)
{
    const uint64_t slot = v.half + moe_gpu_slot(&a.geo, a.rank, token);
    uint32_t to = a.rank;
#pragma unroll 1
    for (uint32_t i = 0; i < a.geo.ranks; i++) {
        to = to + 1 == a.geo.ranks ? 0 : to + 1;
        if (ranks >> to & 1)
            plain_store((unsigned char *)a.base[to] + slot, stage, a.geo.row.bytes, tid,
                        n);
    }
}

/* The flag of a token's row at `to`: all of the row has been written, and a fence has
 * followed. */
MOE_DEVICE void raise_flag(const moe_gpu_args &a, step_view v, uint32_t token,
                           uint32_t to)
{
    store_long((uint64_t *)((unsigned char *)a.base[to] + v.half +
                            moe_gpu_slot(&a.geo, a.rank, token) +
                            tag_offset(a.geo.row.pairs * 2 - 1)),
               tag_word(v.tag));
}

/*
 * A warp raises the flags of the block's rows of some turns, a lane for each rank: by the
 * copy engine it is the lane that has sent them, and PENDING of its rows may be under way
 * still; stores of other threads come before a barrier that this one has passed.
 */
template <int PENDING>
MOE_DEVICE void raise_flags(const moe_gpu_args &a, step_view v, uint32_t turn,
                            uint32_t end)
{
    const uint32_t R = a.geo.ranks;
    uint32_t to = a.rank + 1 + (threadIdx.x & 31);
    to -= to >= R ? R : 0;
    bulk_arrived<PENDING>();
    fence_system();
#pragma unroll 1
    for (; turn < end; turn++)
        if ((threadIdx.x & 31) < R && (shared_words(a.shared.ranks_at)[turn] >> to & 1))
            raise_flag(a, v, sender_number(a) + turn * a.plan.senders, to);
}

/* A warp sends all of one token, through the stage that is for this. */
template <int IN, bool WIDE, bool PLAIN>
MOE_DEVICE void send_token(const moe_gpu_args &a, step_view v, uint32_t token,
                           uint32_t tokens, uint32_t sendable)
{
    const uint32_t lane = threadIdx.x & 31;
    unsigned char *stage = shared_memory + (a.shared.stages - 1) * a.geo.row.stride;
    int64_t id;
    float weight;
    load_routing(a, token, tokens, &id, &weight);
    const uint32_t ranks = send_header(a, v, a.map->even_experts, token, sendable, id);
    ahead_of<fp8_source<IN>::TYPE> ahead;
    if (IN != MOE_GPU_BYTES)
        load_ahead<fp8_source<IN>::TYPE, WIDE>(a, token, lane * 8, WARP, &ahead);
    stage_row<IN, WIDE, PLAIN>(a, v, token, &ahead, NO_TOKEN, stage, lane, WARP);
    if (a.in_weights)
        stage_weights<PLAIN>(a, a.in_weights + token * a.geo.top_k, stage);
    else
        stage_weights<PLAIN>(a, NULL, stage);
    __syncwarp();
    if (PLAIN) {
        store_row_plainly(a, v, token, ranks, stage, lane, WARP);
        __syncwarp();
        fence_system();
        if (lane < a.geo.ranks && (ranks >> lane & 1))
            raise_flag(a, v, token, lane);
    } else {
        store_row(a, v, token, ranks, stage, a.geo.row.stride);
        bulk_wait<0>();
    }
    __syncwarp();
}

/*
 * A warp that waits long sends what blocks that have not been scheduled yet would send:
 * peers may be waiting for it, and this block may hold the place that theirs needs. That
 * a row is then stored twice does no harm: the bytes are the same.
 */
template <int IN, bool WIDE, bool PLAIN>
MOE_COLD void send_unsent(const moe_gpu_args &a, step_view v)
{
    const uint32_t lane = threadIdx.x & 31, tokens = own_tokens(a);
    uint32_t sendable = 0;
    bool locked = lane == 0 && atomicCAS(&b.stage_lock, 0, 1) == 0;
    if (!__any_sync(ALL_LANES, locked))
        return;
    for (uint32_t base = 0; base < gridDim.x; base += WARP)
        for (uint32_t rest = idle_blocks(a, v, 0, base); rest; rest &= rest - 1) {
            uint32_t t = number_of(a, base + __ffs(rest) - 1);
            if (t >= a.plan.senders)
                continue;
            if (!sendable) { /* the own rank is, always */
                sendable = sendable_ranks(a, v, view_rank(a));
                send_sign(a, v, sendable, tokens);
            }
            for (; t < tokens; t += a.plan.senders)
                if (claim(&a.lane.sent_rows[t], v.step))
                    send_token<IN, WIDE, PLAIN>(a, v, t, tokens, sendable);
        }
    if (lane == 0)
        atomicExch(&b.stage_lock, 0);
}

/* What a sending block has asked for before the step is known. */
template <int IN> struct send_begin {
    uint32_t tokens;
    first_header header;
    ahead_of<fp8_source<IN>::TYPE> ahead;
};

template <int IN, bool WIDE>
MOE_DEVICE void begin_send(const moe_gpu_args &a, send_begin<IN> *begin)
{
    begin->tokens = own_tokens(a);
    begin->header = begin_headers(a, begin->tokens);
    if (IN != MOE_GPU_BYTES && sender_number(a) < begin->tokens)
        load_ahead<fp8_source<IN>::TYPE, WIDE>(a, sender_number(a), threadIdx.x * 8,
                                               THREADS, &begin->ahead);
}

template <int IN, bool WIDE, bool PLAIN>
MOE_DEVICE void send_all(const moe_gpu_args &a, step_view v, uint32_t even,
                         send_begin<IN> *begin)
{
    const uint32_t tid = threadIdx.x, tokens = begin->tokens;
    const bool stores = PLAIN && a.geo.row_protocol == MOE_GPU_CHUNK;
    send_headers(a, v, even, begin->header, tokens);
    trace(a, 10);
    uint32_t turn = 0, stored = 0, raised = 0;
#pragma unroll 1
    for (uint32_t t = sender_number(a); t < tokens; t += a.plan.senders, turn++) {
        unsigned char *stage = shared_memory + (turn & 1) * a.geo.row.stride;
        if (turn >= 2 && !stores) {
            if (tid < WARP)
                bulk_wait<1>();
            __syncthreads();
        }
        uint32_t next =
            t + a.plan.senders < tokens ? t + a.plan.senders : (uint32_t)NO_TOKEN;
        stage_row<IN, WIDE, PLAIN>(a, v, t, &begin->ahead, next, stage, tid, THREADS);
        /* The warp that sent the header has read the weights. */
        if (tid / WARP == header_warp(turn))
            stage_weights<PLAIN>(
                a, (const float *)shared_words(a.shared.weights_at) + turn * a.geo.top_k,
                stage);
        __syncthreads();
        trace(a, 2);
        const uint32_t ranks = shared_words(a.shared.ranks_at)[turn];
        if (stores)
            store_row_plainly(a, v, t, ranks, stage, tid, THREADS);
        else if (tid < WARP)
            store_row(a, v, t, ranks, stage, PLAIN ? a.geo.row.bytes : a.geo.row.stride);
        stored += ranks >> (tid & 31) & 1;
        if (PLAIN && turn - raised == MOE_GPU_CHUNK_ROWS) {
            if (tid < WARP)
                raise_flags<1>(a, v, raised, turn);
            raised = turn;
        }
    }
    if (PLAIN) {
        __syncthreads();
        if (tid < WARP)
            raise_flags<0>(a, v, raised, turn);
    }
    if (tid < WARP)
        count_for(a.lane.counters->rows_sent, stored);
}

#endif
