"""What the tests of programs share: record torch's and the mini's program, and compare them line by line.

Both run on a device that writes down what it is told (`fsdp_sim.measure.record`), so what is compared is what a GPU
would have been told: every copy, collective, event and wait, on which stream, and when each buffer lives.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp

import fsdp_sim.mini
from fsdp_sim.measure.record import ProgramRecorder, record
from tests.mini.models import Matrix
from tests.mini.networks import Net

MARKS = [
    pytest.mark.filterwarnings("ignore:reshard_after_forward=1"),
    pytest.mark.filterwarnings("ignore:.*returned a view"),
]
Fsdp = ModuleType  # torch.distributed.fsdp or fsdp_sim.mini: they offer the same names
Run = Callable[[ProgramRecorder, Fsdp], object]
TORCH, MINI = torch.distributed.fsdp, fsdp_sim.mini


def program(run: Run, fsdp: Fsdp, world_size: int = 8) -> list[str]:
    """The lines, or the exception if there is one. Buffers that go at the same moment are put in alphabetical order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small only lose by being shared out
    try:
        lines = record(lambda recorder: run(recorder, fsdp), world_size=world_size, every_op=True)
    except Exception as error:
        return [f"raises {type(error).__name__}"]
    finally:
        torch.set_num_threads(threads)
    runs = groupby(lines, key=lambda line: line.startswith("free"))
    return [line for is_free, some in runs for line in (sorted(some) if is_free else some)]


def assert_same_program(run: Run, world_size: int = 8, may_raise: bool = False) -> None:
    torchs, minis = (program(run, fsdp, world_size) for fsdp in (TORCH, MINI))
    if torchs == ["raises AttributeError"] and may_raise:
        return  # a slip of torch, no error it means: see test_where_torch_slips_the_mini_trains
    assert may_raise or not torchs[0].startswith("raises"), torchs
    if torchs != minis:
        at = next((i for i, (a, b) in enumerate(zip(torchs, minis, strict=False)) if a != b), len(minis))
        before, torchs_lines, minis_lines = (
            "\n  ".join(lines) for lines in (torchs[max(0, at - 12) : at], torchs[at : at + 3], minis[at : at + 3])
        )
        pytest.fail(
            f"line {at} of {len(torchs)} differs, after\n  {before}\ntorch:\n  {torchs_lines}\nmini:\n  {minis_lines}",
            pytrace=False,
        )


def sharded(recorder: ProgramRecorder, fsdp: Fsdp, model: Any = None, **options: Any) -> Any:
    """Three layers and the root, each a unit, watched."""
    model = Net() if model is None else model
    for name, module in model.named_modules():
        if isinstance(module, Matrix):
            recorder.watch(module, name)
    for layer in model.layers:
        fsdp.fully_shard(layer, **options)
    return fsdp.fully_shard(model, **options)


def step(recorder: ProgramRecorder, model: Any, loss: Callable[[Any], torch.Tensor] | None = None) -> None:
    recorder.mark("forward")
    value = loss(model) if loss else model(torch.ones(2, 4)).sum()
    recorder.mark("backward")
    value.backward()
    recorder.mark("optimizer")
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
