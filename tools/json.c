/* SPDX-License-Identifier: Apache-2.0 */
/* Recursive-descent JSON reader. */
#include "tools/json.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { JSON_DEPTH = 32 };

static const char *skip(const char *at)
{
    while (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r')
        at++;
    return at;
}

static int hex_digit(char c)
{
    return isdigit((unsigned char)c) ? c - '0' : tolower((unsigned char)c) - 'a' + 10;
}

/* Code points above 0x7f from \u become '?': hdl_info writes plain UTF-8 itself. */
static const char *unescape(const char *at, char *out)
{
    static const char from[] = "\"\\/bfnrt";
    static const char to[] = "\"\\/\b\f\n\r\t";
    const char *found = strchr(from, *at);
    if (*at && found) {
        *out = to[found - from];
        return at + 1;
    }
    if (*at != 'u')
        return NULL;
    int code = 0;
    for (int i = 1; i <= 4; i++) {
        if (!isxdigit((unsigned char)at[i]))
            return NULL;
        code = code * 16 + hex_digit(at[i]);
    }
    *out = code < 0x80 ? (char)code : '?';
    return at + 5;
}

/* `at` stands behind the opening quote; returns what follows the closing one. */
static const char *read_text(const char *at, char **out)
{
    char *text = malloc(strlen(at) + 1);
    size_t used = 0;
    if (!text)
        return NULL;
    while (*at && *at != '"') {
        if (*at != '\\') {
            text[used++] = *at++;
            continue;
        }
        at = unescape(at + 1, &text[used]);
        if (!at) {
            free(text);
            return NULL;
        }
        used++;
    }
    if (*at != '"') {
        free(text);
        return NULL;
    }
    text[used] = 0;
    *out = text;
    return at + 1;
}

static const char *read_value(const char *at, int depth, struct json **out);

static const char *read_members(const char *at, int depth, struct json *parent)
{
    bool object = parent->kind == JSON_OBJECT;
    char end = object ? '}' : ']';
    struct json **tail = &parent->first;
    at = skip(at);
    if (*at == end)
        return at + 1;
    for (;;) {
        char *name = NULL;
        at = skip(at);
        if (object) {
            at = *at == '"' ? read_text(at + 1, &name) : NULL;
            at = at ? skip(at) : NULL;
            if (!at || *at != ':') {
                free(name);
                return NULL;
            }
            at++;
        }
        at = read_value(at, depth + 1, tail);
        if (!at) {
            free(name);
            return NULL;
        }
        (*tail)->name = name;
        tail = &(*tail)->next;
        at = skip(at);
        if (*at == end)
            return at + 1;
        if (*at++ != ',')
            return NULL;
    }
}

static const char *read_word(const char *at, struct json *value)
{
    static const char *const word[] = {"null", "false", "true"};
    for (int i = 0; i < 3; i++) {
        size_t length = strlen(word[i]);
        if (strncmp(at, word[i], length) == 0) {
            value->kind = (enum json_kind)i;
            return at + length;
        }
    }
    char *end;
    (void)strtod(at, &end);
    if (end == at)
        return NULL;
    value->kind = JSON_NUMBER;
    value->text = strndup(at, (size_t)(end - at));
    return value->text ? end : NULL;
}

static const char *read_value(const char *at, int depth, struct json **out)
{
    struct json *value = calloc(1, sizeof(*value));
    if (!value || depth > JSON_DEPTH) {
        free(value);
        return NULL;
    }
    at = skip(at);
    if (*at == '{' || *at == '[') {
        value->kind = *at == '{' ? JSON_OBJECT : JSON_LIST;
        at = read_members(at + 1, depth, value);
    } else if (*at == '"') {
        value->kind = JSON_TEXT;
        at = read_text(at + 1, &value->text);
    } else {
        at = read_word(at, value);
    }
    if (!at) {
        json_free(value);
        return NULL;
    }
    *out = value;
    return at;
}

struct json *json_parse(const char *text)
{
    struct json *value = NULL;
    const char *end = read_value(text, 0, &value);
    if (!end)
        return NULL;
    if (*skip(end)) {
        json_free(value);
        return NULL;
    }
    return value;
}

void json_free(struct json *value)
{
    while (value) {
        struct json *next = value->next;
        json_free(value->first);
        free(value->name);
        free(value->text);
        free(value);
        value = next;
    }
}

const struct json *json_get(const struct json *object, const char *name)
{
    const struct json *member = object ? object->first : NULL;
    while (member && (!member->name || strcmp(member->name, name) != 0))
        member = member->next;
    return member;
}

const char *json_text(const struct json *value)
{
    static const char *const word[] = {"none", "no", "yes"};
    if (!value || value->kind >= JSON_LIST)
        return "";
    return value->text ? value->text : word[value->kind];
}

void json_print_text(FILE *out, const char *text)
{
    fputc('"', out);
    for (; *text; text++) {
        if (*text == '"' || *text == '\\')
            fprintf(out, "\\%c", *text);
        else if ((unsigned char)*text < 0x20)
            fprintf(out, "\\u%04x", (unsigned)*text);
        else
            fputc(*text, out);
    }
    fputc('"', out);
}
