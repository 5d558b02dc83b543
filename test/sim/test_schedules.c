/* SPDX-License-Identifier: Apache-2.0 */
/* Random schedules: no invariant breaks, whatever goes wrong. */
#include "unit.h"

#include "tools/sim/sim.h"

static void run(struct sim_options *options, uint64_t seeds)
{
    struct sim_result result;
    for (uint64_t seed = 1; seed <= seeds; seed++) {
        options->seed = seed;
        for (int messaged = 0; messaged < 2; messaged++) {
            options->messaged = messaged != 0;
            if (!sim_run(options, &result))
                fail_msg("faults %x seed %llu %s: %s", options->faults,
                         (unsigned long long)seed, messaged ? "messaged" : "mapped",
                         result.text);
        }
    }
}

/* Each of `faults`, which ends with 0. */
static void run_each(struct sim_options options, const unsigned *faults, uint64_t seeds)
{
    for (; *faults; faults++) {
        options.faults = *faults;
        run(&options, seeds);
    }
}

/* Lost ranks are removed, or stay active. */
static void run_policies(struct sim_options options, const unsigned *faults,
                         uint64_t seeds)
{
    for (int manual = 0; manual < 2; manual++) {
        options.manual = manual != 0;
        run_each(options, faults, seeds);
    }
}

static void test_each_fault_alone(void **state)
{
    static const unsigned faults[] = {SIM_KILL, SIM_STOP, SIM_CUT, SIM_SUSPECT, 0};
    struct sim_options options;
    sim_defaults(&options);
    run_each(options, faults, 300);
}

static void test_all_faults_together(void **state)
{
    struct sim_options options;
    sim_defaults(&options);
    options.faults = SIM_KILL | SIM_STOP | SIM_CUT | SIM_DELAY | SIM_REORDER;
    options.num_faults = 4;
    for (options.ranks = 3; options.ranks <= 8; options.ranks++)
        run(&options, 60);
}

/* Ranks die, leave, are removed, return and are replaced while the others go on. */
static void test_membership_changes(void **state)
{
    static const unsigned faults[] = {
        SIM_JOIN, SIM_LEAVE, SIM_KILL | SIM_JOIN | SIM_LEAVE,
        SIM_KILL | SIM_STOP | SIM_CUT | SIM_DELAY | SIM_REORDER | SIM_JOIN | SIM_LEAVE,
        0};
    struct sim_options options;
    sim_defaults(&options);
    options.capacity = 7;
    options.ops = 12;
    options.num_faults = 8;
    run_policies(options, faults, 100);
}

/* A root is lost; who is done with its operation, which ended early, says more than the
 * `ready` of those that are behind. Few schedules need that. */
static void test_done_says_ready(void **state)
{
    struct sim_options options;
    struct sim_result result;
    sim_defaults(&options);
    options.capacity = 7;
    options.ops = 12;
    options.faults = SIM_KILL | SIM_LEAVE | SIM_JOIN | SIM_DELAY | SIM_REORDER;
    options.num_faults = 5;
    options.messaged = true;
    options.seed = 3043;
    if (!sim_run(&options, &result))
        fail_msg("%s", result.text);
}

/* A small group that changes all the time: hardly anybody of the first ones is left. */
static void test_few_ranks_many_changes(void **state)
{
    static const unsigned faults[] = {SIM_KILL | SIM_JOIN | SIM_LEAVE, 0x3ff, 0};
    struct sim_options options;
    sim_defaults(&options);
    options.ranks = 3;
    options.capacity = 5;
    options.ops = 20;
    options.num_faults = 14;
    run_each(options, faults, 400);
}

/* The coordinator is lost with what only some were told: a founder that did not hear of
 * the start was declared dead; a joiner waits behind a predecessor that is dead, but not
 * in any view; one that left did not hear of it; one that was removed asks for its
 * removal. */
static void test_restarts_that_broke(void **state)
{
    static const struct {
        uint32_t ranks, ops;
        bool messaged;
        uint64_t seed;
    } cases[] = {{3, 8, false, 1044299},
                 {7, 8, true, 1017160},
                 {3, 8, true, 1105700},
                 {5, 10, true, 69444}};
    for (int i = 0; i < 4; i++) {
        struct sim_options options;
        struct sim_result result;
        sim_defaults(&options);
        options.ranks = cases[i].ranks;
        options.capacity = options.ranks + 2;
        options.ops = cases[i].ops;
        options.num_faults = 6;
        options.faults = 0x3ff;
        options.messaged = cases[i].messaged;
        options.seed = cases[i].seed;
        if (!sim_run(&options, &result))
            fail_msg("seed %llu: %s", (unsigned long long)options.seed, result.text);
    }
}

/* Links that stay down: ranks are removed, or in manual policy operations fail on all. */
static void test_broken_links(void **state)
{
    static const unsigned faults[] = {SIM_LINK, SIM_LINK | SIM_KILL, 0x3ff, 0};
    struct sim_options options;
    sim_defaults(&options);
    options.capacity = 6;
    options.ops = 10;
    options.num_faults = 4;
    run_policies(options, faults, 100);
}

/* The coordinator's process dies and is started again, with all else going on. */
static void test_the_coordinator_restarts(void **state)
{
    static const unsigned faults[] = {SIM_RESTART,
                                      SIM_RESTART | SIM_JOIN,
                                      SIM_RESTART | SIM_KILL,
                                      SIM_RESTART | SIM_KILL | SIM_JOIN | SIM_LEAVE,
                                      0xff,
                                      0};
    struct sim_options options;
    sim_defaults(&options);
    options.capacity = 6;
    options.ops = 10;
    options.num_faults = 6;
    run_each(options, faults, 150);
}

/* Parts of the job lose the coordinator's side, in one direction or in both. */
static void test_partitions(void **state)
{
    struct sim_options options;
    sim_defaults(&options);
    options.ranks = 6;
    options.capacity = 8;
    options.ops = 10;
    options.num_faults = 4;
    options.faults = SIM_CUT | SIM_JOIN;
    run(&options, 300);
    options.standalone = true;
    run(&options, 300);
}

/* Three groups that share ranks, which have other places in each. */
static void test_groups_share_ranks(void **state)
{
    static const unsigned faults[] = {SIM_KILL | SIM_JOIN | SIM_LEAVE, 0xff, 0x3ff};
    struct sim_options options;
    sim_defaults(&options);
    options.num_faults = 5;
    for (uint32_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++) {
        options.faults = faults[i];
        options.ranks = 3 + i;
        for (options.groups = 2; options.groups <= 3; options.groups++)
            run(&options, 100);
    }
}

static void test_more_than_64_ranks(void **state)
{
    struct sim_options options;
    sim_defaults(&options);
    options.ranks = 70;
    options.capacity = 130;
    options.ranks_per_host = 8;
    options.num_faults = 8;
    options.faults = SIM_KILL | SIM_JOIN | SIM_LEAVE | SIM_CUT | SIM_SUSPECT;
    run(&options, 4);
}

/*
 * Ranks that a commit left out which nobody has any more: others have written over what
 * they still had to read. They end; they never read something else.
 */
static void test_chunks_are_written_over(void **state)
{
    uint64_t overtaken = 0;
    struct sim_options options;
    sim_defaults(&options);
    options.ranks = 4;
    options.ops = 16;
    options.num_faults = 5;
    options.faults = SIM_SUSPECT | SIM_KILL | SIM_RESTART | SIM_DELAY | SIM_CUT;
    for (options.seed = 1; options.seed <= 400; options.seed++) {
        struct sim_result result;
        if (!sim_run(&options, &result))
            fail_msg("seed %llu: %s", (unsigned long long)options.seed, result.text);
        overtaken += result.overtaken;
    }
    assert_true(overtaken > 0);
}

static void test_lost_ranks_stay_active(void **state)
{
    struct sim_options options;
    sim_defaults(&options);
    options.manual = true;
    options.faults = SIM_KILL | SIM_CUT | SIM_REORDER;
    options.num_faults = 3;
    run(&options, 200);
}

static void test_several_deaths_cost_few_ballots(void **state)
{
    struct sim_options options;
    sim_defaults(&options);
    options.ranks = 8;
    options.num_faults = 7;
    run(&options, 200);
}

static void test_one_seed_one_run(void **state)
{
    struct sim_options options;
    struct sim_result first, again;
    sim_defaults(&options);
    options.faults = SIM_KILL | SIM_STOP | SIM_CUT | SIM_REORDER;
    options.messaged = true;
    for (options.seed = 1; options.seed <= 20; options.seed++) {
        (void)sim_run(&options, &first);
        (void)sim_run(&options, &again);
        assert_true(first.events == again.events);
        assert_true(first.virtual_ns == again.virtual_ns);
        assert_true(first.messages == again.messages);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_fault_alone),
        cmocka_unit_test(test_all_faults_together),
        cmocka_unit_test(test_membership_changes),
        cmocka_unit_test(test_done_says_ready),
        cmocka_unit_test(test_few_ranks_many_changes),
        cmocka_unit_test(test_restarts_that_broke),
        cmocka_unit_test(test_broken_links),
        cmocka_unit_test(test_the_coordinator_restarts),
        cmocka_unit_test(test_partitions),
        cmocka_unit_test(test_groups_share_ranks),
        cmocka_unit_test(test_more_than_64_ranks),
        cmocka_unit_test(test_chunks_are_written_over),
        cmocka_unit_test(test_lost_ranks_stay_active),
        cmocka_unit_test(test_several_deaths_cost_few_ballots),
        cmocka_unit_test(test_one_seed_one_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
