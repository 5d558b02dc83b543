/* SPDX-License-Identifier: Apache-2.0 */
/* A small JSON reader, for showing what hdl_info() tells. */
#ifndef TOOLS_JSON_H
#define TOOLS_JSON_H

#include <stddef.h>
#include <stdio.h>

enum json_kind {
    JSON_NULL,
    JSON_FALSE,
    JSON_TRUE,
    JSON_NUMBER,
    JSON_TEXT,
    JSON_LIST,
    JSON_OBJECT
};

/* Members of lists and objects hang on `first`, linked by `next`. */
struct json {
    enum json_kind kind;
    char *name; /* in an object; NULL elsewhere */
    char *text; /* of texts and numbers, as written */
    struct json *first;
    struct json *next;
};

/* NULL if the text is not JSON (or nests deeper than 32), or memory is short. */
struct json *json_parse(const char *text);
void json_free(struct json *value);
/* Member of an object, NULL if absent. */
const struct json *json_get(const struct json *object, const char *name);
/* Text of a scalar, "" for lists and objects. */
const char *json_text(const struct json *value);
/* Writes a text with quotes and escapes. */
void json_print_text(FILE *out, const char *text);

#endif
