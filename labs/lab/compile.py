"""Activation checkpointing and torch.compile: what is saved, what it costs, and in which order they go with FSDP.

    python -m labs.lab.compile                      two ranks, a small GPT
    python -m labs.lab.compile --ranks 4 --n-layer 8

First the trainer with activation checkpointing none, selective and full: the simulator predicts peak memory and step
time, the trainer measures both. Then each block is checkpointed, compiled and sharded, in the right order and in wrong
ones, and torch's own counters say what the compiler saw: none of the wrong ones raises an error, or changes the loss.

    right                   checkpoint, compile, fully_shard: the compiler sees what is computed again, FSDP is outside
    sharded too early       FSDP's hooks are then inside of what is compiled, which the compiler cannot look into
    compiled too early      checkpointing is outside: the compiler does not know that it may compute something again
    whole model compiled    the graph breaks at each unit's hooks

On CPUs inductor needs a C++ compiler; where there is none aot_eager traces, and nothing becomes faster.
Exit status: 0 done, 1 a training failed, 2 asked wrongly, 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from torch.distributed.fsdp import fully_shard

from fsdp_sim import ranks as processes
from fsdp_sim.measure import live_bytes
from labs.checklist import has_compiler
from labs.config import TrainConfig
from labs.data import load_corpus
from labs.gpt import GPT, GPTConfig
from labs.lab.result import Result, Row, this_machine
from labs.models import build
from labs.optimizer import make_optimizer
from labs.pieces import shard
from labs.place import Place, find_device, n_ranks
from labs.simulated import peak_memory_bytes, simulated
from labs.step import train_step
from labs.trained import FailedError, train
from labs.wrapping import wrap
from labs.wrapping.recompute import checkpoint_blocks, compile_blocks

HOW = ("none", "selective", "full")
ROWS, SEQ_LEN, STEPS = 16, 128, 6
SMALL = GPTConfig(n_layer=3, n_head=2, d_model=32, vocab_size=64, context=64)
"""What is compiled: the counts do not depend on the size."""
MB = 1e6


# ---- Activation checkpointing ---------------------------------------------------------------------------------------


def _config(how: str, n_layer: int) -> TrainConfig:
    checkpointing: Any = how
    return TrainConfig(
        n_layer=n_layer, global_batch=ROWS, seq_len=SEQ_LEN, steps=STEPS, activation_checkpointing=checkpointing
    )


def _arguments(n_layer: int) -> tuple[str, ...]:
    return (f"--n_layer={n_layer}", f"--global_batch={ROWS}", f"--seq_len={SEQ_LEN}", f"--steps={STEPS}")


def predict_peak_bytes(how: str, ranks: int = 2, n_layer: int = 5) -> int:
    """The most bytes of tensors on a rank, by the simulator; nothing is run.

    Raises:
        ValueError: on a GPU that is not in the catalogue.
    """
    config, place = _config(how, n_layer), Place(0, ranks, 0, ranks)
    return peak_memory_bytes(config, simulated(config, config.model_config, place, find_device("auto", place)))


def measure_peak_bytes(hows: Sequence[str] = HOW, ranks: int = 2, n_layer: int = 5) -> dict[str, int]:
    """The same, counted in the second step of real ranks on CPU cores: the most of all ranks."""

    def peaks() -> list[int]:
        rank, found = dist.get_rank(), []
        for how in hows:
            config = _config(how, n_layer)
            wrapped = wrap(config, config.model_config, Place(rank, ranks, rank, ranks), torch.device("cpu"))
            optimizer = make_optimizer(wrapped, config)
            batch = load_corpus().loader(SEQ_LEN, ROWS).rows(0, rank, ranks)
            train_step(wrapped, optimizer, batch, 0, config)
            with live_bytes(wrapped.model, optimizer) as meter:
                train_step(wrapped, optimizer, batch, 1, config)
            found.append(meter.peak_bytes)
        return found

    of_ranks = processes.run(peaks, ranks, threads=1, timeout_s=120, progress=False)
    return {how: max(found) for how, *found in zip(hows, *of_ranks, strict=True)}


def checkpointing(ranks: int = 2, n_layer: int = 5, hows: Sequence[str] = HOW) -> list[Row]:
    """The trainer with each: memory and time, predicted and measured.

    Raises:
        FailedError: a run failed.
    """
    rows = []
    for how in hows:
        predicted = predict_peak_bytes(how, ranks, n_layer)
        asked = () if how == "none" else (f"--activation_checkpointing={how}",)
        report = train(*asked, *_arguments(n_layer), "--predict=true", ranks=ranks).report
        name = f"checkpointing {how}"
        rows.append(Row(name, "peak memory", predicted / MB, report["tensor_bytes"] / MB, "MB"))
        steps_s = [one["predicted"] for one in report["compared"] if one["what"] == "step time"]
        rows.append(Row(name, "step time", 1e3 * steps_s[0] if steps_s else None, 1e3 * report["step_s"], "ms"))
    return rows


# ---- The order ------------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
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


def _see(order: Order, backend: str, lengths: Sequence[int]) -> Seen:
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
    return Seen(made[0], sum(counters["graph_break"].values()) + left, seen, again, third, first)


def orders(
    of: Sequence[Order] = tuple(EXPECTED), *, ranks: int = 2, backend: str = "aot_eager", lengths: Sequence[int] = (32,)
) -> dict[Order, Seen]:
    """What the compiler saw in each order, on rank 0.

    Args:
        backend: of torch.compile; what is traced does not depend on it.
        lengths: of rows, one step each; up to three.
    """

    def see_all() -> list[Seen]:
        return [_see(order, backend, lengths) for order in of]

    seen = processes.run(see_all, ranks, threads=1, timeout_s=300, progress=False, show_output=False)[0]
    return dict(zip(of, seen, strict=True))


def order_rows(seen: dict[Order, Seen]) -> list[Row]:
    """The counts, as expected and as found."""
    rows = []
    for order, found in seen.items():
        graphs, checkpoints, breaks = EXPECTED[order]
        rows += [
            Row(order, "graphs", graphs, found.graphs, ""),
            Row(order, "regions to compute again", checkpoints, found.checkpoints, ""),
            Row(order, "graph breaks", breaks, found.breaks, ""),
        ]
    return rows


def lengths_rows(seen: Seen) -> list[Row]:
    """Graphs that were compiled anew: both, with the length left open, and then no more."""
    return [
        Row("right, another length", "graphs made anew", 2, seen.again, ""),
        Row("right, a third length", "graphs made anew", 0, seen.third, ""),
    ]


def compiled(ranks: int = 2, n_layer: int = 5) -> list[Row]:
    """The trainer, compiled in the right order, beside the trainer as it is.

    Raises:
        FailedError: a run failed.
    """
    backend = "inductor" if has_compiler() else "aot_eager"
    eager = train(*_arguments(n_layer), ranks=ranks)
    run = train(*_arguments(n_layer), "--compile=true", f"--compile_backend={backend}", ranks=ranks)
    worst = max(abs(a / b - 1) for a, b in zip(run.losses, eager.losses, strict=True))
    return [
        Row("eager", "step time", None, 1e3 * eager.report["step_s"], "ms"),
        Row(f"compiled, {backend}", "step time", None, 1e3 * run.report["step_s"], "ms"),
        Row(f"compiled, {backend}", "losses differ by", None, worst, "relative"),
    ]


# ---- The lab --------------------------------------------------------------------------------------------------------


def run(ranks: int = 2, n_layer: int = 5) -> Result:
    """All of it.

    Raises:
        FailedError: a training failed.
    """
    rows = checkpointing(ranks, n_layer)
    rows += order_rows(orders(ranks=ranks))
    rows += lengths_rows(orders(["right"], ranks=ranks, lengths=(32, 24, 16))["right"])
    rows += compiled(ranks, n_layer)
    device = find_device("auto", Place(0, ranks, 0, ranks))
    notes = (
        f"The order was looked at on {n_ranks(ranks)} on CPU cores: what is traced is the same on a GPU.",
        *([] if has_compiler() else ["No C++ compiler was found: aot_eager traced, and nothing was compiled."]),
    )
    return Result("compile", "measured", tuple(rows), this_machine(device, ranks), notes=notes)


def main(ranks: int = 2, n_layer: int = 5) -> int:
    """Checkpoint, compile, shard; prints one table.

    Args:
        ranks: they divide 16 rows.
        n_layer: blocks of the model that the trainer trains.
    """
    if ranks < 1 or ROWS % ranks or n_layer < 1:
        print(f"labs.lab.compile: ranks={ranks}, n_layer={n_layer}: ranks divides {ROWS}, n_layer is at least 1",
              file=sys.stderr)  # fmt: skip
        return 2
    try:
        result = run(ranks, n_layer)
    except FailedError as failure:
        print(f"labs.lab.compile: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    result.print(Console())
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
