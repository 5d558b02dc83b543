/* SPDX-License-Identifier: Apache-2.0 */
/* The decoder of control messages, and the coordinator and agent behind it. */
#include <stdlib.h>
#include <string.h>

#include "base/env.h"
#include "ctl/agent.h"
#include "ctl/coordinator.h"
#include "ctl/msg.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* What is decoded must encode to the same bytes. */
static void check_round_trip(struct base_env *env, const uint8_t *data, size_t size)
{
    struct ctl_msg msg;
    if (ctl_msg_decode(env, data, size, &msg) != HDL_OK)
        return;
    bool foreign = msg.type == CTL_MSG_HELLO && (msg.hello.magic != CTL_WIRE_MAGIC ||
                                                 msg.hello.version != CTL_WIRE_VERSION);
    struct ctl_bytes *bytes = ctl_msg_encode(env, &msg);
    struct ctl_msg again;
    if (!foreign && bytes &&
        ctl_msg_decode(env, bytes->data, bytes->size, &again) != HDL_OK)
        abort();
    if (!foreign && bytes)
        ctl_msg_release(env, &again);
    ctl_bytes_unref(bytes);
    ctl_msg_release(env, &msg);
}

static void to_agent(struct base_env *env, const uint8_t *data, size_t size)
{
    struct ctl_agent_options options = {.socket_name = ""};
    struct ctl_actions actions = {.env = env};
    struct ctl_agent *agent;
    if (ctl_agent_create(env, &options, 1, &agent) != HDL_OK)
        return;
    struct ctl_agent_event event = {.kind = CTL_AGENT_TICK};
    (void)ctl_agent_step(agent, &event, 1, &actions);
    event.kind = CTL_AGENT_CONNECTED;
    (void)ctl_agent_step(agent, &event, 1, &actions);
    event.kind = CTL_AGENT_MESSAGE;
    event.data = data;
    event.size = size;
    (void)ctl_agent_step(agent, &event, 2, &actions);
    ctl_actions_free(&actions);
    ctl_agent_destroy(agent);
}

/* The input is cut into messages: one byte of length, then so many bytes. */
static void to_coordinator(struct base_env *env, const uint8_t *data, size_t size)
{
    struct ctl_coordinator_options options = {.num_ranks = 4};
    struct ctl_actions actions = {.env = env};
    struct ctl_coordinator *coordinator;
    if (ctl_coordinator_create(env, &options, 1, &coordinator) != HDL_OK)
        return;
    struct ctl_coordinator_event event = {.kind = CTL_COORDINATOR_OPENED, .conn = 1};
    (void)ctl_coordinator_step(coordinator, &event, 1, &actions);
    event.kind = CTL_COORDINATOR_MESSAGE;
    for (size_t at = 0; at < size;) {
        size_t length = data[at++];
        if (length > size - at)
            length = size - at;
        event.data = data + at;
        event.size = length;
        (void)ctl_coordinator_step(coordinator, &event, 2, &actions);
        at += length;
    }
    ctl_actions_free(&actions);
    ctl_coordinator_destroy(coordinator);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct base_env env;
    base_env_init(&env);
    env.log_level = -1;
    check_round_trip(&env, data, size);
    to_agent(&env, data, size);
    to_coordinator(&env, data, size);
    return 0;
}
