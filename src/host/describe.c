/* SPDX-License-Identifier: Apache-2.0 */
/* What the control thread knows, as text for hdl_context_dump. */
#include <stdarg.h>
#include <stdio.h>

#include "host/conn.h"
#include "host/internal.h"

struct describe {
    struct host_command command;
    char *text;
    size_t room;
    size_t used;
};

size_t host_append(char *text, size_t room, size_t used, const char *format, ...)
{
    va_list args;
    if (used >= room)
        return used;
    va_start(args, format);
    int length = vsnprintf(text + used, room - used, format, args);
    va_end(args);
    if (length < 0)
        return used;
    return (size_t)length < room - used ? used + (size_t)length : room - 1;
}

/* On the control thread, which owns all of it but the stage. */
static size_t describe(struct host *host, char *text, size_t room)
{
    static const char *const stages[] = {"joining", "joined", "refused", "lost"};
    size_t used = host_append(
        text, room, 0, "job rank %d of %d, %s, pid %d, address %s\n", host->rank,
        host->num_ranks, stages[host->stage], host->identity.pid, host->identity.address);
    if (host->hub)
        used = host_append(text, room, used, "coordinator here, %u ranks live\n",
                           host_hub_num_live(host));
    else
        used = host_append(text, room, used, "coordinator at %s, %s\n",
                           host->up ? host->up->peer : "?",
                           host->connected ? "connected" : "not connected");
    used = host_watches_describe(host, text, room, used);
    return host_append(text, room, used,
                       "control payload %llu bytes, reconnects %llu, ended neighbours "
                       "%llu by exit %llu by "
                       "socket, refused %llu\n",
                       (unsigned long long)atomic_load(&host->control_bytes),
                       (unsigned long long)atomic_load(&host->num_reconnects),
                       (unsigned long long)atomic_load(&host->num_exits),
                       (unsigned long long)atomic_load(&host->num_closes),
                       (unsigned long long)atomic_load(&host->num_refused));
}

static void run(struct host *host, struct host_command *command)
{
    struct describe *request = base_container_of(command, struct describe, command);
    request->used = describe(host, request->text, request->room);
}

size_t host_describe(struct host *host, char *text, size_t room)
{
    struct describe request = {.command.run = run, .text = text, .room = room};
    if (room == 0 || host_check(host) != HDL_OK)
        return 0;
    host_command_post(host, &request.command);
    host_barrier(host); /* a later command: the one before has run */
    return request.used;
}
