/* SPDX-License-Identifier: Apache-2.0 */
/* Bootstraps: launchers' variables, shared directory, callbacks, tokens, stale records.
 */
#include <pthread.h>
#include <signal.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "host/boot.h"
#include "jobs.h"

static const char *const variables[] = {"RANK",
                                        "WORLD_SIZE",
                                        "LOCAL_WORLD_SIZE",
                                        "MASTER_ADDR",
                                        "MASTER_PORT",
                                        "OMPI_COMM_WORLD_RANK",
                                        "PMI_RANK",
                                        "OMPI_COMM_WORLD_SIZE",
                                        "OMPI_COMM_WORLD_LOCAL_SIZE",
                                        "PMI_SIZE",
                                        "MPI_LOCALNRANKS",
                                        "PMIX_RANK",
                                        "PMIX_NAMESPACE",
                                        "SLURM_PROCID",
                                        "SLURM_NTASKS",
                                        "SLURM_JOB_ID",
                                        "SLURM_STEP_ID",
                                        "SLURM_STEP_NODELIST",
                                        "SLURM_NODELIST",
                                        "SLURM_STEP_NUM_NODES",
                                        "OMPI_MCA_orte_hnp_uri",
                                        "HEDDLE_TOKEN",
                                        "HEDDLE_TOKEN_FILE",
                                        "HEDDLE_COORDINATOR",
                                        "SLURM_JOB_NODELIST",
                                        "HEDDLE_SHARED_DIR"};

static void clear(void)
{
    for (size_t i = 0; i < sizeof(variables) / sizeof(variables[0]); i++)
        unsetenv(variables[i]);
}

/* "NAME=value" pairs, NULL at the end. */
static void set(const char *const *pairs)
{
    clear();
    for (; *pairs; pairs++) {
        char name[64];
        const char *equals = strchr(*pairs, '=');
        snprintf(name, sizeof(name), "%.*s", (int)(equals - *pairs), *pairs);
        assert_int_equal(setenv(name, equals + 1, 1), 0);
    }
}

static enum hdl_status find(struct host_boot *boot, const struct host_opts *opts)
{
    static struct base_env env;
    struct host_opts none = {0};
    base_env_init(&env);
    assert_int_equal(base_config_load(&env.config), HDL_OK);
    return host_boot_find(&env, opts ? opts : &none, boot);
}

#define SET(...) set((const char *const[]){__VA_ARGS__, NULL})

static void job_of_one_without_launcher(void **state)
{
    (void)state;
    struct host_boot boot;
    clear();
    assert_int_equal(find(&boot, NULL), HDL_OK);
    assert_int_equal(boot.mode, HOST_BOOT_ALONE);
    assert_int_equal(boot.rank, 0);
    assert_int_equal(boot.num_ranks, 1);
}

static void torchrun(void **state)
{
    (void)state;
    struct host_boot boot, other;
    SET("RANK=2", "WORLD_SIZE=4", "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=10.1.2.3",
        "MASTER_PORT=29500");
    assert_int_equal(find(&boot, NULL), HDL_OK);
    assert_int_equal(boot.mode, HOST_BOOT_RANGE);
    assert_int_equal(boot.rank, 2);
    assert_int_equal(boot.num_ranks, 4);
    assert_string_equal(boot.addr.host, "10.1.2.3");
    assert_int_equal(boot.addr.port, 29500);
    assert_false(boot.single_host);
    assert_true(boot.has_token);
    /* The token is the same on all ranks, another for another run. */
    SET("RANK=3", "WORLD_SIZE=4", "LOCAL_WORLD_SIZE=4", "MASTER_ADDR=10.1.2.3",
        "MASTER_PORT=29500");
    assert_int_equal(find(&other, NULL), HDL_OK);
    assert_memory_equal(boot.token, other.token, HOST_TOKEN_BYTES);
    assert_true(other.single_host);
    assert_int_equal(setenv("TORCHELASTIC_RUN_ID", "another", 1), 0);
    assert_int_equal(find(&other, NULL), HDL_OK);
    unsetenv("TORCHELASTIC_RUN_ID");
    assert_memory_not_equal(boot.token, other.token, HOST_TOKEN_BYTES);
}

static void open_mpi(void **state)
{
    (void)state;
    struct host_boot boot, other;
    SET("OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=4",
        "OMPI_COMM_WORLD_LOCAL_SIZE=4", "PMIX_NAMESPACE=1234@0");
    assert_int_equal(find(&boot, NULL), HDL_OK);
    assert_int_equal(boot.rank, 1);
    assert_int_equal(boot.num_ranks, 4);
    assert_string_equal(boot.addr.host, "127.0.0.1");
    assert_true(boot.single_host);
    assert_true(boot.addr.port >= 12000 && boot.addr.port < 30000);
    SET("OMPI_COMM_WORLD_RANK=3", "OMPI_COMM_WORLD_SIZE=4",
        "OMPI_COMM_WORLD_LOCAL_SIZE=2", "PMIX_NAMESPACE=1234@0",
        "OMPI_MCA_orte_hnp_uri=341.0;tcp://10.0.0.5,172.17.0.1:41235");
    assert_int_equal(find(&other, NULL), HDL_OK);
    assert_string_equal(other.addr.host, "10.0.0.5");
    assert_int_equal(other.addr.port, boot.addr.port);
    SET("OMPI_COMM_WORLD_RANK=3", "OMPI_COMM_WORLD_SIZE=4",
        "OMPI_COMM_WORLD_LOCAL_SIZE=2");
    assert_int_equal(find(&other, NULL), HDL_EINVAL);
    assert_non_null(strstr(base_detail(), "MASTER_ADDR"));
}

static void pmi_and_slurm(void **state)
{
    (void)state;
    struct host_boot boot;
    SET("PMI_RANK=0", "PMI_SIZE=2", "MPI_LOCALNRANKS=2");
    assert_int_equal(find(&boot, NULL), HDL_OK);
    assert_int_equal(boot.num_ranks, 2);
    assert_true(boot.single_host);
    SET("SLURM_PROCID=5", "SLURM_NTASKS=8", "SLURM_JOB_ID=77", "SLURM_STEP_ID=0",
        "SLURM_STEP_NUM_NODES=3", "SLURM_STEP_NODELIST=gpu[07-09,12]");
    assert_int_equal(find(&boot, NULL), HDL_OK);
    assert_int_equal(boot.rank, 5);
    assert_string_equal(boot.addr.host, "gpu07");
    SET("SLURM_PROCID=5", "SLURM_NTASKS=8", "SLURM_STEP_NODELIST=a,b");
    assert_int_equal(find(&boot, NULL), HDL_OK);
    assert_string_equal(boot.addr.host, "a");
    SET("PMIX_RANK=3", "SLURM_NTASKS=4", "SLURM_STEP_NUM_NODES=1", "SLURM_PROCID=9");
    assert_int_equal(find(&boot, NULL), HDL_OK);
    assert_int_equal(boot.rank, 3);
    assert_true(boot.single_host);
}

static void bad_values_are_told(void **state)
{
    (void)state;
    struct host_boot boot;
    SET("RANK=4", "WORLD_SIZE=4", "MASTER_ADDR=a", "MASTER_PORT=1");
    assert_int_equal(find(&boot, NULL), HDL_EINVAL);
    assert_non_null(strstr(base_detail(), "RANK is 4"));
    SET("RANK=x", "WORLD_SIZE=4", "MASTER_ADDR=a", "MASTER_PORT=1");
    assert_int_equal(find(&boot, NULL), HDL_EINVAL);
    SET("RANK=-1", "WORLD_SIZE=4", "MASTER_ADDR=a", "MASTER_PORT=1");
    assert_int_equal(find(&boot, NULL), HDL_EINVAL);
    SET("RANK=1", "WORLD_SIZE=0", "MASTER_ADDR=a", "MASTER_PORT=1");
    assert_int_equal(find(&boot, NULL), HDL_EINVAL);
    SET("RANK=1", "WORLD_SIZE=4", "MASTER_ADDR=a");
    assert_int_equal(find(&boot, NULL), HDL_EINVAL);
    SET("RANK=1", "WORLD_SIZE=4", "MASTER_ADDR=a", "MASTER_PORT=65536");
    assert_int_equal(find(&boot, NULL), HDL_EINVAL);
    SET("RANK=1", "WORLD_SIZE=4");
    assert_int_equal(find(&boot, NULL), HDL_EINVAL);
    SET("RANK=1");
    assert_int_equal(find(&boot, NULL), HDL_EINVAL);
    clear();
    struct host_opts opts = {.rank = 2, .num_ranks = 2};
    assert_int_equal(find(&boot, &opts), HDL_EINVAL);
    opts = (struct host_opts){.rank = 1, .num_ranks = 2, .coordinator = "nowhere"};
    assert_int_equal(find(&boot, &opts), HDL_EINVAL);
    opts =
        (struct host_opts){.rank = 1, .num_ranks = 2, .coordinator = "a:1", .token = "z"};
    assert_int_equal(find(&boot, &opts), HDL_EINVAL);
    assert_non_null(strstr(base_detail(), "token"));
}

static void interfaces(void **state)
{
    (void)state;
    struct sockaddr_storage addr;
    char text[64];
    assert_int_equal(host_address_choose("lo", &addr), HDL_OK);
    assert_true(host_address_is_loopback(&addr));
    assert_int_equal(host_address_choose("127.0.0.1", &addr), HDL_OK);
    host_address_numeric(&addr, text, sizeof(text));
    assert_string_equal(text, "127.0.0.1");
    assert_int_equal(host_address_choose("", &addr), HDL_OK);
    assert_int_equal(host_address_choose("^nosuch0,nosuch1", &addr), HDL_OK);
    assert_int_equal(host_address_choose("nosuch0", &addr), HDL_EINVAL);
    assert_int_equal(host_address_choose("192.0.2.77", &addr), HDL_EINVAL);
    if (host_address_choose("^lo", &addr) == HDL_OK)
        assert_false(host_address_is_loopback(&addr));
}

/* ---------------------------------------------------------------- shared directory */

static char directory[64];

static void run_directory(struct job *job, int number)
{
    unsetenv("MASTER_ADDR");
    unsetenv("MASTER_PORT");
    unsetenv("HEDDLE_TOKEN");
    JOB_CHECK(setenv("HEDDLE_SHARED_DIR", directory, 1) == 0);
    if (number == 0)
        usleep(50000); /* the others find the old record first */
    struct job_rank rank;
    job_rank_join(job, number, &rank);
    if (number == 0) {
        char path[128];
        struct stat info;
        snprintf(path, sizeof(path), "%s/heddle-coordinator-0", directory);
        JOB_CHECK(stat(path, &info) == 0 && (info.st_mode & 0777) == 0600);
    }
    job_rank_group(&rank, "world");
    if (job->user) {
        job_ready(job);
        pause();
    }
    job_rank_leave(&rank);
}

static void directory_with_a_killed_jobs_record(void **state)
{
    (void)state;
    strcpy(directory, "/tmp/heddle-boot-XXXXXX");
    assert_non_null(mkdtemp(directory));
    struct job first = {.num_ranks = 3, .run = run_directory, .user = &first};
    job_start(&first);
    job_await_ready(&first, 3);
    for (int i = 0; i < 3; i++)
        kill(first.pids[i], SIGKILL);
    for (int i = 0; i < 3; i++)
        assert_int_equal(job_wait(&first, i), 128 + SIGKILL);
    struct job second = {.num_ranks = 3, .run = run_directory};
    job_start(&second);
    job_finish(&second);
    /* A proper end leaves nothing. */
    assert_int_equal(rmdir(directory), 0);
}

static void records_of_others_are_refused(void **state)
{
    (void)state;
    struct host_boot boot;
    char path[128];
    clear();
    strcpy(directory, "/tmp/heddle-boot-XXXXXX");
    assert_non_null(mkdtemp(directory));
    snprintf(path, sizeof(path), "%s/heddle-coordinator-0", directory);
    struct host_opts opts = {.rank = 1, .num_ranks = 2, .shared_dir = directory};
    struct host_addresses candidates;
    assert_int_equal(find(&boot, &opts), HDL_OK);
    assert_int_equal(host_boot_lookup(&boot, 0, &candidates), HDL_ETIMEDOUT);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs("garbage", file);
    fclose(file);
    assert_int_equal(chmod(path, 0644), 0);
    assert_int_equal(host_boot_lookup(&boot, 0, &candidates), HDL_EINVAL);
    assert_int_equal(chmod(path, 0600), 0);
    assert_int_equal(host_boot_lookup(&boot, 0, &candidates), HDL_EINVAL);
    unlink(path);
    rmdir(directory);
}

/* ----------------------------------------------------------------------- callbacks */

/* A store in shared memory, with a stale record before the first put. */
struct store {
    pthread_mutex_t lock;
    uint32_t filled;
    size_t size[4];
    char keys[4][64];
    uint8_t values[4][512];
};

static enum hdl_status store_put(void *user, const char *key, const void *value,
                                 size_t size)
{
    struct store *store = user;
    pthread_mutex_lock(&store->lock);
    uint32_t at = 0;
    while (at < store->filled && strcmp(store->keys[at], key) != 0)
        at++;
    snprintf(store->keys[at], sizeof(store->keys[at]), "%s", key);
    memcpy(store->values[at], value, size);
    store->size[at] = size;
    if (at == store->filled)
        store->filled++;
    pthread_mutex_unlock(&store->lock);
    return HDL_OK;
}

static enum hdl_status store_get(void *user, const char *key, void *value, size_t *size,
                                 int64_t timeout_us)
{
    struct store *store = user;
    for (int64_t spent = 0; spent <= timeout_us; spent += 1000) {
        pthread_mutex_lock(&store->lock);
        for (uint32_t at = 0; at < store->filled; at++) {
            if (strcmp(store->keys[at], key) != 0 || store->size[at] > *size)
                continue;
            *size = store->size[at];
            memcpy(value, store->values[at], *size);
            pthread_mutex_unlock(&store->lock);
            return HDL_OK;
        }
        pthread_mutex_unlock(&store->lock);
        usleep(1000);
    }
    return HDL_ETIMEDOUT;
}

static void run_callbacks(struct job *job, int number)
{
    clear();
    struct hdl_bootstrap bootstrap = {job->user, store_put, store_get};
    for (int turn = 0; turn < 3; turn++) {
        struct job_rank rank;
        job_rank_env(job, number, &rank);
        struct host_opts opts = {.rank = number,
                                 .num_ranks = job->num_ranks,
                                 .bootstrap = &bootstrap,
                                 .interface = "lo",
                                 .timeout_ns = 10 * BASE_NS_PER_S};
        JOB_CHECK(host_create(&rank.env, &opts, &rank.host) == HDL_OK);
        JOB_CHECK(host_single_host(rank.host));
        job_rank_group(&rank, "world");
        job_rank_leave(&rank);
    }
}

static void callbacks_with_stale_values(void **state)
{
    (void)state;
    struct store *store = mmap(NULL, sizeof(*store), PROT_READ | PROT_WRITE,
                               MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(store, MAP_FAILED);
    pthread_mutexattr_t shared;
    pthread_mutexattr_init(&shared);
    pthread_mutexattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&store->lock, &shared);
    /* Twice with the same store: the second job finds the first one's values. */
    for (int turn = 0; turn < 2; turn++) {
        struct job job = {.num_ranks = 3, .run = run_callbacks, .user = store};
        job_start(&job);
        job_finish(&job);
    }
    munmap(store, sizeof(*store));
}

static enum hdl_status boastful_get(void *user, const char *key, void *value,
                                    size_t *size, int64_t timeout_us)
{
    *size += 100000;
    return HDL_OK;
}

static void callbacks_that_say_too_much(void **state)
{
    struct base_env env;
    struct host *host;
    base_env_init(&env);
    struct hdl_bootstrap bootstrap = {NULL, store_put, boastful_get};
    struct host_opts opts = {.rank = 1, .num_ranks = 2, .bootstrap = &bootstrap};
    clear();
    assert_int_equal(host_create(&env, &opts, &host), HDL_EINVAL);
    assert_non_null(strstr(base_detail(), "there is room for"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(job_of_one_without_launcher),
        cmocka_unit_test(torchrun),
        cmocka_unit_test(open_mpi),
        cmocka_unit_test(pmi_and_slurm),
        cmocka_unit_test(bad_values_are_told),
        cmocka_unit_test(interfaces),
        cmocka_unit_test(directory_with_a_killed_jobs_record),
        cmocka_unit_test(records_of_others_are_refused),
        cmocka_unit_test(callbacks_with_stale_values),
        cmocka_unit_test(callbacks_that_say_too_much),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
