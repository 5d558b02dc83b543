/* SPDX-License-Identifier: Apache-2.0 */
/* What transports refuse: foreign keys, damaged handles, unsealed memory, missing
 * libraries, and what they do when memory is short. */
#include "unit.h"

#include "faults.h"
#include "net/fabric_impl.h"
#include "pair.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

/* A handle with one field changed, packed anew: its checksum is right. */
static struct hdl_peer_window *open_changed(struct pair *pair,
                                            void (*change)(struct net_handle *))
{
    struct net_handle handle;
    while (!atomic_load(&pair->shared->handles[0][0].ready))
        sched_yield();
    CHECK(net_handle_unpack(pair->shared->handles[0][0].bytes, NET_HANDLE_BYTES,
                            &handle) == HDL_OK);
    change(&handle);
    uint8_t bytes[NET_HANDLE_BYTES];
    size_t length = sizeof(bytes);
    CHECK(net_handle_pack(&handle, bytes, &length) == HDL_OK);
    struct hdl_peer_window *remote = NULL;
    enum hdl_status status =
        net_remote_open(pair->net, bytes, length, NET_WRITE, &remote);
    CHECK(status == HDL_OK || remote == NULL);
    return remote;
}

static void wrong_key(struct net_handle *handle)
{
    handle->key ^= 1;
}

static void wrong_window(struct net_handle *handle)
{
    handle->window_id += 1000;
}

static void larger(struct net_handle *handle)
{
    handle->bytes += 1 << 20;
}

/* Memory of the host that calls itself a GPU's. */
static void of_device(struct net_handle *handle)
{
    handle->of_device = true;
}

/* A stranger who has a handle but not the key of the window writes nothing. */
static void body_keys(struct pair *pair)
{
    enum { BYTES = 4096 };
    if (pair->side == 0) {
        struct hdl_window *window = pair_window(pair, 0, BYTES);
        pair_meet(pair);
        CHECK(hdl_window_wait(window, 0, 1, NULL, 20000000) == HDL_OK);
        const uint8_t *data = net_window_data(window);
        for (size_t i = 8; i < BYTES; i++)
            CHECK(data[i] == 0);
        /* Wrong key, beyond the end; an unknown window is only dropped. */
        CHECK(net_refused(pair->net) == 2);
        pair_meet(pair);
        net_window_destroy(window);
        return;
    }
    uint8_t junk[64];
    memset(junk, 0xff, sizeof(junk));
    struct hdl_peer_window *bad[3] = {open_changed(pair, wrong_key),
                                      open_changed(pair, wrong_window),
                                      open_changed(pair, larger)};
    size_t offsets[3] = {512, 512, BYTES};
    pair_meet(pair);
    for (int i = 0; i < 3; i++) {
        CHECK(bad[i]);
        CHECK(net_put(bad[i], offsets[i], junk, sizeof(junk), 1024, 1, HDL_SIGNAL_ADD) ==
              HDL_OK);
    }
    struct hdl_peer_window *good = pair_remote(pair, 0, NET_WRITE);
    CHECK(hdl_signal(good, 0, 1, HDL_SIGNAL_SET) == HDL_OK);
    pair_meet(pair);
    for (int i = 0; i < 3; i++)
        net_remote_close(bad[i]);
    net_remote_close(good);
}

static void test_keys_fabric(void **state)
{
    if (!pair_has_fabric())
        skip();
    assert_int_equal(pair_run(NET_FABRIC, body_keys), 0);
}

/* A peer that acknowledges what it was not sent is not believed. */
static void body_acknowledgements(struct pair *pair)
{
    struct hdl_window *window = pair_window(pair, 0, 4096);
    struct hdl_peer_window *remote = pair_remote(pair, 0, NET_WRITE);
    struct net_fabric *fabric = pair->net->fabric;
    struct fabric_link *link = remote->fabric->link;
    CHECK(hdl_signal(remote, 0, 1, HDL_SIGNAL_SET) == HDL_OK);
    fabric_lock(fabric);
    for (uint32_t ahead = 0; ahead < 3; ahead++) {
        uint32_t base = link->base, tail = link->tail;
        fabric_link_acknowledged(fabric, link, tail + ahead, false);
        CHECK(link->base == base && link->tail == tail);
    }
    fabric_unlock(fabric);
    CHECK(hdl_window_wait(window, 0, 1, NULL, 20000000) == HDL_OK);
    pair_meet(pair);
    net_remote_close(remote);
    net_window_destroy(window);
}

static void test_acknowledgements(void **state)
{
    if (!pair_has_fabric())
        skip();
    assert_int_equal(pair_run(NET_FABRIC, body_acknowledgements), 0);
}

/* Over shared memory the descriptor is not given out at all. */
static void body_keys_shm(struct pair *pair)
{
    if (pair->side == 0) {
        struct hdl_window *window = pair_window(pair, 0, 4096);
        pair_meet(pair);
        net_window_destroy(window);
        return;
    }
    CHECK(!open_changed(pair, wrong_key));
    CHECK(!open_changed(pair, wrong_window));
    CHECK(!open_changed(pair, larger));
    CHECK(!open_changed(pair, of_device));
    pair_meet(pair);
}

static void test_keys_shm(void **state)
{
    assert_int_equal(pair_run(NET_SHM, body_keys_shm), 0);
}

/* Bytes of a stranger at the port that fabric listens on do no harm. */
static void body_strangers(struct pair *pair)
{
    struct hdl_window *window = pair_window(pair, 0, 4096);
    struct hdl_peer_window *remote = pair_remote(pair, 0, NET_WRITE);
    struct net_handle handle;
    CHECK(net_handle_unpack(pair->shared->handles[!pair->side][0].bytes, NET_HANDLE_BYTES,
                            &handle) == HDL_OK);
    uint64_t seed = 7;
    int fds[8];
    for (int i = 0; i < 8; i++) {
        uint8_t noise[4096];
        for (size_t k = 0; k < sizeof(noise); k++)
            noise[k] = (uint8_t)base_splitmix_next(&seed);
        fds[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        CHECK(fds[i] >= 0);
        CHECK(connect(fds[i], (struct sockaddr *)handle.address,
                      sizeof(struct sockaddr_in)) == 0);
        /* Some say nothing, some a little, some much. */
        size_t bytes = i == 0 ? 0 : i < 4 ? (size_t)i * 9 : sizeof(noise);
        if (bytes && send(fds[i], noise, bytes, MSG_NOSIGNAL) < 0)
            errno = 0;
        net_poll(pair->net);
    }
    for (uint64_t round = 1; round <= 200; round++) {
        CHECK(hdl_signal(remote, 0, round, HDL_SIGNAL_SET) == HDL_OK);
        CHECK(hdl_window_wait(window, 0, round, NULL, 20000000) == HDL_OK);
    }
    for (int i = 0; i < 8; i++)
        close(fds[i]);
    pair_meet(pair);
    net_remote_close(remote);
    net_window_destroy(window);
}

static void test_strangers(void **state)
{
    if (!pair_relinks()) /* nor can that library get past a stranger who says nothing */
        skip();
    assert_int_equal(pair_run(NET_FABRIC, body_strangers), 0);
}

/* ----------------------------------------------------------------- without libfabric */

static enum hdl_status create_with(const char *variable, const char *value,
                                   enum net_transport transport, struct base_env *env,
                                   struct net **net)
{
    struct net_exchange exchange = {.rank = 0};
    strcpy(exchange.interface_address, "127.0.0.1");
    struct net_opts opts = {.transport = transport};
    base_env_init(env);
    env->log_level = BASE_LOG_ERROR;
    assert_ok(base_config_set(&env->config, variable, value));
    return net_create(env, &exchange, &opts, net);
}

static void test_no_library(void **state)
{
    struct base_env env;
    struct net *net;
    assert_ok(create_with("HEDDLE_FABRIC_LIBRARY", "libnone.so.9", NET_AUTO, &env, &net));
    assert_null(net_fabric_provider(net));
    assert_non_null(strstr(net_fabric_reason(net), "libnone.so.9"));
    assert_false(net_needs_poll(net));
    assert_int_equal(net_poll(net), 0);
    struct hdl_window *window;
    assert_ok(net_window_create(net, 64, &window));
    net_window_destroy(window);
    net_destroy(net);
    assert_status(
        create_with("HEDDLE_FABRIC_LIBRARY", "libnone.so.9", NET_FABRIC, &env, &net),
        HDL_ENOTSUP);
    assert_status(
        create_with("HEDDLE_FABRIC_LIBRARY", "libc.so.6", NET_FABRIC, &env, &net),
        HDL_ENOTSUP);
    assert_detail("fi_getinfo");
    char json[1024];
    assert_true(net_describe(&env, json, sizeof(json)) < sizeof(json));
    assert_non_null(strstr(json, "\"fabric\":{\"available\":false,\"reason\":"));
}

static void test_no_provider(void **state)
{
    if (!pair_has_fabric())
        skip();
    struct base_env env;
    struct net *net;
    assert_status(create_with("HEDDLE_FABRIC_PROVIDER", "pigeon", NET_FABRIC, &env, &net),
                  HDL_ENOTSUP);
    assert_detail("pigeon");
}

/* Memory that the provider shows to peers has keys that nobody guesses. */
static void test_memory_keys(void **state)
{
    if (!pair_has_fabric())
        skip();
    struct base_env env;
    struct net *net;
    assert_ok(create_with("HEDDLE_FABRIC_PROVIDER", "", NET_FABRIC, &env, &net));
    struct net_fabric *fabric = net->fabric;
    enum { PIECES = 8 };
    struct fabric_piece *pieces[PIECES];
    uint64_t all = 0;
    for (int i = 0; i < PIECES; i++) {
        pieces[i] = fabric_piece_get(fabric);
        assert_non_null(pieces[i]);
        all |= fi_mr_key(pieces[i]->mr);
    }
    if (!(fabric->info->domain_attr->mr_mode & FI_MR_PROV_KEY))
        assert_true(all >> 32);
    for (int i = 0; i < PIECES; i++)
        fabric_piece_put(fabric, pieces[i]);
    net_destroy(net);
}

/* --------------------------------------------------------------------- bad arguments */

static void test_arguments(void **state)
{
    struct pair_shared *shared = calloc(1, sizeof(*shared));
    struct pair pair = {.shared = shared, .address = ""};
    pair_open(&pair);
    struct hdl_window *window;
    struct hdl_peer_window *remote;
    assert_status(net_window_create(pair.net, 0, &window), HDL_EINVAL);
    assert_status(net_window_create(pair.net, SIZE_MAX, &window), HDL_EINVAL);
    assert_status(net_window_create(pair.net, (size_t)1 << 60, &window), HDL_ENOMEM);
    struct rlimit files;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &files), 0);
    const struct rlimit small = {.rlim_cur = 8192, .rlim_max = files.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    assert_status(net_window_create(pair.net, 8193, &window), HDL_ENOMEM);
    assert_detail("ulimit -f");
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &files), 0);
    window = pair_window(&pair, 0, 100);
    const uint8_t *handle = shared->handles[0][0].bytes;
    size_t length = shared->handles[0][0].length;
    assert_status(net_remote_open(pair.net, handle, length, 0, &remote), HDL_EINVAL);
    assert_status(net_remote_open(pair.net, handle, 10, NET_READ, &remote), HDL_EINVAL);
    assert_ok(net_remote_open(pair.net, handle, length, NET_READ, &remote));
    uint64_t word = 1;
    assert_status(net_put(remote, 0, &word, 8, NET_NO_SIGNAL, 0, HDL_SIGNAL_SET),
                  HDL_EINVAL);
    net_remote_close(remote);
    assert_ok(net_remote_open(pair.net, handle, length, NET_READ | NET_WRITE, &remote));
    const struct net_block blocks[2] = {{.offset = 0, .src = &word, .bytes = 8},
                                        {.offset = 16, .src = &word, .bytes = 8}};
    assert_ok(net_put_two(remote, blocks, 32, 5, HDL_SIGNAL_ADD));
    const uint64_t *data = net_window_data(window);
    assert_true(data[0] == 1 && data[1] == 0 && data[2] == 1 && data[4] == 5);
    const struct net_block outside[2] = {blocks[0],
                                         {.offset = 96, .src = &word, .bytes = 8}};
    assert_status(net_put_two(remote, outside, NET_NO_SIGNAL, 0, HDL_SIGNAL_SET),
                  HDL_EINVAL);
    const struct net_exposed exposed = {.bytes = 8};
    assert_status(net_put_exposed(remote, &exposed, 0, &word, 9), HDL_EINVAL);
    assert_status(net_put_exposed(remote, &exposed, 0, &word, 8), HDL_ENOTSUP);
    assert_true(net_remote_delivered(remote));
    assert_ok(net_flush(remote, 0));
    net_remote_close(remote);
    net_remote_close(NULL);
    net_window_destroy(window);
    net_window_destroy(NULL);
    net_destroy(pair.net);
    net_destroy(NULL);
    free(shared);
}

/* Memory that its owner could shrink is not mapped. */
static void test_unsealed(void **state)
{
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(fd >= 0 && ftruncate(fd, 8192) == 0);
    void *data;
    assert_status(net_memory_map(fd, 8192, true, &data), HDL_EINVAL);
    assert_detail("sealed");
    assert_status(net_memory_map(fd, 16384, true, &data), HDL_EINVAL);
    close(fd);
}

/* ---------------------------------------------------------------------- short memory */

static enum hdl_status live_once(struct base_env *env, const char *address)
{
    struct net_exchange exchange = {.rank = 0};
    snprintf(exchange.interface_address, sizeof(exchange.interface_address), "%s",
             address);
    struct net_opts opts = {.transport = NET_AUTO};
    struct net *net;
    enum hdl_status status = net_create(env, &exchange, &opts, &net);
    if (status != HDL_OK)
        return status;
    struct hdl_window *window = NULL;
    status = net_window_create(net, 4096, &window);
    if (status == HDL_OK) {
        uint8_t handle[NET_HANDLE_BYTES];
        size_t length = sizeof(handle);
        struct hdl_peer_window *remote = NULL;
        assert_ok(net_window_pack(window, handle, &length));
        status = net_remote_open(net, handle, length, NET_WRITE, &remote);
        net_remote_close(remote);
    }
    net_window_destroy(window);
    net_destroy(net);
    return status;
}

static void check_short_memory(const char *address)
{
    struct base_env env;
    struct faults faults;
    base_env_init(&env);
    env.log_level = -1;
    for (long n = 0; n < 100; n++) {
        faults_init(&faults, &env, n);
        enum hdl_status status = live_once(&env, address);
        assert_int_equal(faults_live(&faults), 0);
        if (!faults_hit(&faults))
            return;
        /* Without memory for fabric a context goes on without fabric. */
        assert_true(status == HDL_ENOMEM || (address[0] && status == HDL_OK));
    }
    fail();
}

static void test_short_memory(void **state)
{
    check_short_memory("");
}

static void test_short_memory_fabric(void **state)
{
    if (!pair_has_fabric())
        skip();
    check_short_memory("127.0.0.1");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_unsealed),
        cmocka_unit_test(test_no_library),
        cmocka_unit_test(test_no_provider),
        cmocka_unit_test(test_memory_keys),
        cmocka_unit_test(test_keys_shm),
        cmocka_unit_test(test_keys_fabric),
        cmocka_unit_test(test_acknowledgements),
        cmocka_unit_test(test_strangers),
        cmocka_unit_test(test_short_memory),
        cmocka_unit_test(test_short_memory_fabric),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
