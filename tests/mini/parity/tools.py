"""What the tests of this folder share: log what a group does, log what is called in torch.distributed, compare."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.mini.models import Toy, assert_same_grads, my_part, shard, twin

# torch 2.13 renamed the single-tensor collectives.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


@contextmanager
def events(impl: ModuleType) -> Iterator[list[tuple[str, str, str]]]:
    """``(what, name of the unit, training state)`` of every unshard that gathers and of every post-backward."""
    log: list[tuple[str, str, str]] = []
    cls = impl.FSDPParamGroup
    unshard, post_backward = cls.unshard, cls.post_backward

    def unshard_and_log(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._all_gather_result is None and self._sharded_state is not impl.ShardedState.UNSHARDED:
            log.append(("unshard", self._module_fqn, self._training_state.name))
        return unshard(self, *args, **kwargs)

    def post_backward_and_log(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = post_backward(self, *args, **kwargs)
        log.append(("post_backward", self._module_fqn, self._training_state.name))
        return result

    with patch.object(cls, "unshard", unshard_and_log), patch.object(cls, "post_backward", post_backward_and_log):
        yield log


@dataclass(frozen=True)
class Collective:
    """One collective: AG, RS or AR; elements and dtype of its output; the ranks of its group and the group's name."""

    name: str
    numel: int
    dtype: torch.dtype
    ranks: tuple[int, ...]
    group: str


class Issued(TorchDispatchMode):
    """The collectives issued inside, in order, by whatever function."""

    SHORT: ClassVar[dict[str, str]] = {"_allgather_base_": "AG", "_reduce_scatter_base_": "RS", "allreduce_": "AR"}

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            output = args[0][0] if isinstance(args[0], list) else args[0]
            group = dist.ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject)))
            ranks = tuple(dist.get_process_group_ranks(group))
            name = self.SHORT[func._opname]
            self.log.append(Collective(name, output.numel(), output.dtype, ranks, group.group_name))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        return [c.name for c in self.log]

    def of(self, name: str) -> list[Collective]:
        return [c for c in self.log if c.name == name]


@contextmanager
def called() -> Iterator[list[tuple[str, str]]]:
    """``(AG, RS or AR; its reduction)``, found by patching torch.distributed, as torch's own tests do."""
    log: list[tuple[str, str]] = []
    reductions = {dist.ReduceOp.AVG: "AVG", dist.ReduceOp.SUM: "SUM"}

    def logging(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(original).bind(*args, **kwargs)
            bound.apply_defaults()
            op = bound.arguments.get("op")
            log.append((name, next((text for known, text in reductions.items() if op == known), str(op))))
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for short, name in {"AG": GATHER, "RS": REDUCE_SCATTER, "AR": "all_reduce"}.items():
            stack.enter_context(patch.object(dist, name, logging(short, getattr(dist, name))))
        yield log


def group_of(impl: ModuleType, module: nn.Module) -> Any:
    """The parameter group of a module, as torch's own tests reach it."""
    return impl.fully_shard.state(module)._fsdp_param_group


def groups_of(impl: ModuleType, root: nn.Module) -> list[Any]:
    states = {id(s): s for m in root.modules() if (s := impl.fully_shard.state(m)) is not None}
    return [group for state in states.values() for group in state._fsdp_param_groups]


def sharded_toy(impl: ModuleType, n_layers: int = 3, sizes: tuple[int, ...] = (), **options: Any) -> tuple[Any, Any]:
    """A sharded toy, and the same on one process."""
    model = Toy(n_layers, sizes)
    plain = twin(model)
    return shard(model, impl.fully_shard, **options), plain


def square_loss(out: torch.Tensor) -> torch.Tensor:
    return out.pow(2).mean()


def backward_of_both(model: Any, plain: nn.Module, whole: torch.Tensor, afresh: bool = False) -> None:
    """Of the sharded model on this rank's part of a batch, of the plain one on all of it."""
    for m, x in ((model, my_part(whole)), (plain, whole)):
        if afresh:
            m.zero_grad()
        square_loss(m(x)).backward()


def train_side_by_side(model: Any, plain: nn.Module, steps: int = 2, width: int = 4, **optim: Any) -> None:
    """Train both, each rank on its part and one process on the whole batch; gradients and parameters are equal."""
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1, **optim) for m in (model, plain)]
    for step in range(steps):
        whole = torch.randn(2 * dist.get_world_size(), width, generator=torch.Generator().manual_seed(step))
        backward_of_both(model, plain, whole)
        assert_same_grads(model, plain)
        for optimizer in sgd:
            optimizer.step()
            optimizer.zero_grad()


def reshard_all(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def kind(param: torch.Tensor) -> str:
    return "sharded" if isinstance(param, DTensor) else "unsharded"


def raised(fn: Callable[[], Any]) -> tuple[str, str] | None:
    """Type and text of what it raises, None if it does not."""
    try:
        fn()
    except Exception as error:
        return type(error).__name__, str(error)
    return None
