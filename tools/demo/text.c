/* SPDX-License-Identifier: Apache-2.0 */
/* Reading a text and finding its words. */
#include "tools/demo/text.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/demo/words.h"
#include "tools/options.h"

enum { TEXT_MOST = 1 << 20 };

/* Ends each word of the text with 0 and notes where it begins. */
static bool split(struct demo_text *d, size_t length)
{
    d->word = malloc((length / 2 + 2) * sizeof(char *));
    for (size_t i = 0; d->word && i < length;) {
        while (i < length && !word_char(d->text[i]))
            i++;
        if (i == length)
            break;
        d->word[d->num_words++] = d->text + i;
        while (i < length && word_char(d->text[i])) {
            char c = d->text[i];
            d->text[i++] = c >= 'A' && c <= 'Z' ? (char)(c + 32) : c;
        }
        d->text[i++] = 0;
    }
    return d->word != NULL;
}

int demo_text_open(struct demo_text *d, const char *path)
{
    FILE *file = fopen(path, "re");
    if (!file)
        return tool_failed("cannot read '%s': %s", path, strerror(errno));
    d->text = malloc(TEXT_MOST + 1);
    size_t length = d->text ? fread(d->text, 1, TEXT_MOST, file) : 0;
    bool failed = ferror(file);
    int error = errno;
    fclose(file);
    if (failed)
        return tool_failed("cannot read '%s': %s", path, strerror(error));
    if (!d->text || !split(d, length))
        return tool_failed("out of memory");
    if (d->num_words == 0)
        return tool_failed("'%s' has no words", path);
    return TOOL_OK;
}

void demo_text_close(struct demo_text *text)
{
    free(text->word);
    free(text->text);
}
