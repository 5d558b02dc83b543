/* SPDX-License-Identifier: Apache-2.0 */
/* Two exchanges on one group, each in a thread of its own, while a third thread adds up
 * numbers on the same group: all at once, every result checked. */
#include <pthread.h>

#include "rank.h"

enum { TOKENS = 4, HIDDEN = 40, TOP_K = 2, EXPERTS = 12, STEPS = 400 };

static struct rank self;

struct worker {
    struct hdl_moe *moe;
    int number;
    float rows[TOKENS * HIDDEN], weights[TOKENS * TOP_K], results[TOKENS * HIDDEN];
    float received[EXPERTS * TOKENS * HIDDEN]; /* [L][ranks * TOKENS][H] */
    int32_t ids[TOKENS * TOP_K], counts[EXPERTS];
};

/* A token's elements are x, expert e gives (e + 1) * x, weights are 0.5. */
static void step(struct worker *w, int i)
{
    struct hdl_moe_tokens tokens = {.size = sizeof(tokens),
                                    .rows = w->rows,
                                    .topk_ids = w->ids,
                                    .weights = w->weights,
                                    .num_tokens = TOKENS};
    struct hdl_moe_received received = {
        .size = sizeof(received), .rows = w->received, .counts = w->counts};
    struct hdl_moe_outputs outputs = {.size = sizeof(outputs), .rows = w->received};
    struct hdl_moe_result result = {.size = sizeof(result), .rows = w->results};
    struct hdl_moe_handle handle;
    int local = EXPERTS / self.size;
    for (int t = 0; t < TOKENS; t++) {
        for (int h = 0; h < HIDDEN; h++)
            w->rows[t * HIDDEN + h] = (float)(i * 8 + t * 2 + w->number + 1);
        w->ids[2 * t] = (i + t + w->number) % EXPERTS;
        w->ids[2 * t + 1] = (w->ids[2 * t] + 1 + self.rank) % EXPERTS;
        w->weights[2 * t] = w->weights[2 * t + 1] = 0.5f;
    }
    CHECK_OK(hdl_moe_dispatch(w->moe, &tokens, &received, NULL, &handle));
    for (int e = 0; e < local; e++)
        for (int r = 0; r < w->counts[e] * HIDDEN; r++)
            w->received[e * self.size * TOKENS * HIDDEN + r] *=
                (float)(self.rank * local + e + 1);
    CHECK_OK(hdl_moe_combine(w->moe, &handle, &outputs, &result, NULL));
    for (int t = 0; t < TOKENS; t++) {
        float sum =
            0.5f * w->rows[t * HIDDEN] * (float)(w->ids[2 * t] + w->ids[2 * t + 1] + 2);
        for (int h = 0; h < HIDDEN; h++)
            CHECK(w->results[t * HIDDEN + h] == sum, "exchange %d step %d: %g, not %g",
                  w->number, i, (double)w->results[t * HIDDEN + h], (double)sum);
    }
}

static void *run(void *argument)
{
    for (int i = 0; i < STEPS; i++)
        step(argument, i);
    return NULL;
}

int main(void)
{
    static struct worker worker[2];
    pthread_t thread[2];
    struct hdl_moe_opts opts = {.size = sizeof(opts),
                                .num_experts = EXPERTS,
                                .top_k = TOP_K,
                                .hidden = HIDDEN,
                                .max_tokens = TOKENS,
                                .dtype = HDL_F32};
    rank_join(&self);
    for (int i = 0; i < 2; i++) {
        worker[i].number = i;
        CHECK_OK(hdl_moe_create(self.group, &opts, &worker[i].moe));
    }
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&thread[i], NULL, run, &worker[i]) == 0, "no thread");
    rank_sums(&self, STEPS);
    for (int i = 0; i < 2; i++) {
        pthread_join(thread[i], NULL);
        hdl_moe_destroy(worker[i].moe);
    }
    rank_leave(&self);
    return 0;
}
