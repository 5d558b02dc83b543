/* SPDX-License-Identifier: Apache-2.0 */
/* From a token's list of experts to the places where its row goes. */
#include "moe/exchange.h"

uint32_t moe_resolve(const struct moe_config *config, const uint16_t *ids,
                     const float *weights, uint32_t source, uint32_t token,
                     const uint64_t *active, struct moe_route *routes)
{
    uint32_t k = config->shape.top_k, n = 0;
    for (uint32_t j = 0; j < k; j++) {
        uint32_t id = ids[j];
        if (id >= config->shape.experts)
            continue;
        float weight = weights ? weights[j] : 0.0f;
        bool named = false;
        for (uint32_t i = 0; i < j; i++)
            named = named || ids[i] == id;
        if (named)
            continue;
        for (uint32_t i = j + 1; weights && i < k; i++) {
            if (ids[i] == id)
                weight += weights[i];
        }
        struct moe_place place =
            moe_map_place(&config->map, config->shape.dp, id, source, token, active);
        routes[n++] = (struct moe_route){place.rank, place.local, j, weight};
    }
    return n;
}
