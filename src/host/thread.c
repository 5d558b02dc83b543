/* SPDX-License-Identifier: Apache-2.0 */
/* Named threads of the library, which take no signals. */
#include <pthread.h>
#include <signal.h>
#include <string.h>

#include "base/log.h"
#include "host/fork.h"
#include "host/host.h"
#include "host/internal.h"

struct host_thread {
    struct base_env *env;
    pthread_t id;
    unsigned generation;
    char name[16];
    void (*run)(void *argument);
    void *argument;
};

static void *enter(void *argument)
{
    struct host_thread *thread = argument;
    (void)pthread_setname_np(pthread_self(), thread->name);
    thread->run(thread->argument);
    return NULL;
}

/* A signal of the program must find one of its own threads; a fault belongs to whoever
 * makes it. */
static void block_signals(sigset_t *old)
{
    static const int faults[] = {SIGSEGV, SIGBUS,  SIGFPE, SIGILL,
                                 SIGTRAP, SIGABRT, SIGSYS};
    sigset_t all;
    (void)sigfillset(&all);
    for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++)
        (void)sigdelset(&all, faults[i]);
    (void)pthread_sigmask(SIG_BLOCK, &all, old);
}

enum hdl_status host_thread_start_env(struct base_env *env, const char *name,
                                      void (*run)(void *), void *argument,
                                      struct host_thread **out)
{
    struct host_thread *thread = base_alloc(env, 1, sizeof(*thread));
    if (!thread)
        return HDL_ENOMEM;
    thread->env = env;
    thread->run = run;
    thread->argument = argument;
    thread->generation = host_fork_generation();
    strncpy(thread->name, name, sizeof(thread->name) - 1);
    sigset_t old;
    block_signals(&old);
    int error = pthread_create(&thread->id, NULL, enter, thread);
    (void)pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (error) {
        base_free(env, thread);
        return base_fail_errno(HDL_ESYSTEM, error, "cannot start thread %s", name);
    }
    *out = thread;
    return HDL_OK;
}

enum hdl_status host_thread_start(struct host *host, const char *name,
                                  void (*run)(void *), void *argument,
                                  struct host_thread **thread)
{
    return host_thread_start_env(host->env, name, run, argument, thread);
}

void host_thread_join(struct host_thread *thread)
{
    if (!thread)
        return;
    if (thread->generation == host_fork_generation())
        (void)pthread_join(thread->id, NULL);
    base_free(thread->env, thread);
}
