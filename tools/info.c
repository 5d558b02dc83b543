/* SPDX-License-Identifier: Apache-2.0 */
/* `heddle info`: what this build and machine can do, knobs, and the text of a bug report.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "base/config.h"
#include "heddle.h"
#include "tools/commands.h"
#include "tools/json.h"
#include "tools/options.h"

/* ------------------------------------------------------------------- showing JSON */

enum { INFO_COLUMNS = 12, INFO_INDENT = 2 };

static int is_scalar(const struct json *value)
{
    return value->kind < JSON_LIST;
}

static void show_value(const struct json *value, int indent);

static void show_words(const struct json *list)
{
    for (const struct json *item = list->first; item; item = item->next)
        printf("%s%s", item == list->first ? "" : ", ", json_text(item));
    printf("%s\n", list->first ? "" : "none");
}

/* Every member of the objects that is a scalar is a column. */
static void show_table(const struct json *list, int indent)
{
    const char *names[INFO_COLUMNS];
    int widths[INFO_COLUMNS];
    int columns = 0;
    for (const struct json *row = list->first; row; row = row->next) {
        for (const struct json *cell = row->first; cell; cell = cell->next) {
            int at = 0;
            while (at < columns && strcmp(names[at], cell->name) != 0)
                at++;
            if (at == INFO_COLUMNS)
                continue;
            if (at == columns) {
                names[columns] = cell->name;
                widths[columns++] = (int)strlen(cell->name);
            }
            int width = (int)strlen(json_text(cell));
            widths[at] = width > widths[at] ? width : widths[at];
        }
    }
    printf("%*s", indent, "");
    for (int at = 0; at < columns; at++)
        printf("%-*s", at + 1 < columns ? widths[at] + 2 : 0, names[at]);
    printf("\n");
    for (const struct json *row = list->first; row; row = row->next) {
        printf("%*s", indent, "");
        for (int at = 0; at < columns; at++)
            printf("%-*s", at + 1 < columns ? widths[at] + 2 : 0,
                   json_text(json_get(row, names[at])));
        printf("\n");
    }
}

static void show_members(const struct json *object, int indent)
{
    int width = 0;
    for (const struct json *item = object->first; item; item = item->next)
        if (is_scalar(item) && (int)strlen(item->name) > width)
            width = (int)strlen(item->name);
    for (const struct json *item = object->first; item; item = item->next) {
        if (is_scalar(item)) {
            printf("%*s%-*s%s\n", indent, "", width + 2, item->name, json_text(item));
            continue;
        }
        printf("%s%*s%s%s", indent == 0 ? "\n" : "", indent, "", item->name,
               item->first ? ":" : ": none");
        show_value(item, indent + INFO_INDENT);
    }
}

static void show_value(const struct json *value, int indent)
{
    if (!value->first) {
        printf("\n");
    } else if (value->kind == JSON_OBJECT) {
        printf("\n");
        show_members(value, indent);
    } else if (value->first->kind == JSON_OBJECT) {
        printf("\n");
        show_table(value, indent);
    } else {
        printf(" ");
        show_words(value);
    }
}

/* ----------------------------------------------------------------------- sections */

static char *read_info(void)
{
    size_t length = 0;
    char *text = NULL;
    enum hdl_status status = hdl_info(NULL, &length);
    for (int i = 0; i < 3 && (status == HDL_EINVAL || !text); i++) {
        free(text);
        text = malloc(length + 1);
        if (!text)
            return NULL;
        status = hdl_info(text, &length);
    }
    if (status == HDL_OK)
        return text;
    tool_failed("%s", hdl_error_detail());
    free(text);
    return NULL;
}

/* The knobs have a listing of their own. */
static int show_info(void)
{
    char *text = read_info();
    struct json *info = text ? json_parse(text) : NULL;
    if (!info) {
        free(text);
        return tool_failed("could not read the library's description of itself");
    }
    struct json **link = &info->first;
    while (*link && strcmp((*link)->name, "knobs") != 0)
        link = &(*link)->next;
    struct json *knobs = *link;
    if (knobs)
        *link = knobs->next;
    show_members(info, 0);
    if (knobs) {
        knobs->next = NULL;
        json_free(knobs);
    }
    printf("\nheddle info --env lists the environment knobs.\n");
    json_free(info);
    free(text);
    return TOOL_OK;
}

static int show_info_json(void)
{
    char *text = read_info();
    if (!text)
        return TOOL_FAILED;
    printf("%s\n", text);
    free(text);
    return TOOL_OK;
}

static int is_secret(const char *variable)
{
    return strcmp(variable, "HEDDLE_TOKEN") == 0;
}

static int show_env(int as_json)
{
    struct base_config config;
    base_config_default(&config);
    if (base_config_load(&config) != HDL_OK)
        tool_failed("%s", hdl_error_detail());
    for (size_t i = 0; i < base_knob_count(); i++) {
        const struct base_knob *knob = base_knob_at(i);
        char value[BASE_CONFIG_STRING_BYTES + 1];
        base_knob_format(&config, knob, value, sizeof(value));
        if (is_secret(knob->variable) && value[0])
            snprintf(value, sizeof(value), "(set)");
        if (!as_json) {
            printf("%s=%s\n    %s, default '%s'\n    %s\n", knob->variable, value,
                   knob->kind_name, knob->standard, knob->help);
            continue;
        }
        printf("{\"name\": \"%s\", \"type\": \"%s\", \"value\": ", knob->variable,
               knob->kind_name);
        json_print_text(stdout, value);
        printf(", \"default\": ");
        json_print_text(stdout, knob->standard);
        printf(", \"help\": ");
        json_print_text(stdout, knob->help);
        printf("}\n");
    }
    return TOOL_OK;
}

/* ------------------------------------------------------------------------- report */

typedef void report_fn(const char *name, const char *value);

static void report_text(const char *name, const char *value)
{
    printf("%-20s%s\n", name, value);
}

static void report_json(const char *name, const char *value)
{
    printf(", ");
    json_print_text(stdout, name);
    printf(": ");
    json_print_text(stdout, value);
}

/* First line of a file that begins with `key`; its part behind the separator. */
static void report_line(report_fn *report, const char *name, const char *path,
                        const char *key)
{
    char line[512];
    FILE *file = fopen(path, "re");
    if (!file)
        return;
    while (fgets(line, sizeof(line), file)) {
        if (strncmp(line, key, strlen(key)) != 0)
            continue;
        char *value = line + strlen(key);
        value += strspn(value, " \t:=\"");
        value[strcspn(value, "\"\n")] = 0;
        report(name, value);
        break;
    }
    fclose(file);
}

static void report_limit(report_fn *report, const char *name, int resource)
{
    struct rlimit limit;
    char text[64];
    if (getrlimit((__rlimit_resource_t)resource, &limit) != 0)
        return;
    if (limit.rlim_cur == RLIM_INFINITY)
        snprintf(text, sizeof(text), "unlimited");
    else
        snprintf(text, sizeof(text), "%llu", (unsigned long long)limit.rlim_cur);
    report(name, text);
}

/* Variables that change what the library does; secrets only by name. */
static void report_environment(report_fn *report)
{
    static const char *const prefix[] = {
        "HEDDLE_", "RANK=",  "WORLD_SIZE=", "LOCAL_", "MASTER_",      "OMPI_COMM_WORLD_",
        "PMI_",    "SLURM_", "PMIX_RANK",   "FI_",    "CUDA_VISIBLE_"};
    for (char **at = environ; *at; at++) {
        char name[128];
        size_t length = strcspn(*at, "=");
        for (size_t i = 0; i < sizeof(prefix) / sizeof(prefix[0]); i++) {
            if (strncmp(*at, prefix[i], strlen(prefix[i])) != 0 || !(*at)[length])
                continue;
            snprintf(name, sizeof(name), "%.*s", (int)length, *at);
            report(name, is_secret(name) ? "(set)" : *at + length + 1);
        }
    }
}

static void report_machine(report_fn *report)
{
    struct utsname system;
    char text[128];
    if (uname(&system) == 0) {
        snprintf(text, sizeof(text), "%.40s %.60s %.20s", system.sysname, system.release,
                 system.machine);
        report("kernel", text);
    }
    report_line(report, "distribution", "/etc/os-release", "PRETTY_NAME=");
    report_line(report, "cpu", "/proc/cpuinfo", "model name");
    snprintf(text, sizeof(text), "%ld online of %ld", sysconf(_SC_NPROCESSORS_ONLN),
             sysconf(_SC_NPROCESSORS_CONF));
    report("cores", text);
    report_line(report, "memory", "/proc/meminfo", "MemTotal");
    report_line(report, "memory available", "/proc/meminfo", "MemAvailable");
    if (confstr(_CS_GNU_LIBC_VERSION, text, sizeof(text)) > 0)
        report("libc", text);
    report_limit(report, "open files", RLIMIT_NOFILE);
    report_limit(report, "locked memory", RLIMIT_MEMLOCK);
    report_limit(report, "processes", RLIMIT_NPROC);
    report_environment(report);
}

static int show_report(int as_json)
{
    if (!as_json) {
        report_text("heddle", hdl_version());
        report_machine(report_text);
        printf("\n");
        return show_info();
    }
    char *text = read_info();
    if (!text)
        return TOOL_FAILED;
    printf("{\"info\": %s", text);
    report_machine(report_json);
    printf("}\n");
    free(text);
    return TOOL_OK;
}

int command_info(int argc, char **argv)
{
    bool env = false, report = false, json = false;
    const struct tool_option options[] = {
        {0, "env", TOOL_FLAG, &env, 0, NULL, "the environment knobs and their values"},
        {0, "report", TOOL_FLAG, &report, 0, NULL, "all that a bug report needs"},
        {0, "json", TOOL_FLAG, &json, 0, NULL, "JSON, one object a line"},
    };
    const struct tool_usage usage = {
        "heddle info [options]",
        "Tells what this build and machine can do: transports, devices, algorithms.",
        options,
        sizeof(options) / sizeof(options[0]),
        NULL,
    };
    int first, code;
    if (!tool_parse(&usage, true, argc, argv, &first, &code))
        return code;
    if (first < argc)
        return tool_usage_error("info takes no arguments, got '%s'", argv[first]);
    if (env)
        return show_env(json);
    if (report)
        return show_report(json);
    return json ? show_info_json() : show_info();
}
