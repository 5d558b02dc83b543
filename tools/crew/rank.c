/* SPDX-License-Identifier: Apache-2.0 */
/* A rank of the crew: loops over operations, checks every result, obeys commands. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/random.h"
#include "heddle.h"
#include "tools/crew/crew.h"
#include "tools/crew/moe.h"

/*
 * Elements come in pairs: a bit for each rank that took part, and a number that only the
 * ranks of this operation can have made. So a missing, stale or foreign contribution
 * shows.
 *
 *     even  1 << 4 * rank          odd  number * (rank + 1) + i
 */
enum { RECORD_FD = 3, PAIRS_MAX = 65536, MOE_PERIOD = 64, MOE_STEP = 8 };

static struct {
    struct hdl_context *context;
    struct hdl_group *group;
    int rank, ranks;
    uint32_t serial;
    uint64_t seed;
    bool mix;
    const char *mode, *defect;
    int64_t pause_us;
    int64_t before_ns;
    uint64_t told; /* epoch of the view */
    atomic_bool stop;
    atomic_uint batches;    /* asked for */
    pthread_mutex_t change; /* no change of members while the group is made anew */
    int64_t src[2 * PAIRS_MAX], dst[2 * PAIRS_MAX];
} self;

static void emit(struct crew_record *record)
{
    record->rank = (uint32_t)self.rank;
    record->serial = self.serial;
    record->time_ns = base_now_ns();
    const char *at = (const char *)record;
    size_t left = sizeof(*record);
    while (left > 0) {
        ssize_t n = write(RECORD_FD, at, left);
        if (n < 0 && errno != EINTR)
            _exit(9); /* the supervisor is gone */
        if (n > 0) {
            at += n;
            left -= (size_t)n;
        }
    }
}

static void __attribute__((format(printf, 2, 3)))
say(enum crew_what what, const char *format, ...)
{
    struct crew_record record = {.what = what};
    va_list args;
    va_start(args, format);
    vsnprintf(record.text, sizeof(record.text), format, args);
    va_end(args);
    emit(&record);
}

static uint64_t mix64(uint64_t x)
{
    return base_splitmix_next(&x);
}

static enum crew_kind kind_of(uint64_t number)
{
    if (!self.mix)
        return CREW_ALLREDUCE_4K;
    return (enum crew_kind)(mix64(number ^ self.seed) % CREW_KINDS);
}

static size_t pairs_of(enum crew_kind kind)
{
    switch (kind) {
    case CREW_ALLREDUCE_1M:
        return PAIRS_MAX;
    case CREW_ALLREDUCE_4K:
    case CREW_BROADCAST:
        return 256;
    default:
        return 1;
    }
}

static void fill(uint64_t number, size_t pairs)
{
    for (size_t i = 0; i < pairs; i++) {
        self.src[2 * i] = INT64_C(1) << (4 * self.rank);
        self.src[2 * i + 1] = (int64_t)number * (self.rank + 1) + (int64_t)i;
    }
    /* A gathered result is longer, and short. */
    memset(self.dst, 0xff, 2 * sizeof(int64_t) * (pairs > 1 ? pairs : CREW_RANKS_MAX));
}

/* The ranks whose contributions are in a pair of sums; UINT64_MAX if it is none. */
static uint64_t ranks_in(const int64_t *pair, uint64_t number, size_t i)
{
    uint64_t mask = 0;
    int64_t sum = 0, bits = 0;
    for (int r = 0; r < self.ranks; r++) {
        if (!(pair[0] >> (4 * r) & 1))
            continue;
        mask |= UINT64_C(1) << r;
        bits |= INT64_C(1) << (4 * r);
        sum += (int64_t)number * (r + 1) + (int64_t)i;
    }
    return bits == pair[0] && sum == pair[1] ? mask : UINT64_MAX;
}

static bool untouched(const int64_t *data, size_t words)
{
    for (size_t i = 0; i < words; i++)
        if (data[i] != -1)
            return false;
    return true;
}

static bool add_run(struct crew_record *r, size_t end, uint64_t ranks)
{
    struct crew_run *run = &r->op.run[r->op.runs];
    if (r->op.runs > 0 && run[-1].ranks == ranks) {
        run[-1].end = (uint32_t)end;
        return true;
    }
    if (ranks == UINT64_MAX || r->op.runs == CREW_RUNS)
        return false;
    *run = (struct crew_run){(uint32_t)end, (uint32_t)ranks};
    r->op.runs++;
    return true;
}

/* Ranks are lost from one chunk on. */
static bool read_sums(struct crew_record *r, size_t pairs, size_t *at)
{
    for (size_t i = *at = 0; i < pairs; *at = ++i)
        if (!add_run(r, i + 1, ranks_in(self.dst + 2 * i, r->op.number, i)))
            return false;
    return true;
}

static bool read_blocks(struct crew_record *r, size_t *at)
{
    uint64_t ranks = 0;
    for (int k = 0; k < self.ranks; k++) {
        const int64_t *pair = self.dst + 2 * k;
        *at = (size_t)k;
        if (untouched(pair, 2))
            continue;
        if (ranks_in(pair, r->op.number, 0) != UINT64_C(1) << k)
            return false;
        ranks |= UINT64_C(1) << k;
    }
    return add_run(r, 1, ranks);
}

/* All or a prefix of the root's data; what follows is untouched. */
static bool read_root(struct crew_record *r, int root, size_t pairs, size_t *at)
{
    size_t i = 0;
    while (i < pairs && ranks_in(self.dst + 2 * i, r->op.number, i) == UINT64_C(1)
                                                                           << root)
        i++;
    *at = i;
    if (i > 0)
        (void)add_run(r, i, 0);
    return untouched(self.dst + 2 * i, 2 * (pairs - i)) &&
           (r->status != HDL_OK || i == pairs);
}

static enum hdl_status call(enum crew_kind kind, size_t pairs, int root)
{
    switch (kind) {
    case CREW_BROADCAST:
        return hdl_broadcast(self.group, self.src, self.dst, 2 * pairs, HDL_I64, root,
                             NULL, NULL);
    case CREW_ALLGATHER:
        return hdl_allgather(self.group, self.src, self.dst, 2, HDL_I64, NULL, NULL);
    case CREW_BARRIER:
        return hdl_barrier(self.group, NULL, NULL);
    default:
        return hdl_allreduce(self.group, self.src, self.dst, 2 * pairs, HDL_I64, HDL_SUM,
                             NULL, NULL);
    }
}

/* False: the pair at *at is wrong. */
static bool read_result(struct crew_record *r, size_t pairs, int root, size_t *at)
{
    switch ((enum crew_kind)r->op.kind) {
    case CREW_BARRIER:
        return true;
    case CREW_BROADCAST:
        return read_root(r, root, pairs, at);
    case CREW_ALLGATHER:
        return read_blocks(r, at);
    default:
        return read_sums(r, pairs, at);
    }
}

/* Each sends to the next of those who took part and receives from the one before. */
static void exchange(const struct crew_record *r)
{
    int next = self.rank, before = self.rank;
    do
        next = (next + 1) % self.ranks;
    while (!(crew_ranks(r) >> next & 1));
    do
        before = (before + self.ranks - 1) % self.ranks;
    while (!(crew_ranks(r) >> before & 1));
    if (next == self.rank)
        return;
    int64_t out[2] = {self.rank, (int64_t)r->op.number}, in[2] = {-1, -1};
    int tag = (int)(r->op.number % 1000000);
    struct hdl_op *op;
    enum hdl_status sent = hdl_send(self.group, out, 2, HDL_I64, next, tag, NULL, &op);
    if (sent == HDL_OK) {
        enum hdl_status got =
            hdl_recv(self.group, in, 2, HDL_I64, before, tag, NULL, NULL);
        sent = hdl_op_wait(op, HDL_FOREVER);
        hdl_op_free(op);
        if (got == HDL_OK && (in[0] != before || in[1] != out[1]))
            say(CREW_WRONG, "message of operation %ld from rank %d is %ld of %ld",
                (long)out[1], before, (long)in[0], (long)in[1]);
    }
}

/* Links the exchange at numbers that all members know, and makes steps in between. A
 * failure is not the end: the next link tries again. */
static enum hdl_status exchange_step(uint64_t number)
{
    const char *wrong = NULL;
    enum hdl_status status = HDL_OK;
    if (number % MOE_PERIOD == 0)
        status = crew_moe_link(self.group, self.ranks);
    else if (number % MOE_STEP == 0)
        status = crew_moe_step(self.rank, self.ranks, number, &wrong);
    if (wrong)
        say(CREW_WRONG, "exchange at %lu: %.80s", (unsigned long)number, wrong);
    else if (status == HDL_EINVAL || status == HDL_ECONFIG || status == HDL_EORDER ||
             status == HDL_EINTERNAL)
        say(CREW_WRONG, "exchange at %lu: %s: %.70s", (unsigned long)number,
            hdl_status_name(status), hdl_error_detail());
    return status == HDL_ENOTMEMBER || status == HDL_EFENCED || status == HDL_ECOORD
               ? status
               : HDL_OK;
}

/* HDL_OK, or why the loop cannot go on as it is. */
static enum hdl_status one(void)
{
    struct crew_record r = {.what = CREW_OP};
    if (self.mix) {
        enum hdl_status linked = exchange_step(hdl_group_next(self.group));
        if (linked != HDL_OK)
            return linked;
    }
    r.op.number = hdl_group_next(self.group);
    enum crew_kind kind = kind_of(r.op.number);
    r.op.kind = (uint16_t)kind;
    size_t pairs = pairs_of(kind);
    int root = (int)(mix64(r.op.number * 7 + self.seed) % (uint64_t)self.ranks);
    r.op.root = (uint16_t)root;
    fill(r.op.number, pairs);
    enum hdl_status status = call(kind, pairs, root);
    r.status = status;
    (void)hdl_last_failed(&r.op.failed, 1);
    if (status < 0 && status != HDL_EPEER)
        return status;
    if (self.defect && strcmp(self.defect, "byte") == 0 && r.op.number >= 100 &&
        self.rank == 1 && pairs > 0 && kind != CREW_BARRIER) {
        self.dst[1] ^= 4;
        self.defect = NULL;
    }
    int64_t now = base_now_ns();
    r.op.gap_ns = self.before_ns ? now - self.before_ns : 0;
    self.before_ns = now;
    size_t at = 0;
    if (!read_result(&r, pairs, root, &at))
        say(CREW_WRONG, "operation %lu, %s: %s: pair %zu is %lx %lx after %u runs, %s",
            (unsigned long)r.op.number, crew_kind_name(kind), hdl_status_name(status), at,
            (unsigned long)self.dst[2 * at], (unsigned long)self.dst[2 * at + 1],
            r.op.runs, crew_list(r.op.run[0].ranks).text);
    size_t words = 2 * (kind == CREW_ALLGATHER ? (size_t)self.ranks : pairs);
    for (size_t i = 0; i < words && kind != CREW_BARRIER; i++)
        r.op.hash = mix64(r.op.hash ^ (uint64_t)self.dst[i]);
    crew_tell_view(self.group, &self.told, emit);
    emit(&r);
    if (self.mix && kind == CREW_ALLREDUCE_8B && crew_ranks(&r) >> self.rank & 1)
        exchange(&r);
    return HDL_OK;
}

static enum hdl_status join(uint64_t *first)
{
    enum hdl_status status;
    say(CREW_SAY, "ready");
    do
        status = hdl_group_join(self.group, 2000000, first);
    while ((status == HDL_ETIMEDOUT || status == HDL_EINVAL || status == HDL_EPEER) &&
           !self.stop);
    return status;
}

static void join_again(void)
{
    uint64_t first = 0;
    crew_moe_close();
    (void)pthread_mutex_lock(&self.change);
    enum hdl_status status = join(&first);
    /* Not into the middle of the members' link: out again, and in later. */
    while (self.mix && status == HDL_OK && first % MOE_PERIOD > 0 &&
           first % MOE_PERIOD < CREW_MOE_OPS) {
        status = hdl_group_leave(self.group, 5000000);
        if (status == HDL_OK)
            status = join(&first);
    }
    (void)pthread_mutex_unlock(&self.change);
    if (status == HDL_OK)
        say(CREW_SAY, "joined %lu", (unsigned long)first);
    else if (!self.stop)
        say(CREW_WRONG, "join: %s: %.80s", hdl_status_name(status), hdl_error_detail());
    self.before_ns = 0;
}

/* A batch, what idling costs, then a batch for each command. */
static enum hdl_status quiet_loop(void)
{
    for (unsigned batch = 0; !self.stop; batch++) {
        struct crew_record r = {.what = CREW_OP};
        while (batch > self.batches && !self.stop)
            usleep(200);
        r.op.number = hdl_group_next(self.group);
        r.op.runs = 1;
        r.op.run[0].ranks = (UINT32_C(1) << self.ranks) - 1;
        enum hdl_status status =
            self.stop ? HDL_OK : crew_batch(self.group, &r.op.gap_ns);
        if (status != HDL_OK || self.stop)
            return self.stop ? HDL_OK : status;
        emit(&r);
        if (batch > 0)
            continue;
        struct crew_quiet quiet = {0};
        crew_measure_quiet(self.context, self.group, &quiet);
        say(CREW_SAY, "quiet %.3f %.4f %.4f", quiet.view_ns, quiet.cpu_ms,
            quiet.control_kb);
    }
    return HDL_OK;
}

/* Like a data loader's workers: they keep what was open, and outlive their parent. */
static void fork_children(void)
{
    for (int i = 0; i < 2; i++) {
        if (fork() != 0)
            continue;
        (void)close(STDIN_FILENO);
        (void)close(STDOUT_FILENO);
        (void)close(STDERR_FILENO);
        (void)close(RECORD_FD);
        sleep(2);
        _exit(0);
    }
}

/* As the line says: "evict R" or "admit R". */
static enum hdl_status change_members(const char *line)
{
    int32_t rank = -1;
    (void)pthread_mutex_lock(&self.change);
    enum hdl_status status = HDL_OK;
    if (sscanf(line, "evict %d", &rank) == 1)
        status = hdl_group_evict(self.group, &rank, 1, 5000000);
    else if (sscanf(line, "admit %d", &rank) == 1)
        status = hdl_group_admit(self.group, &rank, 1, 5000000, NULL);
    (void)pthread_mutex_unlock(&self.change);
    return status;
}

/* Not with stdio: at exit some C libraries wait for a stream that a thread still reads.
 */
static bool read_line(char *line, size_t room)
{
    size_t n = 0;
    while (n + 1 < room && read(STDIN_FILENO, &line[n], 1) == 1 && line[n] != '\n')
        n++;
    line[n] = 0;
    return n > 0;
}

/* Commands, which block, have a thread of their own. */
static void *obey(void *argument)
{
    char line[64];
    (void)argument;
    while (read_line(line, sizeof(line))) {
        enum hdl_status status = HDL_OK;
        if (strncmp(line, "evict", 5) == 0 || strncmp(line, "admit", 5) == 0)
            status = change_members(line);
        else if (strcmp(line, "dump") == 0)
            status = hdl_context_dump(self.context, STDERR_FILENO);
        else if (strcmp(line, "batch") == 0)
            self.batches++;
        else if (strcmp(line, "fork") == 0)
            fork_children();
        else if (strcmp(line, "exit") == 0)
            _exit(0);
        else if (strcmp(line, "stop") == 0)
            self.stop = true;
        say(CREW_SAY, "done %s %s", line, hdl_status_name(status));
    }
    self.stop = true;
    return NULL;
}

static int64_t number_of(const char *name)
{
    const char *text = getenv(name);
    return text ? strtoll(text, NULL, 10) : 0;
}

static bool enter(void)
{
    enum hdl_status status;
    int64_t until = base_now_ns() + 20 * BASE_NS_PER_S;
    struct hdl_context_opts opts = {.size = sizeof(opts),
                                    .rank = self.rank,
                                    .num_ranks = self.ranks,
                                    .dead_after_us = number_of("CREW_DEAD_AFTER")};
    do
        status = hdl_context_create(&opts, &self.context);
    while (status == HDL_EINVAL && base_now_ns() < until);
    struct hdl_group_opts group = {.size = sizeof(group),
                                   .join = number_of("CREW_JOIN") != 0};
    if (status == HDL_OK)
        do
            status = hdl_group_create(self.context, &group, &self.group);
        while (status == HDL_EINVAL && group.join && base_now_ns() < until);
    if (status != HDL_OK)
        say(CREW_WRONG, "start: %s: %.80s", hdl_status_name(status), hdl_error_detail());
    return status == HDL_OK;
}

static bool step_over(enum hdl_status status)
{
    if (status == HDL_ENOTMEMBER || status == HDL_EFENCED) {
        if (status == HDL_EFENCED)
            say(CREW_SAY, "fenced");
        join_again();
        return true;
    }
    if (status == HDL_ECOORD)
        say(CREW_SAY, "orphan");
    else
        say(CREW_WRONG, "loop ended: %s: %.70s", hdl_status_name(status),
            hdl_error_detail());
    return false;
}

int crew_rank_main(void)
{
    self.rank = (int)number_of("RANK");
    self.ranks = (int)number_of("WORLD_SIZE");
    self.serial = (uint32_t)number_of("CREW_SERIAL");
    self.seed = (uint64_t)number_of("CREW_SEED");
    self.pause_us = number_of("CREW_PAUSE");
    self.mode = getenv("CREW_MODE") ? getenv("CREW_MODE") : "mix";
    self.defect = getenv("CREW_DEFECT");
    self.mix = strcmp(self.mode, "mix") == 0;
    if (!enter())
        return 1;
    pthread_t thread;
    (void)pthread_mutex_init(&self.change, NULL);
    if (pthread_create(&thread, NULL, obey, NULL) != 0)
        return 1;
    if (number_of("CREW_JOIN"))
        join_again();
    else
        say(CREW_SAY, "joined 1");
    if (strcmp(self.mode, "quiet") == 0 && quiet_loop() != HDL_OK)
        say(CREW_WRONG, "quiet: %.90s", hdl_error_detail());
    while (!self.stop) {
        enum hdl_status status = one();
        if (status != HDL_OK && !step_over(status))
            break;
        if (self.pause_us)
            usleep((useconds_t)self.pause_us);
    }
    uint64_t steps, incomplete;
    crew_moe_count(&steps, &incomplete);
    say(CREW_SAY, "steps %lu %lu", (unsigned long)steps, (unsigned long)incomplete);
    crew_moe_close();
    (void)pthread_mutex_lock(&self.change); /* for good */
    hdl_group_destroy(self.group);
    hdl_context_destroy(self.context);
    say(CREW_SAY, "end");
    return 0;
}
