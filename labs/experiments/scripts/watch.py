"""Runs a training script as it is, and notes what one of its steps does: bytes at the peak, collectives.

    torchrun --standalone --nproc_per_node=2 -m labs.experiments.scripts.watch FOLDER SCRIPT [ARGUMENTS]

The step is the third: from the end of the second ``optimizer.step()`` to the end of the third. Memory is counted from
the end of the first, for in the second DDP allocates its buckets anew. Each rank writes FOLDER/RANK.json, a `RankStep`.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_sim.measure import live_bytes

STEP = 3
KINDS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "all_reduce": "all-reduce",  # a DTensor's
}


class IssuedCollective(msgspec.Struct, frozen=True):
    """What was issued; ``bytes`` of the whole message: what an all-gather puts out, a reduce-scatter takes in."""

    kind: str
    bytes: int


class RankStep(msgspec.Struct, frozen=True):
    """One step of one rank."""

    peak_bytes: int
    collectives: list[IssuedCollective]


class Collectives(TorchDispatchMode):
    """Notes every collective: DDP's, which C++ issues, and FSDP's."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[IssuedCollective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: it comes again as operators on its local tensor
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name != "wait_tensor":
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.seen.append(IssuedCollective(KINDS.get(name, name), max((t.nbytes for t in tensors), default=0)))
        return func(*args, **(kwargs or {}))


def main(folder: Path, script: str, arguments: list[str]) -> None:
    """Run the script in this process."""
    device = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    collectives, steps = Collectives(), 0
    meter: Any = None

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal meter, steps
        steps += 1
        if steps == STEP - 2:
            meter = live_bytes(optimizer, device=device)
            meter.__enter__()
        elif steps == STEP - 1:
            meter.mark("before")
            collectives.__enter__()
        elif steps == STEP:
            collectives.__exit__(None, None, None)
            watched = RankStep(meter.mark("step").peak_bytes, collectives.seen)
            meter.__exit__(None, None, None)
            (folder / f"{os.environ['RANK']}.json").write_bytes(msgspec.json.encode(watched))

    hook = register_optimizer_step_post_hook(stepped)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    hook.remove()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still want the GIL, which a Python that shuts down does not give: see labs.train
