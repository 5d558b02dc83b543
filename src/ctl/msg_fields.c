/* SPDX-License-Identifier: Apache-2.0 */
/* Reading and writing the fields of messages, every count checked before it is believed.
 */
#include "ctl/msg_fields.h"

#include <string.h>

#include "base/env.h"

enum {
    SLOT_BYTES = 4 + 1 + 6 * 8,
    ATTEMPT_BYTES = 2 * 8,
    OPEN_BYTES = 8 + 4 + 1,
    STATE_BYTES = 2 * 8,
    PARAMS_MAX = 256
};

enum {
    SLOT_ABSENT = 1,
    SLOT_ACTIVE = 2,
    SLOT_CLOSED = 4,
    SLOT_ENDPOINT = 8,
    SLOT_FLAGS = 15
};

static void write_blob(struct base_writer *writer, const void *data, size_t size)
{
    base_write_u32(writer, (uint32_t)size);
    base_write_bytes(writer, data, size);
}

/* Strings go with their terminator, so that a decoded one can point into the frame. */
static void write_text(struct base_writer *writer, const char *text)
{
    if (!text)
        text = "";
    size_t length = strlen(text);
    if (length >= CTL_TEXT_MAX)
        length = CTL_TEXT_MAX - 1;
    base_write_u32(writer, (uint32_t)length + 1);
    base_write_bytes(writer, text, length);
    base_write_u8(writer, 0);
}

static size_t text_bound(const char *text)
{
    return 5 + (text ? strlen(text) : 0);
}

static const char *read_text(struct base_reader *reader)
{
    uint32_t size = base_read_u32(reader);
    if (size == 0 || size > CTL_TEXT_MAX)
        reader->failed = true;
    const uint8_t *text = base_read_view(reader, size);
    if (!text || text[size - 1] != 0 || memchr(text, 0, size - 1)) {
        reader->failed = true;
        return "";
    }
    return (const char *)text;
}

static const void *read_blob(struct base_reader *reader, size_t *size)
{
    *size = base_read_u32(reader);
    if (*size > CTL_ENDPOINT_MAX)
        reader->failed = true;
    const uint8_t *data = base_read_view(reader, *size);
    if (!data)
        *size = 0;
    return data;
}

/* A count, and memory for that many items once the frame is known to hold them. */
static uint32_t read_count(struct base_env *env, struct base_reader *reader, size_t item,
                           uint32_t most, size_t memory, void **array)
{
    uint32_t count = base_read_u32(reader);
    *array = NULL;
    if (count > most || count > base_reader_left(reader) / item) {
        reader->failed = true;
        return 0;
    }
    if (count == 0)
        return 0;
    *array = base_alloc(env, count, memory);
    if (!*array)
        reader->failed = true;
    return *array ? count : 0;
}

static uint32_t *read_u32s(struct base_env *env, struct base_reader *reader,
                           uint32_t *count)
{
    void *array;
    *count = read_count(env, reader, 4, CTL_CAPACITY_MAX, 4, &array);
    uint32_t *items = array;
    for (uint32_t i = 0; i < *count; i++)
        items[i] = base_read_u32(reader);
    return items;
}

static void write_u32s(struct base_writer *writer, const uint32_t *items, uint32_t count)
{
    base_write_u32(writer, count);
    for (uint32_t i = 0; i < count; i++)
        base_write_u32(writer, items[i]);
}

static void write_hello(struct base_writer *writer, const struct ctl_hello *hello)
{
    base_write_u32(writer, hello->magic);
    base_write_u32(writer, hello->version);
    base_write_u32(writer, hello->rank);
    base_write_u64(writer, hello->incarnation);
    base_write_u64(writer, hello->rank_epoch);
    base_write_u64(writer, hello->term);
    base_write_u32(writer, hello->turn);
    base_write_u64(writer, hello->host_id);
    base_write_u32(writer, hello->pid);
    write_text(writer, hello->socket_name);
    base_write_u32(writer, hello->num_groups);
    for (uint32_t i = 0; i < hello->num_groups; i++) {
        base_write_u64(writer, hello->groups[i].group);
        base_write_u64(writer, hello->groups[i].epoch);
    }
}

static void read_hello(struct base_env *env, struct base_reader *reader,
                       struct ctl_hello *hello)
{
    hello->magic = base_read_u32(reader);
    hello->version = base_read_u32(reader);
    if (hello->magic != CTL_WIRE_MAGIC || hello->version != CTL_WIRE_VERSION)
        return;
    hello->rank = base_read_u32(reader);
    hello->incarnation = base_read_u64(reader);
    hello->rank_epoch = base_read_u64(reader);
    hello->term = base_read_u64(reader);
    hello->turn = base_read_u32(reader);
    hello->host_id = base_read_u64(reader);
    hello->pid = base_read_u32(reader);
    hello->socket_name = read_text(reader);
    void *array;
    hello->num_groups = read_count(env, reader, STATE_BYTES, CTL_CAPACITY_MAX,
                                   sizeof(*hello->groups), &array);
    hello->groups = array;
    for (uint32_t i = 0; i < hello->num_groups; i++) {
        hello->groups[i].group = base_read_u64(reader);
        hello->groups[i].epoch = base_read_u64(reader);
    }
}

bool ctl_msg_is_foreign(const struct ctl_msg *msg)
{
    return msg->type == CTL_MSG_HELLO &&
           (msg->hello.magic != CTL_WIRE_MAGIC || msg->hello.version != CTL_WIRE_VERSION);
}

static size_t registration_bound(const struct ctl_registration *registration)
{
    size_t bound = 64 + text_bound(registration->name) + 4u * registration->num_ranks +
                   registration->endpoint_size;
    for (uint32_t i = 0; i < registration->num_params; i++)
        bound += text_bound(registration->params[i].name) +
                 text_bound(registration->params[i].value);
    return bound;
}

static void write_registration(struct base_writer *writer,
                               const struct ctl_registration *registration)
{
    write_text(writer, registration->name);
    base_write_u32(writer, registration->capacity);
    base_write_u32(writer, registration->slot);
    base_write_u32(writer, registration->num_founders);
    base_write_u8(
        writer, (uint8_t)(registration->join | registration->auto_deactivate << 1 |
                          registration->auto_sync << 2 | registration->found_only << 3));
    base_write_u64(writer, (uint64_t)registration->timeout_ns);
    write_u32s(writer, registration->ranks, registration->num_ranks);
    write_blob(writer, registration->endpoint, registration->endpoint_size);
    base_write_u32(writer, registration->num_params);
    for (uint32_t i = 0; i < registration->num_params; i++) {
        write_text(writer, registration->params[i].name);
        write_text(writer, registration->params[i].value);
    }
}

static void read_registration(struct base_env *env, struct base_reader *reader,
                              struct ctl_registration *registration)
{
    registration->name = read_text(reader);
    registration->capacity = base_read_u32(reader);
    registration->slot = base_read_u32(reader);
    registration->num_founders = base_read_u32(reader);
    unsigned flags = base_read_u8(reader);
    if (flags > 15)
        reader->failed = true;
    registration->join = (flags & 1) != 0;
    registration->found_only = (flags & 8) != 0;
    registration->auto_deactivate = (flags & 2) != 0;
    registration->auto_sync = (flags & 4) != 0;
    registration->timeout_ns = (int64_t)base_read_u64(reader);
    registration->ranks = read_u32s(env, reader, &registration->num_ranks);
    registration->endpoint = read_blob(reader, &registration->endpoint_size);
    void *array;
    registration->num_params =
        read_count(env, reader, 2 * 5, PARAMS_MAX, sizeof(struct ctl_param), &array);
    struct ctl_param *params = array;
    registration->params = params;
    for (uint32_t i = 0; i < registration->num_params; i++) {
        params[i].name = read_text(reader);
        params[i].value = read_text(reader);
    }
}

static void write_answer(struct base_writer *writer, const struct ctl_answer *answer)
{
    base_write_u64(writer, answer->ballot);
    base_write_u64(writer, answer->ready);
    base_write_u64(writer, answer->done);
    base_write_u64(writer, answer->next);
    base_write_u8(writer, answer->messaged);
    base_write_u32(writer, answer->num_dead);
    for (uint32_t i = 0; i < answer->num_dead; i++)
        base_write_u64(writer, answer->published[i]);
    base_write_u32(writer, answer->num_open);
    for (uint32_t i = 0; i < answer->num_open; i++) {
        base_write_u64(writer, answer->open[i].op);
        base_write_u32(writer, answer->open[i].num_chunks);
        base_write_u8(writer, answer->open[i].messaged);
    }
}

static void read_answer(struct base_env *env, struct base_reader *reader,
                        struct ctl_answer *answer)
{
    void *array;
    answer->ballot = base_read_u64(reader);
    answer->ready = base_read_u64(reader);
    answer->done = base_read_u64(reader);
    answer->next = base_read_u64(reader);
    answer->messaged = base_read_u8(reader) != 0;
    answer->num_dead = read_count(env, reader, 8, CTL_CAPACITY_MAX, 8, &array);
    answer->published = array;
    for (uint32_t i = 0; i < answer->num_dead; i++)
        answer->published[i] = base_read_u64(reader);
    answer->num_open =
        read_count(env, reader, OPEN_BYTES, CTL_OPEN_MAX, sizeof(*answer->open), &array);
    answer->open = array;
    for (uint32_t i = 0; i < answer->num_open; i++) {
        answer->open[i].op = base_read_u64(reader);
        answer->open[i].num_chunks = base_read_u32(reader);
        answer->open[i].messaged = base_read_u8(reader) != 0;
    }
}

static void write_slot(struct base_writer *writer, const struct ctl_slot_change *change)
{
    const struct ctl_slot *slot = &change->slot;
    bool endpoint = slot->endpoint || change->has_endpoint;
    base_write_u32(writer, change->index);
    base_write_u8(
        writer,
        (uint8_t)((slot->absent ? SLOT_ABSENT : 0) | (slot->active ? SLOT_ACTIVE : 0) |
                  (slot->closed ? SLOT_CLOSED : 0) | (endpoint ? SLOT_ENDPOINT : 0)));
    base_write_u64(writer, slot->rank_epoch);
    base_write_u64(writer, slot->first);
    base_write_u64(writer, slot->last);
    base_write_u64(writer, slot->reported);
    base_write_u64(writer, slot->before_from);
    base_write_u64(writer, slot->reported_before);
    if (slot->endpoint)
        write_blob(writer, slot->endpoint->data, slot->endpoint->size);
    else if (endpoint)
        write_blob(writer, change->endpoint, change->endpoint_size);
}

static void read_slot(struct base_reader *reader, struct ctl_slot_change *change)
{
    struct ctl_slot *slot = &change->slot;
    change->index = base_read_u32(reader);
    unsigned flags = base_read_u8(reader);
    if (flags > SLOT_FLAGS)
        reader->failed = true;
    slot->absent = (flags & SLOT_ABSENT) != 0;
    slot->active = (flags & SLOT_ACTIVE) != 0;
    slot->closed = (flags & SLOT_CLOSED) != 0;
    slot->rank_epoch = base_read_u64(reader);
    slot->first = base_read_u64(reader);
    slot->last = base_read_u64(reader);
    slot->reported = base_read_u64(reader);
    slot->before_from = base_read_u64(reader);
    slot->reported_before = base_read_u64(reader);
    change->has_endpoint = (flags & SLOT_ENDPOINT) != 0;
    if (change->has_endpoint)
        change->endpoint = read_blob(reader, &change->endpoint_size);
}

static size_t change_bound(const struct ctl_change *change)
{
    size_t bound = 64 + (size_t)change->num_attempts * ATTEMPT_BYTES;
    for (uint32_t i = 0; i < change->num_slots; i++) {
        const struct ctl_slot_change *slot = &change->slots[i];
        bound += SLOT_BYTES + 4 +
                 (slot->slot.endpoint ? slot->slot.endpoint->size : slot->endpoint_size);
    }
    return bound;
}

static void write_change(struct base_writer *writer, const struct ctl_change *change)
{
    base_write_u64(writer, change->base);
    base_write_u64(writer, change->settled);
    base_write_u64(writer, change->begun);
    base_write_u64(writer, change->link_from);
    base_write_u64(writer, change->link_to);
    base_write_u32(writer, change->capacity);
    base_write_u32(writer, change->num_attempts);
    for (uint32_t i = 0; i < change->num_attempts; i++) {
        base_write_u64(writer, change->attempts[i].from);
        base_write_u64(writer, change->attempts[i].epoch);
    }
    base_write_u32(writer, change->num_slots);
    for (uint32_t i = 0; i < change->num_slots; i++)
        write_slot(writer, &change->slots[i]);
}

static void read_change(struct base_env *env, struct base_reader *reader,
                        struct ctl_change *change)
{
    void *array;
    change->base = base_read_u64(reader);
    change->settled = base_read_u64(reader);
    change->begun = base_read_u64(reader);
    change->link_from = base_read_u64(reader);
    change->link_to = base_read_u64(reader);
    change->capacity = base_read_u32(reader);
    if (change->capacity > CTL_CAPACITY_MAX)
        reader->failed = true;
    change->num_attempts = read_count(env, reader, ATTEMPT_BYTES, UINT32_MAX,
                                      sizeof(*change->attempts), &array);
    change->attempts = array;
    for (uint32_t i = 0; i < change->num_attempts; i++) {
        change->attempts[i].from = base_read_u64(reader);
        change->attempts[i].epoch = base_read_u64(reader);
    }
    change->num_slots = read_count(env, reader, SLOT_BYTES, CTL_CAPACITY_MAX,
                                   sizeof(*change->slots), &array);
    change->slots = array;
    for (uint32_t i = 0; i < change->num_slots; i++)
        read_slot(reader, &change->slots[i]);
}

size_t ctl_field_bound(const struct ctl_msg *msg, enum ctl_field field)
{
    switch (field) {
    case CTL_FIELD_TEXT:
        return text_bound(msg->text);
    case CTL_FIELD_SLOTS:
        return 4 + 4 * (size_t)msg->num_slots;
    case CTL_FIELD_ENDPOINT:
        return 4 + msg->endpoint_size;
    case CTL_FIELD_HELLO:
        return 64 + text_bound(msg->hello.socket_name) +
               (size_t)msg->hello.num_groups * STATE_BYTES;
    case CTL_FIELD_REGISTRATION:
        return registration_bound(&msg->registration);
    case CTL_FIELD_ANSWER:
        return 64 + 8 * (size_t)msg->answer.num_dead +
               (size_t)msg->answer.num_open * OPEN_BYTES;
    case CTL_FIELD_CHANGE:
        return change_bound(&msg->change);
    case CTL_FIELD_SETTINGS:
        return 16;
    default:
        return 8;
    }
}

static void write_struct(struct base_writer *writer, const struct ctl_msg *msg,
                         enum ctl_field field)
{
    switch (field) {
    case CTL_FIELD_TEXT:
        write_text(writer, msg->text);
        break;
    case CTL_FIELD_SLOTS:
        write_u32s(writer, msg->slots, msg->num_slots);
        break;
    case CTL_FIELD_ENDPOINT:
        write_blob(writer, msg->endpoint, msg->endpoint_size);
        break;
    case CTL_FIELD_HELLO:
        write_hello(writer, &msg->hello);
        break;
    case CTL_FIELD_REGISTRATION:
        write_registration(writer, &msg->registration);
        break;
    case CTL_FIELD_ANSWER:
        write_answer(writer, &msg->answer);
        break;
    case CTL_FIELD_CHANGE:
        write_change(writer, &msg->change);
        break;
    default:
        base_write_u64(writer, (uint64_t)msg->settings.dead_after_ns);
        base_write_u32(writer, msg->settings.turn);
        base_write_u8(
            writer, (uint8_t)(msg->settings.standalone | msg->settings.collecting << 1));
        break;
    }
}

void ctl_field_write(struct base_writer *writer, const struct ctl_msg *msg,
                     enum ctl_field field)
{
    switch (field) {
    case CTL_FIELD_GROUP:
        base_write_u64(writer, msg->group);
        break;
    case CTL_FIELD_KEY:
        base_write_u64(writer, msg->key);
        break;
    case CTL_FIELD_RANK_EPOCH:
        base_write_u64(writer, msg->rank_epoch);
        break;
    case CTL_FIELD_EPOCH:
        base_write_u64(writer, msg->epoch);
        break;
    case CTL_FIELD_X:
        base_write_u64(writer, msg->x);
        break;
    case CTL_FIELD_ID:
        base_write_u64(writer, msg->id);
        break;
    case CTL_FIELD_TIMEOUT:
        base_write_u64(writer, (uint64_t)msg->timeout_ns);
        break;
    case CTL_FIELD_SLOT:
        base_write_u32(writer, msg->slot);
        break;
    case CTL_FIELD_KIND:
        base_write_u32(writer, msg->kind);
        break;
    case CTL_FIELD_PID:
        base_write_u32(writer, msg->pid);
        break;
    case CTL_FIELD_STATUS:
        base_write_u32(writer, (uint32_t)msg->status);
        break;
    case CTL_FIELD_FLAG:
        base_write_u8(writer, msg->flag);
        break;
    default:
        write_struct(writer, msg, field);
        break;
    }
}

static void read_settings_flags(struct base_reader *reader, struct ctl_settings *settings)
{
    unsigned flags = base_read_u8(reader);
    settings->standalone = (flags & 1) != 0;
    settings->collecting = (flags & 2) != 0;
}

static void read_struct(struct base_env *env, struct base_reader *reader,
                        struct ctl_msg *msg, enum ctl_field field)
{
    switch (field) {
    case CTL_FIELD_TEXT:
        msg->text = read_text(reader);
        break;
    case CTL_FIELD_SLOTS:
        msg->slots = read_u32s(env, reader, &msg->num_slots);
        break;
    case CTL_FIELD_ENDPOINT:
        msg->endpoint = read_blob(reader, &msg->endpoint_size);
        break;
    case CTL_FIELD_HELLO:
        read_hello(env, reader, &msg->hello);
        break;
    case CTL_FIELD_REGISTRATION:
        read_registration(env, reader, &msg->registration);
        break;
    case CTL_FIELD_ANSWER:
        read_answer(env, reader, &msg->answer);
        break;
    case CTL_FIELD_CHANGE:
        read_change(env, reader, &msg->change);
        break;
    default:
        msg->settings.dead_after_ns = (int64_t)base_read_u64(reader);
        msg->settings.turn = base_read_u32(reader);
        read_settings_flags(reader, &msg->settings);
        break;
    }
}

enum hdl_status ctl_field_read(struct base_env *env, struct base_reader *reader,
                               struct ctl_msg *msg, enum ctl_field field)
{
    switch (field) {
    case CTL_FIELD_GROUP:
        msg->group = base_read_u64(reader);
        break;
    case CTL_FIELD_KEY:
        msg->key = base_read_u64(reader);
        break;
    case CTL_FIELD_RANK_EPOCH:
        msg->rank_epoch = base_read_u64(reader);
        break;
    case CTL_FIELD_EPOCH:
        msg->epoch = base_read_u64(reader);
        break;
    case CTL_FIELD_X:
        msg->x = base_read_u64(reader);
        break;
    case CTL_FIELD_ID:
        msg->id = base_read_u64(reader);
        break;
    case CTL_FIELD_TIMEOUT:
        msg->timeout_ns = (int64_t)base_read_u64(reader);
        break;
    case CTL_FIELD_SLOT:
        msg->slot = base_read_u32(reader);
        break;
    case CTL_FIELD_KIND:
        msg->kind = base_read_u32(reader);
        break;
    case CTL_FIELD_PID:
        msg->pid = base_read_u32(reader);
        break;
    case CTL_FIELD_STATUS:
        msg->status = (enum hdl_status)(int32_t)base_read_u32(reader);
        break;
    case CTL_FIELD_FLAG:
        msg->flag = base_read_u8(reader) != 0;
        break;
    default:
        read_struct(env, reader, msg, field);
        break;
    }
    if (reader->failed)
        return base_fail(HDL_EINVAL, "%s message of %zu bytes is malformed at byte %zu",
                         ctl_msg_name(msg->type), reader->size, reader->pos);
    return HDL_OK;
}
