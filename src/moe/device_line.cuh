/* SPDX-License-Identifier: Apache-2.0 */
/* Packed lines between GPUs: whole 16 B accesses at system scope, tags, bounded waits. */
#ifndef MOE_DEVICE_LINE_CUH
#define MOE_DEVICE_LINE_CUH

#include "moe/gpu_args.h"

#define MOE_DEVICE static __device__ __forceinline__
#define MOE_COLD static __device__ __noinline__

enum { WARP = 32, ALL_LANES = 0xffffffff };

MOE_DEVICE uint64_t time_ns(void)
{
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

/* One access of 16 B: never split, seen by other GPUs, not kept in L1. */
MOE_DEVICE void store_packet(void *at, uint4 v)
{
    asm volatile("{ .reg .b128 t; mov.b128 t, {%1, %2};\n"
                 "st.relaxed.sys.global.b128 [%0], t; }" ::"l"(at),
                 "l"((uint64_t)v.y << 32 | v.x), "l"((uint64_t)v.w << 32 | v.z)
                 : "memory");
}

MOE_DEVICE uint4 load_packet(const void *at)
{
    uint64_t lo, hi;
    asm volatile("{ .reg .b128 t; ld.relaxed.sys.global.b128 t, [%2];\n"
                 "mov.b128 {%0, %1}, t; }"
                 : "=l"(lo), "=l"(hi)
                 : "l"(at)
                 : "memory");
    return make_uint4((uint32_t)lo, (uint32_t)(lo >> 32), (uint32_t)hi,
                      (uint32_t)(hi >> 32));
}

/* Shared memory by its own address. */
MOE_DEVICE uint32_t shared_address(const void *at)
{
    return (uint32_t)__cvta_generic_to_shared(at);
}

MOE_DEVICE uint4 load_shared(uint32_t at)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}

MOE_DEVICE void store_shared(uint32_t at, uint4 v)
{
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}

/* Shared memory to a peer by the copy engine; the calling thread commits and waits. */
MOE_DEVICE void bulk_store(void *to, uint32_t shared, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared), "r"(bytes)
                 : "memory");
}

MOE_DEVICE void bulk_commit(void)
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Until at most PENDING of this thread's groups still read shared memory. */
template <int PENDING> MOE_DEVICE void bulk_wait(void)
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

/* Global memory to shared memory by the copy engine, which counts at the barrier
 * `arrived`; what is read there has been seen to be written. */
MOE_DEVICE void bulk_load(uint32_t shared, const void *from, uint32_t bytes,
                          uint32_t arrived)
{
    asm volatile("fence.proxy.async;\n"
                 "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%3], %2;\n"
                 "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(shared),
                 "l"(from), "r"(bytes), "r"(arrived)
                 : "memory");
}

MOE_DEVICE void bulk_load_begin(uint32_t arrived)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n"
                 "fence.proxy.async.shared::cta;" ::"r"(arrived)
                 : "memory");
}

/* Until the load number `number` of a barrier is complete. */
MOE_DEVICE void bulk_load_wait(uint32_t arrived, uint32_t number)
{
    uint32_t done = 0;
    while (!done)
        asm volatile("{ .reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(arrived), "r"(number & 1)
                     : "memory");
}

/* Until at most PENDING of this thread's groups have not arrived yet. */
template <int PENDING> MOE_DEVICE void bulk_arrived(void)
{
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* Orders what this thread has written, or seen written, before what it writes next, for
 * all GPUs. */
MOE_DEVICE void fence_system(void)
{
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

/* Makes this thread's writes to shared memory visible to the copy engine. */
MOE_DEVICE void bulk_fence(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* 16 B of global memory into shared memory, behind the back of the calling thread, which
 * alone may read them after a wait; nothing unless `exists`. */
MOE_DEVICE void copy_ahead(uint32_t shared, const void *from, bool exists)
{
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0;\n"
                 "@p cp.async.cg.shared.global [%0], [%1], 16; }" ::"r"(shared),
                 "l"(from), "r"((uint32_t)exists)
                 : "memory");
}

MOE_DEVICE void copy_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until at most PENDING of this thread's groups of copies are under way. */
template <int PENDING> MOE_DEVICE void copy_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

MOE_DEVICE uint32_t load_word(const uint32_t *at)
{
    uint32_t v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

MOE_DEVICE uint64_t load_long(const uint64_t *at)
{
    uint64_t v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}

/* What was written before the word was is seen by loads from now on. */
MOE_DEVICE uint64_t load_acquire(const void *at)
{
    uint64_t v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}

MOE_DEVICE void store_long(uint64_t *at, uint64_t v)
{
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory");
}

/* The tag of a line: the step, then generation << 2 | bits. */
enum : uint32_t {
    TAG_DROPPED = 1, /* there is no contribution */
    TAG_APART = 2    /* a contribution of one expert, which the owner weighs */
};

struct line_tag {
    uint32_t step;
    uint32_t kind;
};

MOE_DEVICE line_tag make_tag(uint32_t step, uint32_t generation)
{
    line_tag t = {step, generation << 2};
    return t;
}

/* A lane's place in a pair of lines. */
struct pair_lane {
    uint32_t vector; /* of the 15 of the pair */
    bool split;      /* holds half of vector 14 and the tag */
    bool upper;      /* of that, the upper half */
};

MOE_DEVICE pair_lane place_in_pair(uint32_t lane)
{
    uint32_t p = lane & 15;
    pair_lane l;
    l.split = (p & 7) == 7;
    l.upper = p == 15;
    l.vector = l.split ? 14 : p - (p >> 3);
    return l;
}

/* Bytes of payload before a lane's part, in the lines of one warp-wide access. */
MOE_DEVICE uint32_t lane_offset(uint32_t lane, pair_lane l)
{
    return (lane >> 4) * MOE_GPU_PAIR_DATA + l.vector * 16 + (l.upper ? 8 : 0);
}

/* Where payload offset `at`, a multiple of 8, is in packed lines; a vector of 16 B that
 * starts at a multiple of 16 is in one piece unless it is the last of its pair: then 128
 * B apart. */
MOE_DEVICE uint32_t packed_offset(uint32_t at)
{
    uint32_t vector = at >> 4, pair = vector / 15, v = vector - pair * 15;
    uint32_t split = v == 14 ? 112 + ((at & 8) << 4) : (v + (v >= 7)) * 16 + (at & 8);
    return pair * MOE_GPU_PAIR + split;
}

/* Where the tag of line `line` is. */
MOE_DEVICE uint32_t tag_offset(uint32_t line)
{
    return line * MOE_GPU_LINE + 120;
}

/* The same for rows that lie as they are. */
template <bool PLAIN> MOE_DEVICE uint32_t wire_offset(uint32_t at)
{
    return PLAIN ? at : packed_offset(at);
}

/* The tag of a line, or the flag of a row, in one word. */
MOE_DEVICE uint64_t tag_word(line_tag t)
{
    return (uint64_t)t.kind << 32 | t.step;
}

/* A lane's share of a plain copy to a peer, in vectors. */
MOE_DEVICE void plain_store(unsigned char *to, const unsigned char *shared,
                            uint32_t bytes, uint32_t tid, uint32_t n)
{
#pragma unroll 4
    for (uint32_t at = tid * 16; at < bytes; at += n * 16)
        *(uint4 *)(to + at) = *(const uint4 *)(shared + at);
}

/* `v` is the whole vector for every lane, also for those that take half of it. */
MOE_DEVICE uint4 tagged(uint4 v, pair_lane l, line_tag t)
{
    if (l.split) {
        if (l.upper) {
            v.x = v.z;
            v.y = v.w;
        }
        v.z = t.step;
        v.w = t.kind;
    }
    return v;
}

/*
 * Does a lane see its line complete? Only the lanes that hold a tag can tell; a warp
 * votes. `checks` = this lane holds a tag that matters.
 */
MOE_DEVICE bool tag_ok(uint4 v, line_tag want, bool checks)
{
    return !checks || (v.z == want.step && (v.w & ~TAG_DROPPED) == want.kind);
}

/* The same for a line that holds a contribution. */
MOE_DEVICE bool tag_whole(uint4 v, line_tag want, bool checks)
{
    return !checks || (v.z == want.step && v.w == want.kind);
}

/* A complete line that says that there is no contribution. */
MOE_DEVICE bool tag_drops(uint4 v, bool checks)
{
    return checks && (v.w & TAG_DROPPED);
}

/*
 * Bounds a wait: counts polls and looks at the clock and at the masks now and then. What
 * is not done at every poll is out of line, so that waiting code stays small.
 */
struct patience {
    uint64_t deadline; /* 0 = none */
    uint32_t polls;
};

MOE_COLD bool wait_is_over(uint64_t deadline, const uint32_t *active, uint32_t from)
{
    if (deadline && time_ns() > deadline)
        return true;
    return (load_word(active) >> from & 1) == 0;
}

/*
 * True when rank `from` need not be waited for any longer. Masks are read again while
 * waiting, so that the control plane can end a wait of a running kernel.
 */
MOE_DEVICE bool lane_out_of_patience(patience *p, const moe_gpu_state *state,
                                     uint32_t from)
{
    return (++p->polls & 63) == 0 && wait_is_over(p->deadline, &state->active, from);
}

/* The same for a whole warp, whose lanes then go the same way. */
MOE_DEVICE bool out_of_patience(patience *p, const moe_gpu_state *state, uint32_t from)
{
    return (++p->polls & 63) == 0 &&
           __any_sync(ALL_LANES, wait_is_over(p->deadline, &state->active, from));
}

#endif
