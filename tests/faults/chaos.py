"""Kill a training at random, a hundred times, and count what that cost.

    python -m tests.faults.chaos                     make chaos
    python -m tests.faults.chaos --kills 20 --seed 7 --ranks 3 --async-save

A seeded random number generator chooses when and whom: one of the ranks, or now and then the agent (torchrun's), after
which the ranks are to notice, save and leave. At the end the run is told to leave, and a second one is trained to the
same step and left alone: every loss and every bit of the checkpoint must be equal.

Counted, and all to be 0: committed steps lost (a checkpoint was reported as saved, and a later start did not find it),
wrong resumes (losses or bits that differ), orphans (ranks alive after their agent), hangs (no new start within the
time-out).
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from tests.faults.agents import Agents, Job, agents
from tests.faults.runs import checkpoints, tensors_of

HANG_S = 60.0
AGENT_SHARE = 0.1
SETTING = ("--global_batch=12", "--seq_len=32", "--n_layer=2", "--dropout=0.1", "--timeout_s=20", "--save_every=2",
           "--steps=1000000", "--log_every=1000000")  # fmt: skip


@dataclass
class Count:
    """What the kills did."""

    kills: int = 0
    agents: int = 0
    starts: int = 0
    lost: int = 0
    wrong: int = 0
    orphans: int = 0
    hangs: int = 0
    recovery_s: list[float] = field(default_factory=list)

    @property
    def bad(self) -> int:
        return self.lost + self.wrong + self.orphans + self.hangs


def lines_of(job: Job) -> list[dict[str, Any]]:
    """metrics.jsonl, without a last line that is being written."""
    path = job.out / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def newest_step(job: Job) -> int:
    return max((int(path.name[5:]) for path in checkpoints(job)), default=0)


def resumed(job: Job) -> list[int]:
    """The steps that starts went on from, one after the other."""
    return [line["step"] for line in lines_of(job) if line.get("kind") == "resumed"]


def killed(job: Job, victim: psutil.Process, count: Count) -> None:
    """Kill one, and see the others off."""
    victim.kill()
    count.kills += 1
    if victim == job.agent:
        count.agents += 1
        _, alive = psutil.wait_procs(job.ranks(), timeout=HANG_S)
        count.orphans += len(alive)
        job.kill()


def again(job: Job, starts: int, committed: int, count: Count) -> None:
    """Wait for the start after a kill; it has to go on from what was committed before, or later."""
    killed_s = time.monotonic()
    while len(steps := resumed(job)) <= starts:
        if time.monotonic() - killed_s > HANG_S or not (job.agent.is_running() or job.ranks()):
            count.hangs += 1
            raise RuntimeError(f"no new start within {HANG_S:g} s; the log ends:\n{job.printed[-3000:]}")
        time.sleep(0.02)
    count.recovery_s.append(time.monotonic() - killed_s)
    count.lost += steps[-1] < committed


def torment(server: Agents, folder: Path, asked: argparse.Namespace, count: Count) -> Job:
    """Train while killing; returns the job after it was told to leave."""
    chance = random.Random(asked.seed)
    setting = (*SETTING, f"--async_save={asked.async_save}")

    def begin() -> Job:
        return server.start(folder, *setting, ranks=asked.ranks, max_restarts=10**6)

    job = begin()
    wait_for_steps(job, 3)
    for _ in tqdm(range(asked.kills), desc="kills", disable=None):
        time.sleep(chance.uniform(0.0, asked.most_s))
        whole = chance.random() < AGENT_SHARE
        ranks = job.ranks()
        victim = job.agent if whole or not ranks else chance.choice(ranks)
        starts, committed = len(resumed(job)), newest_step(job)
        killed(job, victim, count)
        if victim == job.agent:
            job = begin()
        again(job, starts, committed, count)
    count.starts = len(resumed(job))
    wait_for_steps(job, max(line["step"] for line in lines_of(job)) + 3)
    job.agent.send_signal(signal.SIGTERM)
    job.wait(HANG_S)
    count.orphans += len(job.ranks())
    return job


def wait_for_steps(job: Job, step: int) -> None:
    give_up_s = time.monotonic() + HANG_S
    while max((line["step"] for line in lines_of(job)), default=-1) < step:
        if time.monotonic() > give_up_s:
            raise RuntimeError(f"step {step} was not reached within {HANG_S:g} s:\n{job.printed[-3000:]}")
        time.sleep(0.02)


def compare(server: Agents, folder: Path, job: Job, asked: argparse.Namespace, count: Count) -> int:
    """Train to the same step, left alone; returns that step."""
    step = newest_step(job)
    calm = server.start(folder, *SETTING[:-2], f"--steps={step}", "--log_every=1000000", ranks=asked.ranks)
    if calm.wait(3600) != 0:
        raise RuntimeError(f"the undisturbed run failed:\n{calm.printed[-3000:]}")
    theirs, ours = ({line["step"]: line["loss"] for line in lines_of(j) if "loss" in line} for j in (calm, job))
    count.wrong += sum(ours.get(number) != loss for number, loss in theirs.items())
    count.wrong += tensors_of(checkpoints(calm)[-1]) != tensors_of(checkpoints(job)[-1])
    return step


def report(console: Console, asked: argparse.Namespace, count: Count, step: int, took_s: float) -> None:
    table = Table("what", "how many", title=f"{asked.kills} random kills, seed {asked.seed}, {asked.ranks} ranks")
    table.add_row("kills (of agents)", f"{count.kills} ({count.agents})")
    table.add_row("starts that went on from a checkpoint", str(count.starts))
    table.add_row("steps compared with an undisturbed run, bit for bit", str(step))
    table.add_row("committed steps lost", str(count.lost))
    table.add_row("wrong resumes: losses or checkpoints that differ", str(count.wrong))
    table.add_row("orphans", str(count.orphans))
    table.add_row(f"hangs: no new start within {HANG_S:g} s", str(count.hangs))
    slowest = max(count.recovery_s, default=0.0)
    middle = statistics.median(count.recovery_s) if count.recovery_s else 0.0
    table.add_row("from a kill to going on, median and slowest", f"{middle:.1f} s, {slowest:.1f} s")
    table.add_row("took", f"{took_s:.0f} s")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--most-s", type=float, default=1.0, help="the longest time from a start to the next kill")
    parser.add_argument("--async-save", action="store_true")
    asked = parser.parse_args()
    count, step, start_s = Count(), 0, time.monotonic()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, agents() as server:
        try:
            job = torment(server, Path(folder, "disturbed"), asked, count)
            step = compare(server, Path(folder, "calm"), job, asked, count)
        except RuntimeError as error:
            console.print(str(error), markup=False)
            report(console, asked, count, step, time.monotonic() - start_s)
            return 1
    report(console, asked, count, step, time.monotonic() - start_s)
    return 1 if count.bad else 0


if __name__ == "__main__":
    sys.exit(main())
