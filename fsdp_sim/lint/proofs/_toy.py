"""A small model, and what proofs look at: which collectives are issued, and what raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as of_torch
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
fully_shard: Any = of_torch  # returns the module itself, as which its type has no call


class Shown(NamedTuple):
    """What a proof has shown: whether the trap is one, and what was seen with it and without it."""

    holds: bool
    trap: str
    fix: str


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))  # (B, width)


class Toy(nn.Module):
    """Embedding, blocks and head: (B,) token ids to (B, vocab)."""

    def __init__(self, blocks: int = 3, width: int = 8, vocab: int = 16, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return self.head(x)

    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.forward(tokens).argmax(-1)


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def own_tokens(count: int = 4) -> torch.Tensor:
    """Other token ids on each rank."""
    return (torch.arange(count) * 3 + 5 * dist.get_rank()) % 16


def fsdp2(model: nn.Module, **kwargs: Any) -> Any:
    """Each block a unit, then the model."""
    for block in model.layers:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh(), **kwargs)
    return fully_shard(model, mesh=mesh(), **kwargs)


def fsdp1(model: nn.Module, **kwargs: Any) -> Any:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    kwargs.setdefault("auto_wrap_policy", ModuleWrapPolicy({Block}))
    return FullyShardedDataParallel(model, device_id=CPU, **kwargs)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    """The loss of each step on this rank's tokens."""
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(own_tokens()), own_tokens())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def agree(tensor: torch.Tensor) -> bool:
    """Whether a tensor is the same on all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, tensor.detach().float().flatten().tolist())
    return all(torch.allclose(torch.tensor(one), torch.tensor(found[0])) for one in found)


def of_all(value: Any) -> list[Any]:
    """A value of every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


class Collectives(TorchDispatchMode):
    """Writes down each collective that is issued: its name, its elements and its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and isinstance(args[0], torch.Tensor):
            self.seen.append((func.overloadpacket.__name__.strip("_"), args[0].numel(), args[0].dtype))
        return func(*args, **(kwargs or {}))


def raised(do: Callable[[], Any]) -> str:
    """The kind and the first line of what a call raises; empty if it raises nothing."""
    try:
        do()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    return ""


@contextmanager
def impatient() -> Iterator[DeviceMesh]:
    """A mesh whose collectives give up after a second: what would hang for half an hour raises."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
    yield DeviceMesh.from_group(group, "cpu")
    dist.barrier()


def hangs_on_rank_0(do: Callable[[], Any]) -> str:
    """What rank 0 says, alone, of something that all ranks should do; empty if nothing."""
    said = raised(do) if dist.get_rank() == 0 else ""
    return str(of_all(said)[0])


def is_timeout(text: str) -> bool:
    return "imed out" in text or "timeout" in text.lower()
