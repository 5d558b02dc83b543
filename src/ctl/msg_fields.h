/* SPDX-License-Identifier: Apache-2.0 */
/* The fields that messages are made of: size, write and read of each. */
#ifndef CTL_MSG_FIELDS_H
#define CTL_MSG_FIELDS_H

#include "base/bytes.h"
#include "ctl/msg.h"

enum ctl_field {
    CTL_FIELD_END = 0,
    CTL_FIELD_GROUP,
    CTL_FIELD_KEY,
    CTL_FIELD_RANK_EPOCH,
    CTL_FIELD_EPOCH,
    CTL_FIELD_X,
    CTL_FIELD_ID,
    CTL_FIELD_SLOT,
    CTL_FIELD_KIND,
    CTL_FIELD_PID,
    CTL_FIELD_STATUS,
    CTL_FIELD_FLAG,
    CTL_FIELD_TEXT,
    CTL_FIELD_SLOTS,
    CTL_FIELD_TIMEOUT,
    CTL_FIELD_ENDPOINT,
    CTL_FIELD_HELLO,
    CTL_FIELD_REGISTRATION,
    CTL_FIELD_ANSWER,
    CTL_FIELD_CHANGE,
    CTL_FIELD_SETTINGS
};

/* Bytes that are enough for the field. */
size_t ctl_field_bound(const struct ctl_msg *msg, enum ctl_field field);
void ctl_field_write(struct base_writer *writer, const struct ctl_msg *msg,
                     enum ctl_field field);
/* HDL_EINVAL or HDL_ENOMEM with detail; a truncation may also show in reader->failed
 * only. */
enum hdl_status ctl_field_read(struct base_env *env, struct base_reader *reader,
                               struct ctl_msg *msg, enum ctl_field field);
/* A HELLO of another protocol or version: only its first two fields were read. */
bool ctl_msg_is_foreign(const struct ctl_msg *msg);

#endif
