/* SPDX-License-Identifier: Apache-2.0 */
/* The exchange in the loop of a crew's rank. */
#ifndef TOOLS_CREW_MOE_H
#define TOOLS_CREW_MOE_H

#include <stdbool.h>
#include <stdint.h>

#include "heddle.h"

/* Operations that linking takes, from a number on that all ranks know. */
enum { CREW_MOE_OPS = 4 };

/* Collective of the members: makes the exchange, or links it anew. */
enum hdl_status crew_moe_link(struct hdl_group *group, int ranks);
/* One step, if there is an exchange; *wrong says what was not as it must be. */
enum hdl_status crew_moe_step(int rank, int ranks, uint64_t number, const char **wrong);
void crew_moe_close(void);
void crew_moe_count(uint64_t *all, uint64_t *lacking);

#endif
