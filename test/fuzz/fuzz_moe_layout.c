/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes and offsets of an exchange for any options, against the same sums in 128 bits,
 * written down from the shapes of the interface.
 *
 *     byte 0 to 35   nine int32: ranks, experts, k, hidden, tokens, align, lanes, dp,
 *                    small
 *     byte 36 to 39  dtype, format and wire, layout, flags
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "moe/config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef unsigned __int128 wide;

static void must(int condition)
{
    if (!condition)
        abort();
}

static wide least(wide a, wide b)
{
    return a < b ? a : b;
}

/* Rows of dispatch's output, entries of the index, bytes of the combine buffer and at
 * least so many of the arena. */
struct oracle {
    wide rows, entries, buffer, arena;
};

static struct oracle sizes_of(const struct hdl_moe_opts *o, wide ranks)
{
    static const wide width[] = {
        [HDL_U8] = 1, [HDL_F8E4M3] = 1, [HDL_F16] = 2, [HDL_BF16] = 2, [HDL_F32] = 4};
    wide experts = (wide)o->num_experts, k = (wide)o->top_k, hidden = (wide)o->hidden;
    wide local = experts / ranks, tokens = (wide)o->max_tokens;
    wide dp = o->dp_size ? (wide)o->dp_size : 1, align = o->align ? (wide)o->align : 1;
    wide sources = ranks / dp, most = sources * tokens * least(k, local);
    wide lanes = o->lanes ? (wide)o->lanes : 2;
    enum hdl_dtype dtype = o->dtype ? o->dtype : HDL_BF16, back = o->combine_dtype;
    if (back == 0)
        back = dtype == HDL_F8E4M3 ? HDL_BF16 : dtype;
    wide elem = dtype == HDL_U8 ? 0 : width[back];
    struct oracle s = {sources * tokens, 0, 0, 0};
    if (o->layout == HDL_MOE_EXPERT_3D)
        s.rows = local * sources * tokens;
    else if (o->layout == HDL_MOE_EXPERT_FLAT)
        s.rows = most + local * (align - 1);
    else if (o->layout == HDL_MOE_INDEXED)
        s.entries = most;
    s.buffer =
        (s.entries || o->layout == HDL_MOE_INDEXED ? s.entries : s.rows) * hidden * elem;
    wide row = hidden * (o->format ? 1 : width[dtype]);
    s.arena = lanes * (s.buffer + 2 * ranks * tokens * (row + 8 + k * 6));
    return s;
}

/* Every region begins where the one before it ends or later. */
static void check_order(const struct moe_layout *l, const struct moe_shape *s)
{
    wide pairs = (wide)s->ranks * s->max_tokens;
    const struct {
        size_t at;
        wide bytes;
    } regions[] = {
        {l->header, (wide)s->ranks * l->header_stride},
        {l->weights, s->late_weights ? pairs * s->top_k * 4 : 0},
        {l->arrive, pairs * 8},
        {l->line_out, (wide)s->ranks * MOE_LINE_BYTES},
        {l->line_in, (wide)s->ranks * MOE_LINE_BYTES},
        {l->landed, l->gives ? pairs * 8 : 0},
        {l->slot, pairs * l->row_stride},
        {l->give, pairs * l->gives * l->give_stride},
        {l->take, pairs * l->gives * l->give_stride},
        {l->half_bytes, 0},
    };
    for (size_t i = 0; i + 1 < sizeof(regions) / sizeof(regions[0]); i++)
        must((wide)regions[i].at + regions[i].bytes <= regions[i + 1].at);
    must(l->row_bytes <= l->row_stride && l->give_bytes <= l->give_stride);
    must((wide)l->half_bytes * 2 + l->buffer_bytes <= l->lane_bytes);
    must((wide)MOE_CONTROL_BYTES + (wide)l->lane_bytes * s->lanes <= l->total_bytes);
    must((l->row_stride | l->give_stride | l->header_stride) % MOE_LINE_BYTES == 0);
}

static void fill(struct hdl_moe_opts *o, int32_t *ranks, const uint8_t *data)
{
    static const enum hdl_dtype types[] = {0,      HDL_BF16,   HDL_F16, HDL_F32,
                                           HDL_U8, HDL_F8E4M3, HDL_I64};
    int32_t v[9];
    memcpy(v, data, sizeof(v));
    for (int i = 0; i < 8; i++) /* most values are out of range: make some small */
        v[i] = v[8] >> i & 1 ? (int32_t)((uint32_t)v[i] % 65) : v[i];
    *ranks = v[0];
    *o = (struct hdl_moe_opts){.size = sizeof(*o),
                               .num_experts = v[1],
                               .top_k = v[2],
                               .hidden = v[3],
                               .max_tokens = v[4],
                               .align = v[5],
                               .lanes = v[6],
                               .dp_size = v[7],
                               .dtype = types[data[36] % 7],
                               .combine_dtype = types[data[36] / 7 % 7],
                               .format = (enum hdl_moe_format)(data[37] % 5),
                               .combine_wire = (enum hdl_moe_wire)(data[37] / 5 % 4),
                               .layout = (enum hdl_moe_layout)(data[38] % 5),
                               .exact = data[39] & 1,
                               .late_weights = data[39] & 2,
                               .zero_padding = data[39] & 4};
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct base_env env;
    struct moe_config c;
    struct hdl_moe_opts o;
    struct hdl_moe_sizes s = {.size = sizeof(s)};
    int32_t ranks;
    if (size < 40)
        return 0;
    base_env_init(&env);
    fill(&o, &ranks, data);
    enum hdl_status status = hdl_moe_size_hint(&o, ranks, &s);
    must(status == moe_config_init(&env, &c, &o, ranks));
    if (status != HDL_OK) {
        must(status == HDL_EINVAL);
        return 0;
    }
    struct oracle w = sizes_of(&o, (wide)ranks);
    must(w.arena < (wide)1 << 63); /* else it had to be refused */
    must(s.out_rows == w.rows && s.index_entries == w.entries);
    must(s.combine_buffer_bytes == w.buffer && s.arena_bytes >= w.arena);
    must(s.arena_bytes == c.layout.total_bytes);
    check_order(&c.layout, &c.shape);
    moe_config_free(&env, &c);
    return 0;
}
