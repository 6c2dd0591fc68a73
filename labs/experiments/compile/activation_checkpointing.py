"""Activation checkpointing in the trainer: what is not kept, and what it costs to compute it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp_sim import ranks as processes
from fsdp_sim.measure import live_bytes
from labs.cluster.process_group import RankPlace
from labs.cluster.torchrun import train
from labs.config import TrainConfig
from labs.data import load_corpus
from labs.experiments.result import ResultRow
from labs.loop.optimizer import make_optimizer
from labs.loop.step import train_step
from labs.measure.simulated import peak_memory_bytes, simulated
from labs.wrapping import wrap

HOW = ("none", "selective", "full")
ROWS, SEQ_LEN, STEPS = 16, 128, 6
MB = 1e6


def _config(how: str, n_layer: int) -> TrainConfig:
    checkpointing: Any = how
    return TrainConfig(
        n_layer=n_layer, global_batch=ROWS, seq_len=SEQ_LEN, steps=STEPS, activation_checkpointing=checkpointing
    )


def arguments(n_layer: int) -> tuple[str, ...]:
    """The same for the trainer's command, but for the checkpointing."""
    return (f"--n_layer={n_layer}", f"--global_batch={ROWS}", f"--seq_len={SEQ_LEN}", f"--steps={STEPS}")


def predict_peak_bytes(how: str, ranks: int = 2, n_layer: int = 5, device: str = "cpu") -> int:
    """The most bytes of tensors on a rank, by the simulator; nothing is run."""
    config, place = _config(how, n_layer), RankPlace(0, ranks, 0, ranks)
    return peak_memory_bytes(config, simulated(config, config.model_config, place, torch.device(device)))


def measure_peak_bytes(hows: Sequence[str] = HOW, ranks: int = 2, n_layer: int = 5) -> dict[str, int]:
    """The same, counted in the second step of real ranks on CPU cores: the most of all ranks."""

    def peaks() -> list[int]:
        rank, found = dist.get_rank(), []
        for how in hows:
            config = _config(how, n_layer)
            wrapped = wrap(config, config.model_config, RankPlace(rank, ranks, rank, ranks), torch.device("cpu"))
            optimizer = make_optimizer(wrapped, config)
            batch = load_corpus().loader(SEQ_LEN, ROWS).rows(0, rank, ranks)
            train_step(wrapped, optimizer, batch, 0, config)
            with live_bytes(wrapped.model, optimizer) as meter:
                train_step(wrapped, optimizer, batch, 1, config)
            found.append(meter.peak_bytes)
        return found

    of_ranks = processes.run(peaks, ranks, threads=1, timeout_s=120, progress=False)
    return {how: max(found) for how, *found in zip(hows, *of_ranks, strict=True)}


def checkpointing(ranks: int = 2, n_layer: int = 5, hows: Sequence[str] = HOW, device: str = "cpu") -> list[ResultRow]:
    """The trainer with each: memory and time, predicted and measured.

    Raises:
        FailedError: a run failed.
    """
    rows = []
    for how in hows:
        predicted = predict_peak_bytes(how, ranks, n_layer, device)
        asked = () if how == "none" else (f"--activation_checkpointing={how}",)
        report = train(*asked, *arguments(n_layer), "--predict=true", ranks=ranks, device=device).report
        name = f"checkpointing {how}"
        rows.append(ResultRow(name, "peak memory", predicted / MB, report["tensor_bytes"] / MB, "MB"))
        steps_s = [one["predicted"] for one in report["compared"] if one["what"] == "step time"]
        rows.append(ResultRow(name, "step time", 1e3 * steps_s[0] if steps_s else None, 1e3 * report["step_s"], "ms"))
    return rows
