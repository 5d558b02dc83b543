/* SPDX-License-Identifier: Apache-2.0 */
/* The sending half of combine: rows of experts come ahead, their sums leave as packed
 * lines. */
#ifndef MOE_DEVICE_GIVE_CUH
#define MOE_DEVICE_GIVE_CUH

#include "moe/device_row.cuh"
#include "moe/device_step.cuh"

/*
 * A holder's sums for the tokens of a rank: acc = fmaf(w, x, acc) in f32 from +0, experts
 * ascending, rounded once. What a multiprocessor has handed to the link holds up its
 * later loads for microseconds, so every warp has a ring of pieces in shared memory,
 * which are asked for long before they are added:
 *
 *   entries of the next item -> pieces of rows -> sums in registers -> parts -> link
 *      one item ahead           MOE_GPU_PIECES                        MOE_GPU_RING
 *
 * An item is a (rank, token), a part MOE_GPU_PART_MOST accesses of its contribution, a
 * piece the same of one row. A lane reads only what it has asked for itself, so nothing
 * in here waits for another warp.
 */
enum { THREADS = MOE_GPU_COMBINE_THREADS, WARPS = THREADS / WARP };

/* [warps] pieces, then parts; then [turns] ranks that the block's own tokens lack. */
extern __shared__ __align__(128) unsigned char shared_memory[];

enum {
    PART_BYTES = MOE_GPU_PART_MOST * MOE_GPU_ACCESS,
    PIECES_BYTES = MOE_GPU_PIECES * PART_BYTES,
    RINGS_BYTES = PIECES_BYTES + MOE_GPU_RING * PART_BYTES
};

MOE_DEVICE unsigned char *own_rings(void)
{
    return shared_memory + threadIdx.x / WARP * RINGS_BYTES;
}

/* The work of a warp: tokens of ranks, counted from the one after the own, and accesses
 * of each contribution. */
struct give_work {
    uint32_t rank, rank_step, rank_end;
    uint32_t token, token_step;
    uint32_t from, end;
};

/* An item, its entries by lane. */
struct give_item {
    uint32_t to, token;
    bool late; /* its weights have come as packets */
    moe_gpu_entry entry;
};

/* Where a warp is: the part whose pieces are asked for, the next item. */
struct give_cursor {
    give_item now, next;
    uint32_t rank, token;      /* of the next */
    uint32_t begin, row;       /* of the part, the piece */
    bool open;                 /* `now` has pieces left */
    const unsigned char *from; /* this lane's bytes of the part in row 0 */
    uint32_t left;             /* how many there are in a row from there */
    uint32_t what;             /* as in struct give_piece */
    unsigned char *out;
    bool apart, dropped; /* of `now`, where positions matter */
};

/* What is known of a piece in the ring; lane s has that of slot s. */
struct give_piece {
    float weight;
    uint32_t what; /* accesses | pairs << 8 | PIECE_... */
    unsigned char *out;
};

enum {
    PIECE_LAST = 1 << 16,
    PIECE_DROPPED = 1 << 17,
    PIECE_APART = 1 << 18,
    PIECE_FIRST = 1 << 19, /* its part is the first of the contribution */
    PIECE_RANK = 24        /* whom it is for, from this bit on */
};

/* The member of an owner's DP group whose rows were taken: its weights hold. */
MOE_DEVICE uint32_t source_of(const moe_gpu_args &a, uint32_t to)
{
    return a.dp == 1 ? to : a.lane.state->rows_from[to];
}

MOE_DEVICE const moe_gpu_entry *entries_of(const moe_gpu_args &a, const give_item &item)
{
    const uint32_t from = source_of(a, item.to);
    return a.lane.entries +
           (uint64_t)(from * a.geo.max_tokens + item.token) * a.geo.top_k;
}

/* The first of the places where an owner's experts apart go. */
MOE_DEVICE uint32_t first_apart(const moe_gpu_args &a, uint32_t to)
{
    const uint32_t member = says_source(a) ? a.lane.state->rows_from[to] % a.dp : 0;
    return member * a.geo.top_k;
}

/* The own rank comes last: its lines do not cross the link. */
MOE_DEVICE uint32_t rank_after(const moe_gpu_args &a, uint32_t i)
{
    uint32_t to = a.rank + 1 + i;
    return to - (to >= a.geo.ranks ? a.geo.ranks : 0);
}

MOE_DEVICE void load_entries(const moe_gpu_args &a, give_cursor *c)
{
    const uint32_t lane = threadIdx.x & 31;
    c->next.to = rank_after(a, c->rank);
    c->next.late = false;
    c->next.token = c->token;
    c->next.entry.row = MOE_GPU_NO_ROW;
    if (lane < a.geo.top_k)
        c->next.entry = entries_of(a, c->next)[lane];
}

/* To the next item that exists; `tokens` by lane. */
MOE_DEVICE void find_item(const moe_gpu_args &a, const give_work &w, uint32_t tokens,
                          give_cursor *c)
{
#pragma unroll 1
    while (c->rank < w.rank_end &&
           c->token >= __shfl_sync(ALL_LANES, tokens, rank_after(a, c->rank))) {
        c->rank += w.rank_step;
        c->token = w.token;
    }
}

/* A lane's place in the accesses of a row. */
MOE_DEVICE uint32_t inside_access(void)
{
    const uint32_t lane = threadIdx.x & 31;
    return lane_offset(lane, place_in_pair(lane)) & ~15u;
}

template <bool KEEPS>
MOE_DEVICE void begin_part(const moe_gpu_args &a, step_view v, const give_work &w,
                           give_cursor *c)
{
    const uint32_t count = min(a.give_part, w.end - c->begin);
    const uint32_t at = c->begin * MOE_GPU_ACCESS_DATA + inside_access();
    const uint32_t end =
        min((c->begin + count) * MOE_GPU_ACCESS_DATA, a.geo.give.data_bytes);
    c->row = 0;
    c->from = (const unsigned char *)a.expert_out + at;
    c->left = at < end ? end - at : 0;
    c->what = count | min(count * 2, a.geo.give.pairs - c->begin * 2) << 8;
    if (KEEPS)
        c->what |= (c->begin ? 0 : PIECE_FIRST) | c->now.to << PIECE_RANK;
    c->out = (unsigned char *)a.base[c->now.to] + v.half +
             moe_gpu_take(&a.geo, c->now.token,
                          KEEPS && c->apart ? first_apart(a, c->now.to) : a.rank) +
             c->begin * MOE_GPU_ACCESS;
}

/* Does an owner want the rows of experts apart? `unweighted` = whose weights come with
 * combine: a split call waits for nobody's. */
MOE_DEVICE bool wants_apart(const moe_gpu_args &a, uint32_t owner, uint32_t unweighted)
{
    return a.exact ||
           ((unweighted >> owner & 1) && a.phase != (MOE_GPU_SEND | MOE_GPU_RECV));
}

/* Something of each of up to 64 entries: a lane has those of two. */
template <typename T> struct by_entry {
    T of[2];
};

/* That of entry `i`, which each lane chooses. */
template <typename T> MOE_DEVICE T entry_at(const by_entry<T> &x, uint32_t i)
{
    const T low = __shfl_sync(ALL_LANES, x.of[0], i & 31),
            high = __shfl_sync(ALL_LANES, x.of[1], i & 31);
    return i < WARP ? low : high;
}

/* What is kept of the entries of an own token: rank | first entry of the expert << 8. */
MOE_DEVICE by_entry<uint32_t> own_places(const moe_gpu_args &a, uint32_t token)
{
    const uint32_t lane = threadIdx.x & 31, k = a.geo.top_k;
    const uint16_t *places = a.lane.own_places + token * k;
    by_entry<uint32_t> p;
    p.of[0] = lane < k ? places[lane] : (uint32_t)MOE_GPU_NO_SLOT;
    p.of[1] = lane + WARP < k ? places[lane + WARP] : (uint32_t)MOE_GPU_NO_SLOT;
    return p;
}

/* The weight of the expert that an entry names first: the sum of its entries'. */
MOE_DEVICE by_entry<float> own_weights(const moe_gpu_args &a, uint32_t token,
                                       const by_entry<uint32_t> &places)
{
    const uint32_t lane = threadIdx.x & 31, k = a.geo.top_k;
    const float *weights = (a.in_weights ? a.in_weights : a.lane.own_weights) + token * k;
    by_entry<float> w, sum;
    w.of[0] = lane < k ? weights[lane] : 0.0f;
    w.of[1] = lane + WARP < k ? weights[lane + WARP] : 0.0f;
    sum = w;
#pragma unroll 1
    for (uint32_t i = 1; i < k; i++) {
        const float more = entry_at(w, i);
        const uint32_t first = entry_at(places, i) >> 8;
        sum.of[0] = first == lane && i > lane ? sum.of[0] + more : sum.of[0];
        sum.of[1] =
            first == lane + WARP && i > lane + WARP ? sum.of[1] + more : sum.of[1];
    }
    return sum;
}

/* Do holders wait for weights of this rank? */
MOE_DEVICE bool sends_weights(const moe_gpu_args &a)
{
    const uint32_t unweighted = a.geo.keeps ? a.lane.state->unweighted : 0;
    return (unweighted >> a.rank & 1) && !wants_apart(a, a.rank, unweighted);
}

/* A warp sends the weights of own tokens first, first + step, ... to their holders. */
MOE_COLD void send_weights(const moe_gpu_args &a, step_view v, uint32_t first,
                           uint32_t step)
{
    const uint32_t lane = threadIdx.x & 31, tokens = a.lane.state->own_tokens;
    for (uint32_t t = first; t < tokens; t += step) {
        const by_entry<float> sum = own_weights(a, t, own_places(a, t));
        const uint4 packet = make_uint4(__float_as_uint(entry_at(sum, lane * 2)),
                                        __float_as_uint(entry_at(sum, lane * 2 + 1)),
                                        v.tag.step, v.tag.kind);
        const uint64_t at = v.half + moe_gpu_weights(&a.geo, a.rank, t);
        for (uint32_t to = a.lane.own_ranks[t] & a.lane.state->sent; to; to &= to - 1)
            if (lane < a.geo.weight_packets)
                store_packet((unsigned char *)a.base[__ffs(to) - 1] + at +
                                 lane * MOE_GPU_PACKET,
                             packet);
    }
}

/* Weights of a split call are the receiving call's too, which is not given them. */
MOE_DEVICE void give_weights(const moe_gpu_args &a, step_view v)
{
    if (sends_weights(a)) {
        send_weights(a, v, blockIdx.x + threadIdx.x / WARP * gridDim.x,
                     gridDim.x * WARPS);
    } else if (a.in_weights) {
        const uint32_t n = a.lane.state->own_tokens * a.geo.top_k;
        for (uint32_t i = blockIdx.x * THREADS + threadIdx.x; i < n;
             i += gridDim.x * THREADS)
            a.lane.own_weights[i] = a.in_weights[i];
    }
}

/* The weight of an entry of a contribution whose owner's weights come with combine; false
 * = it has not come. */
MOE_DEVICE bool late_weight(const moe_gpu_args &a, step_view v, uint32_t owner,
                            uint32_t token, uint32_t position, float *weight)
{
    const uint4 packet =
        load_packet(own_half(a, v.half) + moe_gpu_weights(&a.geo, owner, token) +
                    (position >> 1) * MOE_GPU_PACKET);
    *weight = __uint_as_float(position & 1 ? packet.y : packet.x);
    return packet.z == v.tag.step && packet.w == v.tag.kind;
}

/* Waits for the weights of an item's owner and puts them to its entries, as far as lanes
 * hold them; false = they do not come. Nothing is called while there is no need. */
MOE_DEVICE bool await_weights(const moe_gpu_args &a, step_view v, give_item *item)
{
    const uint32_t lane = threadIdx.x & 31, from = source_of(a, item->to);
    patience p = {v.deadline, 0};
    item->late = true;
#pragma unroll 1
    for (uint32_t first = 0; first < a.geo.top_k; first += WARP) {
        moe_gpu_entry entry = item->entry;
        if (first) {
            entry.row = MOE_GPU_NO_ROW;
            if (first + lane < a.geo.top_k)
                entry = entries_of(a, *item)[first + lane];
        }
        const uint32_t ends = __ballot_sync(ALL_LANES, entry.row < 0);
        const bool mine = !ends || lane < (uint32_t)__ffs(ends) - 1;
        const uint32_t position = mine ? __float_as_uint(entry.weight) : 0;
        float weight;
        while (!__all_sync(ALL_LANES,
                           late_weight(a, v, from, item->token, position, &weight) ||
                               !mine)) {
            if (out_of_patience(&p, a.lane.state, from))
                return false;
            if ((p.polls & 0xff) == 0xff)
                send_weights(a, v, 0, 1);
        }
        if (!first)
            item->entry.weight = weight;
        if (ends)
            break;
    }
    return true;
}

/* An entry that lanes do not hold; weights that were waited for are there. */
MOE_COLD moe_gpu_entry entry_beyond(const moe_gpu_args &a, step_view v,
                                    const give_item &item, uint32_t i)
{
    moe_gpu_entry e = entries_of(a, item)[i];
    if (item.late && e.row >= 0)
        (void)late_weight(a, v, source_of(a, item.to), item.token,
                          __float_as_uint(e.weight), &e.weight);
    return e;
}

/* Takes the next item that has anything to send. */
template <int TYPE, bool WIDE, bool KEEPS>
MOE_DEVICE void open_item(const moe_gpu_args &a, step_view v, const give_work &w,
                          uint32_t tokens, give_cursor *c)
{
#pragma unroll 1
    while (!c->open && c->rank < w.rank_end) {
        c->now = c->next;
        c->token += w.token_step;
        find_item(a, w, tokens, c);
        if (c->rank < w.rank_end)
            load_entries(a, c);
        c->open = __shfl_sync(ALL_LANES, c->now.entry.row, 0) != MOE_GPU_NO_ROW;
    }
    c->begin = w.from;
    if (!c->open)
        return;
    if (KEEPS) {
        const uint32_t unweighted = a.lane.state->unweighted;
        c->dropped = __shfl_sync(ALL_LANES, c->now.entry.row, 0) == MOE_GPU_DROPPED_ROW;
        c->apart = wants_apart(a, c->now.to, unweighted);
        if (!c->apart && !c->dropped && (unweighted >> c->now.to & 1))
            c->dropped = !await_weights(a, v, &c->now);
    }
    begin_part<KEEPS>(a, v, w, c);
}

/* A lane's parts of one row, each to its own place. What lies beyond the row stays as it
 * is: nobody reads it. */
template <bool WIDE, int N>
MOE_DEVICE void load_piece(const moe_gpu_args &a, const give_cursor *c, int32_t row,
                           uint32_t slot)
{
    const unsigned char *from = c->from + (uint64_t)(uint32_t)row * a.geo.give.data_bytes;
#pragma unroll
    for (uint32_t u = 0; u < N; u++) {
        const bool exists = u * MOE_GPU_ACCESS_DATA < c->left;
        if (WIDE)
            copy_ahead(slot + u * MOE_GPU_ACCESS, from + u * MOE_GPU_ACCESS_DATA, exists);
        else if (exists)
            store_shared(slot + u * MOE_GPU_ACCESS,
                         load_narrow(from + u * MOE_GPU_ACCESS_DATA,
                                     (int)(c->left - u * MOE_GPU_ACCESS_DATA)));
    }
}

/* Asks for the next piece, into slot number `number` at `slot`. */
template <bool WIDE, int N, bool KEEPS>
MOE_DEVICE void ask_piece(const moe_gpu_args &a, step_view v, const give_work &w,
                          give_cursor *c, give_piece *p, uint32_t number, uint32_t slot)
{
    int32_t row = __shfl_sync(ALL_LANES, c->now.entry.row, c->row & 31);
    int32_t then = __shfl_sync(ALL_LANES, c->now.entry.row, (c->row + 1) & 31);
    float weight = __shfl_sync(ALL_LANES, c->now.entry.weight, c->row & 31);
    if (c->row + 1 >= WARP) { /* beyond what the lanes hold */
        const moe_gpu_entry *entries = entries_of(a, c->now) + c->row;
        row = entries[0].row;
        weight = KEEPS ? entry_beyond(a, v, c->now, c->row).weight : entries[0].weight;
        then = c->row + 1 < a.geo.top_k ? entries[1].row : (int32_t)MOE_GPU_NO_ROW;
    }
    const bool dropped = KEEPS ? c->dropped : row < 0, apart = KEEPS && c->apart;
    const bool last = then < 0 || (dropped && !apart);
    if (!dropped)
        load_piece<WIDE, N>(a, c, row, slot);
    if ((threadIdx.x & 31) == number) {
        p->weight = weight;
        p->what = c->what | (last || apart ? PIECE_LAST : 0) |
                  (dropped ? PIECE_DROPPED : 0) | (apart ? PIECE_APART : 0);
        p->out =
            c->out + (apart ? __float_as_uint(weight) * (uint64_t)a.geo.give.stride : 0);
    }
    c->row++;
    if (last) {
        c->begin += a.give_part;
        c->open = c->begin < w.end;
        if (c->open)
            begin_part<KEEPS>(a, v, w, c);
    }
}

/* Rows given as they are to be sent: the caller has summed them. */
MOE_DEVICE bool rows_are_sums(const moe_gpu_args &a)
{
    return a.order == MOE_GPU_RANK_MAJOR;
}

template <int TYPE, int N> struct give_sum {
    float acc[N][element<TYPE>::COUNT];
    uint4 row[N]; /* the last piece */
};

template <int TYPE, int N> MOE_DEVICE void clear_sum(give_sum<TYPE, N> *s)
{
#pragma unroll
    for (int u = 0; u < N; u++)
#pragma unroll
        for (int i = 0; i < element<TYPE>::COUNT; i++)
            s->acc[u][i] = 0.0f;
}

template <int TYPE, int N> MOE_DEVICE void add_piece(give_sum<TYPE, N> *s, float weight)
{
#pragma unroll
    for (int u = 0; u < N; u++) {
        float x[element<TYPE>::COUNT];
        element<TYPE>::unpack(s->row[u], x);
#pragma unroll
        for (int i = 0; i < element<TYPE>::COUNT; i++)
            s->acc[u][i] = __fmaf_rn(weight, x[i], s->acc[u][i]);
    }
}

/* Hands a part to the copy engine. `used` counts the parts of the warp, whose ring is at
 * `ring` for this lane. */
template <int TYPE, int N>
MOE_DEVICE void send_part(const moe_gpu_args &a, line_tag tag, const give_sum<TYPE, N> &s,
                          uint32_t what, unsigned char *out, uint32_t ring,
                          uint32_t *used)
{
    const uint32_t lane = threadIdx.x & 31;
    const pair_lane place = place_in_pair(lane);
    const uint32_t buffer = ring + *used % MOE_GPU_RING * PART_BYTES;
    if (++*used > MOE_GPU_RING) {
        bulk_wait<MOE_GPU_RING - 1>();
        __syncwarp();
    }
    tag.kind |=
        (what & PIECE_DROPPED ? TAG_DROPPED : 0) | (what & PIECE_APART ? TAG_APART : 0);
    const bool raw =
        (rows_are_sums(a) || (what & PIECE_APART)) && !(what & PIECE_DROPPED);
#pragma unroll
    for (uint32_t u = 0; u < N; u++)
        if (u < (what & 0xff))
            store_shared(
                buffer + u * MOE_GPU_ACCESS,
                tagged(raw ? s.row[u] : element<TYPE>::pack(s.acc[u]), place, tag));
    bulk_fence();
    __syncwarp();
    if (lane == 0)
        bulk_store(out, buffer, (what >> 8 & 0xff) * MOE_GPU_PAIR);
    bulk_commit();
}

/* Sends the sums of a warp's work, N accesses to a part at most. */
template <int TYPE, bool WIDE, int N, bool KEEPS>
MOE_DEVICE void give(const moe_gpu_args &a, step_view v, const give_work &w,
                     uint32_t tokens, give_cursor *c, uint32_t *used)
{
    const uint32_t ring = shared_address(own_rings()) + (threadIdx.x & 31) * 16;
    give_piece p = {0, 0, NULL};
    give_sum<TYPE, N> sum;
    uint32_t asked = 0, added = 0, ahead = 0, number = 0, next = 0, apart = 0;
    clear_sum(&sum);
#pragma unroll 1
    for (;;) {
        /* Every turn makes a group of copies, though it may be empty: they are counted.
         */
        if (!c->open)
            open_item<TYPE, WIDE, KEEPS>(a, v, w, tokens, c);
        if (c->open) {
            ask_piece<WIDE, N, KEEPS>(a, v, w, c, &p, next, ring + next * PART_BYTES);
            next = next + 1 == MOE_GPU_PIECES ? 0 : next + 1;
            asked++;
        }
        copy_commit();
        if (++ahead < MOE_GPU_PIECES)
            continue;
        if (added == asked)
            break;
        const float weight = __shfl_sync(ALL_LANES, p.weight, number);
        const uint32_t what = __shfl_sync(ALL_LANES, p.what, number);
        const uint32_t slot = ring + number * PART_BYTES;
        copy_wait<MOE_GPU_PIECES - 1>();
#pragma unroll
        for (uint32_t u = 0; u < N; u++)
            sum.row[u] = load_shared(slot + u * MOE_GPU_ACCESS);
        if (!(what & PIECE_DROPPED))
            add_piece(&sum, weight);
        if (what & PIECE_LAST) {
            send_part<TYPE, N>(a, v.tag, sum, what,
                               (unsigned char *)__shfl_sync(
                                   ALL_LANES, (unsigned long long)p.out, number),
                               ring + PIECES_BYTES, used);
            clear_sum(&sum);
            if (KEEPS)
                apart += (what & PIECE_APART) && (what & PIECE_FIRST) &&
                         what >> PIECE_RANK == (threadIdx.x & 31);
        }
        number = number + 1 == MOE_GPU_PIECES ? 0 : number + 1;
        added++;
    }
    count_for(a.lane.counters->given, apart);
}

/* Sources without rows here wait for nothing; where members of a DP group may choose
 * different replicas, all learn by whose mask theirs were chosen. */
MOE_DEVICE void send_drops(const moe_gpu_args &a, step_view v)
{
    const uint32_t to = threadIdx.x & 31;
    const moe_gpu_state *state = a.lane.state;
    const bool drops = state->unserved >> to & 1;
    if (to < a.geo.ranks && (drops || says_source(a)) && (state->active >> to & 1))
        store_packet((unsigned char *)a.base[to] + v.half + a.geo.drop_at +
                         (uint64_t)a.rank * MOE_GPU_LINE,
                     make_uint4(v.step, v.tag.kind | (drops ? TAG_DROPPED : 0),
                                says_source(a) ? state->mask_of[to] : 0,
                                says_source(a) ? state->rows_from[to] % a.dp : 0));
}

/* Counts the contributions that go whole, by one warp; those that go apart are counted
 * where they leave. */
MOE_DEVICE void count_given(const moe_gpu_args &a)
{
    const uint32_t to = threadIdx.x & 31;
    const moe_gpu_state *state = a.lane.state;
    const bool whole =
        to < a.geo.ranks && !(a.geo.keeps && wants_apart(a, to, state->unweighted));
    count_for(a.lane.counters->given, whole ? state->here[to] : 0);
}

/* T of each rank, a lane for each. */
MOE_DEVICE uint32_t tokens_by_lane(const moe_gpu_args &a)
{
    const uint32_t lane = threadIdx.x & 31;
    return lane < a.geo.ranks ? a.lane.state->tokens[lane] : 0;
}

/* The part of a warp of a sending block; its first entries are asked for at once. */
MOE_DEVICE give_work begin_give(const moe_gpu_args &a, give_cursor *c)
{
    const uint32_t warp = threadIdx.x / WARP, group = warp >> log_of(a.per_group);
    const uint32_t number = sender_number(a),
                   first = number >> log_of(a.plan.give_slices);
    const uint32_t part =
        (number & (a.plan.give_slices - 1)) * a.per_group + (warp & (a.per_group - 1));
    const uint32_t from = part * a.give_share;
    const bool idle =
        !is_sender(a) || first >= a.plan.give_classes || from >= a.give_accesses;
    give_work w = {group,
                   a.groups,
                   idle ? 0 : a.geo.ranks,
                   first,
                   a.plan.give_classes,
                   from,
                   min(from + a.give_share, a.give_accesses)};
    c->rank = w.rank;
    c->token = w.token;
    c->open = false;
    if (c->rank < w.rank_end)
        load_entries(a, c);
    return w;
}

template <int TYPE, bool WIDE>
MOE_DEVICE void send_all(const moe_gpu_args &a, step_view v, const give_work &w,
                         uint32_t tokens, give_cursor *c, uint32_t *used)
{
    const uint32_t rank = c->rank;
    find_item(a, w, tokens, c);
    if (c->rank != rank && c->rank < w.rank_end)
        load_entries(a, c);
    if (a.geo.keeps)
        give<TYPE, WIDE, MOE_GPU_PART_MOST, true>(a, v, w, tokens, c, used);
    else if (a.give_part == 1) /* few instructions for few tokens */
        give<TYPE, WIDE, 1, false>(a, v, w, tokens, c, used);
    else
        give<TYPE, WIDE, MOE_GPU_PART_MOST, false>(a, v, w, tokens, c, used);
}

/* What a contribution is: lines of a row, or parts; with PLAIN_PARTS they have flags. */
enum give_form { LINES, PARTS, PLAIN_PARTS };

template <int TYPE, bool PLAIN>
MOE_DEVICE void send_wire_item(const moe_gpu_args &a, step_view v, uint32_t to,
                               uint32_t token);

/* A contribution as send_all would send it, but line by line and without the rings, for
 * where there is no hurry; false = its owner has not come so far as to wait for it. */
template <int TYPE, bool WIDE>
MOE_DEVICE bool give_plainly(const moe_gpu_args &a, step_view v, uint32_t to,
                             uint32_t token)
{
    typedef element<TYPE> e;
    const uint32_t lane = threadIdx.x & 31, bytes = a.geo.give.data_bytes;
    const pair_lane place = place_in_pair(lane);
    const give_item item = {to, token, false, {0, 0}};
    const moe_gpu_entry *entries = entries_of(a, item);
    const uint32_t unweighted = a.geo.keeps ? a.lane.state->unweighted : 0;
    const bool apart = a.geo.keeps && wants_apart(a, to, unweighted);
    const bool dropped = entries[0].row == MOE_GPU_DROPPED_ROW;
    const bool late = !apart && !dropped && (unweighted >> to & 1);
    const uint32_t owner = source_of(a, to);
    const bool raw = apart || rows_are_sums(a);
    unsigned char *out =
        (unsigned char *)a.base[to] + v.half +
        moe_gpu_take(&a.geo, token, apart ? first_apart(a, to) : a.rank) + lane * 16;
    line_tag tag = v.tag;
    if (entries[0].row == MOE_GPU_NO_ROW)
        return true;
    tag.kind |= (dropped ? TAG_DROPPED : 0) | (apart ? TAG_APART : 0);
#pragma unroll 1
    for (uint32_t c = 0; c < a.give_accesses; c++) {
        const uint32_t at = c * MOE_GPU_ACCESS_DATA + (lane_offset(lane, place) & ~15u);
        const bool stores = c * 2 + (lane >> 4) < a.geo.give.pairs;
        float acc[e::COUNT] = {}, x[e::COUNT];
        uint4 row = make_uint4(0, 0, 0, 0);
#pragma unroll 1
        for (uint32_t i = 0; i < a.geo.top_k && entries[i].row != MOE_GPU_NO_ROW; i++) {
            float weight = entries[i].weight;
            const uint32_t position = __float_as_uint(weight);
            if (late && !__all_sync(ALL_LANES,
                                    late_weight(a, v, owner, token, position, &weight)))
                return false;
            if (!dropped)
                row = load_vector<WIDE>((const unsigned char *)a.expert_out +
                                            (uint64_t)(uint32_t)entries[i].row * bytes,
                                        at, bytes);
            e::unpack(row, x);
#pragma unroll
            for (int j = 0; j < e::COUNT; j++)
                acc[j] = __fmaf_rn(weight, x[j], acc[j]);
            if (apart && stores)
                store_packet(out + position * (uint64_t)a.geo.give.stride +
                                 c * MOE_GPU_ACCESS,
                             tagged(row, place, tag));
        }
        if (!apart && stores)
            store_packet(out + c * MOE_GPU_ACCESS,
                         tagged(raw ? row : e::pack(acc), place, tag));
    }
    return true;
}

/* A warp sends what sender `number` would send, as far as no other warp does so. */
template <int TYPE, bool WIDE, give_form FORM>
MOE_DEVICE void send_for(const moe_gpu_args &a, step_view v, uint32_t number)
{
    const uint32_t step = a.plan.give_classes;
    const uint32_t first = number >> log_of(a.plan.give_slices);
    bulk_wait<0>(); /* of the ring that parts use */
    __syncwarp();
    for (uint32_t i = 0; first < step && i < a.geo.ranks; i++) {
        const uint32_t to = rank_after(a, i), n = a.lane.state->tokens[to];
        uint32_t *sent = a.lane.sent_sums + to * a.geo.max_tokens;
        for (uint32_t base = first; base < n; base += WARP * step) {
            const uint32_t mine = base + (threadIdx.x & 31) * step;
            const bool open = mine < n && load_word(sent + mine) != v.step;
            for (uint32_t rest = __ballot_sync(ALL_LANES, open); rest; rest &= rest - 1) {
                const uint32_t t = base + (__ffs(rest) - 1) * step;
                if (!claim(sent + t, v.step))
                    continue;
                if constexpr (FORM != LINES)
                    send_wire_item<TYPE, FORM == PLAIN_PARTS>(a, v, to, t);
                else if (!give_plainly<TYPE, WIDE>(a, v, to, t))
                    sent[t] = v.step - 1;
            }
        }
    }
}

/*
 * A warp that waits long sends what blocks that have not been scheduled yet would send.
 * What is stored twice is stored with the same bytes.
 */
template <int TYPE, bool WIDE, give_form FORM>
MOE_COLD void send_unsent(const moe_gpu_args &a, step_view v)
{
    bool first = true;
    for (uint32_t base = 0; base < gridDim.x; base += WARP)
        for (uint32_t rest = idle_blocks(a, v, 1, base); rest; rest &= rest - 1) {
            if (first)
                send_drops(a, v);
            if (first && sends_weights(a))
                send_weights(a, v, 0, 1);
            first = false;
            send_for<TYPE, WIDE, FORM>(a, v, number_of(a, base + __ffs(rest) - 1));
        }
}

#endif
