/* SPDX-License-Identifier: Apache-2.0 */
/* Log lines: the level is checked before anything is formatted. */
#ifndef BASE_LOG_H
#define BASE_LOG_H

#include "base/env.h"

/* Formats one line (lower case, `key value` words, no newline) and hands it to the sink.
 */
void base_log_write(struct base_env *env, enum base_log_level level, const char *format,
                    ...) BASE_PRINTF(3, 4);

const char *base_log_level_name(enum base_log_level level);

#define BASE_LOG(env, level, ...)                                                        \
    do {                                                                                 \
        struct base_env *base_log_env = (env);                                           \
        if ((int)(level) <= base_log_env->log_level)                                     \
            base_log_write(base_log_env, (level), __VA_ARGS__);                          \
    } while (0)

#define base_log_error(env, ...) BASE_LOG(env, BASE_LOG_ERROR, __VA_ARGS__)
#define base_log_warn(env, ...) BASE_LOG(env, BASE_LOG_WARN, __VA_ARGS__)
#define base_log_info(env, ...) BASE_LOG(env, BASE_LOG_INFO, __VA_ARGS__)
#define base_log_debug(env, ...) BASE_LOG(env, BASE_LOG_DEBUG, __VA_ARGS__)

#endif
