"""The learner's own FSDP, ``my_fsdp.py``, beside one process, the mini and torch's `fully_shard`.

    mine()                   # in a notebook: whose each part is, the ladder, two timelines
    fsdp-sim mine --climb    # the same in a terminal
    torchrun --nproc_per_node=2 -m labs.experiments.mine my_fsdp.py

Under torchrun the file trains a GPT with micro-batches and clipping beside torch's `fully_shard`, saves after half of
the steps and goes on from there with a new model: on CPUs not a bit may differ.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from datetime import date
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_sim.learn import mine as own
from fsdp_sim.learn import progress
from fsdp_sim.ranks import Network, RanksError, run
from fsdp_sim.timeline import RECORDER, Op, Timeline
from fsdp_sim.timeline.analysis import exposed_comm_s
from fsdp_sim.words import human_bytes, human_ms
from labs.data import load_corpus, local_batch
from labs.experiments.ladder import Ladder, climb
from labs.experiments.ladder.on_ranks import LadderConfig
from labs.experiments.ladder.rungs import loaded, yours
from labs.loop.minimal import make_optimizer, mean_over_ranks, shard
from labs.model import build
from labs.model.gpt import GPTConfig

RUNGS = ("one-process", "torch-fsdp2", "mini-fsdp")
NETWORK = Network(bandwidth_gbps=0.16, latency_us=200)
"""Slow enough that one sees what is hidden."""
STEPS = 3
MOMENTS = ("exp_avg", "exp_avg_sq")
WAYS = ("torch's fully_shard", "yours")


# ---- A step of one way, on ranks ------------------------------------------------------------------------------------


class _At(torch.autograd.Function):
    """The identity; calls a function when backward comes by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return grad, None


def note_compute(layer: nn.Module, name: str) -> None:
    """Record forward and backward of a layer, between the hooks that any `fully_shard` puts on it."""
    forward, backward = layer.forward, [-1]

    def begin() -> None:
        backward[0] = RECORDER.begin(Op.BWD, name)

    def noted(x: torch.Tensor) -> torch.Tensor:
        with RECORDER.span(Op.FWD, name):
            return _At.apply(forward(_At.apply(x, lambda: RECORDER.end(backward[0]))), begin)

    layer.forward = noted


def steps_of(text: str) -> None:
    """Train a few steps with torch's `fully_shard`, or with that of a file's text."""
    warnings.simplefilter("ignore")
    model = build(GPTConfig.preset("teaching", n_layer=4), seed=0)
    for number, layer in enumerate(model.layers):
        note_compute(layer, f"layers.{number}")
    shard(model, loaded(text)["fully_shard"] if text else fully_shard)
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        RECORDER.step = step
        x, y = (local_batch(t, dist.get_rank(), dist.get_world_size()) for t in load_corpus().batch(step, 8, 128))
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def last_step(text: str, ranks: int) -> Timeline:
    """The last step of `steps_of`, on a slow network."""
    results = run(steps_of, ranks, text, network=NETWORK, threads=1, progress=False, show_output=False)
    return results.timeline.select(step=STEPS - 1)


# ---- Where the file stands ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mine:
    """Where the learner's file stands.

    Attributes:
        file: where it is; if it is not there yet, ``text`` is what it will begin as.
        ladder, timelines: None unless they were asked for, and where the training failed. The timelines are of torch's
            `fully_shard` and of the file.
        trouble: why its training failed.
        climbed: when the file, or one before it, last trained as torch's.
    """

    file: Path
    text: str
    ladder: Ladder | None = None
    timelines: dict[str, Timeline] | None = None
    trouble: str = ""
    climbed: progress.Climb | None = None

    @cached_property
    def parts(self) -> list[own.ChapterPart]:
        return list(own.parts(self.text).values())

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def headline(self) -> str:
        """How many parts are the learner's, how long the file is, and whether it does what torch's does."""
        yours_ = sum(part.whose in (own.Whose.YOURS, own.Whose.BY_HAND) for part in self.parts)
        there = "" if self.file.is_file() else " (it begins with the first part that is accepted)"
        text = f"{self.file.name}{there}: {yours_} of {len(self.parts)} parts are yours, {self.lines} lines"
        if self.lines >= own.MAX_LINES:
            text += f", which should be fewer than {own.MAX_LINES}"
        if self.trouble:
            return f"{text}. It does not train: {self.trouble}"
        if self.ladder is None:
            return text + self.reached
        if self.as_torch:
            return f"{text}. It trains as torch's fully_shard, bit for bit and collective by collective"
        return f"{text}. It does not train as torch's fully_shard: {' '.join(self.ladder.divergences) or 'bits differ'}"

    @property
    def reached(self) -> str:
        """When it trained as torch's, as far as anybody knows without training it; empty if it never has."""
        if self.climbed is None:
            return ""
        since = "" if self.climbed.text == own.digest_of(self.text) else ", and has changed since: climb again"
        return f". It trained as torch's fully_shard, bit for bit, on {self.climbed.on}{since}"

    @property
    def as_torch(self) -> bool:
        """Whether it trained as torch's `fully_shard`: every bit, and every collective in the same order."""
        row = self.ladder["yours"] if self.ladder else None
        return bool(row and row.against_above and row.against_above.bitwise is None and not row.program)

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """Of each part its chapter, its name and whose it is."""
        return [(part.chapter, part.name, str(part.whose)) for part in self.parts]

    @property
    def costs(self) -> list[tuple[str, str, str, str, str]]:
        """Of each way its losses, whether its bits are those of the way above, its peak, and exposed communication."""
        if self.ladder is None or self.timelines is None:
            return []
        exposed = {"torch-fsdp2": WAYS[0], "yours": WAYS[1]}
        rows = []
        for row in self.ladder.rows:
            timeline = self.timelines.get(exposed.get(row.rung.name, ""))
            above = row.against_above
            bits = "–" if above is None else "every bit" if above.bitwise is None else f"off by {above.error:.0e}"
            idle = human_ms(fmean(exposed_comm_s(timeline, rank) for rank in timeline.ranks)) if timeline else "–"
            losses = " ".join(f"{loss:.4f}" for loss in row.losses)
            rows.append((row.rung.title, losses, bits, human_bytes(row.peak_bytes), idle))
        return rows

    def __str__(self) -> str:
        tables: list[list[Any]] = [self.rows, *([[COSTS, *self.costs]] if self.ladder else [])]
        lines = [self.headline + "."]
        for table in tables:
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            lines += ["", *("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)]
        return "\n".join([*lines, "", str(self.file)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from html import escape

        from fsdp_sim import viz

        parts = viz.Table("Whose each part is", ("chapter", "part", "whose"), tuple(self.rows)).to_html()
        if self.ladder is None:
            return f"<p>{escape(self.headline)}.</p>{parts}"
        costs = viz.Table("Beside the others", COSTS, tuple(self.costs)).to_html()
        beside = "display:flex;flex-wrap:wrap;align-items:flex-start;gap:0 3em;overflow-x:auto"
        side = f'<div style="{beside}">{parts}{costs}</div>'
        return f"<p>{escape(self.headline)}.</p>{side}"

    @property
    def picture(self) -> Any:
        """A step of torch's `fully_shard` above one of the file; None where the file does not train."""
        from fsdp_sim import viz

        if self.trouble:
            return None
        if self.timelines is None:
            raise ValueError("nothing was trained: call mine() without climb_it=False")
        title = "One step on a slow network: torch's fully_shard above, yours below"
        return viz.timeline(self.timelines, ranks=[0]).titled(title)


COSTS = ("way", "losses", "as the way above", "peak live", "exposed communication")


def mine(file: str | Path | None = None, *, ranks: int = 2, climb_it: bool = True) -> Mine:
    """Where the learner's file stands, beside one process, torch's `fully_shard` and the mini.

    Args:
        file: by default `fsdp_sim.learn.mine.path`.
        climb_it: train it; else only its parts are looked at.

    Raises:
        OSError: a file that was named is not there. ValueError: the file is no Python.
    """
    path = Path(file) if file is not None else own.path()
    text = own.begun() if file is None and not path.is_file() else own.read(path)
    own.parts(text)
    if not climb_it:
        return Mine(path, text, climbed=progress.climbed())
    try:
        ladder = climb(LadderConfig(ranks=ranks), RUNGS, last=yours(path.name, text))
        timelines = {name: last_step(source, ranks) for name, source in zip(WAYS, ("", text), strict=True)}
    except RanksError as error:  # a notebook goes on
        return Mine(path, text, trouble=error.verdict.headline)
    found = Mine(path, text, ladder, timelines)
    if found.as_torch:
        progress.keep_climb(progress.Climb(own.digest_of(text), f"{date.today():%Y-%m-%d}"))
    return found


# ---- Under torchrun -------------------------------------------------------------------------------------------------


def losses_of(space: Mapping[str, Any], steps: range, file: Path, device: torch.device) -> list[torch.Tensor]:
    """This rank's losses of some steps, of two micro-batches each, clipped.

    Args:
        space: ``fully_shard`` and ``clip_grad_norm``, and where it saves or goes on ``whole_tensors``.
        steps: from 0, or from where ``file`` was saved.
        file: where rank 0 saves the whole model and AdamW's state after the last step, if ``whole_tensors`` is there.
    """
    model, saved = build(GPTConfig.preset("teaching", n_layer=2), seed=0), {}
    if steps.start:
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"], strict=False)  # a tied weight has two names, of which one was saved
    shard(model.to(device), space["fully_shard"])
    optimizer = make_optimizer(model)
    params: dict[str, Any] = dict(model.named_parameters())
    for name, param in params.items():
        for key in MOMENTS if saved else ():
            own_rows = distribute_tensor(saved[key][name].to(device), param.device_mesh, [Shard(0)])
            optimizer.state[param] |= {key: own_rows, "step": torch.tensor(float(steps.start))}
    losses = []
    for step in steps:
        x, y = (local_batch(t, dist.get_rank(), dist.get_world_size()) for t in load_corpus().batch(step, 8, 64))
        for number, (rows, targets) in enumerate(zip(x.to(device).chunk(2), y.to(device).chunk(2), strict=True)):
            model.set_requires_gradient_sync(number == 1)  # type: ignore[operator]
            loss = model(rows, targets) / 2
            loss.backward()
            losses.append(loss.detach())
        space["clip_grad_norm"](list(model.parameters()), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if "whole_tensors" in space:
        whole = {"model": space["whole_tensors"]({name: param.detach() for name, param in params.items()})}
        for key in MOMENTS:
            whole[key] = space["whole_tensors"]({name: optimizer.state[param][key] for name, param in params.items()})
        if dist.get_rank() == 0:
            torch.save(whole, file)
        dist.barrier()
    return losses


def main(path: str) -> int:
    """Train with a file under torchrun, beside torch's `fully_shard`; save after half, and go on with a new model.

    Returns:
        the exit status: 0 if both have torch's losses, bit for bit on CPUs; else 1.
    """
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))  # and the process group, and this rank's GPU
    where, mine_ = torch.device(device), loaded(Path(path).read_text())
    torchs = {"fully_shard": fully_shard, "clip_grad_norm": nn.utils.clip_grad_norm_}
    file = [tempfile.mkdtemp()]
    dist.broadcast_object_list(file, 0)
    saved = Path(file[0], "whole.pt")
    half, whole = range(STEPS), range(2 * STEPS)
    ways = {
        WAYS[0]: losses_of(torchs, whole, saved, where),
        path: losses_of(mine_, half, saved, where) + losses_of(mine_, range(STEPS, 2 * STEPS), saved, where),
    }
    means = {name: mean_over_ranks(torch.stack(losses)) for name, losses in ways.items()}
    theirs, yours_ = means.values()
    # some of a GPU's kernels add up in any order
    same = torch.equal(theirs, yours_) if device == "cpu" else torch.allclose(theirs, yours_, rtol=1e-5)
    if mesh.get_rank() == 0:
        for name, losses in means.items():
            print(f"{name:20}", *(f"{loss:.5f}" for loss in losses.tolist()))
        what = "bit for bit" if device == "cpu" else "to 1e-05"
        print(f"{path}, saved after {STEPS} of {2 * STEPS} steps and resumed: {'' if same else 'not '}equal {what}")
        shutil.rmtree(file[0])
    dist.destroy_process_group()
    return int(not same)


if __name__ == "__main__":
    if len(sys.argv) != 2 or "LOCAL_WORLD_SIZE" not in os.environ:
        sys.exit("usage: torchrun --nproc_per_node=2 -m labs.experiments.mine my_fsdp.py")
    sys.exit(main(sys.argv[1]))
