/* SPDX-License-Identifier: Apache-2.0 */
/* Helpers of the state machines that append one action; out of memory sets `failed`. */
#ifndef CTL_ACTION_H
#define CTL_ACTION_H

#include "base/status.h"
#include "ctl/event.h"

struct ctl_msg;

enum { CTL_LINE_BYTES = 512 };

/* Formatted text owned by the caller, cut at CTL_LINE_BYTES; NULL sets `failed`. */
char *ctl_text(struct ctl_actions *actions, const char *format, ...) BASE_PRINTF(2, 3);
void ctl_do_log(struct ctl_actions *actions, enum hdl_log_level level, const char *format,
                ...) BASE_PRINTF(3, 4);
/* Sends `bytes` (NULL = it could not be encoded: sets `failed`); takes no reference away.
 */
void ctl_do_send_bytes(struct ctl_actions *actions, uint64_t conn,
                       struct ctl_bytes *bytes);
void ctl_do_send(struct ctl_actions *actions, uint64_t conn, const struct ctl_msg *msg);

#endif
