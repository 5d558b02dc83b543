/* SPDX-License-Identifier: Apache-2.0 */
/* Reads /proc for the state of hanging ranks and for descendants left behind. */
#include "tools/procs_state.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* The first line of a file of /proc, "?" if it cannot be read. */
static void read_line(const char *path, char *text, size_t size)
{
    snprintf(text, size, "?");
    FILE *file = fopen(path, "re");
    if (!file)
        return;
    if (fgets(text, (int)size, file))
        text[strcspn(text, "\n")] = '\0';
    fclose(file);
}

/* State letter and parent from a stat line; the name in it may hold spaces and brackets.
 */
static char parse_stat(const char *line, pid_t *parent)
{
    char state = '?';
    int ppid = 0;
    const char *close = strrchr(line, ')');
    if (close && sscanf(close + 1, " %c %d", &state, &ppid) < 1)
        state = '?';
    *parent = ppid;
    return state;
}

static void print_thread(pid_t pid, const char *tid, FILE *out)
{
    char path[128];
    char name[64];
    char stat[512];
    char channel[64];
    char call[128];
    pid_t parent;
    snprintf(path, sizeof(path), "/proc/%d/task/%.20s/comm", pid, tid);
    read_line(path, name, sizeof(name));
    snprintf(path, sizeof(path), "/proc/%d/task/%.20s/stat", pid, tid);
    read_line(path, stat, sizeof(stat));
    snprintf(path, sizeof(path), "/proc/%d/task/%.20s/wchan", pid, tid);
    read_line(path, channel, sizeof(channel));
    snprintf(path, sizeof(path), "/proc/%d/task/%.20s/syscall", pid, tid);
    read_line(path, call, sizeof(call));
    call[strcspn(call, " ")] = '\0';
    fprintf(out, "    thread %s %s state %c waits in %s, system call %s\n", tid, name,
            parse_stat(stat, &parent), channel, call);
}

void procs_print_state(pid_t pid, int rank, FILE *out)
{
    char path[64];
    fprintf(out, "rank %d pid %d runs\n", rank, pid);
    snprintf(path, sizeof(path), "/proc/%d/task", pid);
    DIR *dir = opendir(path);
    if (!dir)
        return;
    for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir)) {
        if (entry->d_name[0] != '.')
            print_thread(pid, entry->d_name, out);
    }
    closedir(dir);
}

/* Sends SIGKILL to every child that /proc shows. */
static void kill_visible_children(void)
{
    DIR *dir = opendir("/proc");
    if (!dir)
        return;
    for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir)) {
        char path[300];
        char stat[512];
        pid_t parent;
        int pid = atoi(entry->d_name);
        if (pid <= 0)
            continue;
        snprintf(path, sizeof(path), "/proc/%s/stat", entry->d_name);
        read_line(path, stat, sizeof(stat));
        parse_stat(stat, &parent);
        if (parent == getpid())
            kill(pid, SIGKILL);
    }
    closedir(dir);
}

int procs_kill_children(void)
{
    for (int killed = 0;;) {
        int code = 0;
        pid_t pid = waitpid(-1, &code, WNOHANG);
        if (pid < 0 && errno == ECHILD)
            return killed;
        if (pid > 0) {
            killed += WIFSIGNALED(code) && WTERMSIG(code) == SIGKILL;
            continue;
        }
        kill_visible_children();
        usleep(1000);
    }
}
