/* SPDX-License-Identifier: Apache-2.0 */
/* A block of dispatch: its shared memory, whom it listens to, where routing entries go,
 * what it reports as wrong. */
#ifndef MOE_DEVICE_BLOCK_CUH
#define MOE_DEVICE_BLOCK_CUH

#include "moe/device_row.cuh"
#include "moe/device_step.cuh"

/* A launch has as many threads in a block as leave room for the blocks beside it. */
#define THREADS blockDim.x
#define WARPS (blockDim.x / WARP)

/* One (source, token) that a group of warps receives. */
struct item_rows {
    uint32_t n; /* rows to be written */
    uint32_t source, token;
    uint32_t failed;
    uint32_t twins; /* an expert was named twice */
    bool valid;
    bool weighs; /* the holder applies the weights, which come with the row */
    int32_t row[MOE_GPU_MAX_TOP_K];
    uint8_t order[MOE_GPU_MAX_TOP_K]; /* of a position's entry among the entries */
    float weight[MOE_GPU_MAX_TOP_K];  /* by position */
};

struct block_state {
    uint32_t tokens[MOE_GPU_MAX_RANKS]; /* T of each source */
    uint8_t listen[MOE_GPU_MAX_RANKS]; /* the member of each DP group, if there are any */
    uint32_t listened;                 /* of these, who has rows for this rank */
    uint32_t unweighted;               /* sources whose weights come with combine */
    uint32_t stage_lock;
    moe_gpu_map map;
    uint64_t moved[MOE_GPU_MOVERS]; /* a warp waits for the row in its stage */
    item_rows item[MOE_GPU_PLACED][MOE_GPU_GROUPS];
};

extern __shared__ __align__(128) unsigned char shared_memory[];
static __shared__ block_state b;
static_assert(sizeof(b) + 1024 <= MOE_GPU_DISPATCH_FIXED, "more shared memory");

MOE_DEVICE uint32_t *shared_words(uint32_t at)
{
    return (uint32_t *)(shared_memory + at);
}

MOE_DEVICE uint32_t *any_set(const moe_gpu_args &a)
{
    return shared_words(a.shared.any_at);
}

/* The bit set of a local expert. */
MOE_DEVICE uint32_t *set_of(const moe_gpu_args &a, uint32_t expert)
{
    return any_set(a) + (expert + 1) * a.shared.words;
}

/* The expert slots of the token of `source` that the block receives in `turn`. */
MOE_DEVICE uint16_t *stashed(const moe_gpu_args &a, uint32_t turn, uint32_t source)
{
    return (uint16_t *)(shared_memory + a.shared.stash_at) +
           (turn * a.geo.ranks + source) * a.geo.top_k;
}

MOE_DEVICE bool needs_offsets(const moe_gpu_args &a)
{
    return a.order != MOE_GPU_3D;
}

MOE_DEVICE uint32_t asked_tokens(const moe_gpu_args &a)
{
    return a.num_tokens_at ? (uint32_t)*a.num_tokens_at : a.num_tokens;
}

MOE_DEVICE uint32_t own_tokens(const moe_gpu_args &a)
{
    uint32_t n = asked_tokens(a);
    return n > a.geo.max_tokens ? 0 : n;
}

/* The rank of source `source`: that itself if every rank has tokens of its own. */
MOE_DEVICE uint32_t source_rank(const moe_gpu_args &a, uint32_t source)
{
    return a.dp == 1 ? source : b.listen[source];
}

/* The ranks whose rows are taken, one of each DP group. */
MOE_DEVICE uint32_t listened_ranks(const moe_gpu_args &a)
{
    return a.dp == 1 ? counted_ranks(a) : b.listened;
}

/*
 * The expert slot that a routing entry goes to: the own rank's, else the live holders in
 * turn, all of them if none is live.
 */
MOE_COLD uint32_t choose_holder(const moe_gpu_args &a, uint32_t expert, uint32_t token)
{
    uint32_t first = a.holder_first[expert], end = a.holder_first[expert + 1], live = 0;
    const uint32_t counted = counted_ranks(a);
    if (end - first == 1)
        return a.holder_slot[first];
    for (uint32_t i = first; i < end; i++) {
        uint32_t rank = a.slot_rank[a.holder_slot[i]];
        const bool up = counted >> rank & 1;
        if (up && (a.dp == 1 ? rank == a.rank : rank / a.dp == a.rank / a.dp))
            return a.holder_slot[i];
        live += up;
    }
    uint32_t turn = (a.rank / a.dp + token) % (live ? live : end - first);
    for (uint32_t i = first; i < end; i++) {
        if (live && (counted >> a.slot_rank[a.holder_slot[i]] & 1) == 0)
            continue;
        if (turn-- == 0)
            return a.holder_slot[i];
    }
    return MOE_GPU_NO_SLOT;
}

/* The host's next call sees that there is an error. */
MOE_DEVICE void give_notice(const moe_gpu_args &a)
{
    __threadfence_system();
    *(volatile uint32_t *)a.lane.notice = 1;
}

MOE_COLD void report_id(const moe_gpu_args &a, uint64_t index, int64_t id)
{
    unsigned long long *first = (unsigned long long *)&a.lane.state->error.first;
    uint64_t mine = index << 8 | MOE_GPU_ERR_ID;
    if (atomicMin(first, (unsigned long long)mine) > mine)
        a.lane.state->error.value = id;
    give_notice(a);
}

/* This rank, or a peer, was asked to send what it cannot. */
MOE_COLD void report_tokens(const moe_gpu_args &a, uint32_t rank, uint32_t asked)
{
    unsigned long long *first = (unsigned long long *)&a.lane.state->error.first;
    uint64_t mine = rank == a.rank ? MOE_GPU_ERR_TOKENS
                                   : (MOE_GPU_PEER_ERROR | rank) << 8 | MOE_GPU_ERR_PEER;
    if (atomicMin(first, (unsigned long long)mine) > mine)
        a.lane.state->error.value = (int32_t)asked;
    give_notice(a);
}

/* Members of the DP group of `rank` do not give weights alike. */
MOE_COLD void report_weights(const moe_gpu_args &a, uint32_t rank)
{
    unsigned long long *first = (unsigned long long *)&a.lane.state->error.first;
    uint64_t mine = (MOE_GPU_PEER_ERROR | rank) << 8 | MOE_GPU_ERR_WEIGHTS;
    atomicMin(first, (unsigned long long)mine);
    give_notice(a);
}

MOE_DEVICE int64_t id_at(const moe_gpu_args &a, uint32_t index)
{
    return a.ids_are_64 ? ((const int64_t *)a.ids)[index]
                        : ((const int32_t *)a.ids)[index];
}

/* The expert slot of routing entry `index` of token `token`, expert `id`, and the rank
 * that it is on. `even` as in struct moe_gpu_map. */
MOE_DEVICE uint32_t slot_of(const moe_gpu_args &a, uint32_t even, int64_t id,
                            uint32_t index, uint32_t token, uint32_t *rank)
{
    if (id < 0 || id >= a.experts) {
        if (id != -1)
            report_id(a, index, id);
        return MOE_GPU_NO_SLOT;
    }
    uint32_t slot = even ? (uint32_t)id : choose_holder(a, (uint32_t)id, token);
    *rank = even ? slot / even : a.slot_rank[slot];
    return slot;
}

#endif
