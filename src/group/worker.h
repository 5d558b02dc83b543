/* SPDX-License-Identifier: Apache-2.0 */
/* A thread of the engine that runs jobs which may block: attaching, users' callbacks. */
#ifndef GROUP_WORKER_H
#define GROUP_WORKER_H

#include <pthread.h>
#include <stdbool.h>

#include "base/list.h"
#include "base/status.h"

struct host;
struct host_thread;

/* Embedded in what it concerns. */
struct group_job {
    struct base_list node; /* in the queue, or alone */
    void (*run)(struct group_job *job);
};

struct group_worker {
    struct host *host;
    const char *name;
    struct host_thread *thread; /* NULL until the first job */
    pthread_mutex_t lock; /* never held while blocking: the control thread takes it */
    pthread_cond_t changed;
    struct base_list queue;
    struct group_job *running;
    pthread_t runner;
    bool stop;
};

void group_worker_init(struct group_worker *worker, struct host *host, const char *name);
void group_worker_destroy(struct group_worker *worker);
void group_job_init(struct group_job *job, void (*run)(struct group_job *job));
/* Any thread. A job that is queued already stays where it is; one that runs runs again.
 */
enum hdl_status group_worker_post(struct group_worker *worker, struct group_job *job);
/* When it returns the job is neither queued nor running, unless called from the job
 * itself. */
void group_worker_cancel(struct group_worker *worker, struct group_job *job);

#endif
