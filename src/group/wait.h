/* SPDX-License-Identifier: Apache-2.0 */
/* Waiting threads: spin, yield, sleep on the bell; they make progress themselves. */
#ifndef GROUP_WAIT_H
#define GROUP_WAIT_H

#include "group/engine.h"
#include "group/op.h"

/* Until the operation is finished or the deadline (base_now_ns scale) is over. Called
 * without the lock. */
void group_op_wait(struct hdl_op *op, int64_t deadline_ns);

/* Rounds of progress under the lock, until so many in a row moved nothing or another
 * thread wants the lock. True if the operation is finished. */
bool group_op_spin(struct hdl_op *op, int rounds);

/* Where ranks outnumber cores: lets a rank that the operation waits for have this core
 * once, or waits a moment for those on other cores; mostly that is all it takes. Under
 * the lock, which is let go for the yield. True if the operation is finished. */
bool group_op_yield(struct hdl_op *op);

/* Deadlines of operations and the line about slow waits; under the lock. */
void group_engine_tick(struct group_engine *engine, int64_t now_ns);

/* The progress thread: starts and stops it (host may be NULL: there is none then), and
 * tells it that there is something to do while nobody waits. */
enum hdl_status group_thread_start(struct group_engine *engine);
void group_thread_stop(struct group_engine *engine);
void group_thread_kick(struct group_engine *engine);

#endif
