/* SPDX-License-Identifier: Apache-2.0 */
/* Windows of device memory that users bring: mapped for kernels, and for nothing else. */
#include "net/internal.h"

static enum hdl_status cuda_open(struct hdl_peer_window *remote,
                                 const struct net_handle *handle)
{
    void *address;
    if (handle->net_id == remote->net->id)
        return net_window_of(remote->net, handle, &remote->data);
    enum hdl_status status = gpu_ipc_open(&handle->shared, &remote->device, &address);
    if (status == HDL_OK)
        remote->data = address;
    else
        base_fail_append(" (memory of rank %d, pid %d)", handle->rank, handle->pid);
    return status;
}

static void cuda_close(struct hdl_peer_window *remote)
{
    gpu_ipc_close(&remote->device);
}

static enum hdl_status cuda_put(struct hdl_peer_window *remote,
                                const struct net_block blocks[2], size_t signal_offset,
                                uint64_t value, enum hdl_signal_op op, unsigned hints)
{
    return base_fail(HDL_ENOTSUP, "a window of device memory is written by kernels only");
}

const struct net_ops net_cuda_ops = {
    .name = "cuda",
    .open = cuda_open,
    .close = cuda_close,
    .put = cuda_put,
};
