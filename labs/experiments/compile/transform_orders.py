"""Checkpoint, compile, shard: what the compiler sees in the right order, and in wrong ones.

right                   checkpoint, compile, fully_shard: the compiler sees what is computed again, FSDP is outside
sharded too early       FSDP's hooks are then inside of what is compiled, which the compiler cannot look into
compiled too early      checkpointing is outside: the compiler does not know that it may compute something again
whole model compiled    the graph breaks at each unit's hooks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.fsdp import fully_shard

from fsdp_sim import ranks as processes
from labs.experiments.result import ResultRow
from labs.loop.minimal import shard
from labs.model import build
from labs.model.gpt import GPT, GPTConfig
from labs.wrapping.checkpoint_and_compile import checkpoint_blocks, compile_blocks

SMALL = GPTConfig(n_layer=3, n_head=2, d_model=32, vocab_size=64, context=64)
"""What is compiled: the counts do not depend on the size."""


class OrderMeasurement(NamedTuple):
    """What the compiler saw of a model, by `torch._dynamo.utils.counters` and a look at its graphs.

    Attributes:
        graphs: how many it made. A block's serves all blocks; what follows them is another.
        breaks: places at which it had to stop: to go on behind, or to leave the whole function to Python.
        checkpoints: regions in its graphs of which it knows that they may be computed again.
        again: graphs made anew when rows of another length came; ``third``: and when a third length came.
        loss: of the first step.
    """

    graphs: int
    breaks: int
    checkpoints: int
    again: int
    third: int
    loss: float


Order = Literal["right", "sharded too early", "compiled too early", "whole model compiled"]
EXPECTED: dict[Order, tuple[int, int, int]] = {
    "right": (2, 1, 0),
    "sharded too early": (1, 0, 1),
    "compiled too early": (2, 0, 0),
    "whole model compiled": (2, 1, 1),
}
"""Graphs, checkpoints and breaks that are to be expected: the compiler stops at FSDP's hooks. Where they are inside of
a block's region the block is left to eager mode, and what is compiled is what follows the blocks."""


def _prepare(order: Order, model: GPT, backend: Any) -> None:
    def checkpoint() -> None:
        checkpoint_blocks(model, "full")

    def compile_each() -> None:
        compile_blocks(model, backend)

    def shard_each() -> None:
        shard(model, fully_shard)

    def compile_whole() -> None:
        model.compile(backend=backend)

    steps: dict[Order, tuple[Callable[[], None], ...]] = {
        "right": (checkpoint, compile_each, shard_each),
        "sharded too early": (shard_each, checkpoint, compile_each),
        "compiled too early": (compile_each, checkpoint, shard_each),
        "whole model compiled": (checkpoint, shard_each, compile_whole),
    }
    for step in steps[order]:
        step()


def _see(order: Order, backend: str, lengths: Sequence[int]) -> OrderMeasurement:
    """Train a step on rows of each length, on this rank."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiler = torch._dynamo.lookup_backend(backend)
    checkpoints = 0

    def look(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        nonlocal checkpoints
        checkpoints += sum(str(node.target).startswith("tag_activation_checkpoint") for node in graph.graph.nodes)
        return compiler(graph, inputs)

    model = build(SMALL)
    _prepare(order, model, look)
    graphs: list[int] = []
    first = 0.0
    for length in lengths:
        rows = torch.arange(2 * length).view(2, length) % SMALL.vocab_size
        loss = model(rows, rows)
        loss.backward()
        first = first or float(loss.detach())
        if not graphs:
            seen = checkpoints
        graphs.append(counters["stats"]["unique_graphs"])
    made = [after - before for before, after in zip([0, *graphs], graphs, strict=False)]
    again, third = ([*made[1:], 0, 0])[:2]
    left = counters["frames"]["total"] - counters["frames"]["ok"]
    return OrderMeasurement(made[0], sum(counters["graph_break"].values()) + left, seen, again, third, first)


def orders(
    of: Sequence[Order] = tuple(EXPECTED), *, ranks: int = 2, backend: str = "aot_eager", lengths: Sequence[int] = (32,)
) -> dict[Order, OrderMeasurement]:
    """What the compiler saw in each order, on rank 0.

    Args:
        backend: of torch.compile; what is traced does not depend on it.
        lengths: of rows, one step each; up to three.
    """

    def see_all() -> list[OrderMeasurement]:
        return [_see(order, backend, lengths) for order in of]

    seen = processes.run(see_all, ranks, threads=1, timeout_s=300, progress=False, show_output=False)[0]
    return dict(zip(of, seen, strict=True))


def order_rows(seen: dict[Order, OrderMeasurement]) -> list[ResultRow]:
    """The counts, as expected and as found."""
    rows = []
    for order, found in seen.items():
        graphs, checkpoints, breaks = EXPECTED[order]
        rows += [
            ResultRow(order, "graphs", graphs, found.graphs, ""),
            ResultRow(order, "regions to compute again", checkpoints, found.checkpoints, ""),
            ResultRow(order, "graph breaks", breaks, found.breaks, ""),
        ]
    return rows


def lengths_rows(seen: OrderMeasurement) -> list[ResultRow]:
    """Graphs that were compiled anew: both, with the length left open, and then no more."""
    return [
        ResultRow("right, another length", "graphs made anew", 2, seen.again, ""),
        ResultRow("right, a third length", "graphs made anew", 0, seen.third, ""),
    ]
