/* SPDX-License-Identifier: Apache-2.0 */
/* What the runner promises, seen from a rank; the argument names the test. */
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int rank;

static int test_plain(void)
{
    static const char *const names[] = {
        "RANK",        "WORLD_SIZE",  "LOCAL_RANK",  "LOCAL_WORLD_SIZE",
        "MASTER_ADDR", "MASTER_PORT", "HEDDLE_TOKEN"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (!getenv(names[i])) {
            fprintf(stderr, "%s is not set\n", names[i]);
            return 1;
        }
    }
    return getchar() != EOF;
}

static int test_kill(void)
{
    if (rank == 1) {
        puts("ready");
        fflush(stdout);
        for (;;)
            pause();
    }
    return 0;
}

/* Rank 0 is stopped for 300 ms by what rank 1 prints: a tick of its clock takes that
 * long. */
static int test_stop(void)
{
    struct timespec before;
    struct timespec now;
    if (rank == 1) {
        usleep(200000);
        puts("stop");
        fflush(stdout);
        usleep(400000);
        puts("cont");
        return 0;
    }
    clock_gettime(CLOCK_MONOTONIC, &before);
    for (int i = 0; i < 1500; i++) {
        usleep(1000);
        clock_gettime(CLOCK_MONOTONIC, &now);
        double ms = (double)(now.tv_sec - before.tv_sec) * 1e3 +
                    (double)(now.tv_nsec - before.tv_nsec) / 1e6;
        if (ms > 300)
            return 0;
        before = now;
    }
    return 1;
}

_Noreturn static void test_hang(void)
{
    printf("rank %d waits for ever\n", rank);
    fflush(stdout);
    for (;;)
        pause();
}

/* A rank that leaves children behind, one of them in a session of its own, and fails. */
static int test_orphans(void)
{
    for (int i = 0; i < 2; i++) {
        if (fork() == 0) {
            if (i == 1)
                setsid();
            for (;;)
                pause();
        }
    }
    return rank;
}

static int test_hosts(void)
{
    struct ifaddrs *list;
    const char *wanted = getenv("HEDDLE_INTERFACE");
    int found = 0;
    if (!wanted || getifaddrs(&list) != 0)
        return 1;
    for (struct ifaddrs *i = list; i; i = i->ifa_next) {
        char text[INET_ADDRSTRLEN];
        if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET)
            continue;
        const struct sockaddr_in *addr = (const void *)i->ifa_addr;
        inet_ntop(AF_INET, &addr->sin_addr, text, sizeof(text));
        found += strcmp(text, wanted) == 0;
    }
    freeifaddrs(list);
    return found != 1 || strcmp(wanted, rank < 2 ? "10.77.0.1" : "10.77.0.2") != 0;
}

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "";
    const char *text = getenv("RANK");
    rank = text ? atoi(text) : 0;
    if (strcmp(name, "plain") == 0)
        return test_plain();
    if (strcmp(name, "kill") == 0)
        return test_kill();
    if (strcmp(name, "stop") == 0)
        return test_stop();
    if (strcmp(name, "code") == 0)
        return rank == 1 ? 3 : 0;
    if (strcmp(name, "hang") == 0)
        test_hang();
    if (strcmp(name, "orphans") == 0)
        return test_orphans();
    if (strcmp(name, "hosts") == 0)
        return test_hosts();
    return 2;
}
