/* SPDX-License-Identifier: Apache-2.0 */
/* Links between live ranks that stay broken. */
#include "ctl/coordinator_state.h"

bool coord_link_is_pending(const struct coord_group *group)
{
    (void)group;
    return false;
}

void coord_link_commit(const struct coord_group *group, struct ctl_change *change,
                       uint64_t ready, uint64_t next)
{
    (void)group;
    (void)change;
    (void)ready;
    (void)next;
}
