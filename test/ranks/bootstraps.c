/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ways in which ranks find each other:
 *
 *     bootstraps openmpi|pmi|slurm|directory|callbacks|address
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "rank.h"

static char directory[128];

/* Ranks of one test share a directory that is named by the job's port. */
static void make_directory(void)
{
    snprintf(directory, sizeof(directory), "/tmp/heddle-test-%s-%.16s",
             getenv("MASTER_PORT"), getenv("HEDDLE_TOKEN"));
    CHECK(mkdir(directory, 0700) == 0 || errno == EEXIST, "cannot make %s", directory);
}

static void remove_directory(void)
{
    char command[256];
    snprintf(command, sizeof(command), "rm -rf %s", directory);
    CHECK(system(command) == 0, "cannot remove %s", directory);
}

static enum hdl_status put(void *user, const char *key, const void *value, size_t length)
{
    char path[512], part[520];
    snprintf(path, sizeof(path), "%s/%s", (const char *)user, key);
    for (char *at = path + strlen(user) + 1; *at; at++)
        *at = *at == '/' ? '_' : *at;
    snprintf(part, sizeof(part), "%s.part", path);
    int fd = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    bool good = fd >= 0 && write(fd, value, length) == (ssize_t)length;
    if (fd >= 0)
        close(fd);
    return good && rename(part, path) == 0 ? HDL_OK : HDL_ESYSTEM;
}

static enum hdl_status get(void *user, const char *key, void *value, size_t *length,
                           int64_t timeout_us)
{
    char path[512];
    double limit = rank_now() + (double)timeout_us / 1e6;
    snprintf(path, sizeof(path), "%s/%s", (const char *)user, key);
    for (char *at = path + strlen(user) + 1; *at; at++)
        *at = *at == '/' ? '_' : *at;
    while (access(path, R_OK) != 0) {
        if (rank_now() > limit)
            return HDL_ETIMEDOUT;
        rank_sleep_ms(2);
    }
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, value, *length);
    if (fd >= 0)
        close(fd);
    *length = got < 0 ? 0 : (size_t)got;
    return got < 0 ? HDL_ESYSTEM : HDL_OK;
}

static void rename_variable(const char *from, const char *to)
{
    CHECK(setenv(to, getenv(from), 1) == 0 && unsetenv(from) == 0, "no environment");
}

int main(int argc, char **argv)
{
    const char *way = argc > 1 ? argv[1] : "address";
    int rank = rank_env("RANK"), size = rank_env("WORLD_SIZE");
    char address[160];
    struct hdl_context_opts opts = {.size = sizeof(opts)};
    struct hdl_bootstrap callbacks = {.user = directory, .put = put, .get = get};
    struct rank self = {0};
    make_directory();
    snprintf(address, sizeof(address), "%s:%s", getenv("MASTER_ADDR"),
             getenv("MASTER_PORT"));
    if (strcmp(way, "openmpi") == 0) {
        rename_variable("RANK", "OMPI_COMM_WORLD_RANK");
        rename_variable("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE");
    } else if (strcmp(way, "pmi") == 0) {
        rename_variable("RANK", "PMI_RANK");
        rename_variable("WORLD_SIZE", "PMI_SIZE");
    } else if (strcmp(way, "slurm") == 0) {
        rename_variable("RANK", "SLURM_PROCID");
        rename_variable("WORLD_SIZE", "SLURM_NTASKS");
    } else {
        opts.rank = rank;
        opts.num_ranks = size;
        CHECK(unsetenv("MASTER_ADDR") == 0 && unsetenv("MASTER_PORT") == 0,
              "no environment");
        if (strcmp(way, "directory") == 0)
            opts.shared_dir = directory;
        else if (strcmp(way, "callbacks") == 0)
            opts.bootstrap = &callbacks;
        else
            opts.coordinator = address;
    }
    /* Rank 0 gives the token out through the bootstrap where there is one. */
    if (opts.shared_dir || opts.bootstrap)
        CHECK(unsetenv("HEDDLE_TOKEN") == 0, "no environment");
    CHECK_OK(hdl_context_create(&opts, &self.context));
    self.group = rank_group(self.context, NULL);
    CHECK(hdl_group_rank(self.group) == rank && hdl_group_size(self.group) == size,
          "%d of %d", hdl_group_rank(self.group), hdl_group_size(self.group));
    int32_t one = 1;
    CHECK_OK(hdl_allreduce(self.group, &one, &one, 1, HDL_I32, HDL_SUM, NULL, NULL));
    CHECK(one == size, "sum %d", one);
    rank_leave(&self);
    if (rank == 0)
        remove_directory();
    return 0;
}
