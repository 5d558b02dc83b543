/* SPDX-License-Identifier: Apache-2.0 */
/* Moving a waiting thread off a core that it shares with the peer it waits for. */
#ifndef GROUP_SPREAD_H
#define GROUP_SPREAD_H

#include <stdint.h>

struct group_engine;

/* After a wait that took so many yields, in a group with cores for all its ranks: moves
 * the calling thread to another core of its mask if wait after wait ends with one yield.
 */
void group_spread(struct group_engine *engine, uint32_t yields);

#endif
