/* SPDX-License-Identifier: Apache-2.0 */
/* hdl_version and hdl_info: what this build and this machine can do, as one JSON object.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <sched.h>
#include <string.h>
#include <unistd.h>

#include "base/config.h"
#include "base/env.h"
#include "base/status.h"
#include "gpu/device.h"
#include "group/reduce.h"
#include "group/table.h"
#include "heddle.h"
#include "net/net.h"

#define STRING(x) #x
#define VERSION(major, minor, patch) STRING(major) "." STRING(minor) "." STRING(patch)

#if defined(__SANITIZE_ADDRESS__)
#define SANITIZER " address-sanitizer"
#elif defined(__SANITIZE_THREAD__)
#define SANITIZER " thread-sanitizer"
#else
#define SANITIZER ""
#endif

#ifdef __clang__
#define COMPILER __VERSION__ /* has its name in it */
#else
#define COMPILER "gcc " __VERSION__
#endif

/* Text that grows past its room: only the length is right then. */
struct text {
    char *at;
    size_t room, length;
};

__attribute__((format(printf, 2, 3))) static void add(struct text *text,
                                                      const char *format, ...)
{
    va_list args;
    va_start(args, format);
    size_t left = text->length < text->room ? text->room - text->length : 0;
    int n = vsnprintf(left ? text->at + text->length : NULL, left, format, args);
    va_end(args);
    text->length += n > 0 ? (size_t)n : 0;
}

static void add_string(struct text *text, const char *value)
{
    add(text, "\"");
    for (const char *c = value; *c; c++) {
        if (*c == '"' || *c == '\\')
            add(text, "\\%c", *c);
        else if ((unsigned char)*c < 0x20)
            add(text, "\\u%04x", (unsigned)*c);
        else
            add(text, "%c", *c);
    }
    add(text, "\"");
}

/* A part that another layer writes; `describe` follows the rules of snprintf. */
static void add_part(struct text *text, struct base_env *env,
                     size_t (*describe)(struct base_env *env, char *json, size_t room))
{
    size_t left = text->length < text->room ? text->room - text->length : 0;
    text->length += describe(env, left ? text->at + text->length : NULL, left);
}

static void add_build(struct text *text)
{
    add(text, "\"build\":{\"compiler\":");
    add_string(text, COMPILER);
    const char *options = hdl_version() + strcspn(hdl_version(), " ");
    add(text, ",\"options\":");
    add_string(text, *options ? options + 1 : "none");
    add(text, "}");
}

static void add_machine(struct text *text)
{
    cpu_set_t set;
    int usable = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 0;
    add(text, "\"topology\":{\"cores\":%ld,\"usable_cores\":%d,\"page_bytes\":%ld",
        sysconf(_SC_NPROCESSORS_ONLN), usable, sysconf(_SC_PAGESIZE));
    add(text, ",\"memory_bytes\":%" PRIu64 ",\"reduction_kernels\":",
        (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE));
    add_string(text, group_reduce_variant());
    add(text, "}");
}

/* Numbers of the devices in a mask, as text. */
static void add_devices_of(struct text *text, const char *name, uint64_t mask)
{
    char list[256] = "";
    for (int d = 0; d < 64; d++)
        if (mask >> d & 1)
            snprintf(list + strlen(list), sizeof(list) - strlen(list), "%s%d",
                     list[0] ? " " : "", d);
    add(text, ",\"%s\":", name);
    add_string(text, list[0] ? list : "none");
}

static void add_device(struct text *text, int device, const struct gpu_info *info)
{
    add(text, "%s{\"device\":%d,\"name\":", device ? "," : "", device);
    add_string(text, info->name);
    add(text, ",\"bus\":");
    add_string(text, info->bus);
    add(text, ",\"capability\":\"%d.%d\",\"multiprocessors\":%d", info->major,
        info->minor, info->multiprocessors);
    add(text, ",\"memory_bytes\":%" PRIu64, info->memory_bytes);
    add_devices_of(text, "nvlink", info->linked);
    add_devices_of(text, "access", info->reached);
    add(text, "}");
}

/* What the kernels in this build were compiled for, whether or not there is a GPU here;
 * the GPUs and how they reach each other, or why there are none. */
static void add_gpus(struct text *text)
{
    bool any = gpu_kernels_architectures[0] != 0;
    struct gpu_info info;
    int count = gpu_count();
    add(text, "\"gpu\":{\"compiled_for\":");
    add_string(text, any ? gpu_kernels_architectures : "nothing: built without nvcc");
    add(text, ",\"driver\":");
    add_string(text, count ? "found" : base_detail());
    if (count)
        add(text, ",\"cuda_version\":%d", gpu_driver_version());
    add(text, ",\"devices\":[");
    for (int d = 0; d < count; d++)
        if (gpu_describe(d, &info) == HDL_OK)
            add_device(text, d, &info);
    add(text, "]}");
}

static void add_algorithms(struct text *text)
{
    add(text, "\"algorithms\":[");
    for (size_t i = 0; i < group_table_size(); i++) {
        const struct group_rule *rule = group_table_rule(i);
        if (rule->kind == GROUP_REFUSED)
            continue;
        add(text, "%s{\"operation\":\"%s\",\"min_bytes\":%zu,\"min_ranks\":%" PRIu32,
            i ? "," : "", group_kind_name((uint8_t)rule->kind), rule->min_bytes,
            rule->min_ranks);
        add(text, ",\"algorithm\":\"%s\"}", rule->algorithm->name);
    }
    add(text, "]");
}

static void add_knobs(struct text *text, const struct base_config *config)
{
    add(text, "\"knobs\":[");
    for (size_t i = 0; i < base_knob_count(); i++) {
        const struct base_knob *knob = base_knob_at(i);
        char value[BASE_CONFIG_STRING_BYTES];
        base_knob_format(config, knob, value, sizeof(value));
        if (!strcmp(knob->variable, "HEDDLE_TOKEN") && value[0])
            snprintf(value, sizeof(value), "(set)");
        add(text, "%s{\"name\":", i ? "," : "");
        add_string(text, knob->variable);
        add(text, ",\"value\":");
        add_string(text, value);
        add(text, ",\"default\":");
        add_string(text, knob->standard);
        add(text, ",\"help\":");
        add_string(text, knob->help);
        add(text, "}");
    }
    add(text, "]");
}

const char *hdl_version(void)
{
    return VERSION(HDL_VERSION_MAJOR, HDL_VERSION_MINOR, HDL_VERSION_PATCH) SANITIZER;
}

enum hdl_status hdl_info(char *json, size_t *length)
{
    struct base_env env;
    if (!length)
        return base_fail(HDL_EINVAL, "length is NULL");
    base_env_init(&env);
    enum hdl_status status = base_config_load(&env.config);
    if (status != HDL_OK)
        return status;

    struct text text = {.at = json, .room = json ? *length : 0};
    add(&text, "{\"version\":");
    add_string(&text, VERSION(HDL_VERSION_MAJOR, HDL_VERSION_MINOR, HDL_VERSION_PATCH));
    add(&text, ",");
    add_build(&text);
    add(&text, ",");
    add_machine(&text);
    add(&text, ",\"transports\":");
    add_part(&text, &env, net_describe);
    add(&text, ",");
    add_gpus(&text);
    add(&text, ",");
    add_algorithms(&text);
    add(&text, ",");
    add_knobs(&text, &env.config);
    add(&text, "}");

    size_t room = text.room;
    *length = text.length + 1;
    if (text.length + 1 > room)
        return base_fail(HDL_EINVAL, "the text needs %zu bytes, there is room for %zu",
                         text.length + 1, room);
    return HDL_OK;
}
