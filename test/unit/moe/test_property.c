/* SPDX-License-Identifier: Apache-2.0 */
/* Random exchanges against the oracle, byte by byte: every layout, type, format, routing,
 * phase order and way to reach peers, drawn from a seed.
 *
 * HEDDLE_TEST_SEED and HEDDLE_TEST_TRIALS choose the first seed and the number of draws.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "trial.h"

static uint64_t from_environment(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 0) : otherwise;
}

#ifdef __SANITIZE_THREAD__
enum { TRIALS = 80 };
#else
enum { TRIALS = 200 };
#endif

static struct trial t;
static pthread_barrier_t meeting;

static void meet(struct crowd_rank *self)
{
    pthread_barrier_wait(&meeting);
}

/* All steps on all ranks, from a step number near a wrap. */
static void run_trial(uint64_t seed)
{
    static const uint64_t starts[] = {1, (1 << 15) - 3, (1 << 16) - 3,
                                      (UINT64_C(1) << 32) - 3};
    char text[256];
    struct crowd *c = crowd_create(t.ranks, t.kind, &t.opts, seed % 3);
    for (uint32_t r = 0; r < t.ranks; r++) {
        c->rank[r].user = &t;
        moe_exchange_start_at(c->rank[r].moe, starts[seed % 4]);
    }
    t.meet = meet;
    pthread_barrier_init(&meeting, NULL, t.ranks);
    crowd_run(c, trial_body);
    pthread_barrier_destroy(&meeting);
    crowd_destroy(c);
    trial_print(&t, seed, text, sizeof(text));
    if (t.failures)
        fail_msg("%s", text);
    trial_free(&t);
}

static int compare_words(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static size_t count_different(uint64_t *values, size_t n)
{
    size_t different = 0;
    qsort(values, n, sizeof(*values), compare_words);
    for (size_t i = 0; i < n; i++)
        different += i == 0 || values[i] != values[i - 1];
    return different;
}

static void test_against_oracle(void **state)
{
    uint64_t first = from_environment("HEDDLE_TEST_SEED", 1), ran = 0;
    uint64_t trials = from_environment("HEDDLE_TEST_TRIALS", TRIALS);
    uint64_t *axes = calloc(trials + 1, sizeof(*axes));
    for (uint64_t seed = first; seed < first + trials; seed++) {
        if (!trial_draw(&t, seed))
            continue;
        axes[ran++] = trial_axes(&t);
        run_trial(seed);
    }
    printf("%llu steps of %llu drawn exchanges, %zu combinations of options and sizes\n",
           (unsigned long long)ran * TRIAL_STEPS, (unsigned long long)ran,
           count_different(axes, ran));
    free(axes);
}

static void check_named(const uint8_t *row, const uint8_t *scales, const char *name)
{
    char text[128];
    trial_explain(&t, row, scales, text, sizeof(text));
    assert_string_equal(text, name);
}

/* A wrong row, a stale one, a torn one and swapped scales have different names. */
static void test_names(void **state)
{
    enum { H = 256, SCALES = 8 };
    uint8_t row[4][H], scales[4][SCALES];
    memset(&t, 0, sizeof(t));
    t.seed = 7;
    t.ranks = 2;
    t.opts = (struct hdl_moe_opts){.size = sizeof(t.opts),
                                   .num_experts = 2,
                                   .top_k = 1,
                                   .hidden = H,
                                   .max_tokens = 4,
                                   .format = HDL_MOE_FP8};
    do {
        trial_free(&t);
        assert_true(trial_draw_steps(&t));
    } while (t.ranks_of[0][0].tokens < 2 || t.ranks_of[0][1].tokens < 1 ||
             t.ranks_of[1][0].tokens < 1);
    for (int i = 0; i < 4; i++) { /* tokens 0 and 1, one of rank 1, one of step 1 */
        const struct moe_reference_rank *in = &t.ranks_of[i == 3][i == 2];
        moe_reference_quantise(HDL_MOE_FP8, HDL_BF16,
                               (const uint8_t *)in->rows + (i == 1 ? 2 * H : 0), H,
                               row[i], scales[i]);
    }
    check_named(row[1], scales[1], "token 1 of rank 0 of step 0");
    check_named(row[2], scales[2], "token 0 of rank 1 of step 0");
    check_named(row[3], scales[3], "token 0 of rank 0 of step 1");
    check_named(row[1], scales[0],
                "token 1 of rank 0 of step 0 with the scales of another");
    memcpy(row[1] + H / 2, row[3] + H / 2, H / 2);
    check_named(row[1], scales[1], "a torn row");
    memset(row[1], 0x55, H);
    check_named(row[1], scales[1], "bytes of no row");
    trial_free(&t);
}

static void test_sizes(void **state)
{
    for (size_t r = 0; r < TRIAL_NUM_RANKS; r++)
        for (int i = 0; trial_draw_shape(&t, trial_ranks[r], i); i++)
            run_trial((uint64_t)i);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_against_oracle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
