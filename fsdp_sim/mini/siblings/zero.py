"""ZeRO-1 and ZeRO-2 in miniature: whole parameters on every rank, the optimizer's work split among the ranks.

With DDP every rank keeps the same optimizer state and makes the same step. ZeRO cuts each bucket of parameters
(`buckets`) into W equal parts, one per rank. With 2 ranks and a bucket of two parameters a (3 elements), b (4):

    parameters   | a a a b | b b b . |       one flat buffer; a and b are views of it; padded (.) to equal parts
    rank 0 owns  | a a a b |                 a view of the same memory, as one 1D parameter of the optimizer
    rank 1 owns            | b b b . |

    stage 1   backward: ALL_REDUCE, as in DDP. Step: each rank its own part. Then ALL_GATHER of the parameters.
              Optimizer state / W.
    stage 2   backward: REDUCE_SCATTER, a rank receives the mean of its own part only, and the bucket's memory goes.
              Step and ALL_GATHER the same. Optimizer state and gradients / W.

An all-reduce *is* a reduce-scatter and an all-gather. So stage 2 sends as many bytes as DDP, gathering parameters
instead of gradients, and stage 1 half as many again: the gradients it gathers belong to parts it does not step.
(torch's ZeroRedundancyOptimizer behind DDP is this stage 1; DeepSpeed's stage 1 reduce-scatters too, and differs from
stage 2 in memory alone.) Stage 3, parameters / W too, is FSDP.

Cutting through parameters is right for optimizers that treat each element alone: SGD, Adam, AdamW and most others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.optim import Optimizer

from fsdp_sim.mini import recording
from fsdp_sim.mini.siblings.buckets import Bucket, Reducer, assign_to_buckets
from fsdp_sim.mini.siblings.collectives import all_gather, all_reduce, default_group, reduce_scatter
from fsdp_sim.mini.siblings.ddp import MIB, broadcast_all, validate_same_on_all_ranks
from fsdp_sim.mini.siblings.watch import SEGMENTS
from fsdp_sim.timeline import Lane, Memory

NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "Shampoo")  # their step looks at whole matrices or all parameters


class OwnedBucket(Bucket):
    """A bucket of parameters of which this rank owns one part.

    Attributes:
        whole: 1D, numel: the parameters, which are views of it.
        owned: 1D, numel / W: this rank's part of ``whole``, a parameter of the wrapped optimizer.
        mean: 1D, numel / W: stage 2's gradient of ``owned``, while it is received.
    """

    def __init__(self, index: int, params: list[nn.Parameter], group: ProcessGroup) -> None:
        super().__init__(index, params, multiple_of=group.size())
        self.group = group
        self.whole = self.zeros()
        for param in params:
            self.part(self.whole, param).copy_(param.detach())
            param.data = self.part(self.whole, param)
        self.owned = nn.Parameter(self.own(self.whole))
        self.mean: torch.Tensor | None = None

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat buffer: a view, 1D: numel / W."""
        return flat.chunk(self.group.size())[self.group.rank()]


class ShardReducer(Reducer):
    """Stage 2: a bucket's memory comes with its first gradient and goes when the bucket is reduced."""

    def allocate(self) -> None:
        pass

    def take(self, bucket: Bucket, param: nn.Parameter) -> None:
        if bucket.buffer is None:
            bucket.buffer = bucket.zeros()
            recording.allocated_storage(Memory.UNSHARDED_GRAD, bucket.unit, bucket.buffer, Lane.COMPUTE)
        if param.grad is not None:
            bucket.part(bucket.buffer, param).copy_(param.grad)
            param.grad = None

    def issue(self, bucket: Bucket) -> None:
        assert isinstance(bucket, OwnedBucket)
        assert bucket.buffer is not None
        bucket.mean = torch.empty_like(bucket.owned)
        recording.allocated_storage(Memory.RS_OUTPUT, bucket.unit, bucket.mean, Lane.REDUCE_SCATTER)
        with SEGMENTS.pause() as computed:
            if self._next > 0:
                self.finish(self.buckets[self._next - 1])  # so that two buckets at most have memory
            bucket.pending = reduce_scatter(bucket.mean, bucket.buffer, self.group, bucket.unit, computed)

    @torch.no_grad()
    def finish(self, bucket: Bucket) -> None:
        assert isinstance(bucket, OwnedBucket)
        if bucket.mean is not None:  # else finished already, or never issued
            super().finish(bucket)
            if bucket.owned.grad is None:
                bucket.owned.grad = bucket.mean
            else:  # gradient accumulation
                bucket.owned.grad += bucket.mean
        bucket.mean = bucket.buffer = None

    def used_somewhere(self) -> set[nn.Parameter]:
        return set()  # zeros in the middle of a part cannot be told from gradients that did not come


class ZeroOptimizer(Optimizer):
    """An optimizer of which each rank holds and steps one part (torch: `ZeroRedundancyOptimizer`).

    It also reduces the gradients, so the model is not wrapped in DDP. Parameters become views of flat buffers: move the
    model to its device and dtype before. Frozen parameters are left alone. To see compute in the timeline, `watch` the
    model.

    Args:
        params: as for any optimizer: parameters, named parameters, or groups. Buckets do not span groups, and are
            issued group by group.
        optimizer_class: a torch optimizer that treats each element alone.
        stage: 1 keeps whole gradients, averaged, in ``.grad``. 2 keeps this rank's part of them, and ``.grad`` is None
            after backward.
        bucket_cap_mb: MiB at which a bucket of gradients is full.
        find_unused_parameters: a gradient that no rank computed counts as zero, and the optimizer steps the parameter
            all the same (weight decay, momentum). If False it is an error.
        **defaults: what the optimizer takes: ``lr``, ``betas``, ...

    Raises:
        ValueError: ``stage`` is not 1 or 2; the optimizer does not treat elements alone.
        RuntimeError: there is no process group; parameters are on the meta device; ranks have different parameters. In
            backward: a parameter got no gradient.

    Example::

        optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, stage=2, lr=1e-3)
        loss(model(batch)).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        *,
        stage: int = 1,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        **defaults: Any,
    ) -> None:
        if stage not in (1, 2):
            raise ValueError(f"stage={stage!r}: must be 1 or 2; stage 3 is fsdp_sim.mini.fully_shard")
        if optimizer_class.__name__ in NOT_ELEMENTWISE:
            raise ValueError(
                f"{optimizer_class.__name__} does not treat each element alone, and a rank has parts of parameters; "
                "use for example AdamW"
            )
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb}: must be above 0, for example 25")
        self.group = default_group(process_group)
        self.stage = stage
        super().__init__(params, defaults)  # groups of whole parameters
        names = _names(self.param_groups)
        if on_meta := [name for p, name in names.items() if p.is_meta]:
            raise RuntimeError(f"parameters are still on the meta device: {on_meta}; initialize them first")
        validate_same_on_all_ranks([(name, tuple(p.shape), p.dtype) for p, name in names.items()], self.group)
        self.buckets: list[OwnedBucket] = []
        owned_groups: list[dict[str, Any]] = []
        for group in self.param_groups:
            first = len(self.buckets)
            for of in assign_to_buckets([p for p in group["params"] if p in names], int(bucket_cap_mb * MIB)):
                self.buckets.append(OwnedBucket(len(self.buckets), of, self.group))
            owned_groups.append(_options(group) | {"params": [b.owned for b in self.buckets[first:]]})
        for bucket in self.buckets:
            broadcast_all([bucket.whole], self.group, bucket.unit)
        self.optim: Optimizer = optimizer_class(owned_groups, **defaults)
        self.state = self.optim.state  # of this rank's parts
        for group, owned_group in zip(self.param_groups, self.optim.param_groups, strict=True):
            group.update(_options(owned_group))  # the optimizer's own defaults, for schedulers to find
        reducer = Reducer if stage == 1 else ShardReducer
        self.reducer = reducer(list(self.buckets), names, self.group, find_unused_parameters)
        recording.install()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step this rank's parts, then gather everybody's."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, owned_group in zip(self.param_groups, self.optim.param_groups, strict=True):
            owned_group.update(_options(group))  # a scheduler changes the learning rate here
        self._take_owned_grads()
        self.optim.step()
        self._all_gather_parameters()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch's step hooks (the timeline's OPTIM) see the inner step only

    def _take_owned_grads(self) -> None:
        """Stage 1: the gradient of an owned part is a view of the averaged bucket."""
        if self.stage == 1:
            for b in self.buckets:
                written = b.buffer is not None and any(p.grad is not None for p in b.params)
                b.owned.grad = b.own(b.buffer) if written and b.buffer is not None else None

    @torch.no_grad()
    def _all_gather_parameters(self) -> None:
        """In place: an owned part lies in what is gathered into."""
        for pending in [all_gather(b.whole, b.owned, self.group, b.unit) for b in self.buckets]:
            pending.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.optim.zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale this rank's part of the gradients so that the 2-norm over all parts is at most ``max_norm``.

        Returns:
            the norm before, 0-d.
        """
        self._take_owned_grads()
        grads = [b.owned.grad for b in self.buckets if b.owned.grad is not None]  # each 1D
        square = sum((g.float().square().sum() for g in grads), torch.zeros(()))
        all_reduce(square, self.group, "gradient norm", ReduceOp.SUM).wait()
        norm = square.sqrt()
        for grad in grads:
            grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's parts: to be loaded with as many ranks and the same buckets."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)
        self.state = self.optim.state


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Of a parameter group: lr, betas, weight_decay, ..."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _names(groups: list[dict[str, Any]]) -> dict[nn.Parameter, str]:
    """The parameters that are trained, and what messages call them."""
    names: dict[nn.Parameter, str] = {}
    for i, group in enumerate(groups):
        given = group.get("param_names") or [f"parameter {j} of group {i}" for j in range(len(group["params"]))]
        names |= {p: name for p, name in zip(group["params"], given, strict=True) if p.requires_grad}
    return names
