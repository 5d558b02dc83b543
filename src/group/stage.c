/* SPDX-License-Identifier: Apache-2.0 */
/* How a rank writes what mapped peers read: through the cache, or past it. */
#include "group/stage.h"

#include <stdatomic.h>

#include "base/checked.h"
#include "base/clock.h"
#include "base/copy.h"

/* A probe is long enough that all slots were written that way before the half that
 * counts, and rare enough not to matter where it is the slow way. */
#define PROBE_NS (50 * BASE_NS_PER_MS)
enum { PROBE_PIECES = 64, PROBE_EVERY = 2048, SMALL_BYTES = 8 * 1024 };

/* Past the cache if the way through it takes so many halves of that time; by size. What
 * goes past comes back from memory; in a collective every rank waits for that, while the
 * sender of a message writes the next piece meanwhile. */
static const uint32_t halves[GROUP_STAGES][GROUP_STAGE_SIZES] = {{3, 6, 6}, {4, 6, 6}};

/* A piece can be slow by accident, but not fast: a lower time counts at once. */
static void note(uint32_t *ps, int64_t ns, size_t bytes)
{
    uint64_t sample = (uint64_t)ns * 1000 / bytes + 1;
    uint64_t known = *ps ? *ps : sample;
    if (sample > known)
        sample = (7 * known + base_min_size(sample, 4 * known)) / 8;
    *ps = (uint32_t)base_min_size(sample, UINT32_MAX / 8);
}

static int size_class(bool large, size_t bytes)
{
    return bytes < SMALL_BYTES ? 0 : 1 + large;
}

/* A clock takes as long as a small piece: those are timed in and after a probe only, and
 * until all of it is written. The slot's header was just written; how long it takes to
 * come from the reader's cache says what the reader will pay for a cached piece. */
void group_stage(struct group_stages *stages, int kind, bool large, void *dst,
                 const void *src, size_t bytes)
{
    int size = size_class(large, bytes);
    struct group_stage *stage = &stages->of[kind][size];
    if (bytes < BASE_SHARED_BYTES) {
        base_copy(dst, src, bytes, false);
        return;
    }
    /* The first small pieces meet fresh pages: no probe yet. */
    if (size == 0 && stage->pieces == 0 && stage->probe_ns == 0)
        stage->pieces = 2 * PROBE_PIECES;
    if (stage->pieces >= PROBE_EVERY && (size > 0 || stage->pieces % PROBE_EVERY == 0)) {
        int64_t now = base_now_ns();
        if (now >= stage->probe_ns) {
            stage->pieces = 0;
            stage->probe_ns = now + PROBE_NS;
        }
    }
    bool timed = size > 0 || stage->pieces < 2 * PROBE_PIECES;
    bool past = stage->past != (stage->pieces++ < PROBE_PIECES);
    int64_t start = timed ? base_now_ns() : 0;
    if (timed && size == 0 && kind == GROUP_STAGE_COLLECTIVE) {
        atomic_thread_fence(memory_order_seq_cst);
        start = past ? base_now_ns() : start;
    }
    base_copy(dst, src, bytes, past);
    if (!timed || stage->pieces <= PROBE_PIECES / 2)
        return;
    if (size == 0)
        atomic_thread_fence(memory_order_seq_cst);
    note(past ? &stage->past_ps : &stage->cached_ps, base_now_ns() - start, bytes);
    if (stage->pieces >= 2 * PROBE_PIECES)
        stage->past = 2 * stage->cached_ps > halves[kind][size] * stage->past_ps;
}

bool group_stage_past(const struct group_stages *stages, bool large, size_t bytes)
{
    return bytes >= BASE_SHARED_BYTES &&
           stages->of[GROUP_STAGE_COLLECTIVE][size_class(large, bytes)].past;
}
