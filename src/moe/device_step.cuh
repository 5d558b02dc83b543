/* SPDX-License-Identifier: Apache-2.0 */
/* One step as a block sees it: its number, who is reached, what is decided about a
 * source. */
#ifndef MOE_DEVICE_STEP_CUH
#define MOE_DEVICE_STEP_CUH

#include "moe/device_line.cuh"

/*
 * A source's sign: {step, generation << 2 | SIGN_ bits, tokens, the ranks it counts on}
 * in one 16 B store. One that refuses its call has no tokens, and in place of the ranks
 * what it was asked to send. All blocks of a rank must agree whether a source came,
 * though they look at different times. Who gives up on a source therefore first says so
 * ("maybe"), then looks once more, and writes what it saw. Who has seen the packet looks
 * at that word afterwards: if it is unset, then the other's second look comes later and
 * sees the packet too.
 */
enum { SOURCE_MAYBE = 1, SOURCE_CAME = 2, SOURCE_MISSING = 3 };
enum : uint32_t {
    SIGN_UNWEIGHTED = 1, /* weights come with combine */
    SIGN_REFUSED = 2
};

struct step_view {
    uint32_t step;
    line_tag tag;
    uint64_t half;
    uint64_t deadline;
};

MOE_DEVICE unsigned char *own_half(const moe_gpu_args &a, uint64_t half)
{
    return (unsigned char *)a.base[a.rank] + half;
}

/* The ranks that this call waits for and takes from. */
MOE_DEVICE uint32_t counted_ranks(const moe_gpu_args &a)
{
    return *a.lane.counted;
}

/* The member of DP group `group` whose rows go to rank `to`: see moe_dp_member. */
MOE_COLD uint32_t dp_member(const moe_gpu_args &a, uint32_t group, uint32_t to,
                            uint32_t counted)
{
    uint32_t number = to % a.dp;
    for (uint32_t i = 0; i < a.dp; i++) {
        uint32_t member = group * a.dp + (to + i) % a.dp;
        if (counted >> member & 1)
            return member;
    }
    return group * a.dp + number;
}

/* The ranks that get rows from this member of its DP group and not from another. */
MOE_COLD uint32_t member_destinations(const moe_gpu_args &a)
{
    const uint32_t counted = counted_ranks(a);
    uint32_t ranks = 0;
    for (uint32_t to = 0; to < a.geo.ranks; to++)
        if (dp_member(a, a.rank / a.dp, to, counted) == a.rank)
            ranks |= 1u << to;
    return ranks;
}

MOE_DEVICE uint32_t destinations(const moe_gpu_args &a)
{
    return a.dp == 1 ? ALL_LANES : member_destinations(a);
}

/* Counts a call that lacks something, once in each step. */
MOE_COLD void note_incomplete(const moe_gpu_args &a, step_view v, uint32_t combine)
{
    moe_gpu_state *state = a.lane.state;
    if (atomicExch(&state->incomplete_step[combine], v.step) != v.step)
        atomicAdd(&state->incomplete_calls, 1);
}

MOE_DEVICE step_view view_of(const moe_gpu_args &a, uint32_t step, uint64_t begin)
{
    step_view v;
    v.step = step;
    v.tag = make_tag(step, a.lane.state->generation);
    v.half = a.half_at[step & 1];
    v.deadline = a.timeout_ns ? begin + a.timeout_ns : 0;
    return v;
}

MOE_DEVICE const void *sign_of(const moe_gpu_args &a, uint64_t half, uint32_t source)
{
    return own_half(a, half) + a.geo.sign_at + (uint64_t)source * MOE_GPU_LINE;
}

MOE_DEVICE bool sign_matches(uint4 sign, step_view v)
{
    return sign.x == v.step && (sign.y & ~3u) == v.tag.kind;
}

/* Has the header of `source` come, sign and all packets? Asked by a whole warp. */
MOE_DEVICE bool header_came(const moe_gpu_args &a, step_view v, uint32_t source)
{
    const uint32_t lane = threadIdx.x & 31;
    uint4 sign = load_packet(sign_of(a, v.half, source));
    if (!__all_sync(ALL_LANES, sign_matches(sign, v)))
        return false;
    const unsigned char *at = own_half(a, v.half) + moe_gpu_header(&a.geo, source, 0);
    bool ok = true;
    for (uint32_t i = lane; i < sign.z * a.geo.packets; i += WARP) {
        uint4 packet = load_packet(at + (uint64_t)i * MOE_GPU_PACKET);
        ok = ok && packet.z == v.tag.step && packet.w == v.tag.kind;
    }
    return __all_sync(ALL_LANES, ok);
}

/* What all blocks are to think of `source`, after a wait for its header has ended. */
MOE_COLD uint32_t decide(const moe_gpu_args &a, step_view v, uint32_t source)
{
    const bool first_lane = (threadIdx.x & 31) == 0;
    unsigned long long *word = (unsigned long long *)&a.lane.state->decided[source];
    uint64_t now = __shfl_sync(ALL_LANES, load_long((uint64_t *)word), 0);
    if (now >> 2 != v.step) {
        uint64_t maybe = (uint64_t)v.step << 2 | SOURCE_MAYBE;
        bool mine = first_lane && atomicCAS(word, now, maybe) == now;
        if (__any_sync(ALL_LANES, mine)) {
            bool came = header_came(a, v, source);
            if (!came)
                a.lane.state->dropped[source] = v.step;
            if (first_lane)
                store_long((uint64_t *)word,
                           (uint64_t)v.step << 2 | (came ? SOURCE_CAME : SOURCE_MISSING));
        }
    }
    do
        now = __shfl_sync(ALL_LANES, load_long((uint64_t *)word), 0);
    while (now >> 2 == v.step && (now & 3) == SOURCE_MAYBE);
    return (uint32_t)now & 3;
}

/*
 * May rank `to` be written into in this step? Its places were last used two steps ago,
 * and it is done with them when it has sent the header of the last step. `wait` = an
 * unsplit call, which gives it time until the deadline.
 */
MOE_COLD bool peer_is_done(const moe_gpu_args &a, step_view v, uint32_t to, bool wait)
{
    patience p = {v.deadline, 0};
    const void *last = sign_of(a, a.half_at[(v.step - 1) & 1], to);
    const void *this_step = sign_of(a, v.half, to);
    do {
        uint4 s = load_packet(last);
        if (s.x == v.step - 1 && (s.y & ~3u) == v.tag.kind)
            return true;
        if (sign_matches(load_packet(this_step), v))
            return true;
    } while (wait && !lane_out_of_patience(&p, a.lane.state, to));
    return false;
}

/* What is known of a lane's rank before it is sent to. */
struct rank_view {
    uint32_t seen; /* newest step whose header came */
    bool live;
};

MOE_DEVICE rank_view view_rank(const moe_gpu_args &a)
{
    const uint32_t to = threadIdx.x & 31;
    const moe_gpu_state *state = a.lane.state;
    const bool exists = to < a.geo.ranks;
    rank_view r = {exists ? state->seen[to] : 0,
                   exists && (load_word(&state->active) >> to & 1)};
    return r;
}

/* The ranks that this step's rows may be stored into; asked by a whole warp. */
MOE_DEVICE uint32_t sendable_ranks(const moe_gpu_args &a, step_view v, rank_view r)
{
    const uint32_t to = threadIdx.x & 31;
    const bool live = r.live;
    bool ok = to == a.rank || (live && r.seen == v.step - 1);
    if (live && !ok)
        ok = peer_is_done(a, v, to, (a.phase & MOE_GPU_RECV) != 0);
    return __ballot_sync(ALL_LANES, ok);
}

/* What a block is, by the plan. */
MOE_DEVICE uint32_t number_of(const moe_gpu_args &a, uint32_t block)
{
    return block - (gridDim.x - a.plan.senders); /* large for others than senders */
}

MOE_DEVICE uint32_t sender_number(const moe_gpu_args &a)
{
    return number_of(a, blockIdx.x);
}

MOE_DEVICE bool is_sender(const moe_gpu_args &a)
{
    return (a.phase & MOE_GPU_SEND) && sender_number(a) < a.plan.senders;
}

/* Of a power of two. */
MOE_DEVICE uint32_t log_of(uint32_t n)
{
    return __ffs(n) - 1;
}

MOE_DEVICE uint32_t take_class(const moe_gpu_args &a)
{
    return blockIdx.x >> log_of(a.plan.take_slices);
}

MOE_DEVICE uint32_t take_slice(const moe_gpu_args &a)
{
    return blockIdx.x & (a.plan.take_slices - 1);
}

MOE_DEVICE bool is_receiver(const moe_gpu_args &a)
{
    return (a.phase & MOE_GPU_RECV) && take_class(a) < a.plan.take_classes;
}

/* A block says that it runs, in dispatch or combine: it will send what it is to send. */
MOE_DEVICE void note_begun(const moe_gpu_args &a, step_view v, uint32_t combine)
{
    if (threadIdx.x == 0)
        a.lane.state->begun[combine][blockIdx.x] = v.step;
}

/* Which of the 32 blocks from `first` on have not been scheduled yet; by a whole warp. */
MOE_DEVICE uint32_t idle_blocks(const moe_gpu_args &a, step_view v, uint32_t combine,
                                uint32_t first)
{
    const uint32_t block = first + (threadIdx.x & 31);
    return __ballot_sync(ALL_LANES,
                         block < gridDim.x &&
                             load_word(&a.lane.state->begun[combine][block]) != v.step);
}

/* A warp takes on a piece of their work; false = another one has done so in this step. */
MOE_DEVICE bool claim(uint32_t *word, uint32_t step)
{
    const bool first_lane = (threadIdx.x & 31) == 0;
    return __any_sync(ALL_LANES, first_lane && atomicExch(word, step) != step);
}

/* The kernel before this one in the stream has ended; this one says so when it waits for
 * no rank any more, so that the blocks of the next take no room from what is waited for.
 */
MOE_DEVICE void await_kernel(void)
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

MOE_DEVICE void let_next_begin(void)
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/* Do holders tell by whose mask they chose replicas? */
MOE_DEVICE bool says_source(const moe_gpu_args &a)
{
    return a.dp > 1 && a.lane.state->says_source;
}

/* Adds to a counter of this lane's rank; nothing waits for it. */
MOE_DEVICE void count_for(uint64_t *counters, uint64_t n)
{
    if (n)
        atomicAdd((unsigned long long *)counters + (threadIdx.x & 31),
                  (unsigned long long)n);
}

/* A kernel that runs a function of its arguments. */
#define MOE_KERNEL(name, threads, ...)                                                   \
    extern "C" __global__ void __launch_bounds__(threads, 1)                             \
        name(const __grid_constant__ moe_gpu_args a)                                     \
    {                                                                                    \
        __VA_ARGS__(a);                                                                  \
    }

/* Notes when a block reached a point; all but the first two only in builds for profiling.
 */
enum { TRACE_BEGIN = 0, TRACE_END = 1 };

MOE_DEVICE void trace(const moe_gpu_args &a, uint32_t point)
{
#ifndef MOE_GPU_PROFILE
    if (point > TRACE_END)
        return;
#endif
    if (a.trace && threadIdx.x == 0)
        a.trace[blockIdx.x * MOE_GPU_TRACE_POINTS + point] = time_ns();
}

#endif
