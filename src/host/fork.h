/* SPDX-License-Identifier: Apache-2.0 */
/* The library's descriptors of the process, so that a forked child can drop them. */
#ifndef HOST_FORK_H
#define HOST_FORK_H

#include "base/status.h"

/*
 * Close-on-exec does not help against a fork without exec (a data loader, say): the child
 * would keep a dead rank's sockets open, and nobody would see them close. So every socket
 * is kept in one table of the process, whose lock the fork handlers hold, and the child
 * closes what is in it.
 *
 *     host_fork_hold();              no fork can happen from here
 *     fd = socket(...);
 *     fd = host_fork_keep(fd);       into the table; -1 with detail if there is no memory
 *     host_fork_release();
 */
enum hdl_status host_fork_install(void); /* once per process, later calls do nothing */
void host_fork_hold(void);
void host_fork_release(void);
/* Under hold. fd < 0 is passed through. On failure fd is closed. */
int host_fork_keep(int fd);
/* A stream socket that does not block, or a connection of one, in the table; -errno. */
int host_fork_socket(int family);
int host_fork_accept(int listener);
/* The same for a descriptor that belongs to a library: it stays open on failure. */
enum hdl_status host_fork_note(int fd);
/* Takes it out of the table and closes it; not under hold. fd < 0 is ignored. */
void host_fork_close(int fd);
/* Takes it out of the table only: somebody else closes it. */
void host_fork_forget(int fd);
/* How many forks lie between the first process and this one. */
unsigned host_fork_generation(void);

#endif
