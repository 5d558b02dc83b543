/* SPDX-License-Identifier: Apache-2.0 */
/* A peer's arena full of garbage, any options, any handle: no access out of bounds, no
 * hang.
 *
 *     byte 0 to 7  options   8 to 39  a handle   the rest  the other rank's arena
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "moe/exchange.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { TOKENS = 4, RANKS = 2 };

struct fake {
    struct moe_peers base;
    uint8_t *bases[RANKS];
};

/* Nothing more will come. */
static bool peers_wait(struct moe_peers *peers, bool (*test)(void *argument),
                       void *argument, int64_t deadline)
{
    return test(argument);
}

static enum hdl_status peers_check(struct moe_peers *peers)
{
    return HDL_OK;
}

static enum moe_presence peers_presence(struct moe_peers *peers, uint32_t rank)
{
    return MOE_PRESENT;
}

static void peers_ring(struct moe_peers *peers, uint32_t rank) {}

static const struct moe_peers_ops ops = {
    .wait = peers_wait,
    .check = peers_check,
    .presence = peers_presence,
    .ring = peers_ring,
};

static void fill_options(struct hdl_moe_opts *o, const uint8_t *data)
{
    static const enum hdl_dtype types[] = {HDL_BF16, HDL_F16, HDL_F32, HDL_U8,
                                           HDL_F8E4M3};
    *o = (struct hdl_moe_opts){.size = sizeof(*o),
                               .num_experts = 2 + data[0] % 7,
                               .top_k = 1 + data[1] % 5,
                               .hidden = 1 + data[2] % 140,
                               .max_tokens = TOKENS,
                               .dtype = types[data[3] % 5],
                               .format = (enum hdl_moe_format)(data[3] / 5 % 5),
                               .combine_wire = (enum hdl_moe_wire)(data[4] % 3),
                               .layout = (enum hdl_moe_layout)(data[4] / 3 % 4),
                               .align = data[5] % 5,
                               .exact = data[5] & 32,
                               .late_weights = data[5] & 64,
                               .zero_padding = data[5] & 128,
                               .dp_size = data[6] % 3};
}

/* The other arena: garbage, but with the flags of the step in front, so that it is read.
 */
static void fill_arena(struct hdl_moe *m, uint8_t *arena, const uint8_t *data,
                       size_t size)
{
    const struct moe_layout *l = &m->config.layout;
    size_t half = moe_half(l, 0, 1), total = l->total_bytes;
    uint64_t flag = moe_flag(0, 1);
    for (size_t at = half; size > 0 && at < total; at += size)
        memcpy(arena + at, data, at + size < total ? size : total - at);
    struct moe_header_line *line = (void *)(arena + moe_header(l, half, 1));
    atomic_store(&line->begun, flag);
    atomic_store(&line->flag, flag);
    atomic_store(&line->rows, flag);
    atomic_store(&line->weights, flag);
    if (size > 0 && data[0] & 1)
        line->refusal = 0;
    atomic_store(moe_word(arena, moe_line_out(l, half, 0)),
                 flag | (size ? data[0] & 3 : 0));
}

static void run_step(struct hdl_moe *m, const uint8_t *data, size_t size)
{
    const struct moe_config *c = &m->config;
    int32_t ids[TOKENS * 5];
    float weights[TOKENS * 5] = {0};
    uint8_t rows[TOKENS * 600] = {0}, missing[TOKENS];
    struct hdl_moe_handle handle, other;
    for (int i = 0; i < TOKENS * 5; i++)
        ids[i] = size > 0 ? data[(size_t)i % size] % 12 - 1 : -1;
    struct hdl_moe_tokens t = {.size = sizeof(t),
                               .rows = rows,
                               .scales = rows,
                               .topk_ids = ids,
                               .weights = weights,
                               .num_tokens = size > 1 ? data[1] % 6 : 0};
    size_t out = c->layout.out_rows + 1;
    struct hdl_moe_received r = {.size = sizeof(r),
                                 .rows = malloc(out * 600),
                                 .scales = malloc(out * 16),
                                 .row_numbers = malloc((c->layout.map_entries + 1) * 8),
                                 .local_ids = malloc(out * 5 * 4)};
    struct hdl_moe_outputs o = {.size = sizeof(o), .weights = weights};
    struct hdl_moe_result result = {
        .size = sizeof(result), .rows = rows, .missing = missing};
    void *buffer = NULL;
    if (hdl_moe_dispatch(m, &t, &r, NULL, &handle) >= HDL_OK) {
        other = handle; /* with some bits turned over */
        for (size_t i = 0; i < sizeof(other) && i < size; i++)
            ((uint8_t *)&other)[i] ^= data[i];
        if (memcmp(&other, &handle, sizeof(other)) != 0 &&
            hdl_moe_combine(m, &other, &o, &result, NULL) == HDL_OK)
            abort(); /* a handle that nobody made */
        if (hdl_moe_next_combine_buffer(m, &handle, &buffer) == HDL_OK) {
            o.rows = buffer;
            enum hdl_status status = hdl_moe_combine(m, &handle, &o, &result, NULL);
            (void)status;
        }
    }
    free(r.rows);
    free(r.scales);
    free(r.row_numbers);
    free(r.local_ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct base_env env;
    struct moe_config config;
    struct hdl_moe_opts opts;
    struct hdl_moe *m;
    struct fake fake = {.base = {.ranks = RANKS, .ops = &ops}};
    if (size < 8)
        return 0;
    base_env_init(&env);
    fill_options(&opts, data);
    if (moe_config_init(&env, &config, &opts, RANKS) != HDL_OK)
        return 0;
    for (int r = 0; r < RANKS; r++)
        fake.bases[r] = calloc(1, config.layout.total_bytes);
    fake.base.own = fake.bases[0];
    fake.base.base = fake.bases;
    if (moe_exchange_create(&env, &config, &fake.base, &m) == HDL_OK) {
        fill_arena(m, fake.bases[1], data + 8, size - 8);
        run_step(m, data + 8, size - 8);
        hdl_moe_destroy(m);
    }
    for (int r = 0; r < RANKS; r++)
        free(fake.bases[r]);
    return 0;
}
