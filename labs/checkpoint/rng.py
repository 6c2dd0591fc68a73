"""The random numbers of a rank: their state is saved with a checkpoint, so that dropout goes on where it was.

The trainer draws from torch only (dropout, sampling); the order of the data is a function of seed and position, not of
this state. Python's and NumPy's generators are not used and not saved.
"""

from __future__ import annotations

import numpy as np
import torch

Device = torch.device | str


def read_rng(device: Device = "cpu") -> dict[str, torch.Tensor]:
    """The state of torch's generators on this rank: ``cpu``, and ``cuda`` for this rank's GPU; uint8 tensors, 1D.

    Source: `torch.get_rng_state`, `torch.cuda.get_rng_state`.
    """
    state = {"cpu": torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def write_rng(state: dict[str, torch.Tensor], device: Device = "cpu") -> None:
    """Go on from a state that `read_rng` returned on a device of the same type.

    Raises:
        ValueError: a GPU's state is needed and was not saved; nothing has been changed.
    """
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu and "cuda" not in state:
        raise ValueError(
            f"the random state was saved on {', '.join(state)} and not for {device}; use reseed(seed, step, rank)"
        )
    torch.set_rng_state(state["cpu"].cpu())
    if on_gpu:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def reseed(seed: int, step: int, rank: int) -> None:
    """Seed all of torch's generators with a number that belongs to (seed, step, rank).

    For a resumed run with another number of ranks, or on another kind of device: the saved states do not fit, and a
    state used by two ranks would drop the same units on both. So each rank starts a stream of its own, which
    depends on nothing else: the same resume, done twice, draws the same numbers.

    Source: `numpy.random.SeedSequence`, which mixes the three numbers so that near ones give unrelated seeds.
    """
    torch.manual_seed(int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0]))
