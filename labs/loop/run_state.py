"""A training as it stands between two steps: what a checkpoint holds, and how a run goes on from one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labs.checkpoint import Checkpointer, CheckpointError, FoundCheckpoint
from labs.checkpoint.full import load_weights
from labs.checkpoint.rng import read_rng, reseed, write_rng
from labs.checkpoint.state import held_bytes, read_state, write_state
from labs.cluster.process_group import n_ranks
from labs.loop.failpoints import failpoint
from labs.loop.preflight import CheckedRun, identity
from labs.loop.progress import Progress
from labs.loop.report import versions
from labs.wrapping import Wrapped


class NoGoodCheckpointError(CheckpointError):
    """All checkpoints of the run are damaged; all ranks know it, and another attempt would find the same."""


def checkpointer(run: CheckedRun, group: dist.ProcessGroup | None) -> Checkpointer | None:
    """What writes and reads the run's checkpoints; None for a run that keeps none.

    Args:
        group: of all ranks, for what they agree on about checkpoints.
    """
    if run.checkpoints is None:
        return None
    config = run.config
    return Checkpointer(run.checkpoints, keep=config.keep, format=config.checkpoint, group=group, schema=Progress)


@dataclasses.dataclass
class RunState:
    """The model, its optimizer, and how far they are.

    Attributes:
        step: steps done.
        position: rows of text taken, over all ranks, see `labs.data.loader`.
        resumed_from: the step of the checkpoint that this process went on from; None if it began.
        saved: checkpoints written here.
        failed_saves: what went wrong in each of the others.
        skipped_in_a_row: the last steps that had no update, see `labs.loop.nonfinite`.
    """

    run: CheckedRun
    wrapped: Wrapped
    optimizer: torch.optim.Optimizer
    checkpointer: Checkpointer | None
    step: int = 0
    position: int = 0
    resumed_from: int | None = None
    saved: int = 0
    failed_saves: list[str] = dataclasses.field(default_factory=list)
    skipped_in_a_row: int = 0
    _kept: int | None = None  # the step of the newest checkpoint

    def progress(self) -> dict[str, Any]:
        """What a checkpoint says besides tensors, a `Progress`."""
        return {
            "step": self.step,
            "position": self.position,
            "identity": identity(self.run),
            "scaler": self.wrapped.scaler.state_dict() if self.wrapped.scaler else None,
            "config": self.run.config.by_key(),
            "world_size": self.run.place.world_size,
            "api": self.run.config.api,
            "device": self.run.device.type,
            "versions": versions(),
        }

    @property
    def state_bytes(self) -> int:
        """What this rank keeps of the parameters and of the optimizer's state."""
        return held_bytes(self.wrapped.model, self.optimizer)

    def save(self, *, asynchronous: bool = False) -> bool:
        """Write a checkpoint, all ranks together; False when it could not be written, which costs nothing else.

        The schedule of the learning rate has no state of its own: it is a function of the step.
        """
        if self.checkpointer is None or self._kept == self.step:
            return True
        state, own = read_state(self.wrapped.model, self.optimizer), read_rng(self.run.device)
        try:
            self.checkpointer.save(self.step, state, self.progress(), own, asynchronous=asynchronous)
        except CheckpointError as error:
            self.failed_saves.append(str(error))
            return False
        finally:
            failpoint("save-ended", self.step)
        self.saved, self._kept = self.saved + 1, self.step
        return True

    def look_after_saves(self, *, wait: bool = False) -> bool:
        """Whether saves in the background have failed: those that ended, or all (``wait``, on all ranks)."""
        if self.checkpointer is not None:
            try:
                self.checkpointer.wait() if wait else self.checkpointer.poll()
            except CheckpointError as error:
                self.failed_saves.append(str(error))
                self.saved, self._kept = self.saved - 1, None
                return False
        return True

    def resume(self) -> list[str]:
        """Go on from the newest good checkpoint, or begin; returns what there is to say about it.

        Raises:
            NoGoodCheckpointError: there are checkpoints, and none of them is good.
            CheckpointError: the newest does not fit this model, or cannot be read.
            ValueError: ``init_from`` does not fit.
        """
        config, place = self.run.config, self.run.place
        reseed(config.seed, 0, place.rank)
        went_on: list[str] = []
        while not went_on and self.checkpointer and (found := self.checkpointer.newest()):
            went_on = self._go_on(found)
        lines = self.checkpointer.messages() if self.checkpointer else []
        if went_on:
            return lines + went_on
        if self.checkpointer and self.checkpointer.damaged:
            raise NoGoodCheckpointError(
                f"{'; '.join(lines)}. There is no good checkpoint in {self.checkpointer.folder}: repair it from a "
                "copy, or begin anew in another folder"
            )
        if config.init_from:
            load_weights(Path(config.init_from), self.wrapped.model)
            lines.append(f"weights from {config.init_from}")
        return lines

    def _go_on(self, found: FoundCheckpoint) -> list[str]:
        """What there is to say; nothing if what was found is damaged after all."""
        assert self.checkpointer is not None
        config, place, progress = self.run.config, self.run.place, found.progress
        state, same_device = read_state(self.wrapped.model, self.optimizer), progress["device"] == self.run.device.type
        try:
            own = self.checkpointer.rank_tensors(found, read_rng(self.run.device) if same_device else {})
        except CheckpointError as error:
            self.checkpointer.pass_over(found.path, str(error))
            return []
        if not self.checkpointer.load(found, state):
            return []
        write_state(self.wrapped.model, self.optimizer, state)
        self.step = self.resumed_from = self._kept = progress["step"]
        self.position = progress["position"]
        if self.wrapped.scaler and progress["scaler"]:
            self.wrapped.scaler.load_state_dict(progress["scaler"])
        if own is not None and same_device:
            write_rng(own, self.run.device)
        else:
            reseed(config.seed, self.step, place.rank)
        lines = [f"goes on from step {self.step} ({found.path})"]
        if (progress["world_size"], progress["api"]) != (place.world_size, config.api):
            lines.append(
                f"it was written by {n_ranks(progress['world_size'])} with api={progress['api']}, and is read by "
                f"{n_ranks(place.world_size)} with api={config.api}: the same parameters, optimizer and rows"
            )
        return lines
