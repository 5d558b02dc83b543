/* SPDX-License-Identifier: Apache-2.0 */
/* Streaming copy: whole lines past the cache, the ends by memcpy. */
#include "group/copy.h"

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>

enum { LINE = 64 };

/* dst is aligned to a line. A line is four stores that the write buffer joins. */
static void stream_lines(char *dst, const char *src, size_t lines)
{
    for (size_t i = 0; i < lines; i++) {
        __m128i a = _mm_loadu_si128((const __m128i *)(const void *)src);
        __m128i b = _mm_loadu_si128((const __m128i *)(const void *)(src + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(const void *)(src + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(const void *)(src + 48));
        _mm_stream_si128((__m128i *)(void *)dst, a);
        _mm_stream_si128((__m128i *)(void *)(dst + 16), b);
        _mm_stream_si128((__m128i *)(void *)(dst + 32), c);
        _mm_stream_si128((__m128i *)(void *)(dst + 48), d);
        src += LINE;
        dst += LINE;
    }
    _mm_sfence();
}

void group_copy(void *dst, const void *src, size_t bytes, bool stream)
{
    if (!stream || bytes < 2 * LINE) {
        if (bytes)
            memcpy(dst, src, bytes);
        return;
    }
    char *to = dst;
    const char *from = src;
    size_t head = (LINE - (uintptr_t)to % LINE) % LINE;
    memcpy(to, from, head);
    size_t lines = (bytes - head) / LINE;
    stream_lines(to + head, from + head, lines);
    size_t moved = head + lines * LINE;
    memcpy(to + moved, from + moved, bytes - moved);
}

#else

void group_copy(void *dst, const void *src, size_t bytes, bool stream)
{
    (void)stream;
    if (bytes)
        memcpy(dst, src, bytes);
}

#endif
