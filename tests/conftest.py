"""A browser, and timelines to draw.

Of the timelines one is tiny; the others are training steps of several ranks with lanes, waits and memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fsdp_sim.timeline import Event, Header, Lane, Memory, Op, Phase, Timeline, lane_of
from tests.browser.chromium import CHROMIUM, FLAGS


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a Chromium."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium (Debian: sudo apt install chromium)")
    return CHROMIUM


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    """One that draws on no screen."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page of it, 1280 by 900 pixels, which remembers nothing of others."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    yield context.new_page()
    context.close()


MIB = 2**20
SECONDS = {
    Op.FWD: 0.004,
    Op.BWD: 0.008,
    Op.OPTIM: 0.003,
    Op.ALL_GATHER: 0.003,
    Op.REDUCE_SCATTER: 0.003,
    Op.RS_COPY_IN: 0.0006,
}


@pytest.fixture
def displayed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a notebook is given to display."""
    display = pytest.importorskip("IPython.display", reason="IPython is not installed")
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(display, "display", lambda bundle, raw, metadata=None: shown.append(bundle))
    monkeypatch.setitem(os.environ, "FSDP_SIM_PNG", "0")
    return shown


class Rank:
    """A CPU that computes what it issues, and one wire on which its collectives queue."""

    def __init__(self, rank: int, world_size: int, slowness: float) -> None:
        self.rank, self.world_size, self.slowness = rank, world_size, slowness
        self.now_s = self.wire_free_s = 0.0
        self.step = 0
        self.phase = Phase.FORWARD
        self.events: list[Event] = []

    def add(self, op: Op, unit: str, start_s: float, end_s: float, **fields: object) -> int:
        common = {"seq": len(self.events), "rank": self.rank, "step": self.step, "phase": self.phase}
        self.events.append(
            Event(
                **common
                | {
                    "op": op,
                    "unit": unit,
                    "lane": lane_of(op),
                    "issue_s": self.now_s,
                    "start_s": start_s,
                    "end_s": end_s,
                }
                | fields
            )
        )
        return len(self.events) - 1

    def compute(self, op: Op, unit: str, *waits_on: int, scale: float = 1.0) -> None:
        start_s = max([self.now_s, *(self.events[seq].end_s for seq in waits_on)])
        self.now_s = start_s
        end_s = start_s + SECONDS[op] * self.slowness * scale
        self.add(op, unit, start_s, end_s, waits_on=waits_on)
        self.now_s = end_s

    def collective(self, op: Op, unit: str) -> int:
        start_s = max(self.now_s, self.wire_free_s)
        self.wire_free_s = start_s + SECONDS[op]
        return self.add(op, unit, start_s, self.wire_free_s, bytes=6 * MIB, group_size=self.world_size, dtype="fp32")

    def memory(self, op: Op, category: Memory, unit: str, n_bytes: int) -> None:
        self.add(op, unit, self.now_s, self.now_s, bytes=n_bytes, category=category, lane=Lane.COMPUTE)


def train(rank: Rank, units: list[str], steps: int, prefetch: bool) -> list[Event]:
    """Forward, backward and optimizer with an all-gather before each unit, or one unit ahead."""
    size, shard = 6 * MIB, 6 * MIB // rank.world_size
    for unit in units:
        rank.memory(Op.ALLOC, Memory.SHARDED, unit, shard)
        rank.memory(Op.ALLOC, Memory.OPTIMIZER, unit, 2 * shard)
    for rank.step in range(steps):
        rank.now_s = rank.wire_free_s = 1.0 * rank.step  # all ranks start a step together
        gathered: dict[str, int] = {}
        for rank.phase, op, order in ((Phase.FORWARD, Op.FWD, units), (Phase.BACKWARD, Op.BWD, units[::-1])):
            for number, unit in enumerate(order):
                for ahead in order[number : number + 1 + prefetch]:
                    if ahead not in gathered:
                        rank.memory(Op.ALLOC, Memory.AG_OUTPUT, ahead, size)
                        gathered[ahead] = rank.collective(Op.ALL_GATHER, ahead)
                all_gather = gathered.pop(unit)
                rank.now_s = max(rank.now_s, rank.events[all_gather].end_s)
                rank.memory(Op.ALLOC, Memory.UNSHARDED, unit, size)
                rank.memory(Op.FREE, Memory.AG_OUTPUT, unit, size)
                rank.compute(op, unit, all_gather)
                if op is Op.FWD:
                    rank.memory(Op.ALLOC, Memory.ACTIVATION, unit, 3 * MIB)
                else:
                    rank.memory(Op.ALLOC, Memory.UNSHARDED_GRAD, unit, size)
                    rank.memory(Op.FREE, Memory.ACTIVATION, unit, 3 * MIB)
                    rank.memory(Op.ALLOC, Memory.RS_INPUT, unit, size)
                    rank.compute(Op.RS_COPY_IN, unit)
                    rank.memory(Op.FREE, Memory.UNSHARDED_GRAD, unit, size)
                    rank.memory(Op.ALLOC, Memory.RS_OUTPUT, unit, shard)
                    rank.collective(Op.REDUCE_SCATTER, unit)
                rank.memory(Op.FREE, Memory.UNSHARDED, unit, size)
        rank.phase = Phase.OPTIMIZER
        rank.now_s = max(rank.now_s, rank.wire_free_s)
        for unit in units:
            rank.memory(Op.FREE, Memory.RS_INPUT, unit, size)
        rank.compute(Op.OPTIM, "")
        for unit in units:
            rank.memory(Op.FREE, Memory.RS_OUTPUT, unit, shard)
    return rank.events


@pytest.fixture
def training_run() -> Callable[..., Timeline]:
    """``training_run(prefetch=..., clock=..., ranks=4, blocks=4, steps=3)``: a run of the program above."""

    def run(
        *, prefetch: bool = False, clock: str = "simulated", ranks: int = 4, blocks: int = 4, steps: int = 3
    ) -> Timeline:
        units = ["embed", *(f"layers.{number}" for number in range(blocks)), "head"]
        skew = 0.03 if clock == "measured" else 0.0
        events = [e for r in range(ranks) for e in train(Rank(r, ranks, 1 + skew * r), units, steps, prefetch)]
        return Timeline(Header(producer="tests", clock=clock, world_size=ranks), events)

    return run


@pytest.fixture
def tiny() -> Timeline:
    """One rank: 2 ms of all-gather before 3 ms of forward, the buffer freed when forward ends. Starts at 10 s."""
    rank = {"rank": 0, "unit": "layers.0"}
    buffer = {"lane": Lane.COMPUTE, "category": Memory.AG_OUTPUT, "bytes": MIB, **rank}
    return Timeline(
        Header(producer="tests", clock="measured", world_size=1),
        [
            Event(seq=0, op=Op.ALLOC, **buffer, issue_s=10.0, start_s=10.0, end_s=10.0),
            Event(
                seq=1,
                op=Op.ALL_GATHER,
                lane=Lane.ALL_GATHER,
                bytes=MIB,
                group_size=2,
                dtype="bf16",
                issue_s=10.0,
                start_s=10.0,
                end_s=10.002,
                source="train.py:7",
                **rank,
            ),
            Event(
                seq=2, op=Op.FWD, lane=Lane.COMPUTE, issue_s=10.001, start_s=10.002, end_s=10.005, waits_on=(1,), **rank
            ),
            Event(seq=3, op=Op.FREE, **buffer, issue_s=10.005, start_s=10.005, end_s=10.005),
        ],
    )
