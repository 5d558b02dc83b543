/* SPDX-License-Identifier: Apache-2.0 */
/* The command's option parser and its JSON reader on arbitrary input. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/json.h"
#include "tools/options.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MAX_ARGS = 32 };

/* Parsing moves arguments, and neither loses nor invents one. */
static void check_same(char **before, char **after, int count)
{
    for (int i = 0; i < count; i++) {
        int at = 0;
        while (at < count && after[at] != before[i])
            at++;
        if (at == count)
            abort();
    }
}

static void parse_options(char *text, bool anywhere)
{
    static char command[] = "fuzz";
    char *args[MAX_ARGS + 1] = {command}, *before[MAX_ARGS + 1];
    bool flag = false;
    int64_t number = 1, seconds = 0;
    const char *word = NULL;
    struct tool_sizes sizes = {0};
    const struct tool_option options[] = {
        {'f', "flag", TOOL_FLAG, &flag, 0, NULL, "a flag"},
        {'n', "number", TOOL_INT, &number, 1, "N", "a number"},
        {0, "seconds", TOOL_SECONDS, &seconds, 0, "S", "seconds"},
        {'w', "word", TOOL_TEXT, &word, 0, "W", "a word"},
        {'b', NULL, TOOL_SIZES, &sizes, 0, "LIST", "sizes"},
    };
    const struct tool_usage usage = {"fuzz", "Parses.", options,
                                     sizeof(options) / sizeof(options[0]), NULL};
    int count = 1, first = 0, code;
    for (char *arg = strtok(text, "\n"); arg && count < MAX_ARGS;
         arg = strtok(NULL, "\n"))
        args[count++] = arg;
    memcpy(before, args, sizeof(before));
    bool parsed = tool_parse(&usage, anywhere, count, args, &first, &code);
    check_same(before, args, count);
    if (parsed && (first < 1 || first > count))
        abort();
    if (number < 1 || seconds < 0 || sizes.count > TOOL_SIZES_MAX)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static FILE *nowhere;
    char *text = malloc(size + 1);
    if (!text)
        return 0;
    if (!nowhere)
        nowhere = fopen("/dev/null", "we");
    if (size > 0)
        memcpy(text, data, size);
    text[size] = 0;
    json_free(json_parse(text));
    /* Each input would print a sentence (glibc lets a program replace its streams). */
    FILE *out = stdout, *err = stderr;
    if (nowhere)
        stdout = stderr = nowhere;
    if (size > 0)
        parse_options(text + 1, text[0] & 1);
    stdout = out;
    stderr = err;
    free(text);
    return 0;
}
