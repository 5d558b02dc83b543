/* SPDX-License-Identifier: Apache-2.0 */
/* Heat on a ring: each rank puts its edge cells into its neighbours' windows. */
#include <heddle.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(call)                                                                      \
    if ((call) < 0)                                                                      \
    (fprintf(stderr, "%s: %s\n", #call, hdl_error_detail()), exit(1))

enum { LEFT, RIGHT, CELLS = 1000, STEPS = 200, HANDLE = HDL_WINDOW_HANDLE_BYTES };
struct halo {
    double edge[2][2]; /* used in turn: a neighbour can be one step ahead, never two */
    uint64_t step[2];  /* raised to n when the edge of step n is here */
};

int main(void)
{
    struct hdl_context *context;
    struct hdl_group *group;
    struct hdl_window *window;
    CHECK(hdl_context_create(NULL, &context));
    CHECK(hdl_group_create(context, NULL, &group));
    CHECK(hdl_window_create(context, sizeof(struct halo), HDL_WINDOW_HOST, &window));
    struct halo *halo = hdl_window_data(window);
    int rank = hdl_group_rank(group), size = hdl_group_size(group);

    char mine[HANDLE] = {0}, *all = malloc((size_t)size * HANDLE);
    size_t length = HANDLE;
    CHECK(hdl_window_pack(window, mine, &length));
    CHECK(hdl_allgather(group, mine, all, HANDLE, HDL_U8, NULL, NULL));
    struct hdl_peer_window *peer[2];
    for (int side = LEFT; side <= RIGHT; side++)
        CHECK(hdl_window_open(context, all + (rank + size + 2 * side - 1) % size * HANDLE,
                              HANDLE, &peer[side]));

    double cells[2][CELLS + 2] = {0}, heat = 0; /* the neighbours' edges around them */
    cells[0][CELLS / 2] = rank == 0 ? 1000.0 : 0.0;
    for (uint64_t step = 1; step <= STEPS; step++) {
        double *now = cells[(step + 1) % 2], *next = cells[step % 2];
        for (int side = LEFT; side <= RIGHT; side++) /* my left edge is its right one */
            CHECK(hdl_put(peer[side], offsetof(struct halo, edge[!side][step % 2]),
                          side == LEFT ? &now[1] : &now[CELLS], sizeof(double),
                          offsetof(struct halo, step[!side]), step, HDL_SIGNAL_SET));
        for (int side = LEFT; side <= RIGHT; side++) {
            CHECK(hdl_window_wait(window, offsetof(struct halo, step[side]), step,
                                  peer[side], HDL_FOREVER));
            now[side == LEFT ? 0 : CELLS + 1] = halo->edge[side][step % 2];
        }
        for (int i = 1; i <= CELLS; i++)
            next[i] = now[i] + 0.25 * (now[i - 1] - 2 * now[i] + now[i + 1]);
    }
    for (int i = 1; i <= CELLS; i++)
        heat += cells[STEPS % 2][i];
    CHECK(hdl_allreduce(group, &heat, &heat, 1, HDL_F64, HDL_SUM, NULL, NULL));
    printf("rank %d of %d: heat after %d steps: %.6f\n", rank, size, STEPS, heat);
    hdl_context_destroy(context); /* with its group and windows */
    free(all);
    return heat < 999.999 || heat > 1000.001;
}
