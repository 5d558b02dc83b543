/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Put, signal, wait and flush on windows of the user, in a ring of ranks; or the
 * coordinator ends, with rank 0 or as a process of its own, and then a rank on another
 * host.
 *
 *     windows [alone [HEDDLE]]
 */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rank.h"

enum {
    ROOM = 1 << 20,
    FLAG = ROOM,
    COUNTER = ROOM + 64,
    BYTES = ROOM + 128,
    ROUNDS = 200
};

static struct rank self;
static struct hdl_window *window;
static struct hdl_peer_window *next, *before;

static struct hdl_peer_window *open_peer(const unsigned char *handles, int rank)
{
    struct hdl_peer_window *peer;
    uint64_t length;
    memcpy(&length, handles + (size_t)rank * (HDL_WINDOW_HANDLE_BYTES + 8), 8);
    CHECK_OK(hdl_window_open(self.context,
                             handles + (size_t)rank * (HDL_WINDOW_HANDLE_BYTES + 8) + 8,
                             (size_t)length, &peer));
    return peer;
}

static void open_windows(void)
{
    static unsigned char own[HDL_WINDOW_HANDLE_BYTES + 8];
    static unsigned char all[64 * (HDL_WINDOW_HANDLE_BYTES + 8)];
    size_t length = HDL_WINDOW_HANDLE_BYTES;
    CHECK_OK(hdl_window_create(self.context, BYTES, HDL_WINDOW_HOST, &window));
    CHECK(hdl_window_bytes(window) == BYTES, "%zu bytes", hdl_window_bytes(window));
    const unsigned char *data = hdl_window_data(window);
    for (size_t i = 0; i < BYTES; i++)
        CHECK(data[i] == 0, "byte %zu of a new window is %d", i, data[i]);
    CHECK_OK(hdl_window_pack(window, own + 8, &length));
    uint64_t used = length;
    memcpy(own, &used, 8);
    CHECK_OK(hdl_allgather(self.group, own, all, sizeof(own), HDL_U8, NULL, NULL));
    next = open_peer(all, (self.rank + 1) % self.size);
    before = open_peer(all, (self.rank + self.size - 1) % self.size);
    length = 8;
    CHECK_STATUS(hdl_window_pack(window, own, &length), HDL_EINVAL);
    struct hdl_peer_window *bad = NULL;
    memset(own, 0x33, sizeof(own));
    CHECK_STATUS(hdl_window_open(self.context, own, 100, &bad), HDL_EINVAL);
    CHECK_STATUS(hdl_window_open(self.context, own, 0, &bad), HDL_EINVAL);
    struct hdl_window *none = NULL;
    CHECK_STATUS(hdl_window_adopt(self.context, NULL, 8, &none), HDL_EINVAL);
    CHECK_STATUS(hdl_window_adopt(self.context, own, 0, &none), HDL_EINVAL);
    /* Memory of the host, where there may be a GPU, or not. */
    enum hdl_status status = hdl_window_adopt(self.context, own, 8, &none);
    CHECK(status == HDL_EINVAL || status == HDL_ENOTSUP, "status %d", (int)status);
    CHECK(none == NULL, "a window of memory of the host");
    CHECK(!hdl_window_data(NULL) && !hdl_window_bytes(NULL) && !hdl_peer_window_map(NULL),
          "no window has memory");
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
}

/* Blocks of many sizes go round; the signal is seen only after the whole block. */
static void test_put(void)
{
    unsigned char *block = malloc(ROOM);
    const unsigned char *data = hdl_window_data(window);
    CHECK(block, "no memory");
    for (uint64_t round = 1; round <= ROUNDS; round++) {
        size_t bytes = (size_t)(round * round * 26 + round) % (ROOM - 64) + 1;
        size_t offset = round % 7;
        memset(block, (int)(round + (uint64_t)self.rank), bytes);
        CHECK_OK(hdl_put(next, offset, block, bytes, FLAG, round, HDL_SIGNAL_SET));
        CHECK_OK(hdl_window_wait(window, FLAG, round, before, 10000000));
        int sender = (self.rank + self.size - 1) % self.size;
        for (size_t i = 0; i < bytes; i++)
            CHECK(data[offset + i] == (unsigned char)(round + (uint64_t)sender),
                  "round %d byte %zu of %zu is %d", (int)round, i, bytes,
                  data[offset + i]);
        CHECK_OK(hdl_flush(next, 10000000));
        CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    }
    free(block);
}

static void test_add(void)
{
    for (int i = 0; i < ROUNDS; i++) {
        CHECK_OK(hdl_signal(next, COUNTER, 1, HDL_SIGNAL_ADD));
        CHECK_OK(hdl_signal(before, COUNTER, 2, HDL_SIGNAL_ADD));
    }
    CHECK_OK(hdl_window_wait(window, COUNTER, 3 * ROUNDS, NULL, 10000000));
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    uint64_t value;
    memcpy(&value, (char *)hdl_window_data(window) + COUNTER, 8);
    CHECK(value == 3 * ROUNDS, "counter %llu", (unsigned long long)value);
}

static void test_refused(void)
{
    char byte = 0;
    CHECK_STATUS(hdl_put(next, BYTES, &byte, 1, SIZE_MAX, 0, HDL_SIGNAL_SET), HDL_EINVAL);
    CHECK_STATUS(hdl_put(next, 8, &byte, SIZE_MAX - 4, SIZE_MAX, 0, HDL_SIGNAL_SET),
                 HDL_EINVAL);
    CHECK_STATUS(hdl_put(next, 0, &byte, 1, FLAG + 4, 0, HDL_SIGNAL_SET), HDL_EINVAL);
    CHECK_STATUS(hdl_signal(next, BYTES, 1, HDL_SIGNAL_SET), HDL_EINVAL);
    CHECK_STATUS(hdl_window_wait(window, BYTES - 4, 1, NULL, 0), HDL_EINVAL);
    CHECK_STATUS(hdl_window_wait(window, FLAG, ROUNDS + 1, NULL, 0), HDL_ETIMEDOUT);
    double start = rank_now();
    CHECK_STATUS(hdl_window_wait(window, FLAG, ROUNDS + 1, NULL, 50000), HDL_ETIMEDOUT);
    CHECK(rank_now() - start >= 0.05, "the wait ended early");
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
}

/* A wait for a rank that dies ends. */
static void test_lost(void)
{
    if (self.rank == self.size - 1)
        _exit(0);
    if (self.rank == 0) {
        double start = rank_now();
        CHECK_STATUS(hdl_window_wait(window, FLAG, ROUNDS + 1, before, 10000000),
                     HDL_EPEER);
        CHECK(rank_now() - start < 3 * RANK_SLOW, "told after %.1f s",
              rank_now() - start);
    }
}

/* So does one for the rank that told of deaths. */
static void test_orphaned(void)
{
    if (self.rank == 0)
        _exit(0);
    CHECK_STATUS(hdl_window_wait(window, FLAG, ROUNDS + 1, before, HDL_FOREVER),
                 HDL_EPEER);
    if (!hdl_peer_window_map(before))
        CHECK_STATUS(hdl_signal(before, COUNTER, 1, HDL_SIGNAL_ADD), HDL_EPEER);
}

/* A coordinator of its own, of rank 0; the others find it by the environment. */
static pid_t start_coordinator(const char *tool)
{
    char address[64];
    snprintf(address, sizeof(address), "%s:%d", getenv("MASTER_ADDR"),
             rank_env("MASTER_PORT"));
    CHECK(setenv("HEDDLE_COORDINATOR", address, 1) == 0 &&
              setenv("HEDDLE_STANDALONE", "1", 1) == 0,
          "no environment");
    pid_t child = rank_env("RANK") == 0 ? fork() : 1;
    if (child == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        execl(tool, "heddle", "coordinator", "--listen", address, (char *)NULL);
        _exit(127);
    }
    CHECK(child > 0, "no coordinator");
    return child;
}

/* Between two hosts nobody sees a process end once the coordinator is gone: the link
 * tells. Until then windows go on. */
static void test_alone(void)
{
    enum hdl_status status = HDL_OK;
    if (self.rank == 0) {
        rank_sleep_ms(50);
        _exit(0);
    }
    while (status == HDL_OK)
        status = hdl_barrier(self.group, NULL, NULL);
    CHECK_STATUS(status, HDL_ECOORD);
    rank_sleep_ms(2500);
    if (self.rank == 2) {
        CHECK_OK(hdl_window_wait(window, FLAG, 1, before, HDL_FOREVER));
        raise(SIGKILL);
    }
    CHECK_OK(hdl_signal(next, FLAG, 1, HDL_SIGNAL_SET));
    double start = rank_now();
    CHECK_STATUS(hdl_window_wait(window, FLAG, 1, next, HDL_FOREVER), HDL_ECOORD);
    CHECK(rank_now() - start < 8 * RANK_SLOW, "told after %.1f s", rank_now() - start);
    CHECK_STATUS(hdl_signal(next, FLAG, 2, HDL_SIGNAL_SET), HDL_ECOORD);
}

/* The same for a group, which goes on without a coordinator that may come back. */
static void test_unattended(pid_t coordinator)
{
    if (self.rank == 0)
        CHECK(kill(coordinator, SIGKILL) == 0 &&
                  waitpid(coordinator, NULL, 0) == coordinator,
              "the coordinator lives");
    rank_sleep_ms(2500);
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    double start = rank_now();
    if (self.rank == 2) {
        rank_sleep_ms(500); /* the others wait already */
        raise(SIGKILL);
    }
    CHECK_STATUS(hdl_barrier(self.group, NULL, NULL), HDL_ECOORD);
    CHECK(rank_now() - start < 8 * RANK_SLOW, "told after %.1f s", rank_now() - start);
}

int main(int argc, char **argv)
{
    pid_t coordinator = argc > 2 ? start_coordinator(argv[2]) : 0;
    rank_join(&self);
    open_windows();
    if (argc > 1) {
        coordinator ? test_unattended(coordinator) : test_alone();
        return 0;
    }
    test_put();
    test_add();
    test_refused();
    if (self.size > 2) {
        test_lost();
        test_orphaned();
    }
    hdl_window_close(next);
    hdl_window_close(before);
    hdl_window_destroy(window);
    rank_leave(&self);
    return 0;
}
