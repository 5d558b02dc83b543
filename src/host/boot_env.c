/* SPDX-License-Identifier: Apache-2.0 */
/* What launchers tell through the environment: torchrun, Open MPI, PMI and PMIx, Slurm.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sodium.h>

#include "base/bytes.h"
#include "base/log.h"
#include "host/boot.h"

/*
 *     launcher   rank                   ranks                  ranks of this host
 *     torchrun   RANK                   WORLD_SIZE             LOCAL_WORLD_SIZE
 *     Open MPI   OMPI_COMM_WORLD_RANK   OMPI_COMM_WORLD_SIZE   OMPI_COMM_WORLD_LOCAL_SIZE
 *     PMI        PMI_RANK               PMI_SIZE               MPI_LOCALNRANKS
 *     PMIx       PMIX_RANK              SLURM_NTASKS           SLURM_STEP_NUM_TASKS...
 *     Slurm      SLURM_PROCID           SLURM_NTASKS           (SLURM_STEP_NUM_NODES 1)
 */
struct launcher {
    const char *name;
    const char *rank;
    const char *size;
    const char *local_size;
};

static const struct launcher launchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"},
    {"PMIx", "PMIX_RANK", "SLURM_NTASKS", ""},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", ""},
};

/* First port of launchers that name none; below the range of ephemeral ports. */
enum { PORT_FIRST = 12000, PORT_SPAN = 18000 };

static const char *variable(const char *name)
{
    const char *value = name[0] ? getenv(name) : NULL;
    return value && value[0] ? value : NULL;
}

static enum hdl_status read_number(const char *name, uint32_t limit, uint32_t *out)
{
    const char *text = variable(name);
    uint32_t value;
    if (!text || base_parse_u32(text, &value) != HDL_OK || value > limit)
        return base_fail(HDL_EINVAL, "%s is \"%s\", not a number up to %u", name,
                         text ? text : "", limit);
    *out = value;
    return HDL_OK;
}

static const struct launcher *find_launcher(void)
{
    for (size_t i = 0; i < sizeof(launchers) / sizeof(launchers[0]); i++)
        if (variable(launchers[i].rank) && variable(launchers[i].size))
            return &launchers[i];
    return NULL;
}

static enum hdl_status read_ranks(struct host_boot *boot, const struct launcher *launcher)
{
    uint32_t rank = 0, size = 0;
    enum hdl_status status = read_number(launcher->size, INT32_MAX, &size);
    if (status == HDL_OK)
        status = read_number(launcher->rank, INT32_MAX, &rank);
    if (status)
        return status;
    if (rank >= size)
        return base_fail(HDL_EINVAL, "%s is %u, but %s is %u", launcher->rank, rank,
                         launcher->size, size);
    boot->rank = (int32_t)rank;
    boot->num_ranks = (int32_t)size;
    return HDL_OK;
}

static void note_single_host(struct host_boot *boot, const struct launcher *launcher)
{
    uint32_t local = 0;
    const char *nodes = variable("SLURM_STEP_NUM_NODES");
    if (variable(launcher->local_size) &&
        read_number(launcher->local_size, INT32_MAX, &local) == HDL_OK)
        boot->single_host = local == (uint32_t)boot->num_ranks;
    else if (strncmp(launcher->rank, "SLURM", 5) == 0 ||
             strncmp(launcher->rank, "PMIX", 4) == 0)
        boot->single_host = nodes && strcmp(nodes, "1") == 0;
}

/* "node[07-09,12]" or "a,b": the first name. */
static bool first_node(const char *list, char *out, size_t size)
{
    size_t used = 0;
    const char *at = list;
    for (; *at && *at != ',' && *at != '['; at++) {
        if (used + 1 >= size)
            return false;
        out[used++] = *at;
    }
    if (*at == '[')
        for (at++; *at && *at != ',' && *at != '-' && *at != ']'; at++) {
            if (used + 1 >= size)
                return false;
            out[used++] = *at;
        }
    out[used] = 0;
    return used > 0;
}

/* "3417112576.0;tcp://10.0.0.5,172.17.0.1:41235;...": the first address. */
static bool first_tcp_address(const char *uri, char *out, size_t size)
{
    const char *at = uri ? strstr(uri, "tcp://") : NULL;
    if (!at)
        return false;
    at += strlen("tcp://");
    size_t used = strcspn(at, ",:;/");
    if (used == 0 || used >= size)
        return false;
    memcpy(out, at, used);
    out[used] = 0;
    return true;
}

/* What all processes of a launch share and no other launch has, as far as there is one.
 */
static const char *job_name(void)
{
    static const char *const names[] = {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid",
                                        "PMI_JOBID", "SLURM_JOB_ID"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (variable(names[i]))
            return variable(names[i]);
    return NULL;
}

static uint16_t job_port(void)
{
    uint8_t hash[16];
    const char *parts[] = {job_name(), variable("SLURM_STEP_ID")};
    crypto_generichash_state state;
    (void)crypto_generichash_init(&state, NULL, 0, 16);
    for (size_t i = 0; i < 2; i++)
        if (parts[i])
            (void)crypto_generichash_update(&state, (const uint8_t *)parts[i],
                                            strlen(parts[i]) + 1);
    (void)crypto_generichash_final(&state, hash, sizeof(hash));
    struct base_reader reader;
    base_reader_init(&reader, hash, sizeof(hash));
    return (uint16_t)(PORT_FIRST + base_read_u64(&reader) % PORT_SPAN);
}

static enum hdl_status launcher_address(struct host_boot *boot)
{
    char *host = boot->addr.host;
    size_t size = sizeof(boot->addr.host);
    const char *nodes = variable("SLURM_STEP_NODELIST");
    if (!nodes)
        nodes = variable("SLURM_JOB_NODELIST");
    bool found = true;
    if (boot->single_host)
        (void)snprintf(host, size, "127.0.0.1");
    else if (strcmp(boot->source, "Open MPI") == 0)
        found = first_tcp_address(variable("OMPI_MCA_orte_hnp_uri"), host, size) ||
                first_tcp_address(variable("PMIX_SERVER_URI2"), host, size);
    else
        found = nodes && first_node(nodes, host, size);
    if (!found)
        return base_fail(HDL_EINVAL,
                         "%s gives no address for the coordinator: set MASTER_ADDR and "
                         "MASTER_PORT, or HEDDLE_COORDINATOR",
                         boot->source);
    boot->addr.port = job_port();
    boot->mode = HOST_BOOT_RANGE;
    return HDL_OK;
}

static enum hdl_status master_address(struct host_boot *boot)
{
    const char *host = variable("MASTER_ADDR");
    if (strlen(host) >= sizeof(boot->addr.host))
        return base_fail(HDL_EINVAL, "MASTER_ADDR has %zu characters", strlen(host));
    uint32_t port = 0;
    enum hdl_status status = read_number("MASTER_PORT", 65535, &port);
    if (status)
        return status;
    if (port == 0)
        return base_fail(HDL_EINVAL, "MASTER_PORT is 0");
    (void)snprintf(boot->addr.host, sizeof(boot->addr.host), "%s", host);
    boot->addr.port = (uint16_t)port;
    boot->mode = HOST_BOOT_RANGE;
    return HDL_OK;
}

enum hdl_status host_boot_ranks(struct host_boot *boot)
{
    const struct launcher *launcher = find_launcher();
    if (!launcher) {
        if (variable("RANK") || variable("WORLD_SIZE"))
            return base_fail(HDL_EINVAL, "RANK and WORLD_SIZE must be set together");
        boot->rank = 0;
        boot->num_ranks = 1;
        return HDL_OK;
    }
    (void)snprintf(boot->source, sizeof(boot->source), "%s", launcher->name);
    enum hdl_status status = read_ranks(boot, launcher);
    if (status == HDL_OK)
        note_single_host(boot, launcher);
    return status;
}

void host_boot_note_launcher(struct host_boot *boot)
{
    const struct launcher *launcher = find_launcher();
    uint32_t size = 0;
    if (launcher && read_number(launcher->size, INT32_MAX, &size) == HDL_OK &&
        size == (uint32_t)boot->num_ranks)
        note_single_host(boot, launcher);
}

enum hdl_status host_boot_place(struct host_boot *boot)
{
    if (variable("MASTER_ADDR"))
        return master_address(boot);
    const struct launcher *launcher = find_launcher();
    if (launcher && launcher != &launchers[0]) {
        (void)snprintf(boot->source, sizeof(boot->source), "%s", launcher->name);
        return launcher_address(boot);
    }
    return base_fail(
        HDL_EINVAL,
        "rank %d of %d has no way to find the coordinator: set MASTER_ADDR and "
        "MASTER_PORT, HEDDLE_COORDINATOR or HEDDLE_SHARED_DIR",
        boot->rank, boot->num_ranks);
}

void host_boot_derive_token(struct host_boot *boot)
{
    crypto_generichash_state state;
    uint8_t number[8];
    struct base_writer writer;
    base_writer_init(&writer, number, sizeof(number));
    base_write_u32(&writer, boot->standalone ? 0 : (uint32_t)boot->num_ranks);
    base_write_u32(&writer, boot->addr.port);
    const char *parts[] = {"heddle derived token", boot->addr.host,
                           variable("TORCHELASTIC_RUN_ID"), job_name(),
                           variable("SLURM_STEP_ID")};
    (void)crypto_generichash_init(&state, NULL, 0, HOST_TOKEN_BYTES);
    (void)crypto_generichash_update(&state, number, sizeof(number));
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        const char *part = parts[i] ? parts[i] : "";
        (void)crypto_generichash_update(&state, (const uint8_t *)part, strlen(part) + 1);
    }
    (void)crypto_generichash_final(&state, boot->token, HOST_TOKEN_BYTES);
    boot->has_token = true;
    base_log_info(boot->env,
                  "no token given: derived from the job's public data; who can "
                  "guess that can join (set HEDDLE_TOKEN)");
}
