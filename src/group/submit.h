/* SPDX-License-Identifier: Apache-2.0 */
/* From a public call to an operation: common checks, numbering, the blocking way. */
#ifndef GROUP_SUBMIT_H
#define GROUP_SUBMIT_H

#include "group/group.h"

/* A collective as it was called. `refused` not HDL_OK: its arguments are bad (detail
 * text); it takes a number all the same. Arrays have `array_size` entries and are copied;
 * with counts and without displs the blocks lie one after another. */
struct group_request {
    struct hdl_group *group;
    struct group_desc desc;
    const void *src;
    void *dst;
    size_t elem;
    const size_t *src_counts, *src_displs, *dst_counts, *dst_displs;
    uint32_t array_size;
    enum hdl_status refused;
};

/* The engine is locked; unlocks it. */
enum hdl_status group_submit(struct group_request *request, const struct hdl_call *call,
                             struct hdl_op **op);

/* A send or receive as it was called, checked; `bytes` is its size. */
struct group_message {
    enum group_kind kind;
    enum hdl_dtype dtype;
    size_t count, bytes;
    const void *src; /* of a send */
    void *dst;       /* of a receive */
    int32_t peer, tag;
};

enum hdl_status group_submit_p2p(struct hdl_group *group,
                                 const struct group_message *message,
                                 const struct hdl_call *call, struct hdl_op **op);

/* Points *call at `copy` if the caller's struct is of another version. HDL_EINVAL (and
 * *call NULL) if it is larger than known and its tail is not zero. */
enum hdl_status group_call_read(const struct hdl_call **call, struct hdl_call *copy);

#endif
