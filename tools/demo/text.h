/* SPDX-License-Identifier: Apache-2.0 */
/* The words of a text, which are the tokens of the demo. */
#ifndef TOOLS_DEMO_TEXT_H
#define TOOLS_DEMO_TEXT_H

#include <stddef.h>

struct demo_text {
    char *text;
    char **word; /* of the whole text, lower case */
    size_t num_words;
};

/* Reads the first MiB of a file; an exit code. demo_text_close in any case. */
int demo_text_open(struct demo_text *text, const char *path);
void demo_text_close(struct demo_text *text);

#endif
