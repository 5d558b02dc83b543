/* SPDX-License-Identifier: Apache-2.0 */
/* Wire format: one table says which fields each type of message carries, in which order.
 */
#include "ctl/msg.h"

#include <string.h>

#include "base/bytes.h"
#include "base/env.h"
#include "ctl/msg_fields.h"

/* One more than the longest layout has: the rest of each is CTL_FIELD_END. */
enum { MAX_FIELDS = 10 };

struct layout {
    const char *name;
    enum ctl_field fields[MAX_FIELDS];
};

static const struct layout layouts[CTL_MSG_TYPES] = {
    [CTL_MSG_HELLO] = {"HELLO", {CTL_FIELD_HELLO}},
    [CTL_MSG_REGISTER] = {"REGISTER", {CTL_FIELD_KEY, CTL_FIELD_REGISTRATION}},
    [CTL_MSG_ATTACHED] = {"ATTACHED",
                          {CTL_FIELD_GROUP, CTL_FIELD_EPOCH, CTL_FIELD_RANK_EPOCH,
                           CTL_FIELD_STATUS, CTL_FIELD_TEXT}},
    [CTL_MSG_ANSWER] = {"ANSWER", {CTL_FIELD_GROUP, CTL_FIELD_ANSWER}},
    [CTL_MSG_FINISHED] = {"FINISHED", {CTL_FIELD_GROUP, CTL_FIELD_X}},
    [CTL_MSG_EXITED] = {"EXITED", {CTL_FIELD_RANK_EPOCH}},
    [CTL_MSG_LINK] = {"LINK", {CTL_FIELD_GROUP, CTL_FIELD_RANK_EPOCH, CTL_FIELD_FLAG}},
    [CTL_MSG_PROPOSE] = {"PROPOSE",
                         {CTL_FIELD_GROUP, CTL_FIELD_ID, CTL_FIELD_KIND, CTL_FIELD_EPOCH,
                          CTL_FIELD_SLOTS, CTL_FIELD_TIMEOUT}},
    [CTL_MSG_LEAVE] = {"LEAVE", {CTL_FIELD_GROUP, CTL_FIELD_KEY}},
    [CTL_MSG_ABORT] = {"ABORT", {CTL_FIELD_GROUP, CTL_FIELD_KEY}},
    [CTL_MSG_GOODBYE] = {"GOODBYE", {CTL_FIELD_END}},
    [CTL_MSG_STATE] = {"STATE",
                       {CTL_FIELD_KEY, CTL_FIELD_GROUP, CTL_FIELD_SLOT,
                        CTL_FIELD_RANK_EPOCH, CTL_FIELD_EPOCH, CTL_FIELD_X,
                        CTL_FIELD_FLAG, CTL_FIELD_REGISTRATION, CTL_FIELD_CHANGE}},
    [CTL_MSG_HEARTBEAT] = {"HEARTBEAT", {CTL_FIELD_FLAG, CTL_FIELD_ID}},
    [CTL_MSG_WELCOME] = {"WELCOME",
                         {CTL_FIELD_RANK_EPOCH, CTL_FIELD_EPOCH, CTL_FIELD_SETTINGS}},
    [CTL_MSG_REFUSED] = {"REFUSED", {CTL_FIELD_STATUS, CTL_FIELD_TEXT}},
    [CTL_MSG_NEIGHBOUR] = {"NEIGHBOUR",
                           {CTL_FIELD_RANK_EPOCH, CTL_FIELD_FLAG, CTL_FIELD_PID,
                            CTL_FIELD_TEXT}},
    [CTL_MSG_REGISTERED] = {"REGISTERED",
                            {CTL_FIELD_KEY, CTL_FIELD_GROUP, CTL_FIELD_SLOT,
                             CTL_FIELD_RANK_EPOCH}},
    [CTL_MSG_VIEW] = {"VIEW",
                      {CTL_FIELD_GROUP, CTL_FIELD_EPOCH, CTL_FIELD_FLAG,
                       CTL_FIELD_CHANGE}},
    [CTL_MSG_START] = {"START", {CTL_FIELD_GROUP, CTL_FIELD_EPOCH}},
    [CTL_MSG_ENDPOINT] = {"ENDPOINT",
                          {CTL_FIELD_GROUP, CTL_FIELD_SLOT, CTL_FIELD_RANK_EPOCH,
                           CTL_FIELD_ENDPOINT}},
    [CTL_MSG_FAILED] = {"FAILED",
                        {CTL_FIELD_KEY, CTL_FIELD_GROUP, CTL_FIELD_STATUS,
                         CTL_FIELD_TEXT}},
    [CTL_MSG_PREPARE] = {"PREPARE", {CTL_FIELD_GROUP, CTL_FIELD_EPOCH, CTL_FIELD_SLOTS}},
    [CTL_MSG_COMMIT] = {"COMMIT", {CTL_FIELD_GROUP, CTL_FIELD_EPOCH, CTL_FIELD_CHANGE}},
    [CTL_MSG_WATCH] = {"WATCH", {CTL_FIELD_GROUP, CTL_FIELD_X}},
    [CTL_MSG_CLOSED] = {"CLOSED",
                        {CTL_FIELD_GROUP, CTL_FIELD_SLOT, CTL_FIELD_RANK_EPOCH}},
    [CTL_MSG_PROPOSED] = {"PROPOSED",
                          {CTL_FIELD_GROUP, CTL_FIELD_ID, CTL_FIELD_STATUS,
                           CTL_FIELD_EPOCH, CTL_FIELD_X, CTL_FIELD_TEXT}},
    [CTL_MSG_LEFT] = {"LEFT", {CTL_FIELD_GROUP, CTL_FIELD_KEY}},
    [CTL_MSG_FENCED] = {"FENCED", {CTL_FIELD_GROUP}},
    [CTL_MSG_NOTICE] = {"NOTICE", {CTL_FIELD_TEXT}},
};

const char *ctl_msg_name(enum ctl_msg_type type)
{
    return type > 0 && type < CTL_MSG_TYPES ? layouts[type].name : "unknown";
}

struct ctl_bytes *ctl_msg_encode(struct base_env *env, const struct ctl_msg *msg)
{
    const struct layout *layout = &layouts[msg->type];
    size_t bound = 1;
    for (const enum ctl_field *f = layout->fields; *f != CTL_FIELD_END; f++)
        bound += ctl_field_bound(msg, *f);
    if (bound > CTL_FRAME_MAX_DOWN) {
        (void)base_fail(HDL_EINVAL, "a %s message of %zu bytes is longer than %zu",
                        layout->name, bound, CTL_FRAME_MAX_DOWN);
        return NULL;
    }
    struct ctl_bytes *bytes = ctl_bytes_new(env, NULL, bound);
    if (!bytes)
        return NULL;
    struct base_writer writer;
    base_writer_init(&writer, bytes->data, bound);
    base_write_u8(&writer, (uint8_t)msg->type);
    for (const enum ctl_field *f = layout->fields; *f != CTL_FIELD_END; f++)
        ctl_field_write(&writer, msg, *f);
    if (writer.failed) {
        ctl_bytes_unref(bytes);
        (void)base_fail(HDL_EINTERNAL, "a %s message does not fit %zu bytes",
                        layout->name, bound);
        return NULL;
    }
    bytes->size = writer.pos;
    return bytes;
}

enum hdl_status ctl_msg_decode(struct base_env *env, const void *data, size_t size,
                               struct ctl_msg *msg)
{
    struct base_reader reader;
    base_reader_init(&reader, data, size);
    memset(msg, 0, sizeof(*msg));
    unsigned type = base_read_u8(&reader);
    if (reader.failed || type == 0 || type >= CTL_MSG_TYPES)
        return base_fail(HDL_EINVAL, "message type %u of %zu bytes is unknown", type,
                         size);
    msg->type = (enum ctl_msg_type)type;
    const struct layout *layout = &layouts[type];
    enum hdl_status status = HDL_OK;
    for (const enum ctl_field *f = layout->fields; *f != CTL_FIELD_END; f++) {
        status = ctl_field_read(env, &reader, msg, *f);
        if (status != HDL_OK)
            break;
    }
    if (status == HDL_OK && ctl_msg_is_foreign(msg))
        return HDL_OK;
    if (status == HDL_OK && !base_reader_done(&reader))
        status = base_fail(HDL_EINVAL, "%s message of %zu bytes is %s", layout->name,
                           size, reader.failed ? "truncated" : "too long");
    if (status != HDL_OK)
        ctl_msg_release(env, msg);
    return status;
}

void ctl_msg_release(struct base_env *env, struct ctl_msg *msg)
{
    base_free(env, msg->slots);
    base_free(env, msg->hello.groups);
    base_free(env, (void *)(uintptr_t)msg->registration.ranks);
    base_free(env, (void *)(uintptr_t)msg->registration.params);
    base_free(env, msg->answer.published);
    base_free(env, msg->answer.open);
    base_free(env, msg->change.attempts);
    base_free(env, msg->change.slots);
    memset(msg, 0, sizeof(*msg));
}
