/* SPDX-License-Identifier: Apache-2.0 */
/* Formats log lines; the default sink is one write to a descriptor per line. */
#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

const char *base_log_level_name(enum base_log_level level)
{
    static const char *const names[] = {"error", "warn", "info", "debug"};
    return (unsigned)level < 4 ? names[level] : "unknown";
}

/* One write, so that lines of several processes on one pipe do not mix. */
static void log_to_descriptor(const struct base_env *env, enum base_log_level level,
                              const char *line)
{
    char text[1200];
    int length;
    if (env->log_rank >= 0)
        length = snprintf(text, sizeof(text), "heddle %s rank %d: %s\n",
                          base_log_level_name(level), env->log_rank, line);
    else
        length = snprintf(text, sizeof(text), "heddle %s: %s\n",
                          base_log_level_name(level), line);
    if (length <= 0)
        return;
    size_t bytes = (size_t)length < sizeof(text) ? (size_t)length : sizeof(text) - 1;
    ssize_t written = write(env->log_fd, text, bytes);
    (void)written;
}

void base_log_write(struct base_env *env, enum base_log_level level, const char *format,
                    ...)
{
    char line[1024];
    va_list args;
    va_start(args, format);
    int length = vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    if (length < 0)
        return;
    if (env->log)
        env->log(env->log_user, level, line);
    else
        log_to_descriptor(env, level, line);
}
