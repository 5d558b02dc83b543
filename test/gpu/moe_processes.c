/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks as processes that each see one GPU: memory by descriptors, steps, a rank that
 * dies. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ranks.h"

/*
 * The parent never touches a GPU. Every child makes its arena, sends the descriptor to
 * the parent, gets all others' and goes through the steps; before each step all wait for
 * each other. In the last step the last rank is killed by SIGKILL instead: the others
 * must end by their deadline with what the oracle says of a masked rank, and their GPUs
 * stay usable.
 */
enum { STEPS = 5, LIMIT_S = 60 };

static bool send_fd(int socket, int fd)
{
    char byte = 0, control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec iov = {&byte, 1};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control,
                       .msg_controllen = sizeof(control)};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &fd, sizeof(int));
    return sendmsg(socket, &m, 0) == 1;
}

static int receive_fd(int socket)
{
    char byte, control[CMSG_SPACE(sizeof(int))];
    struct iovec iov = {&byte, 1};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control,
                       .msg_controllen = sizeof(control)};
    int fd = -1;
    if (recvmsg(socket, &m, 0) != 1 || !CMSG_FIRSTHDR(&m))
        return -1;
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof(int));
    return fd;
}

/* Until all children have come here. */
static bool meet(int socket)
{
    char byte = 1;
    return write(socket, &byte, 1) == 1 && read(socket, &byte, 1) == 1;
}

static bool attach_all(struct gpu_world *w, int socket)
{
    struct moe_gpu *gpu = w->rank[w->only].gpu;
    int fd = -1;
    if (moe_gpu_export(gpu, &fd) || !send_fd(socket, fd))
        return false;
    close(fd);
    for (uint32_t r = 0; r < w->ranks; r++) {
        if (r == w->only)
            continue;
        fd = receive_fd(socket);
        if (fd < 0 || moe_gpu_attach(gpu, r, fd)) {
            fprintf(stderr, "attach %u: %s\n", r, base_detail());
            return false;
        }
        close(fd);
    }
    return true;
}

static int run_child(uint32_t me, uint32_t ranks, int socket)
{
    struct gpu_case c;
    struct gpu_world *w = calloc(1, sizeof(*w));
    char device[16];
    int bad = 0;
    snprintf(device, sizeof(device), "%u", me);
    setenv("CUDA_VISIBLE_DEVICES", device, 1);
    alarm(LIMIT_S);
    gpu_case_defaults(&c);
    c.ranks = ranks;
    c.opts.hidden = 512;
    c.opts.max_tokens = 32;
    c.opts.num_experts = (int32_t)ranks * 8;
    w->apart = true;
    w->only = me;
    if (!gpu_world_open(w, &c.opts, ranks, 1, 0) || !attach_all(w, socket))
        return 2;
    for (int step = 0; step < STEPS; step++) {
        bool last = step == STEPS - 1;
        c.seed = (uint32_t)step * 2;
        for (uint32_t r = 0; r < ranks; r++)
            c.tokens[r] = step == 1 ? r * 5 % 33 : 32;
        if (!gpu_world_fill(w, &c) || !meet(socket))
            return 2;
        if (last && me == ranks - 1)
            kill(getpid(), SIGKILL);
        if (last) {
            w->timeout_ns = 300000000;
            w->present[ranks - 1] = 0;
        }
        if (!gpu_world_step(w, &c, 0))
            return 2;
        bad += gpu_world_compare(w, &c, OF_BOTH) != 0;
    }
    gpu_world_close(w);
    free(w);
    return bad != 0;
}

/* Hands descriptors around, then lets the children meet once for each step. */
static bool serve(const int *sockets, uint32_t ranks)
{
    int fds[MOE_GPU_MAX_RANKS];
    for (uint32_t r = 0; r < ranks; r++)
        if ((fds[r] = receive_fd(sockets[r])) < 0)
            return false;
    for (uint32_t r = 0; r < ranks; r++)
        for (uint32_t o = 0; o < ranks; o++)
            if (o != r && !send_fd(sockets[r], fds[o]))
                return false;
    for (int step = 0; step < STEPS; step++) {
        char byte;
        for (uint32_t r = 0; r < ranks; r++)
            if (read(sockets[r], &byte, 1) != 1)
                return false;
        for (uint32_t r = 0; r < ranks; r++)
            if (write(sockets[r], &byte, 1) != 1)
                return false;
    }
    return true;
}

int main(void)
{
    int sockets[MOE_GPU_MAX_RANKS], gpus = gpu_count_apart(), bad = 0;
    pid_t children[MOE_GPU_MAX_RANKS];
    if (gpus < 2) {
        printf("skipped: %d GPUs\n", gpus);
        return 77;
    }
    signal(SIGPIPE, SIG_IGN);
    for (int r = 0; r < gpus; r++) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
            return 1;
        children[r] = fork();
        if (children[r] == 0)
            _exit(run_child((uint32_t)r, (uint32_t)gpus, pair[1]));
        close(pair[1]);
        sockets[r] = pair[0];
    }
    bool served = serve(sockets, (uint32_t)gpus);
    for (int r = 0; r < gpus; r++) {
        int status = 0;
        waitpid(children[r], &status, 0);
        bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        bool ok = r == gpus - 1 ? killed : WIFEXITED(status) && WEXITSTATUS(status) == 0;
        if (!ok)
            printf("rank %d ended with %#x\n", r, status);
        bad += !ok;
    }
    printf("%d processes, %d steps, the last with rank %d killed: %d ranks wrong%s\n",
           gpus, STEPS, gpus - 1, bad, served ? "" : ", not all came");
    return bad || !served;
}
