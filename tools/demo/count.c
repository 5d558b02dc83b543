/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `heddle demo --words`: N ranks count the words of a text file and check every step.
 *
 *     rank 0      text --broadcast--> length, cuts     --scatter--> a piece for each rank
 *     each rank   counts its piece
 *     all         --all_reduce--> one table of sums by hash
 *                 --all_gather--> all tables, so everybody has every word
 *     each rank   takes the words that its hash range owns, orders them
 *                 --all_to_all--> most frequent words to rank 0, ... rarest to the last
 *     all         --gather--> the ordered list, compared with what one process finds
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "heddle.h"
#include "tools/commands.h"
#include "tools/launch.h"
#include "tools/options.h"
#include "tools/demo/words.h"

enum {
    DEMO_STEPS = 8,
    DEMO_BUCKETS = 4096,
    DEMO_TOP = 10,
    DEMO_RANKS_MAX = LAUNCH_RANKS_MAX
};

struct step {
    const char *name;
    int64_t bytes;     /* moved between ranks, sum over them */
    int64_t ns;        /* slowest rank */
    int64_t single_ns; /* the same work in one process, measured on rank 0 */
    int64_t wrong;
};

struct demo {
    const char *path;
    struct hdl_context *context;
    struct hdl_group *group;
    size_t rank, ranks;
    char *text; /* whole file: every rank reads it, to check what it was sent */
    size_t length;
    size_t counts[DEMO_RANKS_MAX], displs[DEMO_RANKS_MAX];
    char *piece;
    size_t piece_bytes;
    struct words own, whole; /* of the piece; of all, from the gathered tables */
    struct words reference;  /* of the whole text, by one process */
    struct word *ordered;    /* reference list in order */
    struct word *share;      /* own part of the ordered list */
    size_t share_count;
    struct step steps[DEMO_STEPS];
    size_t num_steps;
};

/* --------------------------------------------------------------------------- steps */

static int broken(const struct demo *demo, const char *what, enum hdl_status status)
{
    return tool_failed("rank %zu: %s: %s: %s", demo->rank, what, hdl_status_name(status),
                       hdl_error_detail());
}

static int no_memory(void)
{
    return tool_failed("out of memory");
}

/* Sums bytes and faults over the ranks, and takes the slowest one's time. */
static int finish_step(struct demo *demo, const char *name, size_t bytes, int64_t started,
                       int64_t single_ns, bool good)
{
    int64_t sums[2] = {(int64_t)bytes, good ? 0 : 1};
    int64_t ns = base_now_ns() - started;
    if (!good)
        tool_failed("rank %zu: the result of %s differs", demo->rank, name);
    enum hdl_status status =
        hdl_allreduce(demo->group, sums, sums, 2, HDL_I64, HDL_SUM, NULL, NULL);
    if (status == HDL_OK)
        status = hdl_allreduce(demo->group, &ns, &ns, 1, HDL_I64, HDL_MAX, NULL, NULL);
    if (status != HDL_OK)
        return broken(demo, "all_reduce", status);
    demo->steps[demo->num_steps++] = (struct step){name, sums[0], ns, single_ns, sums[1]};
    return TOOL_OK;
}

static int read_text(struct demo *demo)
{
    FILE *file = fopen(demo->path, "re");
    if (!file)
        return tool_failed("cannot read '%s': %s", demo->path, strerror(errno));
    size_t room = 1 << 16;
    char *text = malloc(room);
    while (text) {
        demo->length += fread(text + demo->length, 1, room - demo->length, file);
        if (demo->length < room)
            break;
        room *= 2;
        char *larger = realloc(text, room);
        if (!larger)
            free(text);
        text = larger;
    }
    bool failed = ferror(file);
    fclose(file);
    demo->text = text;
    if (!text)
        return no_memory();
    if (failed)
        return tool_failed("cannot read '%s': %s", demo->path, strerror(errno));
    if (demo->length == 0)
        return tool_failed("'%s' is empty", demo->path);
    return TOOL_OK;
}

static int step_broadcast(struct demo *demo)
{
    uint64_t wanted[DEMO_RANKS_MAX + 1] = {0}, cuts[DEMO_RANKS_MAX + 1] = {0};
    for (size_t r = 0; r <= demo->ranks; r++)
        wanted[r] =
            words_boundary(demo->text, demo->length, demo->length / demo->ranks * r);
    wanted[demo->ranks] = demo->length;
    if (demo->rank == 0)
        memcpy(cuts, wanted, sizeof(cuts));
    int64_t start = base_now_ns();
    enum hdl_status status =
        hdl_broadcast(demo->group, cuts, cuts, demo->ranks + 1, HDL_U64, 0, NULL, NULL);
    if (status != HDL_OK)
        return broken(demo, "broadcast", status);
    size_t bytes = demo->rank == 0 ? 0 : (demo->ranks + 1) * sizeof(cuts[0]);
    if (finish_step(demo, "broadcast of the cuts", bytes, start, 0,
                    memcmp(cuts, wanted, sizeof(cuts)) == 0) != TOOL_OK)
        return TOOL_FAILED;
    if (memcmp(cuts, wanted, sizeof(cuts)) != 0)
        return tool_failed("rank %zu reads another '%s' than rank 0", demo->rank,
                           demo->path);
    for (size_t r = 0; r < demo->ranks; r++) {
        demo->displs[r] = (size_t)cuts[r];
        demo->counts[r] = (size_t)(cuts[r + 1] - cuts[r]);
    }
    return TOOL_OK;
}

static int step_scatter(struct demo *demo)
{
    demo->piece_bytes = demo->counts[demo->rank];
    demo->piece = calloc(demo->length + 1, 1);
    if (!demo->piece)
        return no_memory();
    int64_t start = base_now_ns();
    memcpy(demo->piece, demo->text, demo->length);
    int64_t single = base_now_ns() - start;
    memset(demo->piece, 0, demo->length);
    start = base_now_ns();
    enum hdl_status status =
        hdl_scatterv(demo->group, demo->rank == 0 ? demo->text : NULL, demo->counts,
                     demo->displs, demo->piece, HDL_U8, 0, NULL, NULL);
    if (status != HDL_OK)
        return broken(demo, "scatter", status);
    bool good = memcmp(demo->piece, demo->text + demo->displs[demo->rank],
                       demo->piece_bytes) == 0;
    return finish_step(demo, "scatter of the text",
                       demo->rank == 0 ? 0 : demo->piece_bytes, start, single, good);
}

static int step_count(struct demo *demo)
{
    int64_t start = base_now_ns();
    if (!words_open(&demo->reference) ||
        !words_count(&demo->reference, demo->text, demo->length))
        return no_memory();
    int64_t single = base_now_ns() - start;
    /* The reference above is not part of the ranks' common work. */
    enum hdl_status status = hdl_barrier(demo->group, NULL, NULL);
    if (status != HDL_OK)
        return broken(demo, "barrier", status);
    start = base_now_ns();
    if (!words_open(&demo->own) ||
        !words_count(&demo->own, demo->piece, demo->piece_bytes))
        return no_memory();
    return finish_step(demo, "counting (no data moves)", 0, start, single, true);
}

static void fill_buckets(const struct words *words, uint64_t *bucket)
{
    for (size_t i = 0; i < words->room; i++)
        bucket[word_hash(words->place[i].text) % DEMO_BUCKETS] += words->place[i].count;
}

static int step_allreduce(struct demo *demo)
{
    static uint64_t bucket[DEMO_BUCKETS], wanted[DEMO_BUCKETS];
    fill_buckets(&demo->reference, wanted);
    fill_buckets(&demo->own, bucket);
    static uint64_t single_sum[DEMO_BUCKETS];
    int64_t start = base_now_ns();
    for (size_t r = 0; r < demo->ranks; r++)
        for (size_t i = 0; i < DEMO_BUCKETS; i++)
            single_sum[i] += bucket[i];
    int64_t single = base_now_ns() - start;
    start = base_now_ns();
    enum hdl_status status = hdl_allreduce(demo->group, bucket, bucket, DEMO_BUCKETS,
                                           HDL_U64, HDL_SUM, NULL, NULL);
    if (status != HDL_OK)
        return broken(demo, "all_reduce", status);
    return finish_step(demo, "all_reduce of the sums",
                       demo->ranks > 1 ? sizeof(bucket) : 0, start, single,
                       memcmp(bucket, wanted, sizeof(bucket)) == 0);
}

/* Adds all gathered records, and says whether the tables are those of the whole text. */
static bool merge(struct demo *demo, const struct word *record, size_t count)
{
    if (!words_open(&demo->whole))
        return false;
    for (size_t i = 0; i < count; i++)
        if (!words_add(&demo->whole, record[i].text, record[i].count))
            return false;
    return demo->whole.total == demo->reference.total &&
           demo->whole.used == demo->reference.used;
}

/* Places of each rank's records, one rank after another; returns how many there are. */
static size_t lay_out(size_t ranks, const uint64_t *records, size_t *counts,
                      size_t *displs)
{
    size_t total = 0;
    for (size_t r = 0; r < ranks; r++) {
        counts[r] = (size_t)records[r] * sizeof(struct word);
        displs[r] = total * sizeof(struct word);
        total += (size_t)records[r];
    }
    return total;
}

static int step_allgather(struct demo *demo)
{
    size_t counts[DEMO_RANKS_MAX], displs[DEMO_RANKS_MAX];
    uint64_t sizes[DEMO_RANKS_MAX];
    uint64_t own = demo->own.used;
    int64_t start = base_now_ns();
    enum hdl_status status =
        hdl_allgather(demo->group, &own, sizes, 1, HDL_U64, NULL, NULL);
    if (status != HDL_OK)
        return broken(demo, "all_gather", status);
    size_t total = lay_out(demo->ranks, sizes, counts, displs);
    struct word *list = words_list(&demo->own);
    struct word *all = calloc(total + 1, sizeof(*all));
    int code = TOOL_OK;
    if (!list || !all) {
        code = no_memory();
    } else {
        status =
            hdl_allgatherv(demo->group, list, all, counts, displs, HDL_U8, NULL, NULL);
        int64_t moved = base_now_ns();
        if (status != HDL_OK) {
            code = broken(demo, "all_gather", status);
        } else {
            bool good = merge(demo, all, total);
            memcpy(all, list, (size_t)own * sizeof(*all));
            code = finish_step(demo, "all_gather of the tables",
                               (total - (size_t)own) * sizeof(*all),
                               start + base_now_ns() - moved, 0, good);
        }
    }
    free(list);
    free(all);
    return code;
}

/* ------------------------------------------------------------------------ ordering */

/*
 * The place in the whole order tells who gets a word. Every rank knows all counts by now,
 * so it can cut the order into equal parts: rank d gets those before border[d + 1].
 */
static size_t receiver(const struct demo *demo, const struct word *border,
                       const struct word *word)
{
    size_t to = 0;
    while (to + 1 < demo->ranks && word_order(word, &border[to + 1]) >= 0)
        to++;
    return to;
}

static struct word *make_borders(const struct demo *demo)
{
    struct word *all = words_list(&demo->whole);
    struct word *border = calloc(demo->ranks + 1, sizeof(*border));
    if (all && border) {
        qsort(all, demo->whole.used, sizeof(*all), word_order);
        for (size_t r = 0; r < demo->ranks; r++)
            border[r] = all[demo->whole.used * r / demo->ranks];
    }
    free(all);
    return border;
}

struct exchange {
    uint64_t send[DEMO_RANKS_MAX], receive[DEMO_RANKS_MAX];
    size_t src_counts[DEMO_RANKS_MAX], src_displs[DEMO_RANKS_MAX];
    size_t dst_counts[DEMO_RANKS_MAX], dst_displs[DEMO_RANKS_MAX];
    struct word *out, *in;
    size_t in_total, out_total;
};

/* Own words (those whose hash falls to this rank) in order, hence grouped by receiver. */
static bool pack(struct demo *demo, struct exchange *exchange, const struct word *border)
{
    exchange->out = calloc(demo->whole.used + 1, sizeof(*exchange->out));
    if (!exchange->out)
        return false;
    for (size_t i = 0; i < demo->whole.room; i++) {
        const struct word *word = &demo->whole.place[i];
        if (word->count && (word_hash(word->text) >> 8) % demo->ranks == demo->rank) {
            exchange->out[exchange->out_total++] = *word;
            exchange->send[receiver(demo, border, word)]++;
        }
    }
    qsort(exchange->out, exchange->out_total, sizeof(*exchange->out), word_order);
    return true;
}

static int trade(struct demo *demo, struct exchange *exchange)
{
    enum hdl_status status = hdl_alltoall(demo->group, exchange->send, exchange->receive,
                                          1, HDL_U64, NULL, NULL);
    if (status != HDL_OK)
        return broken(demo, "all_to_all", status);
    lay_out(demo->ranks, exchange->send, exchange->src_counts, exchange->src_displs);
    exchange->in_total = lay_out(demo->ranks, exchange->receive, exchange->dst_counts,
                                 exchange->dst_displs);
    exchange->in = calloc(exchange->in_total + 1, sizeof(*exchange->in));
    if (!exchange->in)
        return no_memory();
    status = hdl_alltoallv(demo->group, exchange->out, exchange->src_counts,
                           exchange->src_displs, exchange->in, exchange->dst_counts,
                           exchange->dst_displs, HDL_U8, NULL, NULL);
    if (status != HDL_OK)
        return broken(demo, "all_to_all", status);
    qsort(exchange->in, exchange->in_total, sizeof(*exchange->in), word_order);
    demo->share = exchange->in;
    demo->share_count = exchange->in_total;
    exchange->in = NULL;
    return TOOL_OK;
}

static int step_alltoall(struct demo *demo)
{
    struct exchange *exchange = calloc(1, sizeof(*exchange));
    struct word *border = make_borders(demo);
    demo->ordered = words_list(&demo->reference);
    if (!exchange || !border || !demo->ordered)
        return no_memory();
    int64_t start = base_now_ns();
    qsort(demo->ordered, demo->reference.used, sizeof(*demo->ordered), word_order);
    int64_t single = base_now_ns() - start;
    enum hdl_status status = hdl_barrier(demo->group, NULL, NULL);
    if (status != HDL_OK)
        return broken(demo, "barrier", status);
    start = base_now_ns();
    int code = pack(demo, exchange, border) ? trade(demo, exchange) : no_memory();
    size_t first = demo->whole.used * demo->rank / demo->ranks;
    if (code == TOOL_OK)
        code = finish_step(demo, "sort by all_to_all",
                           (demo->share_count - (size_t)exchange->receive[demo->rank]) *
                               sizeof(struct word),
                           start, single,
                           demo->share_count ==
                                   demo->whole.used * (demo->rank + 1) / demo->ranks -
                                       first &&
                               memcmp(demo->share, demo->ordered + first,
                                      demo->share_count * sizeof(struct word)) == 0);
    free(exchange->out);
    free(exchange);
    free(border);
    return code;
}

static int step_gather(struct demo *demo)
{
    size_t counts[DEMO_RANKS_MAX], displs[DEMO_RANKS_MAX];
    size_t used = demo->whole.used;
    for (size_t r = 0; r < demo->ranks; r++) {
        displs[r] = used * r / demo->ranks * sizeof(struct word);
        counts[r] = used * (r + 1) / demo->ranks * sizeof(struct word) - displs[r];
    }
    struct word *all = calloc(used + 1, sizeof(*all));
    if (!all)
        return no_memory();
    int64_t start = base_now_ns();
    enum hdl_status status =
        hdl_gatherv(demo->group, demo->share, all, counts, displs, HDL_U8, 0, NULL, NULL);
    int code;
    if (status != HDL_OK)
        code = broken(demo, "gather", status);
    else
        code = finish_step(
            demo, "gather of the order", demo->rank == 0 ? 0 : counts[demo->rank], start,
            0, demo->rank != 0 || memcmp(all, demo->ordered, used * sizeof(*all)) == 0);
    free(all);
    return code;
}

/* -------------------------------------------------------------------------- report */

static void print_steps(const struct demo *demo)
{
    char bytes[32], time[32], single[32];
    printf("\n%-28s%14s%14s%18s  %s\n", "operation", "bytes moved", "time", "one process",
           "checked");
    for (size_t i = 0; i < demo->num_steps; i++) {
        const struct step *step = &demo->steps[i];
        printf("%-28s%14s%14s%18s  %s\n", step->name,
               tool_bytes_text(bytes, sizeof(bytes), (uint64_t)step->bytes),
               tool_time_text(time, sizeof(time), (double)step->ns / 1e3),
               step->single_ns
                   ? tool_time_text(single, sizeof(single), (double)step->single_ns / 1e3)
                   : "-",
               step->wrong ? "WRONG" : "yes");
    }
}

static int print_report(const struct demo *demo)
{
    int64_t wrong = 0;
    for (size_t i = 0; i < demo->num_steps; i++)
        wrong += demo->steps[i].wrong;
    if (demo->rank == 0) {
        char bytes[32];
        printf("%zu ranks counted the words of %s (%s): %" PRIu64
               " words, %zu different\n\n",
               demo->ranks, demo->path,
               tool_bytes_text(bytes, sizeof(bytes), demo->length), demo->whole.total,
               demo->whole.used);
        printf("most frequent words\n");
        for (size_t i = 0; i < DEMO_TOP && i < demo->share_count; i++)
            printf("%8" PRIu64 "  %s\n", demo->share[i].count, demo->share[i].text);
        print_steps(demo);
        if (wrong == 0)
            printf("\ndemo ok\n");
        else
            printf("\ndemo failed: %" PRId64 " results differ\n", wrong);
    }
    return wrong == 0 ? TOOL_OK : TOOL_FAILED;
}

static int run_steps(struct demo *demo)
{
    static int (*const step[])(struct demo * demo) = {
        read_text,      step_broadcast, step_scatter,  step_count,
        step_allreduce, step_allgather, step_alltoall, step_gather,
    };
    demo->rank = (size_t)hdl_group_rank(demo->group);
    demo->ranks = (size_t)hdl_group_size(demo->group);
    if (demo->ranks > DEMO_RANKS_MAX)
        return tool_usage_error("the demo takes at most %d ranks", DEMO_RANKS_MAX);
    for (size_t i = 0; i < sizeof(step) / sizeof(step[0]); i++) {
        int code = step[i](demo);
        if (code != TOOL_OK)
            return code;
    }
    return print_report(demo);
}

static int run_rank(struct demo *demo)
{
    const struct hdl_group_opts opts = {.size = sizeof(opts), .name = "demo"};
    int code;
    if (hdl_context_create(NULL, &demo->context) != HDL_OK)
        return tool_failed("could not join the job: %s", hdl_error_detail());
    if (hdl_group_create(demo->context, &opts, &demo->group) != HDL_OK)
        code = tool_failed("could not create the group: %s", hdl_error_detail());
    else
        code = run_steps(demo);
    hdl_group_destroy(demo->group);
    hdl_context_destroy(demo->context);
    words_close(&demo->own);
    words_close(&demo->whole);
    words_close(&demo->reference);
    free(demo->ordered);
    free(demo->share);
    free(demo->piece);
    free(demo->text);
    return code;
}

int command_demo_words(const char *path)
{
    static struct demo demo;
    demo.path = path;
    return run_rank(&demo);
}
