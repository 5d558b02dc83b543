/* SPDX-License-Identifier: Apache-2.0 */
/* The list of actions that a step returns, and the helpers that fill it. */
#include "ctl/action.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/env.h"
#include "ctl/msg.h"

static void release(struct base_env *env, struct ctl_action *action)
{
    ctl_bytes_unref(action->bytes);
    ctl_view_unref(action->view);
    base_free(env, action->prepare);
    base_free(env, action->text);
}

void ctl_actions_clear(struct ctl_actions *actions)
{
    for (size_t i = 0; i < actions->count; i++)
        release(actions->env, &actions->items[i]);
    actions->count = 0;
}

void ctl_actions_free(struct ctl_actions *actions)
{
    ctl_actions_clear(actions);
    base_free(actions->env, actions->items);
    actions->items = NULL;
    actions->capacity = 0;
}

struct ctl_action *ctl_actions_add(struct ctl_actions *actions, enum ctl_action_kind kind)
{
    if (actions->count == actions->capacity) {
        size_t capacity = actions->capacity ? 2 * actions->capacity : 16;
        struct ctl_action *items = base_grow(actions->env, actions->items,
                                             actions->capacity, capacity, sizeof(*items));
        if (!items) {
            actions->failed = true;
            return NULL;
        }
        actions->items = items;
        actions->capacity = capacity;
    }
    struct ctl_action *action = &actions->items[actions->count++];
    memset(action, 0, sizeof(*action));
    action->kind = kind;
    return action;
}

BASE_PRINTF(2, 0)
static char *vtext(struct ctl_actions *actions, const char *format, va_list args)
{
    char line[CTL_LINE_BYTES];
    (void)vsnprintf(line, sizeof(line), format, args);
    char *text = base_strdup(actions->env, line);
    if (!text)
        actions->failed = true;
    return text;
}

char *ctl_text(struct ctl_actions *actions, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    char *text = vtext(actions, format, args);
    va_end(args);
    return text;
}

void ctl_do_log(struct ctl_actions *actions, enum hdl_log_level level, const char *format,
                ...)
{
    if ((int)level - 1 > actions->env->log_level)
        return;
    struct ctl_action *action = ctl_actions_add(actions, CTL_DO_LOG);
    if (!action)
        return;
    action->level = level;
    va_list args;
    va_start(args, format);
    action->text = vtext(actions, format, args);
    va_end(args);
}

void ctl_do_send_bytes(struct ctl_actions *actions, uint64_t conn,
                       struct ctl_bytes *bytes)
{
    if (!bytes) {
        actions->failed = true;
        return;
    }
    struct ctl_action *action = ctl_actions_add(actions, CTL_DO_SEND);
    if (!action)
        return;
    action->conn = conn;
    action->bytes = ctl_bytes_ref(bytes);
}

void ctl_do_send(struct ctl_actions *actions, uint64_t conn, const struct ctl_msg *msg)
{
    struct ctl_bytes *bytes = ctl_msg_encode(actions->env, msg);
    ctl_do_send_bytes(actions, conn, bytes);
    ctl_bytes_unref(bytes);
}
