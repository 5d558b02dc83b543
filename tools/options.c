/* SPDX-License-Identifier: Apache-2.0 */
/* Parser and help text of command-line options, and numbers for people. */
#include "tools/options.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/parse.h"

static int complain(int code, const char *format, va_list args)
{
    fflush(stdout);
    fputs("heddle: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    return code;
}

int tool_usage_error(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    complain(TOOL_USAGE, format, args);
    va_end(args);
    return TOOL_USAGE;
}

int tool_failed(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    complain(TOOL_FAILED, format, args);
    va_end(args);
    return TOOL_FAILED;
}

static void help_row(const char *left, const char *text)
{
    if (strlen(left) > 26)
        printf("%s\n%-28s%s\n", left, "", text);
    else
        printf("%-28s%s\n", left, text);
}

static void print_help(const struct tool_usage *usage)
{
    printf("usage: %s\n\n%s\n\noptions:\n", usage->line, usage->purpose);
    for (size_t i = 0; i < usage->num_options; i++) {
        const struct tool_option *option = &usage->options[i];
        char left[96] = "  ";
        size_t used = 2;
        if (!option->help)
            continue;
        if (option->letter)
            used += (size_t)snprintf(left + used, sizeof(left) - used, "-%c%s",
                                     option->letter, option->name ? ", " : "");
        if (option->name)
            used +=
                (size_t)snprintf(left + used, sizeof(left) - used, "--%s", option->name);
        if (option->arg)
            snprintf(left + used, sizeof(left) - used, " %s", option->arg);
        help_row(left, option->help);
    }
    help_row("  -h, --help", "this text");
    if (usage->more)
        printf("\n%s\n", usage->more);
}

/* Whole text a finite decimal number of seconds, at most a year. */
static bool read_seconds(const char *text, int64_t *us)
{
    char *end;
    errno = 0;
    double seconds = strtod(text, &end);
    if (end == text || *end || errno || !(seconds >= 0) || seconds > 31536000.0)
        return false;
    *us = (int64_t)(seconds * 1e6);
    return true;
}

static bool set_seconds(const struct tool_option *option, const char *shown,
                        const char *text)
{
    int64_t us;
    if (!read_seconds(text, &us)) {
        tool_usage_error("%s needs a number of seconds, got '%s'", shown, text);
        return false;
    }
    if (us < option->min) {
        tool_usage_error("%s must be at least %g s, got '%s'", shown,
                         (double)option->min / 1e6, text);
        return false;
    }
    *(int64_t *)option->value = us;
    return true;
}

static bool set_int(const struct tool_option *option, const char *shown, const char *text)
{
    uint64_t number;
    if (base_parse_u64(text, &number) != HDL_OK || number > INT32_MAX) {
        tool_usage_error("%s needs a whole number, got '%s'", shown, text);
        return false;
    }
    if ((int64_t)number < option->min) {
        tool_usage_error("%s must be at least %" PRId64 ", got %" PRIu64, shown,
                         option->min, number);
        return false;
    }
    *(int64_t *)option->value = (int64_t)number;
    return true;
}

int tool_choice(const char *choices, const char *text)
{
    for (int place = 0;; place++) {
        size_t length = strcspn(choices, "|");
        if (strlen(text) == length && strncmp(choices, text, length) == 0)
            return place;
        if (!choices[length])
            return -1;
        choices += length + 1;
    }
}

static bool set_choice(const struct tool_option *option, const char *shown,
                       const char *text)
{
    *(const char **)option->value = text;
    if (tool_choice(option->arg, text) >= 0)
        return true;
    tool_usage_error("%s must be %s, got '%s'", shown, option->arg, text);
    return false;
}

static bool set_value(const struct tool_option *option, const char *shown,
                      const char *text)
{
    struct tool_sizes *sizes;
    switch (option->kind) {
    case TOOL_FLAG:
        *(bool *)option->value = true;
        return true;
    case TOOL_INT:
        return set_int(option, shown, text);
    case TOOL_TEXT:
        *(const char **)option->value = text;
        return true;
    case TOOL_CHOICE:
        return set_choice(option, shown, text);
    case TOOL_SECONDS:
        return set_seconds(option, shown, text);
    case TOOL_SIZES:
        sizes = option->value;
        if (base_parse_size_list(text, sizes->size, TOOL_SIZES_MAX, &sizes->count) ==
            HDL_OK)
            return true;
        tool_usage_error(
            "%s needs a list of sizes such as 8,4K,1M,64M (at most %d), got '%s'", shown,
            TOOL_SIZES_MAX, text);
        return false;
    }
    return false;
}

/* The option that argv[i] spells; *value = text behind '=' or the letter, NULL if none.
 */
static const struct tool_option *find(const struct tool_usage *usage, const char *text,
                                      const char **value)
{
    bool is_long = text[1] == '-';
    const char *equals = strchr(text, '=');
    size_t length = equals ? (size_t)(equals - text - 2) : strlen(text + 2);
    for (size_t i = 0; i < usage->num_options; i++) {
        const struct tool_option *option = &usage->options[i];
        if (!is_long && option->letter == text[1]) {
            *value = text[2] ? text + 2 : NULL;
            return option->kind == TOOL_FLAG && *value ? NULL : option;
        }
        if (is_long && option->name && strlen(option->name) == length &&
            strncmp(option->name, text + 2, length) == 0) {
            *value = equals ? equals + 1 : NULL;
            return option;
        }
    }
    return NULL;
}

/* Reads the option at argv[at]; returns how many arguments it took, 0 if it is wrong. */
static int take(const struct tool_usage *usage, int argc, char **argv, int at)
{
    const char *value = NULL;
    const struct tool_option *option = find(usage, argv[at], &value);
    if (!option) {
        tool_usage_error("unknown option '%s' (see --help)", argv[at]);
        return 0;
    }
    if (option->kind == TOOL_FLAG && value) {
        tool_usage_error("%s takes no value", argv[at]);
        return 0;
    }
    int taken = 1;
    if (option->kind != TOOL_FLAG && !value) {
        if (at + 1 >= argc) {
            tool_usage_error("%s needs a value: %s", argv[at], option->arg);
            return 0;
        }
        value = argv[at + 1];
        taken = 2;
    }
    char shown[64];
    int width = (int)strcspn(argv[at], "=");
    snprintf(shown, sizeof(shown), "%.*s", argv[at][1] == '-' ? width : 2, argv[at]);
    return set_value(option, shown, value) ? taken : 0;
}

/* Moves argv[at .. at + count) in front of argv[to .. at). */
static void move_front(char **argv, int to, int at, int count)
{
    for (int i = 0; i < count; i++) {
        char *moved = argv[at + i];
        memmove(&argv[to + i + 1], &argv[to + i], (size_t)(at - to) * sizeof(argv[0]));
        argv[to + i] = moved;
    }
}

bool tool_parse(const struct tool_usage *usage, bool anywhere, int argc, char **argv,
                int *first, int *code)
{
    int others = 1; /* argv[others .. at) are arguments that were no options */
    int at = 1;
    while (at < argc) {
        const char *text = argv[at];
        if (strcmp(text, "--") == 0) {
            move_front(argv, others, at, 1);
            others++;
            break;
        }
        if (text[0] != '-' || !text[1]) {
            if (!anywhere)
                break;
            at++;
            continue;
        }
        if (strcmp(text, "--help") == 0 || strcmp(text, "-h") == 0) {
            print_help(usage);
            *code = TOOL_OK;
            return false;
        }
        int taken = take(usage, argc, argv, at);
        if (taken == 0) {
            *code = TOOL_USAGE;
            return false;
        }
        move_front(argv, others, at, taken);
        others += taken;
        at += taken;
    }
    *first = others;
    return true;
}

const char *tool_bytes_text(char *room, size_t length, uint64_t bytes)
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    size_t step = 0;
    while (value >= 1023.95 && step < 4) {
        value /= 1024;
        step++;
    }
    snprintf(room, length,
             step && value != (double)(uint64_t)value ? "%.1f %s" : "%.0f %s", value,
             unit[step]);
    return room;
}

const char *tool_time_text(char *room, size_t length, double us)
{
    if (us < 1000)
        snprintf(room, length, us < 100 ? "%.2f us" : "%.1f us", us);
    else if (us < 1e6)
        snprintf(room, length, "%.2f ms", us / 1e3);
    else
        snprintf(room, length, "%.2f s", us / 1e6);
    return room;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void tool_sort(double *values, size_t count)
{
    qsort(values, count, sizeof(*values), by_value);
}
