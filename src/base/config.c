/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the environment knobs. */
#include "base/config.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/parse.h"

static const struct base_knob knobs[] = {
#define BASE_KNOB(field, variable, kind, standard, help)                                 \
    {variable,         #kind,                                                            \
     standard,         help,                                                             \
     BASE_KNOB_##kind, offsetof(struct base_config, field)},
#include "base/config.def"
#undef BASE_KNOB
};

size_t base_knob_count(void)
{
    return sizeof(knobs) / sizeof(knobs[0]);
}

const struct base_knob *base_knob_at(size_t index)
{
    return index < base_knob_count() ? &knobs[index] : NULL;
}

static enum hdl_status parse_level(const char *text, int *out)
{
    for (int level = BASE_LOG_ERROR; level <= BASE_LOG_DEBUG; level++) {
        if (strcmp(text, base_log_level_name((enum base_log_level)level)) == 0) {
            *out = level;
            return HDL_OK;
        }
    }
    return base_fail(HDL_EINVAL, "'%s' is none of error, warn, info, debug", text);
}

static enum hdl_status set_string(struct base_config_string *out, const char *text)
{
    size_t length = strlen(text);
    if (length >= sizeof(out->text))
        return base_fail(HDL_EINVAL, "%zu bytes exceed %zu", length,
                         sizeof(out->text) - 1);
    memset(out->text, 0, sizeof(out->text));
    memcpy(out->text, text, length);
    return HDL_OK;
}

static enum hdl_status set_knob(struct base_config *config, const struct base_knob *knob,
                                const char *text)
{
    void *field = (char *)config + knob->offset;
    switch (knob->kind) {
    case BASE_KNOB_string:
        return set_string(field, text);
    case BASE_KNOB_u64:
        return base_parse_u64(text, field);
    case BASE_KNOB_size:
        return base_parse_size(text, field);
    case BASE_KNOB_duration:
        return base_parse_duration(text, field);
    case BASE_KNOB_boolean:
        return base_parse_bool(text, field);
    case BASE_KNOB_level:
        return parse_level(text, field);
    }
    return base_fail(HDL_EINTERNAL, "%s has an unknown kind", knob->variable);
}

void base_knob_format(const struct base_config *config, const struct base_knob *knob,
                      char *text, size_t size)
{
    const void *field = (const char *)config + knob->offset;
    switch (knob->kind) {
    case BASE_KNOB_string:
        snprintf(text, size, "%s", ((const struct base_config_string *)field)->text);
        return;
    case BASE_KNOB_u64:
        snprintf(text, size, "%" PRIu64, *(const uint64_t *)field);
        return;
    case BASE_KNOB_size:
        base_format_size(*(const uint64_t *)field, text, size);
        return;
    case BASE_KNOB_duration:
        base_format_duration(*(const int64_t *)field, text, size);
        return;
    case BASE_KNOB_boolean:
        snprintf(text, size, "%d", *(const bool *)field);
        return;
    case BASE_KNOB_level:
        snprintf(text, size, "%s",
                 base_log_level_name((enum base_log_level) * (const int *)field));
        return;
    }
}

void base_config_default(struct base_config *config)
{
    memset(config, 0, sizeof(*config));
    for (size_t i = 0; i < base_knob_count(); i++)
        set_knob(config, &knobs[i], knobs[i].standard);
}

enum hdl_status base_config_set(struct base_config *config, const char *variable,
                                const char *value)
{
    for (size_t i = 0; i < base_knob_count(); i++) {
        if (strcmp(knobs[i].variable, variable) != 0)
            continue;
        enum hdl_status status = set_knob(config, &knobs[i], value);
        if (status != HDL_OK) {
            char reason[BASE_DETAIL_BYTES];
            snprintf(reason, sizeof(reason), "%s", base_detail());
            return base_fail(status, "%s: %s", variable, reason);
        }
        return HDL_OK;
    }
    return base_fail(HDL_EINVAL, "unknown knob %s", variable);
}

enum hdl_status base_config_load(struct base_config *config)
{
    struct base_config loaded;
    base_config_default(&loaded);
    for (size_t i = 0; i < base_knob_count(); i++) {
        const char *value = getenv(knobs[i].variable);
        if (!value || !value[0])
            continue;
        enum hdl_status status = base_config_set(&loaded, knobs[i].variable, value);
        if (status != HDL_OK)
            return status;
    }
    *config = loaded;
    return HDL_OK;
}
