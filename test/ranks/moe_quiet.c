/* SPDX-License-Identifier: Apache-2.0 */
/* Steps allocate nothing and make no system call but those of sleeping and waking: the
 * thread that runs them has a filter on its system calls, and malloc counts its callers.
 * Over fabric the provider sends and receives, and allocates as it likes; only what the
 * library itself allocates is counted there.
 */
#include <dlfcn.h>
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "rank.h"

enum { TOKENS = 8, HIDDEN = 64, TOP_K = 2, EXPERTS = 9, STEPS = 20000, WARM = 100 };

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define COUNTS_MALLOC 0
#else
#define COUNTS_MALLOC 1
#endif

static _Thread_local bool counted;
static _Atomic int allocations;
static const char *library; /* where its code begins; NULL: all callers count */

#if COUNTS_MALLOC
/* The C library's own entry: this program's malloc takes precedence in all libraries. */
void *__libc_malloc(size_t bytes);
void *malloc(size_t bytes)
{
    Dl_info caller;
    if (counted && (!library || (dladdr(__builtin_return_address(0), &caller) &&
                                 caller.dli_fbase == library)))
        atomic_fetch_add(&allocations, 1);
    return __libc_malloc(bytes);
}
#endif

static void count_own_only(void)
{
    Dl_info own;
    void *function;
    enum hdl_status (*call)(const struct hdl_moe *, struct hdl_moe_state *) =
        hdl_moe_status;
    memcpy(&function, &call, sizeof(function));
    CHECK(dladdr(function, &own), "the library is not found");
    library = own.dli_fbase;
}

static struct rank self;
static struct hdl_moe *moe;
static uint16_t rows[TOKENS * HIDDEN], received[EXPERTS * TOKENS * 8 * HIDDEN];
static uint16_t results[TOKENS * HIDDEN];
static int32_t ids[TOKENS * TOP_K];
static float weights[TOKENS * TOP_K];
static _Atomic int refused; /* the system call that was made */
static _Atomic int
    finished; /* 1 = all steps done, 2 = one failed, 3 = no filter, 4 = refused */

static bool step(bool split)
{
    const struct hdl_moe_tokens tokens = {.size = sizeof(tokens),
                                          .rows = rows,
                                          .topk_ids = ids,
                                          .weights = weights,
                                          .num_tokens = TOKENS};
    struct hdl_moe_received r = {.size = sizeof(r), .rows = received};
    const struct hdl_moe_outputs o = {.size = sizeof(o), .rows = received};
    const struct hdl_moe_result result = {.size = sizeof(result), .rows = results};
    struct hdl_moe_handle h;
    if (!split)
        return hdl_moe_dispatch(moe, &tokens, &r, NULL, &h) == HDL_OK &&
               hdl_moe_combine(moe, &h, &o, &result, NULL) == HDL_OK;
    return hdl_moe_dispatch_send(moe, &tokens, NULL, &h) == HDL_OK &&
           hdl_moe_dispatch_recv(moe, &h, &r, NULL) == HDL_OK &&
           hdl_moe_combine_send(moe, &h, &o, NULL) == HDL_OK &&
           hdl_moe_combine_recv(moe, &h, &result, NULL) == HDL_OK;
}

/* The thread stops where it made another call; main says which. */
static void refuse(int number, siginfo_t *info, void *context)
{
    atomic_store(&refused, info->si_syscall);
    atomic_store(&finished, 4);
    for (;;)
        sched_yield();
}

/* Sleeping, waking, their barrier, yielding, the clock; over fabric the provider's, which
 * come last. Anything else is trapped. */
static bool filter_calls(void)
{
    static const unsigned allowed[] = {
        SYS_futex,      SYS_membarrier,   SYS_sched_yield, SYS_clock_gettime,
        SYS_exit_group, SYS_rt_sigreturn,
#ifdef SYS_poll
        SYS_poll,       SYS_epoll_wait,
#endif
        SYS_ppoll,      SYS_epoll_pwait,  SYS_read,        SYS_write,
        SYS_sendto,     SYS_recvfrom,     SYS_sendmsg,     SYS_recvmsg,
        SYS_readv,      SYS_writev};
    enum { OWN = 6, N = sizeof(allowed) / sizeof(allowed[0]) };
    struct sock_filter code[N + 3];
    code[0] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
                                           offsetof(struct seccomp_data, nr));
    for (unsigned i = 0; i < N; i++)
        code[1 + i] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K,
                                                   allowed[library || i < OWN ? i : 0],
                                                   (unsigned char)(N - i), 0);
    code[N + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP);
    code[N + 2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {.len = N + 3, .filter = code};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static void *run(void *argument)
{
    bool good = true, filtered;
    for (int i = 0; i < WARM; i++)
        good = good && step(i % 2);
    filtered = filter_calls();
    counted = true;
    for (int i = 0; i < (library ? STEPS / 8 : STEPS); i++)
        good = good && step(i % 2);
    counted = false;
    atomic_store(&finished, !good ? 2 : filtered ? 1 : 3);
    for (;;) /* this thread cannot even end */
        sched_yield();
    return argument;
}

int main(int argc, char **argv)
{
    struct hdl_moe_opts opts = {.size = sizeof(opts),
                                .num_experts = EXPERTS,
                                .top_k = TOP_K,
                                .hidden = HIDDEN,
                                .max_tokens = TOKENS};
    pthread_t thread;
    struct sigaction action = {.sa_sigaction = refuse, .sa_flags = SA_SIGINFO};
    if (argc > 1 && strcmp(argv[1], "fabric") == 0)
        count_own_only();
    sigaction(SIGSYS, &action, NULL);
    rank_join(&self);
    for (int i = 0; i < TOKENS * TOP_K; i++) {
        ids[i] = (i * 3 + self.rank) % EXPERTS;
        weights[i] = 0.5f;
    }
    CHECK_OK(hdl_moe_create(self.group, &opts, &moe));
    CHECK(pthread_create(&thread, NULL, run, NULL) == 0, "no thread");
    while (atomic_load(&finished) == 0)
        rank_sleep_ms(20);
    CHECK(atomic_load(&finished) != 2, "a step failed");
    CHECK(atomic_load(&finished) != 4, "system call %d was made", atomic_load(&refused));
    CHECK(atomic_load(&allocations) == 0, "%d allocations", atomic_load(&allocations));
    if (atomic_load(&finished) == 3)
        rank_say("system calls could not be filtered here");
    fflush(NULL);
    _exit(0); /* the thread has no way out */
}
