/* SPDX-License-Identifier: Apache-2.0 */
/* Many ranks: one loss costs messages in proportion to the ranks and little virtual time.
 */
#include "unit.h"

#include "tools/sim/sim.h"

static void run(uint32_t faults, uint64_t seed, struct sim_result *result)
{
    struct sim_options options;
    sim_defaults(&options);
    options.ranks = 512;
    options.ranks_per_host = 8;
    options.ops = 2;
    options.max_chunks = 1;
    options.link_ns = 1000000;
    options.dead_after_ns = INT64_C(5000000000);
    options.num_faults = faults;
    options.seed = seed;
    if (!sim_run(&options, result))
        fail_msg("seed %llu: %s", (unsigned long long)seed, result->text);
}

/* In some schedules it falls into the creation, or behind all operations. */
static void test_one_loss_is_linear(void **state)
{
    uint32_t committed = 0;
    for (uint64_t seed = 1; seed <= 4; seed++) {
        struct sim_result quiet, loss;
        run(0, seed, &quiet);
        run(1, seed, &loss);
        committed += loss.slowest_commit_ns > 0;
        assert_true(loss.slowest_commit_ns < INT64_C(1000000000));
        assert_true(loss.messages < quiet.messages + 16 * 512);
    }
    assert_true(committed > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_loss_is_linear),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
