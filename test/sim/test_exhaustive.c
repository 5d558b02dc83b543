/* SPDX-License-Identifier: Apache-2.0 */
/* 3 ranks, 3 operations: the loss of each rank after every single event of the schedule.
 */
#include "unit.h"

#include "tools/sim/sim.h"

struct plan {
    unsigned faults, second;
    uint64_t seeds, stride;
    bool in_rank0; /* the coordinator */
};

static void search_plan(const struct plan *plan)
{
    for (int messaged = 0; messaged < 2; messaged++) {
        for (uint64_t seed = 1; seed <= plan->seeds; seed++) {
            struct sim_options options;
            struct sim_search search = {0};
            struct sim_result result;
            sim_defaults(&options);
            options.ranks = 3;
            options.capacity = (plan->faults | plan->second) & SIM_JOIN ? 4 : 3;
            options.ops = 3;
            options.max_chunks = 2;
            options.faults = plan->faults;
            options.second_faults = plan->second;
            options.messaged = messaged != 0;
            options.standalone = !plan->in_rank0;
            options.seed = seed;
            if (!sim_search(&options, plan->stride, &search, &result))
                fail_msg("seed %llu: fault %x of rank %u after event %llu, %x of rank %u "
                         "after %llu: %s",
                         (unsigned long long)seed, plan->faults, search.broken.fault_rank,
                         (unsigned long long)search.broken.fault_at_event, plan->second,
                         search.broken.second_rank,
                         (unsigned long long)search.broken.second_at_event, result.text);
        }
    }
}

static void search(unsigned faults, uint64_t seeds)
{
    struct plan plan = {.faults = faults, .seeds = seeds};
    search_plan(&plan);
}

static void test_kill_at_every_step(void **state)
{
    search(SIM_KILL, 6);
}

/* The coordinator lives in rank 0: its loss at every step ends in HDL_ECOORD on all. */
static void test_coordinator_rank_at_every_step(void **state)
{
    struct plan plan = {.faults = SIM_KILL, .seeds = 4, .in_rank0 = true};
    search_plan(&plan);
}

/* Two deaths in one window, the death of a joiner at each step, and the like. */
static void test_two_faults(void **state)
{
    static const struct plan plans[] = {
        {.faults = SIM_KILL, .second = SIM_KILL, .seeds = 1, .stride = 13},
        {.faults = SIM_JOIN, .second = SIM_KILL, .seeds = 1, .stride = 13},
        {.faults = SIM_LEAVE, .second = SIM_KILL, .seeds = 1, .stride = 13},
        {.faults = SIM_KILL, .second = SIM_JOIN, .seeds = 1, .stride = 13},
        {.faults = SIM_RESTART, .second = SIM_KILL, .seeds = 1, .stride = 17},
        {.faults = SIM_SUSPECT, .second = SIM_LEAVE, .seeds = 1, .stride = 17},
    };
    for (size_t i = 0; i < sizeof(plans) / sizeof(plans[0]); i++)
        search_plan(&plans[i]);
}

/*
 * Fault points before and after each message that coordinator and agents send: founding,
 * and what follows a loss, a removal and an admission (of rank 1, after that event).
 */
static void test_the_sender_dies_at_every_message(void **state)
{
    static const struct {
        unsigned faults;
        uint64_t at_event;
    } plans[] = {
        {0, 0}, {SIM_KILL, 70}, {SIM_LEAVE, 70}, {SIM_LEAVE, 90}, {SIM_JOIN, 60}};
    uint64_t runs = 0;
    for (size_t i = 0; i < sizeof(plans) / sizeof(plans[0]); i++) {
        for (int way = 0; way < 4; way++) {
            struct sim_options options;
            struct sim_search found = {0};
            struct sim_result result;
            sim_defaults(&options);
            options.ranks = 3;
            options.capacity = plans[i].faults == SIM_JOIN ? 4 : 3;
            options.ops = 3;
            options.max_chunks = 2;
            options.num_faults = plans[i].faults != 0;
            options.faults = plans[i].faults;
            options.fault_at_event = plans[i].at_event;
            options.fault_rank = 1;
            options.messaged = way % 2 != 0;
            options.standalone = way / 2 == 0;
            for (options.seed = 1; options.seed <= 3; options.seed++) {
                if (!sim_search_messages(&options, &found, &result))
                    fail_msg("fault %x, seed %llu: the sender %s message %llu: %s",
                             plans[i].faults, (unsigned long long)options.seed,
                             found.broken.kill_after_message ? "after" : "before",
                             (unsigned long long)found.broken.kill_at_message,
                             result.text);
            }
            runs += found.runs;
        }
    }
    printf("%llu fault points\n", (unsigned long long)runs);
}

static void test_stop_at_every_step(void **state)
{
    search(SIM_STOP, 3);
}

static void test_cut_at_every_step(void **state)
{
    search(SIM_CUT, 3);
}

static void test_wrong_evidence_at_every_step(void **state)
{
    search(SIM_SUSPECT, 3);
}

static void test_join_at_every_step(void **state)
{
    search(SIM_JOIN, 3);
}

static void test_restart_at_every_step(void **state)
{
    search(SIM_RESTART, 3);
}

static void test_removal_at_every_step(void **state)
{
    search(SIM_LEAVE, 6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kill_at_every_step),
        cmocka_unit_test(test_coordinator_rank_at_every_step),
        cmocka_unit_test(test_two_faults),
        cmocka_unit_test(test_the_sender_dies_at_every_message),
        cmocka_unit_test(test_stop_at_every_step),
        cmocka_unit_test(test_cut_at_every_step),
        cmocka_unit_test(test_wrong_evidence_at_every_step),
        cmocka_unit_test(test_join_at_every_step),
        cmocka_unit_test(test_restart_at_every_step),
        cmocka_unit_test(test_removal_at_every_step),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
