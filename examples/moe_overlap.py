# SPDX-License-Identifier: Apache-2.0
"""A mixture-of-experts layer with Buffer: two micro-batches, each computes while the other's tokens travel.

heddle run -n 4 -- python examples/moe_overlap.py (or torchrun)
"""

import torch
import torch.distributed as dist

import mooncake.pg  # noqa: F401  registers the backends
from mooncake.mooncake_ep_buffer import Buffer

TOKENS, HIDDEN, TOP_K, LOCAL = 16, 256, 2, 2


class Layer:
    """Experts are linear maps; rank r holds experts r * LOCAL and following."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.experts = LOCAL * self.size
        made = torch.Generator().manual_seed(1)  # the same on all ranks, to check the results below
        self.weights = torch.randn(self.experts, HIDDEN, HIDDEN, generator=made) / HIDDEN**0.5
        self.router = torch.randn(HIDDEN, self.experts, generator=made)
        self.buffer = Buffer(group, Buffer.get_ep_buffer_size_hint(TOKENS, HIDDEN, self.size, self.experts))
        self.active = torch.ones(self.size, dtype=torch.int32)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = torch.topk(torch.softmax(x.float() @ self.router, -1), TOP_K)
        return ids, weights

    def send(self, x: torch.Tensor, ids: torch.Tensor) -> tuple:
        """Tokens leave; nothing is waited for until the hook is called."""
        return self.buffer.dispatch(x, ids, self.active, TOKENS, self.experts, -1, use_fp8=False, return_recv_hook=True)

    def compute(self, rows: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Each expert on its own rows, which lie in front."""
        out = torch.empty_like(rows)
        for e, n in enumerate(count.tolist()):
            out[e, :n] = (rows[e, :n].float() @ self.weights[self.rank * LOCAL + e]).to(rows.dtype)
        return out

    def __call__(self, batches: list[torch.Tensor]) -> list[torch.Tensor]:
        routed = [self.route(x) for x in batches]
        flights = [self.send(x, ids) for x, (ids, _) in zip(batches, routed, strict=True)]
        results, hooks = [], []
        for (ids, weights), (rows, count, handle, _, arrive) in zip(routed, flights, strict=True):
            arrive()  # the next micro-batch, and the results of the one before, travel during the computation
            result, _, finish = self.buffer.combine(
                self.compute(rows, count), ids, weights, self.active, -1, handle, return_recv_hook=True
            )
            results.append(result)
            hooks.append(finish)
        for finish in hooks:
            finish()
        return results

    def alone(self, x: torch.Tensor) -> torch.Tensor:
        """The same, with all experts here."""
        ids, weights = self.route(x)
        outputs = torch.einsum("th,tkhg->tkg", x.float(), self.weights[ids])
        return (outputs * weights[..., None]).sum(1)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("mooncake-cpu")
    layer = Layer(dist.group.WORLD)
    torch.manual_seed(layer.rank)
    for step in range(5):
        batches = [torch.randn(TOKENS, HIDDEN).to(torch.bfloat16) for _ in range(2)]
        for x, result in zip(batches, layer(batches), strict=True):
            error = (result.float() - layer.alone(x)).abs().max().item()
            assert error < 0.1, f"step {step}: error {error}"
    print(f"rank {layer.rank} of {layer.size}: 5 steps are right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
