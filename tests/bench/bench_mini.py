"""The mini-FSDP against torch's `fully_shard`: the same GPT, the same ranks, the same processes, taking turns.

Four parts, each a ratio within one run, for times mean little on a shared machine and less on another one:

    loopback   tokens per second on gloo's own speed
    network    the same, of the first size given, over a slow wire, on which communication takes 40 % of torch's
               step: what overlap is worth. torch waits for each collective where it issues it, unless told otherwise
               by its private `_set_unshard_async_op`, which is shown beside it
    memory     peak live bytes of a rank, counted by `fsdp_sim.measure.live_bytes`
    hooks      the CPU seconds of the training thread, waits not counted, when there is next to nothing to compute or
               send: 100 units of 8 numbers

Both models live in each rank and take turns in the order A B B A ..., so that whatever else the machine does slows
both. A ratio is the median over the turns, with a 95 % interval (bootstrap); above 1 the mini is better.
The exit status is 1 if a ratio is below what it must be, or if a meter gave two different numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_sim import mini
from fsdp_sim.measure import live_bytes, units_from_module
from fsdp_sim.ranks import Network, run, track
from labs.model.gpt import GPT, GPTConfig

EXAMPLES = """examples:
  python tests/bench/bench_mini.py                                  all parts, about 10 M and 85 M parameters
  python tests/bench/bench_mini.py --quick                          a few minutes: 10 M parameters, 2 ranks, 6 turns
  python tests/bench/bench_mini.py --part hooks --repeats 50
  python tests/bench/bench_mini.py --part network --params 10M --ranks 4
"""
GPTS = {
    "10M": GPTConfig(n_layer=6, n_head=6, d_model=384, vocab_size=256, context=128),
    "85M": GPTConfig(n_layer=12, n_head=12, d_model=768, vocab_size=256, context=128),
}
TOKENS = {"10M": (2, 128), "85M": (1, 64)}  # rows per rank, tokens per row
FULLY_SHARD: dict[str, Any] = {"mini": mini.fully_shard, "torch": torch_fully_shard}
COMM_SHARE = 0.4  # of torch's step, on the slow network
LATENCY_US = 200.0
UNITS = 100  # of the hooks part


@dataclasses.dataclass(frozen=True)
class Variant:
    """Who trains, and how it gathers."""

    who: str
    prefetch: bool = False  # the same explicit lists of depth 1 on both sides, forward and backward
    async_op: bool = False  # torch's private switch

    def __str__(self) -> str:
        return self.who + ", prefetch 1" * self.prefetch + ", async_op" * self.async_op


TORCH, MINI = Variant("torch"), Variant("mini")
ORDERS = [
    TORCH, MINI, Variant("torch", async_op=True),
    Variant("torch", prefetch=True), Variant("mini", prefetch=True), Variant("torch", prefetch=True, async_op=True),
]  # fmt: skip


# On a rank


class Training:
    """A GPT sharded by one of the two, an optimizer, and the batches."""

    def __init__(self, who: str, size: str) -> None:
        torch.manual_seed(0)
        self.model: Any = GPT(GPTS[size])
        for layer in self.model.layers:
            FULLY_SHARD[who](layer)
        FULLY_SHARD[who](self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.random = torch.Generator().manual_seed(dist.get_rank())
        self.shape = TOKENS[size]

    def set(self, variant: Variant) -> None:
        layers = list(self.model.layers)
        for i, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 2] if variant.prefetch else [])
            layer.set_modules_to_backward_prefetch(layers[max(i - 1, 0) : i] if variant.prefetch else [])
        if variant.who == "torch":
            self.model._set_unshard_async_op(variant.async_op)

    def step(self) -> float:
        tokens = torch.randint(256, self.shape, generator=self.random)
        loss = self.model(tokens, tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def turns(n: int, variants: Sequence[Any]) -> Iterator[Any]:
    """A B B A A B ...: each variant once per turn, and none always first."""
    for i in track(range(n)):
        yield from variants if i % 2 == 0 else reversed(variants)


def train(size: str, variants: Sequence[Variant], repeats: int) -> dict[Variant, list[float]]:
    """Seconds of each step after a warm-up, by variant."""
    trainings = {who: Training(who, size) for who in dict.fromkeys(v.who for v in variants)}
    losses: dict[str, list[float]] = {who: [] for who in trainings}
    seconds: dict[Variant, list[float]] = {v: [] for v in variants}
    for variant in (*variants, *turns(repeats, variants)):
        training = trainings[variant.who]
        training.set(variant)
        dist.barrier()
        start_s = time.perf_counter()
        losses[variant.who].append(training.step())
        seconds[variant].append(time.perf_counter() - start_s)
    n = min(map(len, losses.values()))
    for found in losses.values():
        np.testing.assert_allclose(found[:n], losses["torch"][:n], rtol=1e-3, err_msg="they do not train the same")
    return {v: found[1:] for v, found in seconds.items()}


def count_bytes(size: str, variants: Sequence[Variant]) -> dict[Variant, list[tuple[int, int]]]:
    """Of three steps the peak live bytes of this rank, and those that only Python's garbage collector could free."""
    peaks: dict[Variant, list[tuple[int, int]]] = {}
    for variant in track(variants):
        training = Training(variant.who, size)
        training.set(variant)
        training.step()  # makes the optimizer's states
        peaks[variant] = []
        for _ in range(3):
            with live_bytes(training.model, training.optimizer) as meter:
                training.step()
            peaks[variant].append((meter.peak_bytes, meter.cycle_bytes))
        del training
        gc.collect()
    return peaks


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scale() for _ in range(UNITS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def time_hooks(repeats: int, steps: int) -> dict[str, list[float]]:
    """CPU seconds of forward and backward per step, of the plain module and of both FSDPs."""
    models: dict[str, nn.Module] = {who: Tiny() for who in ("plain", "torch", "mini")}
    for who, fully_shard in FULLY_SHARD.items():
        for layer in models[who].layers:  # type: ignore[union-attr]
            fully_shard(layer)
        fully_shard(models[who])
    x = torch.ones(8, requires_grad=True)
    seconds: dict[str, list[float]] = {who: [] for who in models}
    gc.collect()
    gc.freeze()  # no pause for objects that belong to nobody's hooks
    for who in (*models, *turns(repeats, list(models))):
        total_s = 0.0
        for _ in range(steps):
            dist.barrier()
            start_s = time.thread_time()  # the backward of CPU tensors runs in this thread too
            models[who](x).sum().backward()
            total_s += time.thread_time() - start_s
            models[who].zero_grad()
            x.grad = None
        seconds[who].append(total_s / steps)
    return {who: found[1:] for who, found in seconds.items()}


# What comes out


@dataclasses.dataclass(frozen=True)
class Result:
    """A line of the table.

    Attributes:
        ratios: one per turn, above 1 where the mini is better.
        target: what the median should be at least; None for what is only shown.
        must: what it must be at least, else the exit status is 1.
    """

    what: str
    torch: str
    mini: str
    ratios: Sequence[float]
    target: float | None = None
    must: float = 0.0

    @property
    def ratio(self) -> float:
        return float(np.median(self.ratios))

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of the medians of samples drawn from the ratios."""
        samples = np.random.default_rng(0).choice(self.ratios, (10_000, len(self.ratios)))
        low, high = np.quantile(np.median(samples, axis=1), [0.025, 0.975])
        return float(low), float(high)

    @property
    def failed(self) -> bool:
        return self.ratio < self.must

    def row(self) -> list[str]:
        verdict = "" if self.target is None else "met" if self.ratio >= self.target else "missed"
        interval = "{:.3f} to {:.3f}".format(*self.interval) if len(set(self.ratios)) > 1 else ""
        target = "" if self.target is None else f"{self.target:.3f}"
        return [self.what, self.torch, self.mini, f"{self.ratio:.3f}", interval, target, verdict]


def slowest(by_rank: Sequence[dict[Any, list[float]]]) -> dict[Any, np.ndarray]:
    """Seconds of the slowest rank in each turn."""
    return {key: np.max([rank[key] for rank in by_rank], axis=0) for key in by_rank[0]}


def compare(
    what: str, seconds: dict[Any, np.ndarray], a: Any, b: Any, tokens: int, target: float | None, must: float
) -> Result:
    speeds = [f"{tokens / np.median(seconds[v]):,.0f} tokens/s" for v in (a, b)]
    return Result(what, speeds[0], speeds[1], list(seconds[a] / seconds[b]), target, must)


class Bench:
    """The parts; each prints nothing and returns its lines."""

    def __init__(self, repeats: int, console: Console) -> None:
        self.repeats, self.console = repeats, console

    def loopback(self, size: str, ranks: int) -> list[Result]:
        seconds = self._train(size, ranks, [TORCH, MINI], self.repeats, None)
        tokens = ranks * TOKENS[size][0] * TOKENS[size][1]
        return [compare(f"loopback, {size}, {ranks} ranks", seconds, TORCH, MINI, tokens, 1.0, 0.98)]

    def network(self, size: str, ranks: int) -> list[Result]:
        network = self._network(size, ranks)
        seconds = self._train(size, ranks, ORDERS, self.repeats, network)
        share = wire_s(network, size, ranks) / np.median(seconds[TORCH])
        self.console.print(
            f"{size}, {ranks} ranks: {network.bandwidth_gbps:.3g} Gbit/s and {network.latency_us:g} us per collective, "
            f"on which the wire is busy for {share:.0%} of torch's step"
        )
        tokens = ranks * TOKENS[size][0] * TOKENS[size][1]
        lines = []
        for prefetch, target in ((True, 1.25), (False, 1.1)):
            what = f"network, {size}, {ranks} ranks, {'prefetch 1' if prefetch else 'default order'}"
            a, b = Variant("torch", prefetch), Variant("mini", prefetch)
            c = Variant("torch", prefetch, async_op=True)
            lines.append(compare(what, seconds, a, b, tokens, target, target))
            lines.append(compare(f"{what}, torch with async_op", seconds, c, b, tokens, None, 0.0))
        return lines

    def memory(self, size: str, ranks: int) -> list[Result]:
        variants = [v for v in ORDERS if not v.async_op]
        by_rank = self._run(count_bytes, ranks, size, variants, title=f"memory, {size}, {ranks} ranks")
        lines = []
        for prefetch in (False, True):
            peaks = {who: [rank[Variant(who, prefetch)] for rank in by_rank] for who in FULLY_SHARD}
            for who, found in peaks.items():
                if any(len(set(rank)) > 1 for rank in found):
                    raise SystemExit(f"the meter is not deterministic: {who}, {size}: {found}")
                if in_cycles := found[0][0][1]:
                    self.console.print(
                        f"{size}, {ranks} ranks: {who} leaves {in_cycles:,} B per step in reference cycles"
                    )
            most = {who: max(rank[0][0] for rank in found) for who, found in peaks.items()}
            what = f"memory, {size}, {ranks} ranks, {'prefetch 1' if prefetch else 'default order'}"
            shown = [f"{most[who] / 1e6:,.2f} MB" for who in ("torch", "mini")]
            lines.append(Result(what, shown[0], shown[1], [most["torch"] / most["mini"]], 1 / 1.02, 1 / 1.02))
        return lines

    def hooks(self, ranks: int) -> list[Result]:
        title = f"hooks, {ranks} ranks" if ranks > 1 else "hooks, 1 rank"
        seconds = slowest(self._run(time_hooks, ranks, self.repeats, 2, title=title))
        overhead = {who: (seconds[who] - seconds["plain"]) / UNITS for who in FULLY_SHARD}
        shown = [f"{np.median(overhead[who]) * 1e6:,.0f} us per unit" for who in ("torch", "mini")]
        return [Result(title, shown[0], shown[1], list(overhead["torch"] / overhead["mini"]), 1.0, 0.98)]

    def _train(
        self, size: str, ranks: int, variants: Sequence[Variant], repeats: int, network: Network | None
    ) -> dict[Any, np.ndarray]:
        title = f"{'network' if network else 'loopback'}, {size}, {ranks} ranks"
        return slowest(self._run(train, ranks, size, variants, repeats, network=network, title=title))

    def _run(self, fn: Any, ranks: int, *args: Any, **how: Any) -> Sequence[Any]:
        return run(fn, ranks, *args, record=False, timeout_s=120.0, **how)

    def _network(self, size: str, ranks: int) -> Network:
        """One on which the wire is busy for `COMM_SHARE` of torch's step, which waits for every collective."""
        busy = COMM_SHARE / (1 - COMM_SHARE)  # per second of the rest of the step
        rest_s = float(np.median(self._train(size, ranks, [TORCH], 3, None)[TORCH]))  # with gloo's own time in it
        network = network_of(busy * rest_s, size, ranks)
        for _ in range(3):
            step_s = float(np.median(self._train(size, ranks, [TORCH], 5, network)[TORCH]))
            busy_s = wire_s(network, size, ranks)
            if abs(busy_s / step_s - COMM_SHARE) < 0.03:
                break
            network = network_of(busy * (step_s - busy_s), size, ranks)
        return network


def wire_s(network: Network, size: str, ranks: int) -> float:
    """Seconds for which the wire is busy in a step: layers gather twice, the root once, and all reduce."""
    with torch.device("meta"):
        units = units_from_module(GPT(GPTS[size]))
    total_s = 0.0
    for unit in units:
        n_bytes = sum(param.padded_bytes(ranks) for param in unit.params)
        gathers = 1 if unit.name == "root" else 2
        total_s += gathers * network.seconds("all_gather", n_bytes, ranks)
        total_s += network.seconds("reduce_scatter", n_bytes, ranks)
    return total_s


def network_of(busy_s: float, size: str, ranks: int) -> Network:
    """The network whose wire is busy for so long in a step."""
    latency_s = wire_s(Network(1e9, LATENCY_US), size, ranks)
    if busy_s <= latency_s:
        raise SystemExit(f"{size}: a step is too short for {LATENCY_US:g} us per collective; use a larger model")
    return Network(wire_s(Network(1.0), size, ranks) / (busy_s - latency_s), LATENCY_US)


def hardware() -> str:
    cpuinfo = Path("/proc/cpuinfo")  # Linux; elsewhere the general name will do
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = (models or [platform.processor() or platform.machine()])[0]
    return f"{model}, {os.cpu_count()} cores, torch {torch.__version__}, gloo"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ["loopback", "network", "memory", "hooks"]
    parser.add_argument("--part", nargs="+", choices=parts, default=parts, help="default: all")
    parser.add_argument("--params", nargs="+", choices=GPTS, default=list(GPTS), help="default: 10M 85M")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="default: 2 4")
    parser.add_argument("--repeats", type=int, default=20, help="turns of each, default: 20")
    parser.add_argument(
        "--quick", action="store_true", help="10M, 2 ranks, 6 turns: shows that it runs, decides nothing"
    )
    options = parser.parse_args()
    if options.quick:
        options.params, options.ranks, options.repeats = ["10M"], [2], 6
    if options.repeats < 2 or min(options.ranks) < 2:
        parser.error("--repeats and --ranks are at least 2: one turn has no interval, one rank no communication")

    start_s = time.monotonic()
    console = Console() if sys.stdout.isatty() else Console(width=140)
    bench = Bench(options.repeats, console)
    results: list[Result] = []
    for part in options.part:
        if part == "hooks":
            results += [line for ranks in (1, 2) for line in bench.hooks(ranks)]
            continue
        for size in options.params if part != "network" else options.params[:1]:
            for ranks in options.ranks:
                results += getattr(bench, part)(size, ranks)
    table = Table("", "torch", "mini", "ratio", "95 % interval", "target", "", title=hardware())
    for result in results:
        table.add_row(*result.row(), style="red" if result.failed else "")
    console.print(table)
    minutes, seconds = divmod(round(time.monotonic() - start_s), 60)
    console.print(f"{options.repeats} turns each; {minutes} min {seconds} s in all")
    sys.exit(any(result.failed for result in results))


if __name__ == "__main__":
    main()
