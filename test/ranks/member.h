/* SPDX-License-Identifier: Apache-2.0 */
/* One rank of a group whose members change: what the elastic tests share. */
#ifndef RANKS_MEMBER_H
#define RANKS_MEMBER_H

#include <sys/types.h>

#include "rank.h"

static const int64_t CHANGE_US = 20000000; /* no change of membership takes longer */

struct member {
    struct hdl_context *context;
    struct hdl_group *group;
    int rank, size; /* in the job */
};

extern struct member self;

/* Joins the job with these options (NULL = from the environment), as `rank`. A
 * replacement waits until its predecessor is known to have ended. */
void member_begin(const struct hdl_context_opts *opts, bool replacement);
void member_end(void);
/* Creates the group, as a founder or as a joiner. */
void member_found(int founders, int capacity, bool join);
/* One all_reduce of 1 << rank: the set of ranks that took part. */
int member_sum(enum hdl_status *status);
int member_sum_ok(void);
/* Sums until the set is `wanted`, which takes some operations after a change; losses of
 * `lost` may be told meanwhile. */
void member_sum_until(int wanted, int lost);
int member_active(void);
void member_admit(int rank);
void member_evict(int rank);
/* Waits until the rank is (not) active in the own view. */
void member_await(int rank, bool active);
/* A new process with this program and argument, as job rank `rank`. */
pid_t member_spawn(int rank, const char *mode);
void member_reap(pid_t child);

#endif
