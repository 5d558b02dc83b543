/* SPDX-License-Identifier: Apache-2.0 */
/* Copies past the cache, by what the processor has. */
#include "base/copy.h"

#include <stdint.h>
#include <string.h>

enum { LINE = 64, STREAM_LEAST = 8 * LINE };

#if defined(__x86_64__)
#include <immintrin.h>

/* Bytes up to the next line of dst: streaming stores must be aligned. */
static size_t copy_head(uint8_t *dst, const uint8_t *src, size_t bytes)
{
    size_t head = (size_t)(-(uintptr_t)dst & (LINE - 1));
    if (head > bytes)
        head = bytes;
    memcpy(dst, src, head);
    return head;
}

__attribute__((target("avx512f"))) static void
stream_avx512(uint8_t *dst, const uint8_t *src, size_t bytes)
{
    size_t at = copy_head(dst, src, bytes);
    for (; at + 4 * LINE <= bytes; at += 4 * LINE) {
        _mm_prefetch((const char *)src + at + 1024, _MM_HINT_T0);
        _mm_prefetch((const char *)src + at + 1088, _MM_HINT_T0);
        _mm_prefetch((const char *)src + at + 1152, _MM_HINT_T0);
        _mm_prefetch((const char *)src + at + 1216, _MM_HINT_T0);
        __m512i a = _mm512_loadu_si512(src + at);
        __m512i b = _mm512_loadu_si512(src + at + LINE);
        __m512i c = _mm512_loadu_si512(src + at + 2 * LINE);
        __m512i d = _mm512_loadu_si512(src + at + 3 * LINE);
        _mm512_stream_si512((void *)(dst + at), a);
        _mm512_stream_si512((void *)(dst + at + LINE), b);
        _mm512_stream_si512((void *)(dst + at + 2 * LINE), c);
        _mm512_stream_si512((void *)(dst + at + 3 * LINE), d);
    }
    _mm_sfence();
    memcpy(dst + at, src + at, bytes - at);
}

__attribute__((target("avx2"))) static void stream_avx2(uint8_t *dst, const uint8_t *src,
                                                        size_t bytes)
{
    size_t at = copy_head(dst, src, bytes);
    for (; at + 2 * LINE <= bytes; at += 2 * LINE) {
        _mm_prefetch((const char *)src + at + 1024, _MM_HINT_T0);
        _mm_prefetch((const char *)src + at + 1088, _MM_HINT_T0);
        __m256i a = _mm256_loadu_si256((const void *)(src + at));
        __m256i b = _mm256_loadu_si256((const void *)(src + at + 32));
        __m256i c = _mm256_loadu_si256((const void *)(src + at + 64));
        __m256i d = _mm256_loadu_si256((const void *)(src + at + 96));
        _mm256_stream_si256((void *)(dst + at), a);
        _mm256_stream_si256((void *)(dst + at + 32), b);
        _mm256_stream_si256((void *)(dst + at + 64), c);
        _mm256_stream_si256((void *)(dst + at + 96), d);
    }
    _mm_sfence();
    memcpy(dst + at, src + at, bytes - at);
}
#endif

void base_copy(void *restrict dst, const void *restrict src, size_t bytes,
               bool past_cache)
{
    if (!past_cache || bytes < STREAM_LEAST) {
        if (bytes)
            memcpy(dst, src, bytes);
        return;
    }
#if defined(__x86_64__)
    _mm_sfence();
    if (__builtin_cpu_supports("avx512f"))
        stream_avx512(dst, src, bytes);
    else if (__builtin_cpu_supports("avx2"))
        stream_avx2(dst, src, bytes);
    else
#endif
        memcpy(dst, src, bytes);
}
