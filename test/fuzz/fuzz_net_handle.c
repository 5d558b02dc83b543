/* SPDX-License-Identifier: Apache-2.0 */
/* Packed window handles and fabric messages from bytes that anybody may have sent. */
#include "net/fabric_wire.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void fuzz_handle(const uint8_t *data, size_t size)
{
    struct net_handle handle;
    if (net_handle_unpack(data, size, &handle) != HDL_OK)
        return;
    /* What was accepted packs to the same bytes. */
    uint8_t again[NET_HANDLE_BYTES];
    size_t length = sizeof(again);
    if (net_handle_pack(&handle, again, &length) != HDL_OK)
        return;
    struct net_handle copy;
    if (net_handle_unpack(again, length, &copy) != HDL_OK ||
        memcmp(&copy, &handle, sizeof(copy)) != 0)
        abort();
}

static void fuzz_message(const uint8_t *data, size_t size)
{
    static uint8_t window[4096];
    struct net_wire_view view = {0};
    if (!net_wire_parse(data, size, UINT64_C(0x0123456789abcdef), &view))
        return;
    if (view.head.kind == NET_WIRE_HELLO) {
        uint8_t address[NET_MAX_ADDRESS];
        memcpy(address, view.hello->address, view.hello->address_length);
    }
    struct net_wire_part part;
    const uint8_t *at = view.parts;
    size_t left = view.head.kind == NET_WIRE_PUT ? view.parts_bytes : 0;
    while (net_wire_next(&at, &left, &part)) {
        const struct net_wire_put *put = &part.put;
        if (part.offered || !net_wire_put_fits(put, sizeof(window)))
            continue;
        memcpy(window + put->offset, part.payload, put->bytes);
        memcpy(window + put->offset2, part.payload + put->bytes, put->bytes2);
        if (put->signal_offset != UINT64_MAX)
            net_raise(window, put->signal_offset, put->value,
                      (enum hdl_signal_op)put->op);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_handle(data, size);
    /* An aligned copy, as receive buffers are. */
    uint8_t *message = malloc(size + 1);
    if (!message)
        return 0;
    memcpy(message, data, size);
    fuzz_message(message, size);
    free(message);
    return 0;
}
