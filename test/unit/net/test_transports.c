/* SPDX-License-Identifier: Apache-2.0 */
/* The same tests over every transport: self, shm, fabric. */
#include <setjmp.h>
#include <stdarg.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "pair.h"

#include <sys/resource.h>

enum { WINDOW = 4 << 20, FLAGS = WINDOW - 4096 };

static const size_t sizes[] = {0,    1,    7,    8,     255,     256,          257,
                               4352, 4353, 8193, 65536, 1 << 20, (3 << 20) + 5};
enum { NUM_SIZES = sizeof(sizes) / sizeof(sizes[0]) };

static uint8_t pattern(size_t i, size_t round, int side)
{
    return (uint8_t)(i * 7 + i / 251 + round * 31 + (size_t)side * 101 + 1);
}

static bool word_is(struct hdl_window *window, size_t offset, uint64_t value)
{
    return hdl_window_wait(window, offset, value, NULL, 20000000) == HDL_OK;
}

/* Shared memory that this process has mapped in large pages. */
static size_t large_kib(void)
{
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    char line[256];
    size_t kib = 0;
    while (file && fgets(line, sizeof(line), file))
        if (sscanf(line, "ShmemPmdMapped: %zu kB", &kib) == 1)
            break;
    if (file)
        fclose(file);
    return kib;
}

/* Every size there and back; the signal must not overtake the block. In between the
 * memory goes into large pages. */
static void body_put(struct pair *pair)
{
    struct hdl_window *window = pair_window(pair, 0, WINDOW);
    struct hdl_peer_window *remote = pair_remote(pair, 0, NET_WRITE);
    uint8_t *src = malloc(WINDOW);
    const uint8_t *data = net_window_data(window);
    for (size_t round = 0; round < NUM_SIZES; round++) {
        size_t bytes = sizes[round];
        if (round == NUM_SIZES / 2 && net_window_enlarge(window, WINDOW))
            CHECK(large_kib() >= 2048);
        for (size_t i = 0; i < bytes; i++)
            src[i] = pattern(i, round, pair->side);
        CHECK(hdl_put(remote, 3, src, bytes, FLAGS, round + 1, HDL_SIGNAL_SET) == HDL_OK);
        CHECK(hdl_flush(remote, 20000000) == HDL_OK);
        memset(src, 0xee, bytes);
        CHECK(word_is(window, FLAGS, round + 1));
        for (size_t i = 0; i < bytes; i++)
            CHECK(data[3 + i] == pattern(i, round, !pair->side));
        CHECK(data[3 + bytes] == 0 || round > 0);
        pair_meet(pair);
    }
    free(src);
    pair_meet(pair);
    net_remote_close(remote);
    net_window_destroy(window);
}

/* More puts than any queue holds, without waiting; adds are not lost, sets come in order.
 */
static void body_flood(struct pair *pair)
{
    enum { COUNT = 5000 };
    struct hdl_window *window = pair_window(pair, 0, 1 << 20);
    struct hdl_peer_window *remote = pair_remote(pair, 0, NET_WRITE);
    for (uint64_t i = 0; i < COUNT; i++) {
        size_t at = (i % 1000) * 64;
        CHECK(hdl_put(remote, 4096 + at, &i, sizeof(i), 0, 1, HDL_SIGNAL_ADD) == HDL_OK);
        CHECK(hdl_signal(remote, 8, i + 1, HDL_SIGNAL_SET) == HDL_OK);
    }
    CHECK(word_is(window, 0, COUNT));
    CHECK(word_is(window, 8, COUNT));
    const uint64_t *words = net_window_data(window);
    CHECK(words[0] == COUNT && words[1] == COUNT);
    for (uint64_t i = COUNT - 1000; i < COUNT; i++)
        CHECK(words[(4096 + (i % 1000) * 64) / 8] == i);
    pair_meet(pair);
    net_remote_close(remote);
    net_window_destroy(window);
}

/* Puts that say that more follow, small and large ones, lazy or not, arrive whole and
 * once, also the last one, which nothing follows. */
static void body_more(struct pair *pair)
{
    enum { ROUNDS = 30, PUTS = 20, LARGE = 150000 };
    static const size_t most[] = {100, 2000, NET_EAGER_BYTES, 66000, LARGE};
    struct hdl_window *window = pair_window(pair, 0, 64 + PUTS * LARGE);
    struct hdl_peer_window *remote = pair_remote(pair, 0, NET_WRITE);
    uint8_t *src = malloc(LARGE);
    const uint8_t *data = net_window_data(window);
    uint64_t seed = 5; /* the same sizes on both sides */
    for (uint64_t round = 1; round <= ROUNDS; round++) {
        size_t bytes[PUTS];
        for (size_t i = 0; i < PUTS; i++) {
            bytes[i] = base_splitmix_below(&seed, most[base_splitmix_below(&seed, 5)]);
            unsigned hints = base_splitmix_below(&seed, 4) > 0 ? NET_PUT_MORE : 0;
            hints |= base_splitmix_below(&seed, 2) ? NET_PUT_LAZY : 0;
            memset(src, (int)(round + i), bytes[i]);
            while (net_put_hinted(remote, 64 + i * LARGE, src, bytes[i], 0, 1,
                                  HDL_SIGNAL_ADD, hints) == HDL_PENDING)
                net_poll(pair->net);
        }
        CHECK(word_is(window, 0, round * PUTS));
        for (size_t i = 0; i < PUTS; i++)
            for (size_t b = 0; b < bytes[i]; b++)
                CHECK(data[64 + i * LARGE + b] == (uint8_t)(round + i));
        pair_meet(pair);
    }
    free(src);
    pair_meet(pair);
    net_remote_close(remote);
    net_window_destroy(window);
}

/* What is wrong is refused here and changes nothing there. */
static void body_bounds(struct pair *pair)
{
    struct hdl_window *window = pair_window(pair, 0, 4096);
    struct hdl_peer_window *remote = pair_remote(pair, 0, NET_WRITE);
    uint8_t src[64] = {0};
    CHECK(net_put(remote, 4096, src, 1, NET_NO_SIGNAL, 0, HDL_SIGNAL_SET) == HDL_EINVAL);
    CHECK(net_put(remote, 4090, src, 7, NET_NO_SIGNAL, 0, HDL_SIGNAL_SET) == HDL_EINVAL);
    CHECK(net_put(remote, SIZE_MAX, src, 2, NET_NO_SIGNAL, 0, HDL_SIGNAL_SET) ==
          HDL_EINVAL);
    CHECK(net_put(remote, 0, src, 8, 4, 0, HDL_SIGNAL_SET) == HDL_EINVAL);
    CHECK(net_put(remote, 0, src, 8, 4096, 0, HDL_SIGNAL_SET) == HDL_EINVAL);
    CHECK(net_signal(remote, NET_NO_SIGNAL, 1, HDL_SIGNAL_SET) == HDL_EINVAL);
    CHECK(net_put(remote, 4096, src, 0, 4088, 7, HDL_SIGNAL_SET) == HDL_OK);
    CHECK(word_is(window, 4088, 7));
    CHECK(hdl_window_wait(window, 0, 1, NULL, 2000) == HDL_ETIMEDOUT);
    CHECK(hdl_window_wait(window, 0, 0, NULL, 0) == HDL_OK);
    CHECK(hdl_window_wait(window, 4096, 0, NULL, 0) == HDL_EINVAL);
    CHECK(hdl_window_wait(window, 4, 0, NULL, 0) == HDL_EINVAL);
    pair_meet(pair);
    net_rank_lost(pair->net, !pair->side, 0);
    CHECK(net_remote_check(remote) == HDL_EPEER);
    CHECK(hdl_window_wait(window, 0, 1, remote, 10000000) == HDL_EPEER);
    net_remote_close(remote);
    net_window_destroy(window);
}

static int64_t cpu_ns(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * BASE_NS_PER_S +
           (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * BASE_NS_PER_US;
}

/* A sleeper costs nothing and is woken. */
static void body_sleep(struct pair *pair)
{
    struct hdl_window *window = pair_window(pair, 0, 4096);
    struct hdl_peer_window *remote = pair_remote(pair, 0, NET_WRITE);
    CHECK(hdl_signal(remote, 0, 1, HDL_SIGNAL_SET) == HDL_OK);
    CHECK(word_is(window, 0, 1));
    pair_meet(pair);
    for (uint64_t round = 2; round < 6; round++) {
        if (pair->side == 0) {
            int64_t before = cpu_ns();
            int64_t start = base_now_ns();
            CHECK(word_is(window, 0, round));
            int64_t cost = cpu_ns() - before;
            if (base_now_ns() - start > 150 * BASE_NS_PER_MS)
                CHECK(cost < 30 * BASE_NS_PER_MS);
        } else {
            usleep(200000);
            CHECK(hdl_signal(remote, 0, round, HDL_SIGNAL_SET) == HDL_OK);
        }
        pair_meet(pair);
    }
    net_remote_close(remote);
    net_window_destroy(window);
}

/* Many rounds in which each side waits for the other, mostly asleep. */
static void body_ping(struct pair *pair)
{
    struct hdl_window *window = pair_window(pair, 0, 4096);
    struct hdl_peer_window *remote = pair_remote(pair, 0, NET_WRITE);
    for (uint64_t round = 1; round <= 2000; round++) {
        if (pair->side == 0)
            CHECK(hdl_signal(remote, 0, round, HDL_SIGNAL_SET) == HDL_OK);
        for (;;) {
            uint32_t ticket = net_sleep_begin(pair->net);
            if (atomic_load((_Atomic uint64_t *)net_window_data(window)) >= round) {
                net_sleep_cancel(pair->net);
                break;
            }
            net_sleep(pair->net, ticket, 5 * BASE_NS_PER_S, 0);
            net_poll(pair->net);
        }
        if (pair->side == 1)
            CHECK(hdl_signal(remote, 0, round, HDL_SIGNAL_SET) == HDL_OK);
    }
    pair_meet(pair);
    net_remote_close(remote);
    net_window_destroy(window);
}

/* A cut link is made again, nothing is lost or done twice, and it is counted. */
static void body_break(struct pair *pair)
{
    struct hdl_window *window = pair_window(pair, 0, WINDOW);
    struct hdl_peer_window *remote = pair_remote(pair, 0, NET_WRITE);
    uint8_t *src = malloc(1 << 20);
    memset(src, 1, 1 << 20);
    int cuts = 0;
    for (uint64_t round = 1; round <= 400; round++) {
        uint64_t big = round % 4 == 0;
        size_t bytes = big ? 1 << 20 : 64;
        memset(src, (int)round, bytes);
        CHECK(hdl_put(remote, 4096, src, bytes, 0, 1, HDL_SIGNAL_ADD) == HDL_OK);
        if (pair->side == 0 && round % 40 == 0)
            cuts += net_test_break_link(remote) > 0;
        CHECK(hdl_flush(remote, 20000000) == HDL_OK);
        CHECK(word_is(window, 0, round));
        const uint8_t *data = net_window_data(window);
        CHECK(data[4096] == (uint8_t)round && data[4096 + bytes - 1] == (uint8_t)round);
        CHECK(hdl_signal(remote, 8, round, HDL_SIGNAL_SET) == HDL_OK);
        CHECK(word_is(window, 8, round));
    }
    CHECK(*(uint64_t *)net_window_data(window) == 400);
    if (pair->side == 0) {
        CHECK(cuts == 10);
        CHECK(net_reconnects(pair->net) >= 10);
    }
    CHECK(net_remote_check(remote) == HDL_OK && net_remote_down_since(remote) == 0);
    free(src);
    pair_meet(pair);
    net_remote_close(remote);
    net_window_destroy(window);
}

/* The first message of all reaches a process that sleeps without a limit. */
static void body_cold(struct pair *pair)
{
    struct hdl_window *window = pair_window(pair, 0, 4096);
    if (pair->side == 0) {
        int64_t start = base_now_ns();
        int64_t before = cpu_ns();
        CHECK(hdl_window_wait(window, 0, 1, NULL, HDL_FOREVER) == HDL_OK);
        CHECK(cpu_ns() - before < 50 * BASE_NS_PER_MS);
        CHECK(base_now_ns() - start < 2 * BASE_NS_PER_S);
        atomic_store(&pair->shared->numbers[0], 1);
    } else {
        usleep(300000);
        struct hdl_peer_window *remote = pair_remote(pair, 0, NET_WRITE);
        CHECK(hdl_signal(remote, 0, 1, HDL_SIGNAL_SET) == HDL_OK);
        while (!atomic_load(&pair->shared->numbers[0])) {
            net_poll(pair->net);
            sched_yield();
        }
        net_remote_close(remote);
    }
    net_window_destroy(window);
}

/* The peer has answered before the first put. */
static void body_greet(struct pair *pair)
{
    struct hdl_window *window = pair_window(pair, 0, 4096);
    struct hdl_peer_window *remote = pair_remote(pair, 0, NET_WRITE);
    if (pair->side == 1) {
        int64_t end = base_now_ns() + 10 * BASE_NS_PER_S;
        while (!net_remote_greet(remote)) {
            CHECK(base_now_ns() < end);
            if (net_poll(pair->net) == 0)
                sched_yield();
        }
        CHECK(hdl_signal(remote, 0, 1, HDL_SIGNAL_SET) == HDL_OK);
        CHECK(hdl_flush(remote, 10000000) == HDL_OK);
    } else {
        CHECK(hdl_window_wait(window, 0, 1, remote, 20000000) == HDL_OK);
    }
    pair_meet(pair);
    net_remote_close(remote);
    net_window_destroy(window);
}

/* A peer that is killed in the middle of large puts: the rest is dropped, soon, safely.
 */
static void body_killed(struct pair *pair)
{
    struct hdl_window *window = pair_window(pair, 0, WINDOW);
    struct hdl_peer_window *remote = pair_remote(pair, 0, NET_WRITE);
    CHECK(hdl_signal(remote, 0, 1, HDL_SIGNAL_SET) == HDL_OK);
    CHECK(word_is(window, 0, 1));
    if (pair->side == 1) {
        atomic_store(&pair->shared->numbers[0], 1);
        usleep(20000);
        /* The parent must not take it for a failure. */
        kill(getpid(), SIGTERM);
    }
    uint8_t *src = malloc(1 << 20);
    memset(src, 3, 1 << 20);
    while (!atomic_load(&pair->shared->numbers[0]))
        sched_yield();
    int64_t start = base_now_ns();
    /* How soon it dies and is seen depends on the machine's load. */
    while (base_now_ns() - start < 200 * BASE_NS_PER_MS ||
           (pair->transport == NET_FABRIC && net_remote_down_since(remote) == 0)) {
        CHECK(base_now_ns() - start < 5 * BASE_NS_PER_S);
        enum hdl_status status =
            net_put(remote, 4096, src, 1 << 20, 8, 1, HDL_SIGNAL_ADD);
        CHECK(status == HDL_OK || status == HDL_PENDING);
        status = net_signal(remote, 8, 1, HDL_SIGNAL_ADD);
        CHECK(status == HDL_OK || status == HDL_PENDING);
        net_poll(pair->net);
    }
    if (pair->transport == NET_FABRIC)
        CHECK(net_remote_down_since(remote) > start);
    net_rank_lost(pair->net, 1, 0);
    net_remote_close(remote);
    free(src);
    net_window_destroy(window);
    start = base_now_ns();
    net_destroy(pair->net);
    CHECK(base_now_ns() - start < 700 * BASE_NS_PER_MS);
    exit(0);
}

#define OVER(body, transport)                                                            \
    static void test_##body##_##transport(void **state)                                  \
    {                                                                                    \
        if (NET_##transport == NET_FABRIC ? !pair_has_fabric()                           \
                                          : getenv("NETNS_NAMES") != NULL)               \
            skip();                                                                      \
        assert_int_equal(pair_run(NET_##transport, body_##body), 0);                     \
    }

OVER(put, SHM)
OVER(put, FABRIC)
OVER(more, SHM)
OVER(more, FABRIC)
OVER(flood, SHM)
OVER(flood, FABRIC)
OVER(bounds, SHM)
OVER(bounds, FABRIC)
OVER(sleep, SHM)
OVER(sleep, FABRIC)
OVER(ping, SHM)
OVER(ping, FABRIC)
OVER(cold, SHM)
OVER(cold, FABRIC)
OVER(greet, SHM)
OVER(greet, FABRIC)
OVER(killed, SHM)
OVER(killed, FABRIC)

static void test_break_FABRIC(void **state)
{
    if (!pair_relinks())
        skip();
    assert_int_equal(pair_run(NET_FABRIC, body_break), 0);
}

/* Alone: a process that opens its own window. */
static void test_self(void **state)
{
    struct pair_shared *shared = calloc(1, sizeof(*shared));
    struct pair pair = {.shared = shared, .address = ""};
    pair_open(&pair);
    assert_null(net_fabric_provider(pair.net));
    assert_string_not_equal(net_fabric_reason(pair.net), "");
    struct hdl_window *window = pair_window(&pair, 0, WINDOW);
    struct hdl_peer_window *remote;
    assert_int_equal(net_remote_open(pair.net, shared->handles[0][0].bytes,
                                     NET_HANDLE_BYTES, NET_READ | NET_WRITE, &remote),
                     HDL_OK);
    assert_string_equal(net_remote_transport(remote), "self");
    assert_ptr_equal(net_remote_map(remote), net_window_data(window));
    uint8_t *src = malloc(WINDOW);
    for (size_t round = 0; round < NUM_SIZES; round++) {
        for (size_t i = 0; i < sizes[round]; i++)
            src[i] = pattern(i, round, 0);
        assert_int_equal(hdl_put(remote, 5, src, sizes[round], FLAGS, 1, HDL_SIGNAL_ADD),
                         HDL_OK);
        assert_int_equal(hdl_window_wait(window, FLAGS, round + 1, remote, 0), HDL_OK);
        assert_memory_equal((uint8_t *)net_window_data(window) + 5, src, sizes[round]);
    }
    assert_int_equal(net_put_count(remote), NUM_SIZES);
    assert_int_equal(net_put_done(remote), NUM_SIZES);
    free(src);
    net_remote_close(remote);
    net_window_destroy(window);
    assert_int_equal(net_remote_open(pair.net, shared->handles[0][0].bytes,
                                     NET_HANDLE_BYTES, NET_READ, &remote),
                     HDL_EPEER);
    net_destroy(pair.net);
    free(shared);
}

static void check_handle(const struct net_handle *handle)
{
    uint8_t bytes[NET_HANDLE_BYTES];
    size_t length = sizeof(bytes);
    assert_int_equal(net_handle_pack(handle, bytes, &length), HDL_OK);
    struct net_handle copy;
    assert_int_equal(net_handle_unpack(bytes, length, &copy), HDL_OK);
    assert_memory_equal(&copy, handle, sizeof(copy));
    for (size_t cut = 0; cut < length; cut++)
        assert_int_equal(net_handle_unpack(bytes, cut, &copy), HDL_EINVAL);
    for (size_t i = 0; i < length; i++) {
        bytes[i] ^= 0x40;
        assert_int_equal(net_handle_unpack(bytes, length, &copy), HDL_EINVAL);
        bytes[i] ^= 0x40;
    }
    size_t small = 40;
    assert_int_equal(net_handle_pack(handle, bytes, &small), HDL_EINVAL);
}

static void test_handle(void **state)
{
    struct net_handle handle = {
        .socket_name = "socket", .pid = 7, .bytes = 100, .address_length = 16};
    check_handle(&handle);
    handle.of_device = true;
    memset(handle.shared.ipc.bytes, 0x5a, sizeof(handle.shared.ipc));
    handle.shared.offset = 4096;
    check_handle(&handle);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_handle),       cmocka_unit_test(test_self),
        cmocka_unit_test(test_put_SHM),      cmocka_unit_test(test_put_FABRIC),
        cmocka_unit_test(test_flood_SHM),    cmocka_unit_test(test_flood_FABRIC),
        cmocka_unit_test(test_more_SHM),     cmocka_unit_test(test_more_FABRIC),
        cmocka_unit_test(test_bounds_SHM),   cmocka_unit_test(test_bounds_FABRIC),
        cmocka_unit_test(test_sleep_SHM),    cmocka_unit_test(test_sleep_FABRIC),
        cmocka_unit_test(test_ping_SHM),     cmocka_unit_test(test_ping_FABRIC),
        cmocka_unit_test(test_cold_SHM),     cmocka_unit_test(test_cold_FABRIC),
        cmocka_unit_test(test_greet_SHM),    cmocka_unit_test(test_greet_FABRIC),
        cmocka_unit_test(test_killed_SHM),   cmocka_unit_test(test_killed_FABRIC),
        cmocka_unit_test(test_break_FABRIC),
    };
    const char *only = getenv("NET_TEST");
    if (only)
        cmocka_set_test_filter(only);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
