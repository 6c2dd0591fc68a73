"""What is measured while training: utilisation, memory, the time of a step."""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from fsdp_sim.spec import gpu
from labs.model import ModelConfig, empty

Gather = Callable[[torch.Tensor], torch.Tensor]
"""From this rank's numbers (k,) to those of all ranks (ranks, k): the caller's collective."""


@functools.cache
def flops_per_token(model_config: ModelConfig, seq_len: int) -> float:
    """FLOPs that a token of training takes by the book: 6 N + 12 L d T, forward and backward, nothing recomputed.

    N counts the parameters but learned positions, whose rows are added and not multiplied; a tied weight counts once,
    for the head. The second term is attention's, over the whole square.

    Source: Chowdhery et al. 2022, "PaLM", appendix B; without positions as in nanoGPT.

    Example:
        >>> from labs.model import model_config
        >>> flops_per_token(model_config("gpt2"), seq_len=1024) / 1e6
        855.0...
    """
    named = empty(model_config).named_parameters()
    params = sum(p.numel() for name, p in named if name != "pos_emb.weight")
    return 6.0 * params + 12.0 * model_config.n_layer * model_config.d_model * seq_len


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """The device's dense peak in FLOP/s from the simulator's catalogue; None where there is none, as for a CPU.

    Args:
        dtype: ``fp32``, ``bf16`` or ``fp16``: what matmuls compute in.
    """
    if device.type != "cuda":
        return None
    try:
        return gpu(torch.cuda.get_device_name(device)).peak_flops(dtype)
    except ValueError:  # a GPU that the catalogue lacks, or a dtype that the GPU lacks
        return None


def mfu(tokens_per_s: float, flops_per_token: float, peak_flops: float | None, ranks: int) -> float | None:
    """Model-FLOPs utilisation: those of all ranks' tokens over all ranks' peak; None without a known peak."""
    return tokens_per_s * flops_per_token / (peak_flops * ranks) if peak_flops else None


class RankMemory(NamedTuple):
    """Of this rank so far.

    Attributes:
        peak_bytes: on a GPU the most that tensors held at one moment; on a CPU the most that the process had in
            memory, torch's own code and buffers included.
        reserved_bytes: on a GPU the most that torch's allocator took from the driver; on a CPU what the process has in
            memory now.
        workspace_bytes: of the peak, what cuBLAS had, see `fsdp_sim.measure.live_bytes.workspace_bytes`; 0 until the
            end of a training, where it is measured.
    """

    peak_bytes: int
    reserved_bytes: int
    workspace_bytes: int = 0


def memory_bytes(device: torch.device) -> RankMemory:
    """What this process has needed so far."""
    if device.type == "cuda":
        return RankMemory(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    return RankMemory(_peak_rss_bytes(), psutil.Process().memory_info().rss)


def reset_peak_memory(device: torch.device) -> None:
    """What comes from here on counts; on a CPU the process's memory cannot be counted anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_rss_bytes() -> int:
    """The most this process has had in memory. On Linux ``ru_maxrss`` would count what started it, too."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def of_ranks(mine: RankMemory, gather: Gather, device: torch.device) -> list[RankMemory]:
    """Every rank's memory, by rank. A collective call if ``gather`` is one."""
    rows = gather(torch.tensor(mine, dtype=torch.int64, device=device))
    return [RankMemory(*row) for row in rows.tolist()]


def median_step_s(steps_s: Sequence[float]) -> float:
    """Of all steps but the first, which pays for starting up (buffers, threads, compiling), if there is another."""
    return statistics.median(steps_s[1:] or steps_s)
