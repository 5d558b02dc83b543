/* SPDX-License-Identifier: Apache-2.0 */
/* The wire format: every type there and back; truncated, long and damaged frames. */
#include "unit.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/env.h"
#include "base/random.h"
#include "ctl/msg.h"

static struct base_env env;

static void fill_change(struct ctl_change *change)
{
    static struct ctl_attempt attempts[2] = {{1, 2}, {3, 4}};
    static struct ctl_slot_change slots[2];
    slots[0] = (struct ctl_slot_change){
        .index = 1,
        .slot = {.rank_epoch = 9, .first = 1, .last = CTL_X_FOREVER, .active = true},
        .has_endpoint = true,
        .endpoint = "where",
        .endpoint_size = 5};
    slots[1] = (struct ctl_slot_change){
        .index = 3, .slot = {.rank_epoch = 8, .absent = true, .closed = true}};
    *change = (struct ctl_change){.base = 1,
                                  .settled = 2,
                                  .link_from = 1,
                                  .capacity = 8,
                                  .num_attempts = 2,
                                  .attempts = attempts,
                                  .num_slots = 2,
                                  .slots = slots};
}

/* A message with something in every field, whatever the type uses. */
static void fill(struct ctl_msg *msg, enum ctl_msg_type type)
{
    static uint32_t numbers[3] = {0, 2, 7};
    static uint64_t published[2] = {5, 6};
    static struct ctl_open_op open[2] = {{3, 4, true}, {4, 0, false}};
    static struct ctl_param params[2] = {{"capacity", "4"}, {"chunk_bytes", ""}};
    static struct ctl_group_state states[2] = {{1, 2}, {4, 5}};
    *msg = (struct ctl_msg){
        .type = type,
        .group = 11,
        .key = 12,
        .rank_epoch = ctl_rank_epoch(3, 1),
        .epoch = 14,
        .x = ctl_x(5, 2),
        .id = 16,
        .slot = 17,
        .kind = 2,
        .pid = 99,
        .status = HDL_ECONFIG,
        .flag = true,
        .text = "something is wrong",
        .endpoint = "blob",
        .endpoint_size = 4,
        .num_slots = 3,
        .slots = numbers,
        .timeout_ns = 1000,
        .hello = {.magic = CTL_WIRE_MAGIC,
                  .version = CTL_WIRE_VERSION,
                  .rank = 1,
                  .incarnation = 77,
                  .turn = 78,
                  .socket_name = "heddle-1",
                  .num_groups = 2,
                  .groups = states},
        .registration = {.name = "world",
                         .capacity = 8,
                         .slot = 2,
                         .num_founders = 3,
                         .ranks = numbers,
                         .num_ranks = 3,
                         .auto_sync = true,
                         .found_only = true,
                         .timeout_ns = 5,
                         .params = params,
                         .num_params = 2,
                         .endpoint = "blob",
                         .endpoint_size = 4},
    };
    msg->answer = (struct ctl_answer){.ballot = 1,
                                      .ready = 2,
                                      .done = 3,
                                      .next = 4,
                                      .num_dead = 2,
                                      .published = published,
                                      .num_open = 2,
                                      .open = open,
                                      .messaged = true};
    fill_change(&msg->change);
    msg->settings =
        (struct ctl_settings){.dead_after_ns = 5, .turn = 6, .standalone = true};
}

static struct ctl_bytes *sample(enum ctl_msg_type type)
{
    struct ctl_msg msg;
    fill(&msg, type);
    struct ctl_bytes *bytes = ctl_msg_encode(&env, &msg);
    assert_non_null(bytes);
    return bytes;
}

static void test_there_and_back(void **state)
{
    for (int type = 1; type < CTL_MSG_TYPES; type++) {
        struct ctl_bytes *bytes = sample((enum ctl_msg_type)type);
        struct ctl_msg msg;
        assert_ok(ctl_msg_decode(&env, bytes->data, bytes->size, &msg));
        struct ctl_bytes *again = ctl_msg_encode(&env, &msg);
        assert_non_null(again);
        assert_int_equal(again->size, bytes->size);
        assert_memory_equal(again->data, bytes->data, bytes->size);
        ctl_msg_release(&env, &msg);
        ctl_bytes_unref(bytes);
        ctl_bytes_unref(again);
    }
}

static void test_truncated_and_long(void **state)
{
    for (int type = 1; type < CTL_MSG_TYPES; type++) {
        struct ctl_bytes *bytes = sample((enum ctl_msg_type)type);
        struct ctl_msg msg;
        unsigned char *copy = malloc(bytes->size + 1);
        assert_non_null(copy);
        memcpy(copy, bytes->data, bytes->size);
        copy[bytes->size] = 0;
        assert_status(ctl_msg_decode(&env, copy, bytes->size + 1, &msg), HDL_EINVAL);
        free(copy);
        for (size_t size = 0; size < bytes->size; size++) {
            unsigned char *cut = malloc(size + 1);
            assert_non_null(cut);
            memcpy(cut, bytes->data, size);
            assert_status(ctl_msg_decode(&env, cut, size, &msg), HDL_EINVAL);
            free(cut);
        }
        ctl_bytes_unref(bytes);
    }
}

/* Whatever is damaged: an error or another valid message, no access out of bounds. */
static void test_damaged(void **state)
{
    uint64_t random = 3;
    for (int round = 0; round < 20000; round++) {
        unsigned type = 1 + (unsigned)base_splitmix_below(&random, CTL_MSG_TYPES - 1);
        struct ctl_bytes *bytes = sample((enum ctl_msg_type)type);
        for (unsigned i = 0; i <= round % 4u; i++)
            bytes->data[base_splitmix_below(&random, bytes->size)] =
                (unsigned char)base_splitmix_next(&random);
        struct ctl_msg msg;
        if (ctl_msg_decode(&env, bytes->data, bytes->size, &msg) == HDL_OK)
            ctl_msg_release(&env, &msg);
        ctl_bytes_unref(bytes);
    }
}

static void test_counts_beyond_the_frame(void **state)
{
    unsigned char frame[32] = {CTL_MSG_PREPARE};
    struct ctl_msg msg;
    memset(frame + 17, 0xff, 4); /* 2^32 - 1 slots follow, it says */
    assert_status(ctl_msg_decode(&env, frame, sizeof(frame), &msg), HDL_EINVAL);
    assert_detail("PREPARE");
    frame[0] = 0;
    assert_status(ctl_msg_decode(&env, frame, sizeof(frame), &msg), HDL_EINVAL);
    frame[0] = CTL_MSG_TYPES;
    assert_status(ctl_msg_decode(&env, frame, sizeof(frame), &msg), HDL_EINVAL);
}

/* A HELLO of another version is understood far enough to refuse it with both versions. */
static void test_foreign_hello(void **state)
{
    struct ctl_msg msg;
    fill(&msg, CTL_MSG_HELLO);
    msg.hello.version = CTL_WIRE_VERSION + 1;
    struct ctl_bytes *bytes = ctl_msg_encode(&env, &msg);
    assert_non_null(bytes);
    struct ctl_msg got;
    assert_ok(ctl_msg_decode(&env, bytes->data, 1 + 8 + 3, &got));
    assert_int_equal(got.hello.version, CTL_WIRE_VERSION + 1);
    ctl_msg_release(&env, &got);
    ctl_bytes_unref(bytes);
}

static void test_strings_end(void **state)
{
    struct ctl_bytes *bytes = sample(CTL_MSG_REFUSED);
    struct ctl_msg msg;
    bytes->data[bytes->size - 1] = 'x';
    assert_status(ctl_msg_decode(&env, bytes->data, bytes->size, &msg), HDL_EINVAL);
    bytes->data[bytes->size - 1] = 0;
    bytes->data[bytes->size - 4] = 0;
    assert_status(ctl_msg_decode(&env, bytes->data, bytes->size, &msg), HDL_EINVAL);
    ctl_bytes_unref(bytes);
}

/* With a folder as argument: writes one message of each type there, for the fuzzer. */
static int write_corpus(const char *folder)
{
    for (int type = 1; type < CTL_MSG_TYPES; type++) {
        char path[512];
        struct ctl_bytes *bytes = sample((enum ctl_msg_type)type);
        (void)snprintf(path, sizeof(path), "%s/%s", folder,
                       ctl_msg_name((enum ctl_msg_type)type));
        FILE *file = fopen(path, "wb");
        if (!file || fwrite(bytes->data, 1, bytes->size, file) != bytes->size)
            return 1;
        (void)fclose(file);
        ctl_bytes_unref(bytes);
    }
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_there_and_back),
        cmocka_unit_test(test_truncated_and_long),
        cmocka_unit_test(test_damaged),
        cmocka_unit_test(test_counts_beyond_the_frame),
        cmocka_unit_test(test_foreign_hello),
        cmocka_unit_test(test_strings_end),
    };
    base_env_init(&env);
    if (argc > 1)
        return write_corpus(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
