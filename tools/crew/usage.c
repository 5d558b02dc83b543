/* SPDX-License-Identifier: Apache-2.0 */
/* What a rank's process holds, to see what grows. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/crew/crew.h"

static long count_entries(pid_t pid)
{
    char path[64];
    long n = 0;
    snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
    DIR *dir = opendir(path);
    while (dir && readdir(dir))
        n++;
    if (dir)
        (void)closedir(dir);
    return n;
}

/* Lines of a file of the process; *kb: the number behind `key`. */
static long count_lines(pid_t pid, const char *name, const char *key, long *kb)
{
    char path[64], line[512];
    long n = 0;
    snprintf(path, sizeof(path), "/proc/%d/%s", (int)pid, name);
    FILE *file = fopen(path, "re");
    for (; file && fgets(line, sizeof(line), file); n++)
        if (key && strncmp(line, key, strlen(key)) == 0)
            *kb = strtol(line + strlen(key), NULL, 10);
    if (file)
        (void)fclose(file);
    return n;
}

struct crew_usage crew_usage(const struct crew *crew, int rank)
{
    struct crew_usage usage = {0};
    pid_t pid = crew->rank[rank].pid;
    usage.descriptors = count_entries(pid);
    usage.mappings = count_lines(pid, "maps", NULL, NULL);
    (void)count_lines(pid, "status", "RssAnon:", &usage.memory_kb);
    return usage;
}
