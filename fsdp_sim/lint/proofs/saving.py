"""Proofs of the traps in checkpoints and data."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fsdp_sim.lint.proofs._toy import Shown, Toy, fsdp2, of_all, raised


def full_state_into_shards() -> Shown:
    state, model = Toy().state_dict(), fsdp2(Toy())
    trap = raised(lambda: model.load_state_dict(state))
    options = StateDictOptions(full_state_dict=True)
    fix = raised(lambda: set_model_state_dict(model, Toy().state_dict(), options=options))
    return Shown("Error" in trap and not fix, trap, fix or "is loaded")


class FullDisk(dcp.FileSystemWriter):
    """A writer that fails after torch has prepared the folder."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        raise OSError("no space left on device")


def async_save_unchecked() -> Shown:
    with tempfile.TemporaryDirectory() as folder:
        found: list[Any] = []
        trap = raised(
            lambda: found.append(dcp.async_save({"x": torch.ones(2)}, storage_writer=FullDisk(folder), no_dist=True))
        )
        fix = raised(lambda: found[0].result())
    return Shown(not trap and bool(fix), trap or "says nothing", fix)


def save_over_the_last() -> Shown:
    class CutShort(dcp.FileSystemWriter):
        """A writer that is ended when its shards are written, and its metadata are not."""

        def finish(self, metadata: Any, results: Any) -> None:
            raise SystemExit

    def survives(same_folder: bool) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            dcp.save({"x": torch.ones(2)}, checkpoint_id=f"{folder}/1", no_dist=True)
            second = CutShort(f"{folder}/{1 if same_folder else 2}", overwrite=True)
            raised(lambda: dcp.save({"x": torch.zeros(2)}, storage_writer=second, no_dist=True))
            state = {"x": torch.full((2,), 7.0)}
            said = raised(lambda: dcp.load(state, checkpoint_id=f"{folder}/1", no_dist=True))
            return not said and state["x"].tolist() == [1, 1]

    trap, fix = survives(True), survives(False)
    return Shown(not trap and fix, f"the last good checkpoint can be read: {trap}", f"{fix}")


def _batches(sampled: bool) -> list[list[int]]:
    torch.manual_seed(0)
    data = TensorDataset(torch.arange(8))
    loader = (
        DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
        if sampled
        else DataLoader(data, batch_size=2, shuffle=True)
    )
    return of_all([int(x) for (batch,) in loader for x in batch])


def same_data_on_every_rank() -> Shown:
    trap, fix = _batches(False), _batches(True)
    return Shown(trap[0] == trap[1] and set(fix[0]).isdisjoint(fix[1]), f"both ranks read {trap[0]}", f"{fix}")


def set_epoch_missing() -> Shown:
    def epochs(says: bool) -> list[list[int]]:
        sampler: Any = DistributedSampler(range(8), num_replicas=2, rank=dist.get_rank())  # type: ignore[arg-type]
        found = []
        for epoch in range(2):
            if says:
                sampler.set_epoch(epoch)
            found.append(list(sampler))
        return found

    trap, fix = epochs(False), epochs(True)
    return Shown(trap[0] == trap[1] and fix[0] != fix[1], f"two epochs: {trap}", f"{fix}")
