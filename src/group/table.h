/* SPDX-License-Identifier: Apache-2.0 */
/* Which algorithm, which chunk size: by kind, bytes, ranks and path. */
#ifndef GROUP_TABLE_H
#define GROUP_TABLE_H

#include "group/group.h"

/* One line of the table. The first that fits is taken. */
struct group_rule {
    enum group_kind kind;
    size_t min_bytes; /* of one rank's input */
    uint32_t min_ranks;
    const struct group_algorithm *algorithm;
};

size_t group_table_size(void);
const struct group_rule *group_table_rule(size_t index);

/* Overrides from HEDDLE_ALGORITHM ("allreduce=direct,reduce=pieces"). HDL_EINVAL names
 * the part that is wrong. */
enum hdl_status group_table_check(const char *overrides);

/* Also sets op->stream and op->ahead. Depends on what all ranks know alike. */
const struct group_algorithm *group_table_choose(struct hdl_group *group,
                                                 struct hdl_op *op);
/* Bytes of a slot to use for chunks of `blocks` blocks of `count` elements. */
size_t group_table_chunk_bytes(const struct hdl_op *op, size_t blocks, size_t count);

#endif
