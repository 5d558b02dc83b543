/* SPDX-License-Identifier: Apache-2.0 */
/* Every planted defect breaks an invariant in some schedule; without it none breaks. */
#include "unit.h"

#include "tools/sim/sim.h"

struct plan {
    enum sim_defect defect;
    bool messaged;
    unsigned faults;
    uint32_t num_faults;
    uint64_t seeds;
    uint32_t ranks, ops; /* 0 = as usual */
};

static uint64_t broken_by(const struct plan *plan, enum sim_defect defect)
{
    struct sim_options options;
    struct sim_result result;
    sim_defaults(&options);
    options.defect = defect;
    options.messaged = plan->messaged;
    options.faults = plan->faults;
    options.num_faults = plan->num_faults;
    if (plan->ranks > 0)
        options.ranks = plan->ranks;
    if (plan->ops > 0)
        options.ops = plan->ops;
    options.capacity = plan->faults & SIM_JOIN ? 7 : 0;
    for (options.seed = 1; options.seed <= plan->seeds; options.seed++) {
        if (!sim_run(&options, &result))
            return options.seed;
    }
    return 0;
}

static void test_every_defect_is_found(void **state)
{
    static const struct plan plans[] = {
        {SIM_LAST_LOW, false, SIM_KILL, 2, 200},
        {SIM_LAST_LOW, true, SIM_KILL, 2, 400},
        {SIM_LAST_HIGH, false, SIM_KILL, 2, 100},
        {SIM_LAST_HIGH, true, SIM_KILL, 2, 100},
        {SIM_NO_FREEZE, false, SIM_LEAVE, 3, 300},
        {SIM_NO_FREEZE, true, SIM_LEAVE, 3, 300},
        {SIM_NO_FREEZE, true, SIM_SUSPECT | SIM_REORDER, 3, 500},
        {SIM_SAMPLE_FIRST, false, SIM_KILL, 2, 200},
        {SIM_PER_OPERATION, false, SIM_KILL, 2, 300},
        {SIM_PER_OPERATION, true, SIM_KILL, 2, 300},
        {SIM_STALE_READY, true, SIM_KILL | SIM_REORDER | SIM_LEAVE | SIM_JOIN, 5, 3000},
        {SIM_DROP_NEWER, true, SIM_KILL, 2, 300},
        {SIM_NEXT_STARTED, false, SIM_JOIN, 3, 300},
        {SIM_NEXT_STARTED, true, SIM_JOIN, 3, 300},
        {SIM_STALE_ANSWER, false, SIM_KILL, 2, 300},
        {SIM_LEAST_PUBLISHED, false, SIM_SUSPECT | SIM_REORDER, 3, 500},
        {SIM_OWN_EVIDENCE, false, SIM_KILL, 2, 200},
        {SIM_OWN_EVIDENCE, true, SIM_KILL, 2, 200},
        {SIM_SKIP_COMMIT, false, SIM_KILL, 2, 200},
        {SIM_SKIP_COMMIT, true, SIM_KILL, 2, 200},
        {SIM_NO_FENCE, false, SIM_LEAVE, 3, 300},
        {SIM_NO_FENCE, true, SIM_LEAVE, 3, 300},
        {SIM_STALE_MESSAGE, true,
         SIM_KILL | SIM_JOIN | SIM_LEAVE | SIM_SUSPECT | SIM_DELAY, 10, 40000, 4, 12},
    };
    for (size_t i = 0; i < sizeof(plans) / sizeof(plans[0]); i++) {
        uint64_t seed = broken_by(&plans[i], plans[i].defect);
        if (seed == 0)
            fail_msg("%s (%s) is not found in %llu schedules",
                     sim_defect_name(plans[i].defect),
                     plans[i].messaged ? "messaged" : "mapped",
                     (unsigned long long)plans[i].seeds);
        struct plan same = plans[i];
        same.seeds = seed;
        assert_true(broken_by(&same, SIM_NO_DEFECT) == 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_defect_is_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
