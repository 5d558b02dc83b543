/* SPDX-License-Identifier: Apache-2.0 */
/* Silence counts only while the observer ran: finds out whether it did. */
#ifndef CTL_DETECTOR_H
#define CTL_DETECTOR_H

#include <stdbool.h>
#include <stdint.h>

enum { CTL_BEATS_PER_LIFE = 20 };

/* Steps of a machine that observes others come at least every `interval` (its ticks do).
 */
struct ctl_detector {
    int64_t dead_after;
    int64_t interval; /* of heartbeats */
    int64_t last_step;
};

static inline void ctl_detector_set(struct ctl_detector *detector, int64_t dead_after,
                                    int64_t now)
{
    detector->dead_after = dead_after;
    detector->interval = dead_after / CTL_BEATS_PER_LIFE;
    detector->last_step = now;
}

/*
 * Called first in every step. True: the observer itself was stopped or starved, so what
 * it has not heard may still be waiting to be read: every count of silence starts again.
 */
static inline bool ctl_detector_woke_late(struct ctl_detector *detector, int64_t now)
{
    bool late = now - detector->last_step > 3 * detector->interval;
    detector->last_step = now;
    return late;
}

static inline bool ctl_detector_is_silent(const struct ctl_detector *detector,
                                          int64_t last_heard, int64_t now)
{
    return now - last_heard > detector->dead_after;
}

#endif
