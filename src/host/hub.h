/* SPDX-License-Identifier: Apache-2.0 */
/* The coordinator's side of the control thread. */
#ifndef HOST_HUB_H
#define HOST_HUB_H

#include "host/conn.h"

/* agent.c: for a connection to the coordinator once it is authentic. */
extern const struct host_conn_ops host_agent_conn_ops;

#endif
