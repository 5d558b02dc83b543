/* SPDX-License-Identifier: Apache-2.0 */
/* Intrusive doubly linked list; the head is a node of its own.
 *
 *     head <-> a <-> b <-> (head)        an empty head points at itself
 */
#ifndef BASE_LIST_H
#define BASE_LIST_H

#include <stdbool.h>
#include <stddef.h>

struct base_list {
    struct base_list *next;
    struct base_list *prev;
};

#define base_container_of(ptr, type, member)                                             \
    ((type *)(void *)((char *)(ptr)-offsetof(type, member)))

/* Visits every node; the current one may be removed while visited. */
#define base_list_each(node, after, head)                                                \
    for (struct base_list *node = (head)->next, *after = node->next; node != (head);     \
         node = after, after = node->next)

static inline void base_list_init(struct base_list *node)
{
    node->next = node;
    node->prev = node;
}

static inline bool base_list_empty(const struct base_list *head)
{
    return head->next == head;
}

static inline void base_list_insert_after(struct base_list *where, struct base_list *node)
{
    node->prev = where;
    node->next = where->next;
    where->next->prev = node;
    where->next = node;
}

static inline void base_list_push_back(struct base_list *head, struct base_list *node)
{
    base_list_insert_after(head->prev, node);
}

static inline void base_list_push_front(struct base_list *head, struct base_list *node)
{
    base_list_insert_after(head, node);
}

/* Leaves the node as an empty list, so that removing twice is harmless. */
static inline void base_list_remove(struct base_list *node)
{
    node->next->prev = node->prev;
    node->prev->next = node->next;
    base_list_init(node);
}

/* First node, or NULL. */
static inline struct base_list *base_list_first(const struct base_list *head)
{
    return base_list_empty(head) ? NULL : head->next;
}

/* Removes and returns the first node, or NULL. */
static inline struct base_list *base_list_pop_front(struct base_list *head)
{
    struct base_list *node = base_list_first(head);
    if (node)
        base_list_remove(node);
    return node;
}

#endif
