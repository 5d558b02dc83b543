# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine inside a function that torch.compile takes whole."""

import torch

import heddle
import heddle.torch
from heddle.torch import register_exchange


def test_compiled_layers_equal_the_plain_one() -> None:
    with heddle.Context(0, 1) as context, heddle.Group(context) as group:
        # Layers of one code with an exchange each, as those of a model.
        for _ in range(3):
            check_layer(heddle.Moe(group, 4, 2, 16, 8, dtype=heddle.DType.F32))


def check_layer(moe: heddle.Moe) -> None:
    exchange = register_exchange(moe)

    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows, _, _, step = torch.ops.heddle.dispatch(exchange, x, ids, weights)
        factor = torch.arange(1, 5, dtype=rows.dtype, device=rows.device)[:, None, None]
        return torch.ops.heddle.combine(exchange, step, rows * factor, x.size(0))

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (5, 8):
        x, weights = torch.randn(tokens, 16), torch.rand(tokens, 2)
        ids = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)])
        wanted = (weights * (ids + 1)).sum(1, keepdim=True) * x
        torch.testing.assert_close(layer(x, ids, weights), wanted)
        torch.testing.assert_close(compiled(x, ids, weights), wanted)
