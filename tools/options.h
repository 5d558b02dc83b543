/* SPDX-License-Identifier: Apache-2.0 */
/* Command-line options of the `heddle` command: one table makes parser and help; numbers
 * for people. */
#ifndef TOOLS_OPTIONS_H
#define TOOLS_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum tool_option_kind {
    TOOL_FLAG,    /* bool */
    TOOL_INT,     /* int64_t, at least `min` */
    TOOL_SECONDS, /* int64_t microseconds, at least `min`, from a decimal number of
                     seconds */
    TOOL_TEXT,    /* const char * */
    TOOL_CHOICE,  /* const char *, one of those in `arg`: "shm|fabric" */
    TOOL_SIZES    /* struct tool_sizes */
};

#define TOOL_SIZES_MAX 64

/* A list such as 8,4K,1M: powers of 1024. */
struct tool_sizes {
    size_t count;
    uint64_t size[TOOL_SIZES_MAX];
};

struct tool_option {
    char letter;      /* 0 = none */
    const char *name; /* without the dashes; NULL = only the letter */
    enum tool_option_kind kind;
    void *value;
    int64_t min;
    const char *arg;  /* its name in the help; NULL for flags */
    const char *help; /* NULL = not shown: another spelling of the one above */
};

struct tool_usage {
    const char *line;    /* "heddle run -n N [options] [--] program [arguments]" */
    const char *purpose; /* one sentence */
    const struct tool_option *options;
    size_t num_options;
    const char *more; /* shown after the options; NULL = nothing */
};

/* Exit codes of the command. */
enum { TOOL_OK = 0, TOOL_FAILED = 1, TOOL_USAGE = 2 };

/*
 * Reads options up to the first other argument or "--"; *first is the index of what
 * follows. With `anywhere`, options may also stand between and after other arguments,
 * which are moved behind them. False, with the command's exit code, if it has printed the
 * help, or one sentence about what is wrong.
 */
bool tool_parse(const struct tool_usage *usage, bool anywhere, int argc, char **argv,
                int *first, int *code);
/* Place of `text` in choices such as "shm|fabric", -1 if it is none of them. */
int tool_choice(const char *choices, const char *text);

/* One sentence on stderr, with the command's name in front; returns TOOL_USAGE. */
int tool_usage_error(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The same for failures of the work itself; returns TOOL_FAILED. */
int tool_failed(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* "4.0 KiB", "64.0 MiB"; "1.25 ms" from microseconds. */
const char *tool_bytes_text(char *room, size_t length, uint64_t bytes);
const char *tool_time_text(char *room, size_t length, double us);

/* Ascending. */
void tool_sort(double *values, size_t count);

#endif
