/* SPDX-License-Identifier: Apache-2.0 */
/* An exchange on GPUs as ranks of a group: arenas of all ranks, and the public calls. */
#ifndef MOE_GPU_LINK_H
#define MOE_GPU_LINK_H

#include "group/engine.h"
#include "group/group.h"
#include "moe/exchange.h"
#include "moe/gpu_exchange.h"
#include "net/net.h"

struct moe_gpu_link {
    struct moe_peers base;
    struct base_env *env;
    struct hdl_group *group;
    struct moe_gpu *gpu;
    struct group_watch watch;
    int fd; /* of the own arena, offered; -1 = none */
    struct net_ticket ticket;
    uint64_t mapped[MOE_GPU_MAX_RANKS]; /* key of the arena that is mapped, 0 = none */
    uint32_t members; /* of creation or the last update, also who was lost meanwhile */
};

/* The newest generation and step of any rank before this creation or update. */
struct moe_newest {
    uint64_t generation, step;
    /* Ranks that took part or were lost in it: who is there no more is missing. */
    uint64_t members[MOE_MAX_RANKS / 64];
};

/*
 * What hdl_moe_create, and hdl_moe_update do once all ranks have agreed on the options,
 * as collectives that meet each other. The config becomes the exchange's, or is freed on
 * failure; an exchange that cannot be updated is as it was.
 */
enum hdl_status moe_gpu_link_create(struct hdl_group *group,
                                    const struct hdl_moe_opts *opts,
                                    struct moe_config *config,
                                    const struct moe_newest *newest,
                                    struct hdl_moe **moe);
enum hdl_status moe_gpu_link_update(struct hdl_moe *m, struct moe_config *config,
                                    const struct moe_newest *newest);
/* The highest step that a lane has come to on the device. */
uint64_t moe_gpu_link_step(const struct hdl_moe *m);

/* The phases of a step (MOE_GPU_SEND, MOE_GPU_RECV or both) as the public calls. */
enum hdl_status moe_gpu_call_dispatch(struct hdl_moe *m, uint32_t phase,
                                      const struct hdl_moe_tokens *tokens,
                                      struct hdl_moe_received *received,
                                      const struct hdl_moe_call *opts,
                                      struct hdl_moe_handle *handle);
enum hdl_status moe_gpu_call_combine(struct hdl_moe *m, uint32_t phase,
                                     const struct hdl_moe_handle *handle,
                                     const struct hdl_moe_outputs *outputs,
                                     const struct hdl_moe_result *result,
                                     const struct hdl_moe_call *opts);
enum hdl_status moe_gpu_call_buffer(struct hdl_moe *m,
                                    const struct hdl_moe_handle *handle, void **rows);
enum hdl_status moe_gpu_call_status(struct hdl_moe *m);

#endif
