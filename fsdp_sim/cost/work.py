"""What has to be computed: the kernels and the activations of each segment of a model, before any hardware is named.

A `Workload` is a model cut into FSDP units with the work of each segment. Two makers: `fsdp_sim.cost.transformer`
writes it down from a model's dimensions, `fsdp_sim.measure.model_from_module` traces any `nn.Module`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

from fsdp_sim.cost.tape import Output, Tape, kept_of
from fsdp_sim.schedule import Policy, Unit, policy_of
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Op

OF_WORK = {  # fields of a plan that decide what is computed, and how a module is made to compute so before it is traced
    "freeze": "freeze the module's own parameters (requires_grad_(False))",
    "lora_rank": "trace the module with its adapters (peft's get_peft_model)",
    "lora_targets": "trace the module with its adapters (peft's get_peft_model)",
    "base_quantization": "give the model's dimensions (Model): quantised modules cannot be traced",
    "fp8": "give the model's dimensions (Model): modules in fp8 cannot be traced",
    "kbit_training": "give the model's dimensions (Model): quantised modules cannot be traced",
    "held_logits": "give the model's dimensions (Model): which of a module's outputs are logits is not known",
    "loss_chunks": "trace the module with a loss in chunks",
    "expert_parallel": "give the model's dimensions (Model): experts of a module are not told apart",
    "fp8_all_gather": "give the model's dimensions (Model): modules in fp8 cannot be traced",
}

_T = TypeVar("_T")
KernelKind = Literal["matmul", "attention", "memory", "cross_entropy", "embedding"]


class Kernel(NamedTuple):
    """One kernel, or several alike that run one after the other.

    Attributes:
        kind: ``matmul``; ``attention`` (fused, flash-like); ``memory`` (pointwise, norms, copies); ``cross_entropy``;
            ``embedding`` (gather, scatter-add).
        flops: floating-point operations of one of them (a multiply and an add are two); causal attention counts
            what is computed, half of the square.
        bytes: read and written by one of them.
        shape: of a matmul ``(batch, m, n, k)``; of attention ``(batch, heads, seq_len, head_dim)``; else empty.
        dtype: what it computes in.
        count: how many.
        fusable: a compiler may fuse it with its neighbours, so that what passes between them is not written.
        op: the name of the operator, where activation checkpointing may keep its output (`fsdp_sim.spec.OPERATORS`).
        row: of a matmul, the greatest number that divides the length of every row of its three matrices as they lie in
            memory; 0 where that is not known.
    """

    kind: KernelKind
    flops: float
    bytes: float
    shape: tuple[int, ...] = ()
    dtype: str = "bf16"
    count: int = 1  # type: ignore[assignment]  # not tuple.count
    fusable: bool = False
    op: str = ""
    row: int = 0


@dataclass(frozen=True)
class Work:
    """What one segment computes for one micro-batch on one rank.

    Attributes:
        forward, backward: kernels in order.
        saved_bytes: activations kept from this segment's forward to its backward, its output included, its input not.
        input_bytes: the segment's input, which is the output of the segment before: what checkpointing keeps.
        output_bytes: its output.
        forward_temporary_bytes: the most alive during forward beyond what is kept at its end.
        backward_temporary_bytes: the most alive during backward, less ``saved_bytes`` and less the whole gradients of
            the segment's parameters; the gradient of the output, which comes in, included. Negative where gradients
            arrive as activations leave.
        outputs: of the operators that activation checkpointing may keep, in order.
        is_block: activation checkpointing applies to it.
        logits_bytes: of ``saved_bytes``, logits and loss.
        held_bytes: what the training loop holds of its output until backward is over.
        saves_input: its input is kept for its backward.
        tape: its tensors one by one, where they are known; else what is kept counts as one tensor, and so on.
    """

    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    saved_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    forward_temporary_bytes: int = 0
    backward_temporary_bytes: int = 0
    outputs: tuple[Output, ...] = field(default=(), repr=False)
    is_block: bool = False
    logits_bytes: int = 0
    held_bytes: int = 0
    saves_input: bool = True
    tape: Tape | None = field(default=None, repr=False, compare=False)

    def kept_bytes(self, again: bool, policy: Policy) -> int:
        """What stays of it after forward; ``again``: its backward computes it again, but for what a policy keeps."""
        return self.output_bytes + kept_of(self.outputs, policy).bytes if again else self.saved_bytes

    @property
    def forward_flops(self) -> float:
        return sum(k.flops * k.count for k in self.forward)

    @property
    def backward_flops(self) -> float:
        return sum(k.flops * k.count for k in self.backward)


def recomputed(work: Work, plan: Plan) -> list[Kernel]:
    """The kernels of a checkpointed block's forward that run again: whose outputs are not kept."""
    policy = policy_of(plan)
    keeps, again = policy.keeps(), []
    ops = [kernel.op for kernel in work.forward if kernel.op for _ in range(kernel.count)]
    told = policy.compiled and ops == [output.op for output in work.outputs]
    needed = iter([output.needed for output in work.outputs] if told else [True] * len(ops))
    for kernel in work.forward:
        of_each = zip(range(kernel.count), needed, strict=False) if kernel.op else ()
        count = sum(not keeps(kernel.op) and used for _, used in of_each) if kernel.op else kernel.count
        if count:
            again.append(kernel._replace(count=count))
    return again


@dataclass(frozen=True)
class Workload:
    """A model as FSDP sees it: its units, and the work of every segment.

    Attributes:
        name: for headings.
        units: the root and its layers in execution order.
        work: by segment; equal segments share one object.
        param_count: parameters of the whole model, tied ones counted once.
        model_flops_per_token: for the model-FLOPs utilisation: of a transformer 6 N + 12 L d T (Chowdhery et al. 2022,
            "PaLM", appendix B), of which frozen parameters have 4 N; else forward and backward without recomputation.
        tokens: per rank and micro-batch.
        dtype: what the matmuls compute in.
        attention_impl: whether its kernels are those of the plan's ``math``, or of fused attention.
        written_for: fields of the plan that decided what is computed, with their values (`OF_WORK`); those that are not
            there had their defaults.
        loose_blocks: blocks of a traced module that are part of the root's compute, where the plan's activation
            checkpointing cannot reach them.
    """

    name: str
    units: tuple[Unit, ...]
    work: Mapping[str, Work] = field(repr=False)
    param_count: int = 0
    model_flops_per_token: float = 0.0
    tokens: int = 0
    dtype: str = "bf16"
    attention_impl: str = "sdpa"
    written_for: Mapping[str, Any] = field(default_factory=dict, repr=False)
    loose_blocks: tuple[str, ...] = ()
    _known: list[Any] = field(default_factory=lambda: [None, None, {}], init=False, repr=False, compare=False)

    @cached_property
    def trained_of_dtype(self) -> Counter[str]:
        """By dtype the parameters that the optimizer steps, of all ranks together."""
        count: Counter[str] = Counter()
        for param in [p for unit in self.units for p in unit.params if p.requires_grad]:
            count[param.dtype] += math.prod(param.shape)
        return count

    def once(self, what: object, work_out: Callable[[], _T]) -> _T:
        """What follows from this workload and nothing else, under the name ``what``; worked out the first time."""
        known: dict[object, _T] = self._known[2]
        if what not in known:
            known[what] = work_out()
        return known[what]

    def known(
        self, *asked: Hashable
    ) -> tuple[dict[tuple[Op, int], float], dict[int, int], dict[tuple[Op, int], float]]:
        """What is known of how long segments take, by operation and identity of their work (equal blocks share it), of
        how many launches kernels are, by identity, and of how long segments take beside their work.

        Plans and clusters that differ in nothing that is ``asked`` about share it too, one after the other.
        """
        if self._known[0] != asked:
            self._known[:2] = [asked, ({}, {}, {})]
        known: tuple[dict[tuple[Op, int], float], dict[int, int], dict[tuple[Op, int], float]] = self._known[1]
        return known

    @cached_property
    def alike(self) -> dict[str, int]:
        """By segment the number of its work: equal for segments that share one."""
        numbers: dict[int, int] = {}
        return {segment: numbers.setdefault(id(work), len(numbers)) for segment, work in self.work.items()}


def trained_count_of(units: Iterable[Unit]) -> int:
    """Parameters that require gradients."""
    return sum([unit.trained_count for unit in units])
