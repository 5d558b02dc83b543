/* SPDX-License-Identifier: Apache-2.0 */
/* Headers in, and what follows from them: bit sets, counts, the places of rows. */
#ifndef MOE_DEVICE_PLACE_CUH
#define MOE_DEVICE_PLACE_CUH

#include "moe/device_send.cuh"

/* A header packet: marks the rows that come to this rank, keeps what the block needs;
 * true = some do. FEW: there is one packet for a warp at most, so it is what a step waits
 * for, entry by entry. */
template <bool FEW>
MOE_DEVICE bool take_packet(const moe_gpu_args &a, uint32_t source, uint32_t token,
                            uint32_t first, uint4 v)
{
    const uint32_t word = source * a.geo.token_words + (token >> 5),
                   bit = 1u << (token & 31);
    const uint32_t turn = __umulhi(token << 1, a.classes_magic);
    const uint32_t n = min((uint32_t)MOE_GPU_PACKET_SLOTS, a.geo.top_k - first);
    const bool mine = token - turn * a.plan.take_classes == take_class(a);
    uint16_t *stash = stashed(a, turn, source) + first;
    uint32_t w0 = v.x, w1 = v.y;
    bool any = false;
#pragma unroll FEW ? MOE_GPU_PACKET_SLOTS : 1
    for (uint32_t i = 0; i < (FEW ? (uint32_t)MOE_GPU_PACKET_SLOTS : n); i++) {
        const uint32_t slot = w0 & 0xffff, e = slot - b.map.slot_base;
        if (slot != MOE_GPU_NO_SLOT && e < b.map.local_experts) {
            atomicOr(&set_of(a, e)[word], bit);
            any = true;
        }
        if (mine && i < n)
            stash[i] = (uint16_t)slot;
        w0 = __funnelshift_r(w0, w1, 16);
        w1 >>= 16;
    }
    return any;
}

/* Marks the tokens of a part that have rows here. They follow each other, so they lie in
 * two words at most: one lane for all of them, instead of 32 for one word. */
MOE_DEVICE void mark_tokens(const moe_gpu_args &a, uint32_t source, uint32_t token,
                            bool any)
{
    const uint32_t word = token >> 5, first = __shfl_sync(ALL_LANES, word, 0);
    const uint32_t bit = any ? 1u << (token & 31) : 0;
    const uint32_t low = __reduce_or_sync(ALL_LANES, word == first ? bit : 0),
                   high = __reduce_or_sync(ALL_LANES, word == first ? 0 : bit);
    uint32_t *set = any_set(a) + source * a.geo.token_words + first;
    if ((threadIdx.x & 31) != 0)
        return;
    if (low)
        atomicOr(set, low);
    if (high)
        atomicOr(set + 1, high);
}

/* A part of the headers: 32 packets of one source, a lane for each. */
struct header_part {
    uint32_t source, number, token;
    bool over, whole; /* this lane waits no longer; has a packet */
    uint4 packet, sign;
};

/* Looks once at each of some parts; true = none is waited for any longer. */
template <int N>
MOE_DEVICE bool look_at_headers(const moe_gpu_args &a, step_view v, header_part *p)
{
    const unsigned char *here = own_half(a, v.half);
    const uint64_t packets = (uint64_t)a.geo.max_tokens * a.geo.packets;
    bool over = true;
#pragma unroll
    for (int u = 0; u < N; u++)
        if (!p[u].over) {
            p[u].packet = load_packet(here + a.geo.header_at +
                                      (p[u].source * packets + p[u].number) * 16);
            p[u].sign = load_packet(here + a.geo.sign_at + p[u].source * MOE_GPU_LINE);
        }
#pragma unroll
    for (int u = 0; u < N; u++) {
        if (p[u].over)
            continue;
        const bool there = p[u].packet.z == v.tag.step && p[u].packet.w == v.tag.kind;
        const bool beyond = p[u].token >= p[u].sign.z;
        p[u].over = sign_matches(p[u].sign, v) && (there || beyond);
        p[u].whole = p[u].over && !beyond;
        over &= p[u].over;
    }
    return __all_sync(ALL_LANES, over);
}

/* A wait for headers has become long: gives up on sources that do not come. */
MOE_COLD bool give_up_source(const moe_gpu_args &a, step_view v, uint32_t source)
{
    return __any_sync(ALL_LANES,
                      wait_is_over(v.deadline, &a.lane.state->active, source)) &&
           decide(a, v, source) == SOURCE_MISSING;
}

/* The member of each DP group that has rows for this rank, by a warp: the first in turn
 * that came and finds nobody before it (moe_dp_member), `sign` by lane. Behind one that
 * is missed nobody is looked for: blocks may differ in when they missed it. A group of
 * which some give weights with dispatch and others do not has no rows. */
MOE_DEVICE void choose_members(const moe_gpu_args &a, uint32_t came, uint4 sign)
{
    const uint32_t source = threadIdx.x & 31, counted = counted_ranks(a);
    const uint32_t counts = sign.y & SIGN_REFUSED ? ~0u : sign.w;
    const uint32_t says = __ballot_sync(
        ALL_LANES, (came >> source & 1) && !(sign.y & SIGN_REFUSED) && sign.z);
    const uint32_t late =
        __ballot_sync(ALL_LANES, (sign.y & SIGN_UNWEIGHTED) != 0) & says;
    const uint32_t group = ((2u << (a.dp - 1)) - 1) << (source * a.dp & 31);
    uint32_t listen = source * a.dp + a.rank % a.dp, found = 0;
    bool over = source >= a.geo.sources;
    if (!over && (late & group) && (~late & says & group)) {
        if (blockIdx.x == 0)
            report_weights(a, source * a.dp);
        over = true;
    }
    for (uint32_t i = 0; i < a.dp; i++) {
        const uint32_t member =
            min(source, a.geo.sources - 1) * a.dp + (a.rank + i) % a.dp;
        const uint32_t its = __shfl_sync(ALL_LANES, counts, member);
        if (over || (counted >> member & 1) == 0)
            continue;
        over = (came >> member & 1) == 0;
        if (over || dp_member(a, source, a.rank, its) != member)
            continue;
        listen = member;
        found = 1u << member;
        over = true;
    }
    b.listen[source] = (uint8_t)listen;
    found = __reduce_or_sync(ALL_LANES, found);
    if (source == 0)
        b.listened = found;
}

/* In DP groups the signs of all members come first, since they say whose rows come. One
 * warp waits for them, a lane for each. */
template <int IN, bool WIDE, bool PLAIN>
MOE_COLD void receive_signs(const moe_gpu_args &a, step_view v)
{
    const uint32_t r = threadIdx.x & 31;
    bool over = r >= a.geo.ranks || (counted_ranks(a) >> r & 1) == 0, came = false;
    uint32_t polls = 0;
    uint4 sign = make_uint4(0, 0, 0, 0);
    for (;;) {
        if (!over) {
            sign = load_packet(sign_of(a, v.half, r));
            came = over = sign_matches(sign, v);
        }
        uint32_t waiting = __ballot_sync(ALL_LANES, !over);
        if (!waiting)
            break;
        if ((++polls & 63) != 0)
            continue;
        for (; waiting; waiting &= waiting - 1) {
            const uint32_t source = __ffs(waiting) - 1;
            if (give_up_source(a, v, source) && r == source)
                over = true;
        }
        if ((polls & 0xff) == 0 && (a.phase & MOE_GPU_SEND))
            send_unsent<IN, WIDE, PLAIN>(a, v);
    }
    const uint64_t word = r < a.geo.ranks ? load_long(&a.lane.state->decided[r]) : 0;
    uint32_t doubtful = __ballot_sync(ALL_LANES, came && word >> 2 == v.step);
    for (; doubtful; doubtful &= doubtful - 1) {
        const uint32_t source = __ffs(doubtful) - 1;
        if (decide(a, v, source) == SOURCE_MISSING && r == source)
            came = false;
    }
    choose_members(a, __ballot_sync(ALL_LANES, came), sign);
}

/* Takes the headers of all sources, N parts of a warp at once. */
template <int IN, bool WIDE, bool PLAIN, int N, bool FEW>
MOE_DEVICE void receive_headers(const moe_gpu_args &a, step_view v)
{
    const uint32_t packets = a.geo.max_tokens * a.geo.packets;
    const uint32_t listened = listened_ranks(a);
    uint32_t source = 0, part = threadIdx.x / WARP, polls = 0;
    for (;;) {
        header_part p[N];
#pragma unroll
        for (int u = 0; u < N; u++) {
            while (part >= a.header_parts) {
                part -= a.header_parts;
                source++;
            }
            if (u == 0 && source >= a.geo.ranks)
                return;
            p[u].source = source;
            p[u].number = part * WARP + (threadIdx.x & 31);
            p[u].token = __umulhi(p[u].number << 1, a.packets_magic);
            p[u].whole = false;
            p[u].sign.y = 0;
            p[u].over = source >= a.geo.ranks || p[u].number >= packets ||
                        (listened >> source & 1) == 0;
            part += WARPS;
        }
        uint64_t waits = 0;
        while (!look_at_headers<N>(a, v, p)) {
            if (blockIdx.x == 0 && !waits)
                waits = time_ns();
            if ((++polls & 63) != 0)
                continue;
#pragma unroll
            for (int u = 0; u < N; u++)
                if (!__all_sync(ALL_LANES, p[u].over) &&
                    give_up_source(a, v, p[u].source))
                    p[u].over = true;
            if ((polls & 0xff) == 0 && (a.phase & MOE_GPU_SEND))
                send_unsent<IN, WIDE, PLAIN>(a, v);
        }
#pragma unroll
        for (int u = 0; u < N; u++) {
            if ((p[u].sign.y & SIGN_REFUSED) && p[u].number == 0 && blockIdx.x == 0 &&
                p[u].source != a.rank)
                report_tokens(a, p[u].source, p[u].sign.w);
            const bool any = p[u].whole &&
                             take_packet<FEW>(a, p[u].source, p[u].token,
                                              (p[u].number - p[u].token * a.geo.packets) *
                                                  MOE_GPU_PACKET_SLOTS,
                                              p[u].packet);
            mark_tokens(a, p[u].source, p[u].token, any);
            if (waits && p[u].number == 0)
                atomicAdd((unsigned long long *)&a.lane.counters->wait_ns[p[u].source],
                          (unsigned long long)(time_ns() - waits));
            if (p[u].whole && p[u].number == 0) {
                b.tokens[p[u].source] = p[u].sign.z;
                if (p[u].sign.y & SIGN_UNWEIGHTED)
                    atomicOr(&b.unweighted, 1u << p[u].source);
            }
        }
    }
}

MOE_DEVICE uint32_t count_rows(const uint32_t *set, uint32_t words, uint32_t lane)
{
    uint32_t sum = 0;
#pragma unroll 1
    for (uint32_t w = lane; w < words; w += WARP)
        sum += __popc(set[w]);
    return __reduce_add_sync(ALL_LANES, sum);
}

/* Counts of all experts and where their rows begin, for the orders that pack experts. */
MOE_COLD void find_offsets(const moe_gpu_args &a)
{
    const uint32_t lane = threadIdx.x & 31, L = b.map.local_experts;
    const uint32_t align = a.order == MOE_GPU_FLAT ? a.align : 1;
    for (uint32_t e = threadIdx.x / WARP; e < L; e += WARPS) {
        uint32_t n = count_rows(set_of(a, e), a.shared.words, lane);
        if (lane == 0)
            shared_words(a.shared.counts_at)[e] = n;
    }
    __syncthreads();
    if (threadIdx.x < WARP) {
        uint32_t base = 0;
        for (uint32_t first = 0; first <= L; first += WARP) {
            uint32_t e = first + lane;
            uint32_t n = e < L ? moe_gpu_round_up(shared_words(a.shared.counts_at)[e],
                                                  align)
                               : 0,
                     sum = n;
            for (int d = 1; d < WARP; d <<= 1) {
                uint32_t o = __shfl_up_sync(ALL_LANES, sum, d);
                sum += lane >= (uint32_t)d ? o : 0;
            }
            if (e <= L)
                shared_words(a.shared.offsets_at)[e] = base + sum - n;
            base += __shfl_sync(ALL_LANES, sum, 31);
        }
    }
    __syncthreads();
}

/*
 * Row of combine's input for (expert, position), which for the orders by expert is also
 * the row that dispatch writes.
 */
MOE_DEVICE int32_t expert_row(const moe_gpu_args &a, uint32_t e, uint32_t position)
{
    uint32_t base =
        a.order == MOE_GPU_3D ? e * a.expert_rows : shared_words(a.shared.offsets_at)[e];
    return (int32_t)(base + position);
}

/* A lane's share of the set bits before bit `bit` of word `word`. */
MOE_DEVICE uint32_t bits_before(const uint32_t *set, uint32_t word, uint32_t bit,
                                uint32_t lane)
{
    uint32_t sum = 0;
#pragma unroll 1
    for (uint32_t w = lane; w <= word; w += WARP)
        sum += __popc(set[w] & (w == word ? (1u << bit) - 1 : ~0u));
    return sum;
}

/* Sums of two small counts over `share` neighbouring lanes. */
MOE_DEVICE void add_shares(uint32_t *x, uint32_t *y, uint32_t share)
{
#pragma unroll 1
    for (uint32_t d = share >> 1; d; d >>= 1) {
        *x += __shfl_xor_sync(ALL_LANES, *x, d);
        *y += __shfl_xor_sync(ALL_LANES, *y, d);
    }
}

/* What a warp finds out about one entry of a token's routing. */
struct entry_place {
    uint32_t before; /* rows of the expert before this one */
    uint32_t order;  /* distinct experts of this rank below it */
    bool again;      /* named before */
};

/* `share` lanes for each entry; `e` is this lane's local expert. */
MOE_DEVICE entry_place find_place(const moe_gpu_args &a, const uint16_t *slots,
                                  const uint32_t *set, uint32_t word, uint32_t bit,
                                  uint32_t j, uint32_t e, uint32_t share)
{
    const uint32_t part = threadIdx.x & (share - 1), k = a.geo.top_k;
    uint32_t before = 0, counts = 0;
#pragma unroll 2
    for (uint32_t i = part; i < k; i += share) {
        uint32_t other = slots[i] - b.map.slot_base;
        counts += (other < e) + (i < j && other == e ? 0x100 : 0);
    }
#pragma unroll 2
    for (uint32_t w = part; w <= word; w += share)
        before += __popc(set[w] & (w == word ? (1u << bit) - 1 : ~0u));
    add_shares(&before, &counts, share);
    entry_place p = {before, counts & 0xff, counts > 0xff};
    return p;
}

/* Distinct experts of this rank below `e`, for tokens that name one twice. */
MOE_COLD uint32_t distinct_below(const moe_gpu_args &a, const uint16_t *slots, uint32_t e)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < a.geo.top_k; i++) {
        bool counts = slots[i] - b.map.slot_base < e;
        for (uint32_t h = 0; h < i; h++)
            counts = counts && slots[h] != slots[i];
        n += counts;
    }
    return n;
}

/* For the orders by rank: what the caller learns about the experts of a row. */
MOE_DEVICE void deliver_local_id(const moe_gpu_args &a, uint32_t rank_row, uint32_t j,
                                 bool first, uint32_t e, uint32_t row)
{
    if (a.local_ids)
        a.local_ids[(uint64_t)rank_row * a.geo.top_k + j] = first ? (int32_t)e : -1;
    if (first && a.order == MOE_GPU_INDEXED && a.row_numbers)
        a.row_numbers[row] = rank_row;
}

/*
 * A warp finds the rows of one (source, token) and writes what combine must know. Entries
 * are handled side by side, by several lanes each if there are few.
 */
MOE_DEVICE void place_item(const moe_gpu_args &a, item_rows *item, uint32_t turn)
{
    const uint32_t lane = threadIdx.x & 31, k = a.geo.top_k;
    const uint32_t share = k <= 8 ? 4 : k <= 16 ? 2 : 1, log = share >> 1;
    const uint32_t word = item->source * a.geo.token_words + (item->token >> 5);
    const uint32_t bit = item->token & 31;
    const uint16_t *slots = stashed(a, turn, item->source);
    const bool by_rank = a.order >= MOE_GPU_RANK_MAJOR, any = any_set(a)[word] >> bit & 1;
    moe_gpu_entry *entries =
        a.lane.entries + ((uint64_t)item->source * a.geo.max_tokens + item->token) * k;
    const uint32_t rank_row =
        by_rank ? __reduce_add_sync(ALL_LANES, bits_before(any_set(a), word, bit, lane))
                : 0;
    const bool writes = take_slice(a) == 0; /* the other slices find the same */
    uint32_t total = 0, twins = 0;
#pragma unroll 1
    for (uint32_t first = 0; first < k; first += WARP / share) {
        uint32_t j = first + (lane >> log);
        uint32_t slot = j < k ? slots[j] : (uint32_t)MOE_GPU_NO_SLOT,
                 e = slot - b.map.slot_base;
        bool mine = slot != MOE_GPU_NO_SLOT && e < b.map.local_experts;
        entry_place p =
            find_place(a, slots, set_of(a, mine ? e : 0), word, bit, j, e, share);
        bool lead = (lane & (share - 1)) == 0 && mine && !p.again;
        uint32_t row = a.order == MOE_GPU_RANK_MAJOR
                           ? rank_row
                           : expert_row(a, mine ? e : 0, p.before);
        twins |= __any_sync(ALL_LANES, mine && p.again);
        if (twins || k > WARP) /* in one round all twins are seen */
            p.order = distinct_below(a, slots, e);
        if (j < k)
            item->order[j] = mine ? (uint8_t)p.order : 0xff;
        if (lead && !by_rank)
            item->row[p.order] = (int32_t)row;
        if (lead && writes) {
            entries[p.order].row = (int32_t)row;
            if (!item->weighs)
                entries[p.order].weight = __uint_as_float(j);
            if (!by_rank && a.source_token)
                a.source_token[row] = (int32_t)item->token;
        }
        if (by_rank && any && writes && (lane & (share - 1)) == 0 && j < k)
            deliver_local_id(a, rank_row, j, lead, e, row);
        total += __popc(__ballot_sync(ALL_LANES, lead));
    }
    if (lane == 0) {
        uint32_t end = a.order == MOE_GPU_RANK_MAJOR && any ? 1 : total;
        if (end < k && writes)
            entries[end].row = MOE_GPU_NO_ROW;
        item->n = by_rank && any ? 1 : total;
        item->twins = twins;
        item->valid = any;
        if (by_rank && any) {
            item->row[0] = (int32_t)rank_row;
            if (a.source_token && writes)
                a.source_token[rank_row] = (int32_t)item->token;
        }
    }
}

#endif
