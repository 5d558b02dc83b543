/* SPDX-License-Identifier: Apache-2.0 */
/* Fabric when things go wrong: whatever is lost, whoever is stopped, whatever is given
 * up, memory holds what was put by who may put, once. */
#include "unit.h"

#include "net/fabric_impl.h"
#include "pair.h"

enum {
    PIECES = 3 << 20, /* a put of a dozen pieces */
    WINDOW = PIECES + 4096,
    FLAG = PIECES,
    ROUNDS = 6,
    LOSSES = 60
};

static uint64_t word_at(const struct hdl_window *window, size_t offset)
{
    const uint8_t *data = net_window_data(window);
    return atomic_load((const _Atomic uint64_t *)(const void *)(data + offset));
}

static bool all_bytes(const struct hdl_window *window, uint8_t value)
{
    const uint8_t *data = net_window_data(window);
    for (size_t i = 0; i < PIECES; i++)
        if (data[i] != value)
            return false;
    return true;
}

static void poll_ms(struct pair *pair, int ms)
{
    for (int64_t end = base_now_ns() + ms * BASE_NS_PER_MS; base_now_ns() < end;)
        if (net_poll(pair->net) == 0)
            sched_yield();
}

static bool is_stopped(pid_t pid)
{
    char path[64], state = 0;
    snprintf(path, sizeof(path), "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    CHECK(file && fscanf(file, "%*d %*s %c", &state) == 1);
    fclose(file);
    return state == 'T';
}

static void stop(pid_t pid)
{
    CHECK(kill(pid, SIGSTOP) == 0);
    while (!is_stopped(pid))
        sched_yield();
}

static pid_t other_pid(struct pair *pair)
{
    atomic_store(&pair->shared->numbers[pair->side], (uint64_t)getpid());
    pair_meet(pair);
    return (pid_t)atomic_load(&pair->shared->numbers[!pair->side]);
}

/* --------------------------------------------------------------------------- fenced */

/* Puts without end; the test's side says as whom. */
static void keep_putting(struct pair *pair, struct hdl_peer_window *remote)
{
    static uint8_t src[PIECES];
    net_remote_write_as(remote, 1, &pair->shared->numbers[2]);
    for (uint64_t round = 1; !atomic_load(&pair->shared->numbers[3]); round++) {
        uint64_t writer = atomic_load(&pair->shared->numbers[2]);
        memset(src, (int)writer, sizeof(src));
        CHECK(hdl_put(remote, 0, src, round % 2 ? PIECES : 512, FLAG,
                      writer << 32 | round, HDL_SIGNAL_SET) == HDL_OK);
        CHECK(hdl_flush(remote, 20000000) == HDL_OK);
    }
}

/* A writer is stopped wherever it happens to be, its place is given to another, it is
 * continued: not a byte of it is stored. The next writer of the same process is heard. */
static void body_fenced(struct pair *pair)
{
    pid_t other = other_pid(pair);
    if (pair->side == 1) {
        atomic_store(&pair->shared->numbers[2], 1);
        struct hdl_peer_window *remote = pair_remote(pair, 0, NET_WRITE);
        keep_putting(pair, remote);
        pair_meet(pair);
        net_remote_close(remote);
        return;
    }
    static _Atomic uint64_t writers[2];
    struct hdl_window *window = NULL;
    CHECK(net_window_create(pair->net, WINDOW, &window) == HDL_OK);
    net_window_set_writers(window, writers, 2);
    net_set_writer(pair->net, &writers[1], 1);
    size_t length = NET_HANDLE_BYTES;
    CHECK(net_window_pack(window, pair->shared->handles[0][0].bytes, &length) == HDL_OK);
    pair->shared->handles[0][0].length = length;
    atomic_store(&pair->shared->handles[0][0].ready, 1);
    uint64_t seed = (uint64_t)base_now_ns();
    for (uint64_t writer = 1; writer <= ROUNDS; writer++) {
        while (word_at(window, FLAG) >> 32 != writer)
            net_poll(pair->net);
        int64_t until = base_now_ns() + (int64_t)(base_splitmix_next(&seed) % 8000000);
        while (base_now_ns() < until)
            net_poll(pair->net);
        stop(other);
        net_set_writer(pair->net, &writers[1], writer + 1);
        memset(net_window_data(window), 0x77, PIECES);
        uint64_t flag = word_at(window, FLAG);
        poll_ms(pair, 20);
        CHECK(kill(other, SIGCONT) == 0);
        poll_ms(pair, 100);
        CHECK(all_bytes(window, 0x77) && word_at(window, FLAG) == flag);
        atomic_store(&pair->shared->numbers[2], writer + 1);
    }
    CHECK(net_stale(pair->net) >= ROUNDS);
    CHECK(net_refused(pair->net) == 0);
    while (word_at(window, FLAG) >> 32 != ROUNDS + 1)
        net_poll(pair->net);
    atomic_store(&pair->shared->numbers[3], 1);
    pair_meet(pair);
    net_window_destroy(window);
}

/* ------------------------------------------------------------------------ given up */

/* Puts to a stopped peer are given up in different ways and their sources go away at
 * once. What the peer finds when it wakes up is the old or the new, never what came
 * after. */
static void body_given_up(struct pair *pair)
{
    pid_t other = other_pid(pair);
    struct hdl_window *window = pair_window(pair, 0, WINDOW);
    struct hdl_peer_window *remote = pair_remote(pair, 0, NET_WRITE | NET_READ);
    CHECK(hdl_signal(remote, FLAG, 1, HDL_SIGNAL_SET) == HDL_OK);
    CHECK(hdl_window_wait(window, FLAG, 1, NULL, 20000000) == HDL_OK);
    pair_meet(pair);
    if (pair->side == 1) {
        CHECK(hdl_window_wait(window, FLAG, 2, NULL, 20000000) == HDL_OK);
        const uint8_t *data = net_window_data(window);
        for (size_t i = 0; i < PIECES; i++)
            CHECK(data[i] == (i < 512 ? 3 : i < PIECES / 2 ? 2 : data[i] & 1));
        pair_meet(pair);
        net_remote_close(remote);
        net_window_destroy(window);
        return;
    }
    stop(other);
    uint8_t *src =
        mmap(NULL, PIECES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(src != MAP_FAILED);
    memset(src, 1, PIECES);
    CHECK(hdl_put(remote, 0, src, PIECES, FLAG, 3, HDL_SIGNAL_SET) == HDL_OK);
    CHECK(hdl_flush(remote, 50000) == HDL_ETIMEDOUT);
    memset(src, 0xdd, PIECES);
    net_rank_lost(pair->net, 1, 0);
    CHECK(hdl_flush(remote, 50000) == HDL_EPEER);
    CHECK(munmap(src, PIECES) == 0);
    net_remote_close(remote);
    /* Long enough for the link to be given up, too. */
    poll_ms(pair, 6000);
    remote = pair_remote(pair, 0, NET_WRITE);
    uint8_t *next = malloc(PIECES / 2);
    memset(next, 2, PIECES / 2);
    CHECK(hdl_put(remote, 0, next, PIECES / 2, FLAG + 8, 1, HDL_SIGNAL_SET) == HDL_OK);
    CHECK(kill(other, SIGCONT) == 0);
    CHECK(hdl_flush(remote, 20000000) == HDL_OK);
    memset(next, 3, 512);
    CHECK(hdl_put(remote, 0, next, 512, FLAG, 2, HDL_SIGNAL_SET) == HDL_OK);
    free(next);
    pair_meet(pair);
    net_remote_close(remote);
    net_window_destroy(window);
}

/* Memory that was exposed and is not any more is left alone, whatever is under way. */
static void body_unexposed(struct pair *pair)
{
    pid_t other = other_pid(pair);
    struct hdl_window *window = pair_window(pair, 0, WINDOW);
    struct hdl_peer_window *remote = pair_remote(pair, 0, NET_WRITE);
    _Atomic uint64_t *words = &pair->shared->numbers[8];
    if (pair->side == 1) {
        static uint8_t src[PIECES];
        memset(src, 1, sizeof(src));
        pair_meet(pair);
        struct net_exposed exposed = {
            .key = words[0], .window = words[1], .bytes = PIECES};
        for (size_t at = 0; at < PIECES; at += NET_PIECE_BYTES)
            while (net_put_exposed(remote, &exposed, at, src + at, NET_PIECE_BYTES) ==
                   HDL_PENDING)
                net_poll(pair->net);
        CHECK(hdl_flush(remote, 20000000) == HDL_OK);
        pair_meet(pair);
        net_remote_close(remote);
        net_window_destroy(window);
        return;
    }
    uint8_t *data =
        mmap(NULL, PIECES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct net_exposed exposed;
    struct hdl_window *registration;
    CHECK(data != MAP_FAILED);
    CHECK(net_expose(pair->net, data, PIECES, &exposed, &registration) == HDL_OK);
    words[0] = exposed.key;
    words[1] = exposed.window;
    pair_meet(pair);
    while (!*(_Atomic uint8_t *)data)
        net_poll(pair->net);
    stop(other);
    net_unexpose(pair->net, registration);
    CHECK(munmap(data, PIECES) == 0);
    CHECK(kill(other, SIGCONT) == 0);
    pair_meet(pair);
    net_remote_close(remote);
    net_window_destroy(window);
}

/* ----------------------------------------------------------------------------- losses */

/* The n-th thing that the provider hands over is lost, or the connection breaks there,
 * for every n: a message, the end of a send or of a read. Everything arrives all the
 * same, in order, once. */
static void body_losses(struct pair *pair)
{
    struct hdl_window *window = pair_window(pair, 0, WINDOW);
    struct hdl_peer_window *remote = pair_remote(pair, 0, NET_WRITE);
    uint8_t *src = malloc(PIECES);
    for (int n = 1; n <= 2 * LOSSES; n++) {
        if (pair->side == n % 2)
            net_test_lose(pair->net, (uint32_t)n / 4, n & 2 ? remote : NULL);
        memset(src, n, PIECES);
        for (int k = 0; k < 6; k++) { /* some with a message of their own */
            while (net_put_hinted(remote, 0, NULL, 0, FLAG, 1, HDL_SIGNAL_ADD,
                                  k < 3 ? 0 : NET_PUT_MORE) == HDL_PENDING)
                net_poll(pair->net);
        }
        /* In pieces, as one, as a message. */
        const size_t sizes[] = {NET_PIECE_BYTES * 2 + 5, 80000, 9000, 60000};
        size_t bytes = sizes[n % 4];
        CHECK(hdl_put(remote, 0, src, bytes, FLAG, 1, HDL_SIGNAL_ADD) == HDL_OK);
        CHECK(hdl_flush(remote, 20000000) == HDL_OK);
        CHECK(hdl_signal(remote, FLAG + 8, (uint64_t)n, HDL_SIGNAL_SET) == HDL_OK);
        CHECK(hdl_window_wait(window, FLAG + 8, (uint64_t)n, NULL, 20000000) == HDL_OK);
        CHECK(word_at(window, FLAG) == (uint64_t)n * 7);
        const uint8_t *data = net_window_data(window);
        for (size_t i = 0; i < bytes; i += 63)
            CHECK(data[i] == (uint8_t)n);
        CHECK(data[bytes - 1] == (uint8_t)n);
        pair_meet(pair);
    }
    net_test_lose(pair->net, 0, NULL);
    free(src);
    pair_meet(pair);
    net_remote_close(remote);
    net_window_destroy(window);
}

/* Two blocks of which the second does not fit now send nothing, however often they are
 * tried; with reads and, as for old libraries, without. */
static void body_two(struct pair *pair)
{
    enum { HEAD = 64, TAIL = 200000, COUNT = 40 };
    struct hdl_window *window = pair_window(pair, 0, WINDOW);
    struct hdl_peer_window *remote = pair_remote(pair, 0, NET_WRITE);
    uint8_t *src = malloc(TAIL);
    memset(src, 7 + pair->side, TAIL);
    const struct net_block blocks[2] = {{.src = src, .bytes = HEAD},
                                        {.offset = HEAD, .src = src, .bytes = TAIL}};
    struct net_fabric *fabric = pair->net->fabric;
    for (int reads = 1; reads >= 0; reads--) {
        uint64_t *bytes = &fabric->counters.bytes;
        uint32_t refused = 0;
        fabric->reads = reads;
        for (int i = 0; i < COUNT;) {
            uint64_t before = *bytes;
            enum hdl_status status = net_put_two(remote, blocks, FLAG, 1, HDL_SIGNAL_ADD);
            CHECK(*bytes == before + (status == HDL_OK ? HEAD + TAIL : 0));
            i += status == HDL_OK;
            if (status == HDL_OK)
                continue;
            CHECK(status == HDL_PENDING);
            if (++refused % 3 == 0)
                net_poll(pair->net);
        }
        while (word_at(window, FLAG) < (uint64_t)COUNT * (uint64_t)(2 - reads))
            net_poll(pair->net);
        pair_meet(pair);
    }
    CHECK(((const uint8_t *)net_window_data(window))[HEAD + TAIL - 1] == 7 + !pair->side);
    free(src);
    pair_meet(pair);
    net_remote_close(remote);
    net_window_destroy(window);
}

/* ------------------------------------------------------------------------------ wrap */

/* Numbers a link that rests, as it has them after days. */
static void number_link(struct pair *pair, uint32_t next)
{
    struct net_fabric *fabric = pair->net->fabric;
    fabric_lock(fabric);
    struct fabric_link *link =
        base_container_of(base_list_first(&fabric->links), struct fabric_link, node);
    CHECK(link->base == link->tail);
    link->base = link->post = link->tail = link->expected = next;
    fabric_unlock(fabric);
}

static void body_wrap(struct pair *pair)
{
    enum { PUTS = 40 };
    if (pair->side == 1) {
        struct hdl_peer_window *remote = pair_remote(pair, 0, NET_WRITE);
        CHECK(hdl_signal(remote, FLAG, 1, HDL_SIGNAL_SET) == HDL_OK);
        while (!net_remote_delivered(remote))
            net_poll(pair->net);
        pair_meet(pair);
        number_link(pair, UINT32_MAX - PUTS / 2);
        pair_meet(pair);
        for (uint64_t i = 2; i <= PUTS; i++)
            CHECK(hdl_signal(remote, FLAG, i, HDL_SIGNAL_SET) == HDL_OK);
        for (int64_t end = base_now_ns() + 10 * BASE_NS_PER_S;
             !net_remote_delivered(remote);) {
            CHECK(base_now_ns() < end);
            net_poll(pair->net);
        }
        pair_meet(pair);
        net_remote_close(remote);
        return;
    }
    struct hdl_window *window = pair_window(pair, 0, WINDOW);
    pair_meet(pair);
    number_link(pair, UINT32_MAX - PUTS / 2);
    pair_meet(pair);
    CHECK(hdl_window_wait(window, FLAG, PUTS, NULL, 10000000) == HDL_OK);
    CHECK(net_refused(pair->net) == 0);
    pair_meet(pair);
    net_window_destroy(window);
}

#define OVER_FABRIC(body)                                                                \
    static void test_##body(void **state)                                                \
    {                                                                                    \
        if (!pair_has_fabric())                                                          \
            skip();                                                                      \
        assert_int_equal(pair_run(NET_FABRIC, body_##body), 0);                          \
    }

OVER_FABRIC(fenced)
OVER_FABRIC(given_up)
OVER_FABRIC(unexposed)
OVER_FABRIC(two)
OVER_FABRIC(wrap)

static void test_losses(void **state)
{
    if (!pair_relinks())
        skip();
    assert_int_equal(pair_run(NET_FABRIC, body_losses), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fenced),    cmocka_unit_test(test_given_up),
        cmocka_unit_test(test_unexposed), cmocka_unit_test(test_two),
        cmocka_unit_test(test_losses),    cmocka_unit_test(test_wrap),
    };
    const char *only = getenv("NET_TEST");
    if (only)
        cmocka_set_test_filter(only);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
