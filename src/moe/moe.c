/* SPDX-License-Identifier: Apache-2.0 */
/* The public calls of a step: options, handles, and the phases in order. */
#include <string.h>

#include "base/option.h"
#include "moe/gpu_link.h"

/* Is it an exchange on GPUs? Others, and what is none, take the way of the host. */
static bool on_gpu(const struct hdl_moe *m)
{
    return moe_exchange_check(m) == HDL_OK && m->link;
}

static const uint32_t whole = MOE_GPU_SEND | MOE_GPU_RECV;

enum hdl_status hdl_moe_dispatch_send(struct hdl_moe *m,
                                      const struct hdl_moe_tokens *tokens,
                                      const struct hdl_moe_call *opts,
                                      struct hdl_moe_handle *handle)
{
    if (on_gpu(m))
        return moe_gpu_call_dispatch(m, MOE_GPU_SEND, tokens, NULL, opts, handle);
    struct moe_call call;
    struct moe_lane *lane;
    struct hdl_moe_tokens t;
    enum hdl_status status = moe_call_begin(m, opts, &call);
    if (status == HDL_OK)
        status = base_option_copy("hdl_moe_tokens", tokens, &t, sizeof(t));
    if (status == HDL_OK && !handle)
        status = base_fail(HDL_EINVAL, "dispatch_send: handle is NULL");
    if (status == HDL_OK)
        status = moe_dispatch_begin(m, &t, &call, false, &lane);
    if (status == HDL_OK)
        moe_handle_make(m, lane, handle);
    return status;
}

enum hdl_status hdl_moe_dispatch_recv(struct hdl_moe *m,
                                      const struct hdl_moe_handle *handle,
                                      struct hdl_moe_received *received,
                                      const struct hdl_moe_call *opts)
{
    struct hdl_moe_handle step = handle ? *handle : (struct hdl_moe_handle){{0}};
    if (on_gpu(m))
        return moe_gpu_call_dispatch(m, MOE_GPU_RECV, NULL, received, opts, &step);
    struct moe_call call;
    struct moe_lane *lane;
    struct hdl_moe_received r;
    enum hdl_status status = moe_call_begin(m, opts, &call);
    if (status == HDL_OK)
        status = moe_received_open(m, received, &r);
    if (status == HDL_OK)
        status = moe_handle_open(m, handle, MOE_SENT, &lane);
    if (status == HDL_OK && !base_mask_test(m->mask, m->peers->self))
        status = base_fail(HDL_EINVAL, "dispatch_recv: the mask excludes its own rank %u",
                           m->peers->self);
    if (status != HDL_OK)
        return status;
    status = moe_dispatch_finish(m, lane, &r, &call);
    if (status >= HDL_OK)
        moe_received_close(received, r.num_rows, r.num_pairs);
    return status;
}

enum hdl_status hdl_moe_dispatch(struct hdl_moe *m, const struct hdl_moe_tokens *tokens,
                                 struct hdl_moe_received *received,
                                 const struct hdl_moe_call *opts,
                                 struct hdl_moe_handle *handle)
{
    if (on_gpu(m))
        return moe_gpu_call_dispatch(m, whole, tokens, received, opts, handle);
    struct moe_call call;
    struct moe_lane *lane;
    struct hdl_moe_tokens t;
    struct hdl_moe_received r;
    enum hdl_status status = moe_call_begin(m, opts, &call);
    if (status == HDL_OK)
        status = base_option_copy("hdl_moe_tokens", tokens, &t, sizeof(t));
    if (status == HDL_OK)
        status = moe_received_open(m, received, &r);
    if (status == HDL_OK && !handle)
        status = base_fail(HDL_EINVAL, "dispatch: handle is NULL");
    if (status == HDL_OK)
        status = moe_dispatch_begin(m, &t, &call, true, &lane);
    if (status != HDL_OK)
        return status;
    moe_handle_make(m, lane, handle);
    status = moe_dispatch_finish(m, lane, &r, &call);
    if (status >= HDL_OK)
        moe_received_close(received, r.num_rows, r.num_pairs);
    return status;
}

static enum hdl_status begin_combine(struct hdl_moe *m,
                                     const struct hdl_moe_handle *handle,
                                     enum moe_phase phase,
                                     const struct hdl_moe_call *opts,
                                     struct moe_call *call, struct moe_lane **lane)
{
    enum hdl_status status = moe_call_begin(m, opts, call);
    if (status == HDL_OK && m->config.opaque)
        status = base_fail(HDL_ENOTSUP, "combine: opaque rows cannot be summed");
    if (status == HDL_OK)
        status = moe_handle_open(m, handle, phase, lane);
    if (status == HDL_OK && !base_mask_test(m->mask, m->peers->self))
        status = base_fail(HDL_EINVAL, "combine: the mask excludes its own rank %u",
                           m->peers->self);
    return status;
}

enum hdl_status hdl_moe_combine_send(struct hdl_moe *m,
                                     const struct hdl_moe_handle *handle,
                                     const struct hdl_moe_outputs *outputs,
                                     const struct hdl_moe_call *opts)
{
    if (on_gpu(m))
        return moe_gpu_call_combine(m, MOE_GPU_SEND, handle, outputs, NULL, opts);
    struct moe_call call;
    struct moe_lane *lane;
    struct hdl_moe_outputs o;
    enum hdl_status status = base_option_copy("hdl_moe_outputs", outputs, &o, sizeof(o));
    if (status == HDL_OK)
        status = begin_combine(m, handle, MOE_RECEIVED, opts, &call, &lane);
    if (status == HDL_OK)
        status = moe_combine_begin(m, lane, &o, &call, false);
    return status;
}

enum hdl_status hdl_moe_combine_recv(struct hdl_moe *m,
                                     const struct hdl_moe_handle *handle,
                                     const struct hdl_moe_result *result,
                                     const struct hdl_moe_call *opts)
{
    if (on_gpu(m))
        return moe_gpu_call_combine(m, MOE_GPU_RECV, handle, NULL, result, opts);
    struct moe_call call;
    struct moe_lane *lane;
    struct hdl_moe_result r;
    enum hdl_status status = base_option_copy("hdl_moe_result", result, &r, sizeof(r));
    if (status == HDL_OK)
        status = begin_combine(m, handle, MOE_COMBINING, opts, &call, &lane);
    if (status == HDL_OK)
        status = moe_combine_finish(m, lane, &r, &call);
    return status;
}

enum hdl_status hdl_moe_combine(struct hdl_moe *m, const struct hdl_moe_handle *handle,
                                const struct hdl_moe_outputs *outputs,
                                const struct hdl_moe_result *result,
                                const struct hdl_moe_call *opts)
{
    if (on_gpu(m))
        return moe_gpu_call_combine(m, whole, handle, outputs, result, opts);
    struct moe_call call;
    struct moe_lane *lane;
    struct hdl_moe_outputs o;
    struct hdl_moe_result r;
    enum hdl_status status = base_option_copy("hdl_moe_outputs", outputs, &o, sizeof(o));
    if (status == HDL_OK)
        status = base_option_copy("hdl_moe_result", result, &r, sizeof(r));
    if (status == HDL_OK)
        status = begin_combine(m, handle, MOE_RECEIVED, opts, &call, &lane);
    if (status == HDL_OK)
        status = moe_combine_begin(m, lane, &o, &call, true);
    if (status == HDL_OK)
        status = moe_combine_finish(m, lane, &r, &call);
    return status;
}

enum hdl_status hdl_moe_next_combine_buffer(struct hdl_moe *m,
                                            const struct hdl_moe_handle *handle,
                                            void **rows)
{
    struct moe_call call;
    struct moe_lane *lane;
    enum hdl_status status = moe_call_begin(m, NULL, &call);
    if (status == HDL_OK && !rows)
        status = base_fail(HDL_EINVAL, "next_combine_buffer: rows is NULL");
    if (status == HDL_OK && m->config.opaque)
        status =
            base_fail(HDL_ENOTSUP, "next_combine_buffer: opaque rows have no combine");
    if (status == HDL_OK && m->link)
        return moe_gpu_call_buffer(m, handle, rows);
    if (status == HDL_OK)
        status = moe_handle_open_early(m, handle, &lane);
    if (status == HDL_OK)
        *rows = m->peers->own + moe_buffer(&m->config.layout, lane->number);
    return status;
}

enum hdl_status hdl_moe_status(const struct hdl_moe *m, struct hdl_moe_state *state)
{
    enum hdl_status status = moe_exchange_check(m);
    if (status == HDL_OK && !state)
        status = base_fail(HDL_EINVAL, "hdl_moe_status: state is NULL");
    if (status == HDL_OK && m->link) /* fetches the device's counters */
        status = moe_gpu_call_status((struct hdl_moe *)(uintptr_t)m);
    return status ? status : moe_exchange_status(m, state);
}

enum hdl_status hdl_moe_size_hint(const struct hdl_moe_opts *opts, int32_t num_ranks,
                                  struct hdl_moe_sizes *sizes)
{
    struct base_env env;
    struct moe_config c;
    struct hdl_moe_sizes s;
    struct moe_gpu_geometry geo = {0};
    base_env_init(&env);
    enum hdl_status status = base_option_copy("hdl_moe_sizes", sizes, &s, sizeof(s));
    if (status == HDL_OK && !sizes)
        status = base_fail(HDL_EINVAL, "hdl_moe_size_hint: sizes is NULL");
    if (status == HDL_OK)
        status = moe_config_init(&env, &c, opts, num_ranks);
    if (status == HDL_OK && c.shape.device) {
        status = moe_gpu_geometry_init(&c, &geo);
        if (status != HDL_OK)
            moe_config_free(&env, &c);
    }
    if (status != HDL_OK)
        return status;
    size_t size = sizes->size < sizeof(s) ? sizes->size : sizeof(s);
    s = (struct hdl_moe_sizes){
        .size = sizes->size,
        .arena_bytes = c.shape.device ? geo.total_bytes : c.layout.total_bytes,
        .combine_buffer_bytes = c.layout.buffer_bytes,
        .combine_buffer_elements = c.layout.take_rows * c.shape.hidden,
        .out_rows = c.layout.out_rows,
        .index_entries = c.layout.map_entries,
        .row_elements = c.shape.hidden,
        .row_bytes = (uint64_t)c.shape.hidden * c.shape.row_elem,
        .scale_bytes = c.shape.row_scales,
    };
    memcpy(sizes, &s, size);
    moe_config_free(&env, &c);
    return HDL_OK;
}
