/* SPDX-License-Identifier: Apache-2.0 */
/* The thread behind group_worker: one job at a time, in order. */
#include "group/worker.h"

#include <string.h>

#include "host/host.h"

void group_worker_init(struct group_worker *worker, struct host *host, const char *name)
{
    memset(worker, 0, sizeof(*worker));
    worker->host = host;
    worker->name = name;
    (void)pthread_mutex_init(&worker->lock, NULL);
    (void)pthread_cond_init(&worker->changed, NULL);
    base_list_init(&worker->queue);
}

static void lock(struct group_worker *worker)
{
    (void)pthread_mutex_lock(&worker->lock);
}

static void unlock(struct group_worker *worker)
{
    (void)pthread_mutex_unlock(&worker->lock);
}

static void worker_main(void *argument)
{
    struct group_worker *worker = argument;
    lock(worker);
    worker->runner = pthread_self();
    while (!worker->stop) {
        struct base_list *node = base_list_pop_front(&worker->queue);
        if (!node) {
            (void)pthread_cond_wait(&worker->changed, &worker->lock);
            continue;
        }
        struct group_job *job = base_container_of(node, struct group_job, node);
        worker->running = job;
        unlock(worker);
        job->run(job);
        lock(worker);
        worker->running = NULL;
        (void)pthread_cond_broadcast(&worker->changed);
    }
    unlock(worker);
}

void group_worker_destroy(struct group_worker *worker)
{
    lock(worker);
    worker->stop = true;
    (void)pthread_cond_broadcast(&worker->changed);
    unlock(worker);
    host_thread_join(worker->thread);
    worker->thread = NULL;
    (void)pthread_cond_destroy(&worker->changed);
    (void)pthread_mutex_destroy(&worker->lock);
}

void group_job_init(struct group_job *job, void (*run)(struct group_job *job))
{
    base_list_init(&job->node);
    job->run = run;
}

enum hdl_status group_worker_post(struct group_worker *worker, struct group_job *job)
{
    enum hdl_status status = HDL_OK;
    lock(worker);
    if (!worker->thread && worker->host)
        status = host_thread_start(worker->host, worker->name, worker_main, worker,
                                   &worker->thread);
    if (status == HDL_OK && base_list_empty(&job->node))
        base_list_push_back(&worker->queue, &job->node);
    (void)pthread_cond_broadcast(&worker->changed);
    unlock(worker);
    return status;
}

void group_worker_cancel(struct group_worker *worker, struct group_job *job)
{
    lock(worker);
    base_list_remove(&job->node);
    while (worker->running == job && !pthread_equal(worker->runner, pthread_self()))
        (void)pthread_cond_wait(&worker->changed, &worker->lock);
    unlock(worker);
}
