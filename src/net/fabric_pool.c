/* SPDX-License-Identifier: Apache-2.0 */
/* Buffers of the fabric transport: messages in slabs, pieces, writes, receives. */
#include "net/fabric_impl.h"

#include <string.h>
#include <sys/mman.h>

/* A slab is one allocation and, if the provider wants it, one registration. Slabs are
 * made when a link has room but no buffer is free: after the first busy moment never
 * again. */
struct fabric_slab {
    struct base_list node;
    struct fid_mr *mr;
    uint8_t *bytes;
    struct fabric_message messages[];
};

size_t fabric_message_room(const struct net_fabric *fabric, enum fabric_size size)
{
    const size_t payloads[] = {FABRIC_SMALL_PAYLOAD, NET_EAGER_BYTES, fabric->eager};
    return NET_WIRE_HEADS + payloads[size];
}

static bool slab_add(struct net_fabric *fabric, enum fabric_size size)
{
    size_t each = (fabric_message_room(fabric, size) + 63) & ~(size_t)63;
    size_t count = size == FABRIC_LARGE ? 4 : 32;
    struct fabric_slab *slab =
        base_alloc(fabric->env, 1, sizeof(*slab) + count * sizeof(struct fabric_message));
    if (!slab)
        return false;
    slab->bytes = base_alloc_aligned(fabric->env, 64, count, each);
    if (!slab->bytes || fabric_register(fabric, slab->bytes, count * each, FI_SEND,
                                        &slab->mr) != HDL_OK) {
        base_free_aligned(fabric->env, slab->bytes);
        base_free(fabric->env, slab);
        return false;
    }
    for (size_t i = 0; i < count; i++) {
        struct fabric_message *message = &slab->messages[i];
        message->op.kind = FABRIC_OP_MESSAGE;
        message->size = size;
        message->bytes = slab->bytes + i * each;
        message->desc = slab->mr ? fi_mr_desc(slab->mr) : NULL;
        base_list_push_back(&fabric->free_messages[size], &message->node);
    }
    base_list_push_back(&fabric->slabs, &slab->node);
    return true;
}

struct fabric_message *fabric_message_get(struct net_fabric *fabric, size_t payload)
{
    enum fabric_size size = FABRIC_SMALL;
    while (fabric_message_room(fabric, size) < NET_WIRE_HEADS + payload)
        size++;
    struct base_list *list = &fabric->free_messages[size];
    if (base_list_empty(list) && !slab_add(fabric, size))
        return NULL;
    struct base_list *node = base_list_pop_front(list);
    struct fabric_message *message = base_container_of(node, struct fabric_message, node);
    message->open = message->offers = message->posted = false;
    message->posted_at = 0;
    message->acked = false;
    message->link = NULL;
    return message;
}

void fabric_message_put(struct net_fabric *fabric, struct fabric_message *message)
{
    /* Front: the same few buffers stay in the cache. */
    base_list_push_front(&fabric->free_messages[message->size], &message->node);
}

static struct fabric_piece *piece_add(struct net_fabric *fabric)
{
    size_t bytes = NET_PIECE_BYTES + sizeof(uint64_t);
    struct fabric_piece *piece = base_alloc(fabric->env, 1, sizeof(*piece));
    if (!piece)
        return NULL;
    piece->bytes = base_alloc_aligned(fabric->env, 4096, 1, bytes);
    if (!piece->bytes ||
        fabric_register(fabric, piece->bytes, bytes, FI_READ | FI_REMOTE_READ,
                        &piece->mr) != HDL_OK) {
        base_free_aligned(fabric->env, piece->bytes);
        base_free(fabric->env, piece);
        return NULL;
    }
    piece->op.kind = FABRIC_OP_READ;
    bool virtual = fabric->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
    piece->offer.address = virtual ? (uint64_t)(uintptr_t)piece->bytes : 0;
    base_list_push_back(&fabric->pieces, &piece->all);
    return piece;
}

struct fabric_piece *fabric_piece_get(struct net_fabric *fabric)
{
    struct base_list *node = base_list_pop_front(&fabric->free_pieces);
    struct fabric_piece *piece =
        node ? base_container_of(node, struct fabric_piece, node) : piece_add(fabric);
    if (!piece)
        return NULL;
    base_list_init(&piece->node);
    piece->write = NULL;
    piece->length = 0;
    return piece;
}

void fabric_piece_put(struct net_fabric *fabric, struct fabric_piece *piece)
{
    memset(piece->bytes + piece->length, 0, sizeof(piece->offer.stamp));
    /* The stamp goes first: a reader that gets a byte of what comes next misses it. */
    atomic_thread_fence(memory_order_seq_cst);
    base_list_remove(&piece->node);
    base_list_push_front(&fabric->free_pieces, &piece->node);
}

void fabric_pool_init(struct net_fabric *fabric)
{
    for (int i = 0; i < FABRIC_SIZES; i++)
        base_list_init(&fabric->free_messages[i]);
    base_list_init(&fabric->free_writes);
    base_list_init(&fabric->free_pieces);
    base_list_init(&fabric->slabs);
    base_list_init(&fabric->pieces);
}

enum hdl_status fabric_pool_create(struct net_fabric *fabric)
{
    fabric->receive_stride = (NET_WIRE_HEADS + fabric->eager + 63) & ~(size_t)63;
    size_t bytes = FABRIC_RECEIVES * fabric->receive_stride;
    fabric->writes = base_alloc(fabric->env, FABRIC_WRITES, sizeof(*fabric->writes));
    fabric->receives =
        base_alloc(fabric->env, FABRIC_RECEIVES, sizeof(*fabric->receives));
    if (!fabric->writes || !fabric->receives)
        return HDL_ENOMEM;
    /* Pages, not the allocator's zeroes: most of it is never touched. */
    void *pages =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED)
        return base_fail(HDL_ENOMEM, "no memory for %zu bytes of receive buffers", bytes);
    fabric->receive_bytes = pages;
    for (size_t i = 0; i < FABRIC_WRITES; i++) {
        base_list_init(&fabric->writes[i].remote_node);
        base_list_push_back(&fabric->free_writes, &fabric->writes[i].node);
    }
    for (size_t i = 0; i < FABRIC_RECEIVES; i++) {
        fabric->receives[i].op.kind = FABRIC_OP_RECEIVE;
        fabric->receives[i].bytes = fabric->receive_bytes + i * fabric->receive_stride;
    }
    return fabric_register(fabric, pages, bytes, FI_RECV, &fabric->receive_mr);
}

void fabric_pool_close(struct net_fabric *fabric)
{
    if (fabric->receive_mr)
        fi_close(&fabric->receive_mr->fid);
    fabric->receive_mr = NULL;
    base_list_each(node, after, &fabric->slabs)
    {
        struct fabric_slab *slab = base_container_of(node, struct fabric_slab, node);
        if (slab->mr)
            fi_close(&slab->mr->fid);
        slab->mr = NULL;
    }
    base_list_each(node, after, &fabric->pieces)
    {
        struct fabric_piece *piece = base_container_of(node, struct fabric_piece, all);
        if (piece->mr)
            fi_close(&piece->mr->fid);
        piece->mr = NULL;
    }
}

void fabric_pool_free(struct net_fabric *fabric)
{
    base_list_each(node, after, &fabric->slabs)
    {
        struct fabric_slab *slab = base_container_of(node, struct fabric_slab, node);
        base_free_aligned(fabric->env, slab->bytes);
        base_free(fabric->env, slab);
    }
    base_list_each(node, after, &fabric->pieces)
    {
        struct fabric_piece *piece = base_container_of(node, struct fabric_piece, all);
        base_free_aligned(fabric->env, piece->bytes);
        base_free(fabric->env, piece);
    }
    base_free(fabric->env, fabric->writes);
    base_free(fabric->env, fabric->receives);
    if (fabric->receive_bytes)
        munmap(fabric->receive_bytes, FABRIC_RECEIVES * fabric->receive_stride);
}
