/* SPDX-License-Identifier: Apache-2.0 */
/* Shared immutable bytes: encoded frames and endpoint blobs, counted references. */
#ifndef CTL_BYTES_H
#define CTL_BYTES_H

#include <stddef.h>
#include <stdint.h>

struct base_env;

/*
 * One allocation. A frame sent to many connections is encoded once; the host takes a
 * reference for every write that is still under way. The count is atomic, so a reference
 * may be dropped on any thread.
 */
struct ctl_bytes {
    struct base_env *env;
    uint32_t references;
    size_t size;
    unsigned char data[];
};

/* Copies `size` bytes (data NULL = zeros); NULL with detail on failure. One reference. */
struct ctl_bytes *ctl_bytes_new(struct base_env *env, const void *data, size_t size);
struct ctl_bytes *ctl_bytes_ref(struct ctl_bytes *bytes); /* NULL is legal */
void ctl_bytes_unref(struct ctl_bytes *bytes);            /* NULL is legal */

#endif
