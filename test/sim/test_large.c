/* SPDX-License-Identifier: Apache-2.0 */
/* Many ranks: one loss costs messages in proportion to the ranks and little virtual time.
 */
#include "unit.h"

#include "tools/sim/sim.h"

static uint64_t messages_of(uint32_t ranks, uint32_t faults, int64_t *commit_ns)
{
    struct sim_options options;
    struct sim_result result;
    sim_defaults(&options);
    options.ranks = ranks;
    options.ranks_per_host = 8;
    options.ops = 2;
    options.max_chunks = 1;
    options.link_ns = 1000000;
    options.dead_after_ns = INT64_C(5000000000);
    options.num_faults = faults;
    options.seed = 2;
    if (!sim_run(&options, &result))
        fail_msg("%u ranks: %s", ranks, result.text);
    *commit_ns = result.slowest_commit_ns;
    return result.messages;
}

static void test_one_loss_is_linear(void **state)
{
    int64_t quiet_ns, loss_ns;
    uint64_t quiet = messages_of(512, 0, &quiet_ns);
    uint64_t loss = messages_of(512, 1, &loss_ns);
    assert_true(loss_ns > 0);
    assert_true(loss_ns < INT64_C(1000000000));
    assert_true(loss < quiet + 16 * 512);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_loss_is_linear),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
