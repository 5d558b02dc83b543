/* SPDX-License-Identifier: Apache-2.0 */
/* Exhaustive search: faults after every event of a schedule. */
#include "tools/sim/sim.h"

/* Events of the schedule without faults: a fault later than that falls into nothing. */
static uint64_t length_of(const struct sim_options *options)
{
    struct sim_options quiet = *options;
    struct sim_result result;
    quiet.faults = 0;
    quiet.num_faults = 0;
    (void)sim_run(&quiet, &result);
    return result.events;
}

static bool run_one(const struct sim_options *options, struct sim_search *search,
                    struct sim_result *result)
{
    search->runs++;
    if (sim_run(options, result))
        return true;
    search->broken = *options;
    return false;
}

static bool search_second(struct sim_options *options, uint64_t length, uint64_t stride,
                          struct sim_search *search, struct sim_result *result)
{
    for (uint64_t at = options->fault_at_event + 1; at <= length; at += stride) {
        for (uint32_t rank = 0; rank < options->ranks; rank++) {
            options->second_at_event = at;
            options->second_rank = rank;
            if (!run_one(options, search, result))
                return false;
        }
    }
    return true;
}

bool sim_search_messages(const struct sim_options *base, struct sim_search *search,
                         struct sim_result *result)
{
    struct sim_options options = *base;
    if (!run_one(&options, search, result))
        return false;
    uint64_t messages = result->messages;
    for (uint64_t at = 1; at <= messages; at++) {
        for (int after = 0; after < 2; after++) {
            options.kill_at_message = at;
            options.kill_after_message = after != 0;
            if (!run_one(&options, search, result))
                return false;
        }
    }
    return true;
}

bool sim_search(const struct sim_options *base, uint64_t stride,
                struct sim_search *search, struct sim_result *result)
{
    struct sim_options options = *base;
    uint64_t length = length_of(base);
    options.num_faults = base->second_faults != 0 ? 2 : 1;
    for (uint64_t at = 1; at <= length; at += base->second_faults != 0 ? stride : 1) {
        for (uint32_t rank = 0; rank < base->ranks; rank++) {
            options.fault_at_event = at;
            options.fault_rank = rank;
            bool good = base->second_faults != 0
                            ? search_second(&options, length, stride, search, result)
                            : run_one(&options, search, result);
            if (!good)
                return false;
        }
    }
    return true;
}
