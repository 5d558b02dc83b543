/* SPDX-License-Identifier: Apache-2.0 */
/* The environment knobs, one field for each line of config.def. */
#ifndef BASE_CONFIG_H
#define BASE_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { BASE_CONFIG_STRING_BYTES = 256 };

enum base_knob_kind {
    BASE_KNOB_string,
    BASE_KNOB_u64,
    BASE_KNOB_size,
    BASE_KNOB_duration,
    BASE_KNOB_boolean,
    BASE_KNOB_level,
};

struct base_config_string {
    char text[BASE_CONFIG_STRING_BYTES];
};

#define BASE_KNOB_TYPE_string struct base_config_string
#define BASE_KNOB_TYPE_u64 uint64_t
#define BASE_KNOB_TYPE_size uint64_t
#define BASE_KNOB_TYPE_duration int64_t /* ns */
#define BASE_KNOB_TYPE_boolean bool
#define BASE_KNOB_TYPE_level int /* enum base_log_level */

struct base_config {
#define BASE_KNOB(field, variable, kind, standard, help) BASE_KNOB_TYPE_##kind field;
#include "base/config.def"
#undef BASE_KNOB
};

/* One line of config.def as data, for `heddle info --env` and the manual. */
struct base_knob {
    const char *variable;
    const char *kind_name;
    const char *standard;
    const char *help;
    enum base_knob_kind kind;
    size_t offset;
};

size_t base_knob_count(void);
const struct base_knob *base_knob_at(size_t index);

/* The value of one knob as text, as one would type it. */
void base_knob_format(const struct base_config *config, const struct base_knob *knob,
                      char *text, size_t size);

void base_config_default(struct base_config *config);

/* Sets one knob by its variable's name; HDL_EINVAL names variable, value and what is
 * wrong. */
enum hdl_status base_config_set(struct base_config *config, const char *variable,
                                const char *value);

/* Defaults, then every variable that is set to a non-empty text. HDL_EINVAL at the first
 * bad value. An unknown HEDDLE_* variable is no error: other programs may own it. */
enum hdl_status base_config_load(struct base_config *config);

#endif
