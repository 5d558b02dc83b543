/* SPDX-License-Identifier: Apache-2.0 */
/* What the MoE kernels are given: geometry of the device arena, parameter block, lane
 * state. */
#ifndef MOE_GPU_ARGS_H
#define MOE_GPU_ARGS_H

/*
 * Plain data in the common subset of C and CUDA C++. Every rank owns one arena in device
 * memory that all ranks of the host map; all arenas have the same offsets:
 *
 *   +---- lane 0, half 0 ------------------------------------------------+
 *   | sign    [R]     one line each: source's header packet              |
 *   | drop    [R]     one line each: "I dropped you", by contributor     |
 *   | header  [R][M]  routing of a token of a source, packets            |
 *   | weight  [R][M]  its weights, if they come with combine, packets    |
 *   | slot    [R][M]  dispatch rows by source and token, packed lines    |
 *   | take    [M][C]  contributions by token and place, packed lines     |
 *   +---- lane 0, half 1 ------------------------------------------------+
 *   | ...                                                                |
 *
 * Packed lines carry their own flag, so nothing is ever cleared or fenced: a line of 128
 * B holds 120 B of data and an 8 B tag {step, generation}. Two lines are a pair, which
 * holds 15 vectors of 16 B, the last of them split over both lines:
 *
 *   lane      0  1  2  3  4  5  6  7        8  9  10 11 12 13 14 15
 *   vector    0  1  2  3  4  5  6  14lo+tag 7  8  9  10 11 12 13 14hi+tag
 *
 * Lines are put together in shared memory and written by the bulk copy engine, so that
 * stores that wait for the link hold up no loads; a line is read by one load instruction
 * of 8 lanes. The link keeps lines whole (heddle perf --micro counts torn ones). Headers
 * are small: their packets are 16 B of 4 expert slots and the tag, each complete in
 * itself. They leave before the rows do, since what comes later waits behind the rows.
 *
 * By the other protocols a row, or a part of a contribution, lies in the same place as it
 * is, without tags, but for that of its last line: this is its flag. Who writes lets all
 * of a few rows arrive, by one fence, and then writes the flags of these.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define MOE_GPU_FN static __host__ __device__ inline
#else
#define MOE_GPU_FN static inline
#endif

enum {
    MOE_GPU_MAX_RANKS = 32,
    MOE_GPU_MAX_CTAS = 512,
    MOE_GPU_TRACE_POINTS = 16,
    MOE_GPU_LINE = 128,
    MOE_GPU_PAIR = 256,
    MOE_GPU_PAIR_DATA = 240,
    MOE_GPU_PACKET = 16,
    MOE_GPU_ACCESS = 512, /* what a warp reads or writes at once: two pairs */
    MOE_GPU_ACCESS_DATA = 480,
    MOE_GPU_STAGES = 3, /* rows in shared memory: two in turn, one for late blocks' */
    MOE_GPU_MOVERS = 8, /* warps that move rows by the copy engine, at most: one in each
                           stage but the last */
    MOE_GPU_PIECES = 4, /* parts of rows on their way in, for each warp */
    MOE_GPU_RING = 2,   /* parts of contributions on their way out, for each warp */
    MOE_GPU_CHUNK_ROWS = 4,   /* whose flags a fence is for; also of parts */
    MOE_GPU_PART_MOST = 4,    /* accesses in a part, at most */
    MOE_GPU_PLACED = 4,       /* turns whose rows are placed ahead */
    MOE_GPU_GROUPS = 8,       /* most groups of warps in a block */
    MOE_GPU_PACKET_SLOTS = 4, /* routing entries in a header packet */
    MOE_GPU_NO_SLOT = 0xffff,
    MOE_GPU_MAX_TOP_K = 64,
    MOE_GPU_COMBINE_THREADS = 512,
    MOE_GPU_DISPATCH_THREADS =
        512, /* most; half of them if blocks share multiprocessors */
    /* Shared memory of a dispatch block besides moe_gpu_share(), at most: its state, what
     * the driver takes. */
    MOE_GPU_DISPATCH_FIXED = 20480
};

/* Bits of moe_gpu_args.phase. */
enum { MOE_GPU_SEND = 1, MOE_GPU_RECV = 2 };

/* Order of the delivered rows; equal to enum hdl_moe_layout. */
enum { MOE_GPU_3D = 0, MOE_GPU_FLAT = 1, MOE_GPU_RANK_MAJOR = 2, MOE_GPU_INDEXED = 3 };

/* Equal to enum hdl_moe_format. */
enum { MOE_GPU_PLAIN = 0, MOE_GPU_FP8 = 1, MOE_GPU_POW2 = 2, MOE_GPU_UE8M0 = 3 };

/* How rows and contributions cross; equal to enum hdl_moe_protocol. */
enum { MOE_GPU_LL = 1, MOE_GPU_CHUNK = 2, MOE_GPU_BULK = 3 };

/* Contributions of combine; equal to enum hdl_moe_wire. */
enum { MOE_GPU_WIRE_ROW = 0, MOE_GPU_WIRE_F32 = 1, MOE_GPU_WIRE_FP8 = 2 };

/* Element types of rows that kernels compute with. */
enum { MOE_GPU_BYTES = 0, MOE_GPU_BF16 = 1, MOE_GPU_F16 = 2, MOE_GPU_F32 = 3 };

/* What a handle row says besides a row number. */
enum { MOE_GPU_NO_ROW = -1, MOE_GPU_DROPPED_ROW = -2 };

/* What a kernel can find wrong with its arguments: struct moe_gpu_error.kind. */
enum {
    MOE_GPU_ERR_NONE = 0,
    MOE_GPU_ERR_TOKENS = 1,
    MOE_GPU_ERR_ID = 2,
    MOE_GPU_ERR_PEER = 3,   /* a peer refused its call */
    MOE_GPU_ERR_WEIGHTS = 4 /* members of a DP group do not give weights alike */
};
/* Marks a rank in the place of an index: behind all own offences. */
#define MOE_GPU_PEER_ERROR (UINT64_C(1) << 40)
/* In a number of tokens: they had no data. */
#define MOE_GPU_NO_DATA (UINT32_C(1) << 30)

/* Bytes of one row on the wire, and where its parts lie. */
struct moe_gpu_row {
    uint32_t data_bytes;
    uint32_t scale_bytes;
    uint32_t scale_at;
    uint32_t weight_at; /* f32 [k], only in dispatch rows */
    uint32_t bytes;
    uint32_t pairs;
    uint32_t stride;  /* of a place in the arena */
    uint32_t crosses; /* bytes of it that cross, tags or flags included */
};

struct moe_gpu_geometry {
    uint32_t ranks;
    uint32_t top_k;
    uint32_t top_k_pad; /* rounded up to 4 */
    uint32_t max_tokens;
    uint32_t places; /* C, contributions a token can get; experts apart: [dp][k] */
    uint32_t sources;
    uint32_t token_words; /* words of a bit set of one source's tokens */
    uint32_t packets;     /* of a token's header */
    uint32_t
        weight_packets; /* of a token's weights that come with combine; 0 = none do */
    uint32_t keeps;     /* positions of experts matter: exact sums, late weights */
    uint32_t row_protocol, give_protocol; /* of dispatch, of combine */
    struct moe_gpu_row row;               /* of dispatch */
    struct moe_gpu_row give;              /* of combine; data_bytes are those of a row */
    uint32_t parts; /* of a contribution, unless it is rows in packed lines */
    uint32_t part_elements, part_pairs;
    uint64_t sign_at, drop_at, header_at, weight_at, slot_at, take_at; /* in a half */
    uint64_t half_bytes;
    uint64_t total_bytes;
};

/* What an update may change in the expert map of a rank; one load of 16 B. */
struct moe_gpu_map {
    uint32_t local_experts; /* of this rank */
    uint32_t slot_base;     /* number of its first expert slot */
    uint32_t even_experts;  /* E / R of the contiguous map, 0 = use the tables */
    uint32_t says_source;   /* DP groups and replicas: masks must be compared */
};

/*
 * Shared memory of a dispatch block, offsets in bytes:
 *
 *   stages | any [words] bits [L][words] | counts [L + 1] | offsets [L + 1] |
 *   ranks | weights | stash
 *
 * stages hold rows as packed lines, which the copy engine reads; bits the bit sets of the
 * experts' tokens, any the set of the tokens that chose any of them; ranks [turns] and
 * weights [turns][k] are those of the tokens that the block sends; stash [turns][R][k]
 * the expert slots of the tokens that the block receives. L is the most experts that
 * there is room for.
 */
struct moe_gpu_shared {
    uint32_t any_at, counts_at, offsets_at, ranks_at, weights_at, stash_at;
    uint32_t words; /* of one bit set */
    uint32_t stages;
    uint64_t bytes;
};

/*
 * Which blocks do what. Some send, others receive: what a multiprocessor has handed to
 * the link holds up its later loads, so a block that waits for rows must not have sent
 * any.
 *
 *   block   0 .. take_classes * take_slices | ... reports ... | last `senders` blocks
 *
 * Receivers take the tokens of their class, token mod take_classes; slices share the
 * accesses to a row. In combine, senders are divided in the same way, into give_classes *
 * give_slices. Blocks without rows of their own write the caller's counts. With a single
 * block, or when the phases are separate calls, the ranges overlap and a block does both.
 */
struct moe_gpu_plan {
    uint32_t grid;
    uint32_t senders;
    uint32_t take_classes, take_slices;
    uint32_t give_classes, give_slices;
};

struct moe_gpu_error {
    uint64_t
        first; /* lowest offence: (token * k + position, or MOE_GPU_PEER_ERROR | rank)
                  << 8 | kind, ~0 = none */
    int64_t value;
};

/*
 * State of one lane in the rank's own device memory, never written by peers. The arrays
 * behind it (struct moe_gpu_lane has their addresses) are the handle of the open step.
 */
struct moe_gpu_state {
    uint32_t generation;
    uint32_t active;  /* ranks that the control plane believes in; may change any time */
    uint32_t sent;    /* ranks that this step's rows were sent to */
    uint32_t members; /* of creation or the last update, also who was lost meanwhile */
    uint32_t mask;    /* of these, who the caller's mask has */
    uint32_t alone;   /* the own rank: a call that is refused counts on nobody */
    uint32_t unweighted;  /* sources whose weights come with combine */
    uint32_t unserved;    /* ranks for whose tokens nothing came */
    uint32_t own_mask;    /* the ranks that the step's dispatch counted on */
    uint32_t same_routes; /* of combine: holders that chose replicas by the same mask */
    uint32_t says_source; /* of the map that the step's dispatch had */
    uint32_t own_tokens;  /* that results are wanted for */
    uint32_t mask_of[MOE_GPU_MAX_RANKS];   /* if says_source: by which the replicas of a
                                              rank's tokens were chosen here */
    uint32_t member_of[MOE_GPU_MAX_RANKS]; /* and by which member at a holder */
    uint32_t incomplete_calls;
    uint32_t incomplete_step[2];     /* newest that dispatch, combine counted there */
    uint32_t step[MOE_GPU_MAX_CTAS]; /* of the next dispatch; one word for each block */
    uint32_t begun[2][MOE_GPU_MAX_CTAS]; /* newest step of dispatch, combine in which a
                                            block was scheduled */
    uint32_t dropped[MOE_GPU_MAX_RANKS]; /* newest step in which rows of a source were
                                            missing */
    uint32_t late[MOE_GPU_MAX_RANKS]; /* newest step in which a contributor was missing */
    uint32_t seen[MOE_GPU_MAX_RANKS]; /* newest step whose header came */
    uint32_t missed[MOE_GPU_MAX_RANKS];    /* newest step whose header was given up on */
    uint32_t tokens[MOE_GPU_MAX_RANKS];    /* T of every rank whose rows were taken */
    uint32_t here[MOE_GPU_MAX_RANKS];      /* tokens of every rank that have rows here */
    uint32_t rows_from[MOE_GPU_MAX_RANKS]; /* the member of a rank's DP group whose rows
                                              were taken */
    uint64_t decided[MOE_GPU_MAX_RANKS]; /* step << 2 | what was decided about a source */
    struct moe_gpu_error error;
};

/* A row of combine's input and its weight: those of one (source, token) follow each other
 * by expert, ended by a negative row if there are fewer than k. Where weights are not the
 * holder's to apply, or not there yet, `weight` holds the position as an integer. */
struct moe_gpu_entry {
    int32_t row;
    float weight;
};

/* Rows of an own expert since the last update. What is counted twice in a step holds as
 * it was counted last. */
struct moe_gpu_expert_count {
    uint64_t rows;
    uint32_t step, newest;
};

/* What a lane counts from creation on: hdl_moe_status reads it. By rank, rows of dispatch
 * as stored and as come; contributions of combine as stored, as a token's rank owes them,
 * and what comes beyond that if experts come apart; tokens of its headers, how long the
 * first block waited for these, and how many came when their step had gone on without. */
struct moe_gpu_counters {
    uint64_t rows_sent[MOE_GPU_MAX_RANKS], rows_received[MOE_GPU_MAX_RANKS];
    uint64_t given[MOE_GPU_MAX_RANKS], taken[MOE_GPU_MAX_RANKS], more[MOE_GPU_MAX_RANKS];
    uint64_t tokens[MOE_GPU_MAX_RANKS];
    uint64_t wait_ns[MOE_GPU_MAX_RANKS];
    uint64_t stale[MOE_GPU_MAX_RANKS];
    struct moe_gpu_expert_count expert[];
};

/* Addresses of a lane's local arrays. */
struct moe_gpu_lane {
    struct moe_gpu_state *state;
    struct moe_gpu_counters *counters;
    const uint32_t *counted; /* ranks to wait for: members or mask of the state */
    uint32_t *notice;        /* word of the host, set when there is an error */
    uint32_t *sent_rows;     /* [M] step in which a warp took on another block's row */
    uint32_t *sent_sums;     /* [R][M] the same for contributions */
    uint32_t *own_ranks;     /* [M] ranks that hold experts of an own token */
    /* If geo.keeps: [M][k] rank of an own entry | first entry of its expert << 8, and the
     * weights. */
    uint16_t *own_places;
    float *own_weights;
    struct moe_gpu_entry *entries; /* [R][M][k] */
};

struct moe_gpu_args {
    uint64_t base[MOE_GPU_MAX_RANKS]; /* arenas as mapped here */
    struct moe_gpu_geometry geo;
    struct moe_gpu_lane lane;
    uint64_t half_at[2]; /* of this lane */

    struct moe_gpu_shared shared;
    struct moe_gpu_plan plan;
    uint32_t classes_magic; /* for division by plan.take_classes */
    uint32_t packets_magic; /* by geo.packets */
    uint32_t header_parts;  /* 32 packets each, of one source's header */
    uint32_t row_accesses;  /* warp-wide accesses to a row, a contribution */
    uint32_t give_accesses;
    uint32_t give_share; /* of one warp of one slice */
    uint32_t give_part;  /* of these, what is put together before any of it is sent */
    uint32_t groups;     /* of warps that work on different ranks, and warps in each */
    uint32_t per_group;

    uint32_t rank;
    uint32_t phase;
    uint32_t experts; /* E */
    uint32_t dp;      /* ranks that hold the same tokens */
    uint32_t order;
    uint32_t align;
    uint32_t format;
    uint32_t hidden;
    uint32_t expert_rows; /* capacity of an expert's rows in 3D */
    uint64_t timeout_ns;  /* 0 = none */

    /* Expert map: holders of expert e are holder_slot[holder_first[e] .. first[e + 1]).
     * An update changes what these point to, so that captured graphs follow. */
    const struct moe_gpu_map *map;
    const uint32_t *holder_first;
    const uint16_t *holder_slot;
    const uint16_t *slot_rank;

    /* dispatch in */
    const void *in_rows;
    const void *in_scales;
    const void *ids;
    const float *in_weights;
    const int32_t *num_tokens_at; /* device word, or NULL = num_tokens */
    uint32_t num_tokens;
    uint32_t ids_are_64;
    uint32_t in_scale_bytes; /* stride of in_scales */
    uint32_t zero_padding;
    uint32_t exact; /* one contribution for each expert, for all tokens */

    /* dispatch out */
    void *out_rows;
    void *out_scales;
    int32_t *counts;
    int64_t *offsets;
    int64_t *row_numbers;
    int32_t *source_token;
    int64_t *ranges;
    int32_t *local_ids;
    float *out_weights;
    int32_t *source_counts;
    int64_t *totals; /* rows, pairs */

    /* combine */
    const void *expert_out;
    void *result;
    const void *bias[2];
    uint8_t *missing; /* [T] */
    uint32_t accumulate;
    uint32_t wire;   /* MOE_GPU_WIRE_ */
    uint32_t wide;   /* rows are aligned; for kernels for any */
    uint64_t *trace; /* [grid][TRACE_POINTS] nanoseconds, or NULL */
};

/* What the kernels around a call with a mask are given. */
struct moe_gpu_mask {
    struct moe_gpu_state *state;
    int32_t *active; /* [ranks], the caller's */
    uint32_t ranks, rank;
    uint32_t combine;
};

MOE_GPU_FN uint32_t moe_gpu_round_up(uint32_t n, uint32_t unit)
{
    return (n + unit - 1) / unit * unit;
}

MOE_GPU_FN uint32_t moe_gpu_pairs(uint32_t bytes)
{
    return (bytes + MOE_GPU_PAIR_DATA - 1) / MOE_GPU_PAIR_DATA;
}

/* Words of a bit set: an odd number, so that the same word of all experts' sets lies in
 * different banks. There is one set for each expert of a rank, and one for all of them.
 */
MOE_GPU_FN uint32_t moe_gpu_set_words(const struct moe_gpu_geometry *g)
{
    return (g->ranks * g->token_words) | 1;
}

/* How tokens are divided among `by` blocks: most that one gets. */
MOE_GPU_FN uint32_t moe_gpu_turns(const struct moe_gpu_geometry *g, uint32_t by)
{
    return (g->max_tokens + by - 1) / by;
}

/* n / divisor = umulhi(n << 1, moe_gpu_magic(divisor)) for n * divisor < 2^31. */
MOE_GPU_FN uint32_t moe_gpu_magic(uint32_t divisor)
{
    return ((UINT32_C(1) << 31) + divisor - 1) / divisor;
}

/* Where things are in the shared memory of a dispatch block, and its size. */
MOE_GPU_FN struct moe_gpu_shared moe_gpu_share(const struct moe_gpu_geometry *g,
                                               uint32_t stages, uint32_t local_experts,
                                               uint32_t order,
                                               const struct moe_gpu_plan *plan)
{
    struct moe_gpu_shared s;
    uint32_t offsets = order == MOE_GPU_3D ? 0 : local_experts + 1;
    uint64_t sets = (local_experts + 1ull) * moe_gpu_set_words(g) * 4;
    uint64_t stash =
        (uint64_t)moe_gpu_turns(g, plan->take_classes) * g->ranks * g->top_k * 2;
    s.words = moe_gpu_set_words(g);
    s.stages = stages;
    s.any_at = stages * g->row.stride;
    s.counts_at = (uint32_t)(s.any_at + sets);
    s.offsets_at = s.counts_at + offsets * 4;
    s.ranks_at = s.offsets_at + offsets * 4;
    s.weights_at = s.ranks_at + moe_gpu_turns(g, plan->senders) * 4;
    s.stash_at = s.weights_at + moe_gpu_turns(g, plan->senders) * g->top_k * 4;
    s.bytes = s.stash_at + stash;
    return s;
}

/* Shared memory of a combine block: rings of its warps, the ranks that its own tokens
 * lack. */
MOE_GPU_FN uint64_t moe_gpu_combine_shared(const struct moe_gpu_geometry *g,
                                           const struct moe_gpu_plan *plan)
{
    return MOE_GPU_COMBINE_THREADS / 32ull * (MOE_GPU_PIECES + MOE_GPU_RING) *
               MOE_GPU_PART_MOST * MOE_GPU_ACCESS +
           moe_gpu_turns(g, plan->take_classes) * 8ull;
}

MOE_GPU_FN uint64_t moe_gpu_header(const struct moe_gpu_geometry *g, uint32_t source,
                                   uint32_t token)
{
    return g->header_at +
           ((uint64_t)source * g->max_tokens + token) * g->packets * MOE_GPU_PACKET;
}

MOE_GPU_FN uint64_t moe_gpu_weights(const struct moe_gpu_geometry *g, uint32_t source,
                                    uint32_t token)
{
    return g->weight_at + ((uint64_t)source * g->max_tokens + token) * g->weight_packets *
                              MOE_GPU_PACKET;
}

MOE_GPU_FN uint64_t moe_gpu_slot(const struct moe_gpu_geometry *g, uint32_t source,
                                 uint32_t token)
{
    return g->slot_at + ((uint64_t)source * g->max_tokens + token) * g->row.stride;
}

MOE_GPU_FN uint64_t moe_gpu_take(const struct moe_gpu_geometry *g, uint32_t token,
                                 uint32_t place)
{
    return g->take_at + ((uint64_t)token * g->places + place) * g->give.stride;
}

#endif
