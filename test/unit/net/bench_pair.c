/* SPDX-License-Identifier: Apache-2.0 */
/* Measures a pair: 8 B round trip and 64 MiB stream. Arguments: shm | fabric [chunk]. */
#include "pair.h"

enum { ROUNDS = 20000, STREAM = 64 << 20, REPEAT = 20 };
static size_t chunk = 256 << 10;

static int compare(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void wait_word(struct pair *pair, const struct hdl_window *window, size_t offset,
                      uint64_t value)
{
    _Atomic uint64_t *word =
        (_Atomic uint64_t *)((uint8_t *)net_window_data(window) + offset);
    int64_t last = base_now_ns();
    for (unsigned spins = 0; atomic_load_explicit(word, memory_order_acquire) < value;
         spins++) {
        if (net_poll(pair->net))
            last = base_now_ns();
        else if (spins % 64 == 0 && base_now_ns() - last > 20000)
            sched_yield();
        else
            base_cpu_relax();
    }
}

static void body(struct pair *pair)
{
    static int64_t times[ROUNDS];
    size_t flags = STREAM;
    struct hdl_window *window = pair_window(pair, 0, STREAM + 4096);
    struct hdl_peer_window *remote = pair_remote(pair, 0, NET_WRITE);
    for (uint64_t i = 1; i <= ROUNDS; i++) {
        int64_t start = base_now_ns();
        if (pair->side == 1)
            wait_word(pair, window, flags, i);
        CHECK(hdl_put(remote, 0, &i, 8, flags, i, HDL_SIGNAL_SET) == HDL_OK);
        if (pair->side == 0)
            wait_word(pair, window, flags, i);
        times[i - 1] = base_now_ns() - start;
    }
    if (pair->side == 0) {
        qsort(times, ROUNDS, sizeof(times[0]), compare);
        printf("8 B round trip min %.2f p50 %.2f p99 %.2f us\n", (double)times[0] / 1e3,
               (double)times[ROUNDS / 2] / 1e3, (double)times[ROUNDS * 99 / 100] / 1e3);
    }
    uint8_t *src = malloc(STREAM);
    memset(src, 1, STREAM);
    pair_meet(pair);
    for (int r = 0; r < REPEAT; r++) {
        int64_t start = base_now_ns();
        if (pair->side == 0) {
            for (size_t at = 0; at < STREAM; at += chunk)
                CHECK(hdl_put(remote, at, src + at, chunk, flags + 8, 1,
                              HDL_SIGNAL_ADD) == HDL_OK);
            wait_word(pair, window, flags + 16, (uint64_t)r + 1);
        } else {
            wait_word(pair, window, flags + 8, (uint64_t)(r + 1) * (STREAM / chunk));
            CHECK(hdl_signal(remote, flags + 16, (uint64_t)r + 1, HDL_SIGNAL_SET) ==
                  HDL_OK);
        }
        times[r] = base_now_ns() - start;
    }
    if (pair->side == 0) {
        qsort(times, REPEAT, sizeof(times[0]), compare);
        printf("64 MiB in pieces of %zu: best %.2f median %.2f GB/s\n", chunk,
               STREAM / (double)times[0], STREAM / (double)times[REPEAT / 2]);
    }
    pair_meet(pair);
    net_remote_close(remote);
    net_window_destroy(window);
}

int main(int argc, char **argv)
{
    bool shm = argc > 1 && strcmp(argv[1], "shm") == 0;
    if (argc > 2)
        chunk = strtoul(argv[2], NULL, 0);
    return pair_run(shm ? NET_SHM : NET_FABRIC, body);
}
