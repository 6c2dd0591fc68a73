"""`Plan`: how the model is trained. Its fields carry torch's names and torch's defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import InitVar, fields
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any, Literal

from fsdp_sim.spec.dtypes import DTYPE_OR_NONE
from fsdp_sim.spec.fields import SIZE, Allowed, field, number, one_of, spec, whole
from fsdp_sim.spec.operators import OPERATORS
from fsdp_sim.spec.optimizers import OPTIMIZERS
from fsdp_sim.spec.quantization import QUANTIZATIONS
from fsdp_sim.spec.stacks import stack_names, stack_settings

TORCH_VERSIONS = ("2.13", "2.14", "2.15")  # whose programs of `fully_shard` are known; 2.14 issues 2.13's
Api = Literal["fsdp2", "fsdp1", "ddp", "zero1", "zero2"]
PerMicroBatch = bool | Literal["last"]

SETTINGS_OF = {  # fields that only some ways to train have; a value other than the default is refused elsewhere
    "reshard_after_forward": ("fsdp2",),
    "reduce_scatter_max_input_buffers": ("fsdp2",),
    "separate_reduce_scatter_group": ("fsdp2",),
    "post_optim_event": ("fsdp2",),
    "unshard_async_op": ("fsdp2",),
    "requires_all_reduce": ("fsdp2",),
    "reshard_after_backward": ("fsdp2",),
    "is_last_backward": ("fsdp2",),
    "gradient_divide_factor": ("fsdp2",),
    "torch": ("fsdp2",),
    "limit_all_gathers": ("fsdp1",),
    "sharding_strategy": ("fsdp1",),
    "forward_prefetch": ("fsdp2", "fsdp1"),
    "backward_prefetch": ("fsdp2", "fsdp1"),
    "cpu_offload": ("fsdp2", "fsdp1"),
    "activation_offload": ("fsdp2",),
    "shard_size": ("fsdp2", "fsdp1"),
    "expert_parallel": ("fsdp2",),
    "bucket_cap_mb": ("ddp", "zero1", "zero2"),
    "fp8_all_gather": ("fsdp2",),
    "clip_grad_norm": ("fsdp2", "fsdp1", "ddp", "zero1"),
    "kbit_training": ("ddp",),
    "use_reentrant": ("fsdp1",),
}


def _is_given(value: object) -> bool:
    return value is not None


NEEDS: dict[str, tuple[str, Callable[[Any], bool], str]] = {  # fields that mean something only beside another
    "lora_targets": ("lora_rank", _is_given, "a number"),
    "base_quantization": ("lora_rank", _is_given, "a number: weights of four bits cannot be trained"),
    "kbit_training": ("base_quantization", _is_given, "a kind of bitsandbytes"),
    "use_reentrant": ("activation_checkpointing", _is_given, "'full'"),
    "fp8_all_gather": (
        "fp8",
        lambda value: value == "tensorwise",
        "'tensorwise', the one recipe for which torchao has it",
    ),
    "async_save": ("save_every", _is_given, "a number of steps"),
    "storage_gb_per_s": ("save_every", _is_given, "a number of steps"),
    "save_every": ("storage_gb_per_s", _is_given, "the rate at which one rank writes"),
    "fp8_precompute_scale": ("fp8_all_gather", bool, "True"),
}
EXCLUDES = {  # fields that do not go together, and why
    ("freeze", "lora_rank"): "LoRA trains nothing but its adapters",
    ("held_logits", "loss_chunks"): "the logits are never whole",
    ("fp8", "base_quantization"): "quantised weights are multiplied in the dtype of compute",
}
ONLY_WITH_ACCUMULATION = ("requires_gradient_sync", "requires_all_reduce", "reshard_after_backward", "is_last_backward")
INSTEAD = {  # what another way to train calls it
    ("reshard_after_forward", "fsdp1"): "fsdp1 has sharding_strategy='FULL_SHARD' or 'SHARD_GRAD_OP'",
    ("sharding_strategy", "fsdp2"): "fsdp2 has reshard_after_forward and shard_size",
    ("limit_all_gathers", "fsdp2"): "fsdp2 bounds its memory by events, without blocking the CPU",
}

_BOOL = one_of(True, False)
_DEPTH = one_of(None).explained("implicit prefetch") | whole(1, SIZE).explained("depth of explicit prefetch")
_PER_MICRO_BATCH = one_of(True, False, "last")
_NAMES = Allowed(
    "a tuple of names of modules",
    lambda value: isinstance(value, tuple) and len(value) > 0 and all(isinstance(n, str) and n for n in value),
    are_names=True,
)
_OPERATORS = Allowed(
    f"a tuple of operators to keep (of {', '.join(OPERATORS)})",
    lambda value: isinstance(value, tuple) and len(value) > 0 and all(name in OPERATORS for name in value),
)
_FSDP1_BACKWARD = one_of("BACKWARD_PRE", "BACKWARD_POST", "none")
PREFETCH_OF = {  # what prefetch is to each of the two that have it
    ("fsdp2", "forward_prefetch"): Allowed("None (implicit) or a depth >= 1", _DEPTH.test),
    ("fsdp2", "backward_prefetch"): Allowed("None (implicit) or a depth >= 1", _DEPTH.test),
    ("fsdp1", "forward_prefetch"): Allowed("True, False or None", one_of(True, False, None).test),
    ("fsdp1", "backward_prefetch"): Allowed(
        "'BACKWARD_PRE', 'BACKWARD_POST' or 'none'", (one_of(None) | _FSDP1_BACKWARD).test
    ),
}

BESIDE_EXPERT_PARALLEL = {  # what fields may be where experts are a unit with a mesh of its own
    "wrap": Allowed(
        "their units are inside of those of blocks; it must be 'block' or 'embed_block_head'",
        lambda value: value in ("block", "embed_block_head"),
    ),
    "reshard_after_forward": Allowed(
        "groups of a few ranks are not known for experts; it must be True, False or None",
        lambda value: type(value) is not int,
    ),
    "optimizer": Allowed(
        "Muon's matrices are those of one mesh; take another optimizer", lambda value: value != "muon"
    ),
    "activation_checkpointing": Allowed(
        "which outputs of all-to-alls it keeps is not known; take 'full', a number or None",
        lambda value: value != "selective" and not isinstance(value, tuple),
    ),
    "experts_impl": one_of("grouped").explained("ranks share out experts that are one tensor"),
    "activation_offload": one_of(None).explained("when tokens that travel are copied is not known"),
    "base_quantization": one_of(None).explained("quantised experts are linear layers, which ranks do not share out"),
}


@spec
class Plan:
    """How a model is sharded, prefetched and stepped.

    Attributes:
        api: ``fsdp2`` is ``torch.distributed.fsdp.fully_shard``, ``fsdp1`` ``FullyShardedDataParallel``, ``ddp``
            ``DistributedDataParallel``; ``zero1`` shards the optimizer's state, ``zero2`` the gradients too.
        reshard_after_forward: fsdp2, the argument of ``fully_shard``, given to every unit. True frees parameters
            after forward, False keeps them until backward, None (torch's default) is True for all units but the
            root, a number n keeps a slice of 1/n and gathers within groups of n ranks in backward.
        forward_prefetch: fsdp2: None issues a unit's all-gather in its own pre-forward; a depth k gives each layer
            the list of the next k layers (``set_modules_to_forward_prefetch``), the root none. fsdp1: torch's bool,
            None is its default False.
        backward_prefetch: fsdp2: None prefetches the previous unit of the post-forward order; a depth k gives each
            layer the list of the k layers before it (``set_modules_to_backward_prefetch``), the root none. fsdp1:
            ``BACKWARD_PRE`` (torch's default there), ``BACKWARD_POST`` or ``none``; None is the default.
        limit_all_gathers: fsdp1, the rate limiter.
        sharding_strategy: fsdp1. HYBRID_SHARD takes its shard group from ``shard_size``.
        param_dtype: of gathers and compute (``MixedPrecisionPolicy``); None is the dtype of the parameters.
        reduce_dtype: of the gradients' reduction; None is the dtype of the gradients (see ``torch``): of ddp that of
            compute. Under autocast it is that of the parameters, ``fp32``.
        cpu_offload: shards, gradients and the optimizer live in the CPU's memory (``CPUOffloadPolicy``).
        activation_checkpointing: None keeps all activations; ``full`` keeps each block's input and computes the
            block again in backward; a number k does so for every k-th block. Names of operators
            (`fsdp_sim.spec.OPERATORS`) keep what these put out besides, and compute the rest again, as the list that
            ``create_selective_checkpoint_contexts`` takes: ``("mm", "scaled_dot_product_attention")``. ``selective``
            keeps attention and every second linear layer, and no experts, as torchtitan 0.2.2 does (option ``op``;
            that and 0.3.0's `SelectiveAC` count layers without a bias only: 0.3.0 keeps all with one, 0.2.2 none).
        use_reentrant: fsdp1: blocks are computed again by reentrant checkpointing (``torch.utils.checkpoint``, and the
            default of transformers). Of frozen units, LoRA's among them, inputs and their gradients then stay until
            backward is over (`fsdp_sim.engine.activations.staying` says why).
        activation_offload: fsdp2: what backward needs goes to the CPU's memory in forward, and comes back: with
            ``save_on_cpu`` (``torch.autograd.graph.save_on_cpu(pin_memory=True)``) while compute and CPU wait, with
            ``streams`` (torchtune's ``OffloadActivations``) beside compute. With activation_checkpointing it is what
            that keeps.
        shard_size: ranks that share one copy of the parameters (HSDP); None is all of them.
        expert_parallel: fsdp2: ranks of a shard group that share out the experts of each mixture of experts
            (torchtitan's ``expert_parallel_degree``). The experts are a unit of their own inside their block's, which
            FSDP shards among the ranks that have the same ones; tokens travel to their experts and back (two
            all-to-alls forward, two backward, and a small one, for whose result the CPU waits). It must divide the
            experts and the shard group. Experts are taken to get equally many tokens.
        grad_accum: micro-batches per optimizer step.
        micro_batch: sequences per rank and micro-batch.
        seq_len: tokens per sequence.
        wrap: ``block`` makes each block a unit, ``embed_block_head`` (fsdp2) the embedding and the last norm with the
            head besides, as torchtitan does: without ``reshard_after_forward`` the head stays whole until backward, and
            tied weights stay in the root; ``root`` the whole model one unit, a number the blocks of at least
            that many parameters, a tuple of names those modules. (torch's ``size_based_auto_wrap_policy`` cuts inside
            of blocks too: `fsdp_sim.measure.model_from_module` takes it.)
        stack: the software that trains, by its name in ``stacks.toml``: it sets some fields that are not given,
            and how long a step takes beside its kernels. A copy with another stack (``dataclasses.replace``) takes that
            one's.
        compile: whether ``torch.compile`` fuses the memory-bound kernels of each block.
        attention_impl: ``sdpa`` is fused (torch's own, FlashAttention-2), ``flash1`` fused with the kernels of 2023,
            ``math`` writes the matrix of scores.
        cross_entropy: ``torch`` computes the loss in fp32, beside the logits; ``shifted`` copies these without the last
            of each sequence first (transformers before 5), where there are several; ``shifted_uncast`` does so in the
            dtype of compute, but for autocast, as transformers 4.45 does for GPT-2, GPT-BigCode, GPT-NeoX and OPT;
            ``compiled`` converts the logits as it goes; ``fused`` is one kernel whose backward writes over them
            (FlashAttention's).
        held_logits: what of the model's outputs a loop holds until backward is over, as in ``out = model(**batch)``:
            None nothing, ``computed`` the logits, ``fp32`` their copy, which Accelerate makes of outputs in mixed
            precision, ``fp32_in_head`` the same until the head's backward is over.
        experts_impl: how a mixture of experts is computed: ``grouped`` in grouped matmuls, as in transformers 5 and
            torchtitan; ``loop`` one expert's linear layers after the other's, as in transformers before 5, and as
            quantised ones are in any case.
        rms_norm: ``fused`` is one kernel, as in torch since 2.9; ``composed`` casts, squares and scales in kernels of
            their own, as Hugging Face's Llama does. Without effect on models with another norm.
        loss_metrics: how often the loss is computed once more from the logits, without gradients, for logging.
        freeze: parameters that are not trained, by the names of parameters or modules; ``*`` stands for any part of a
            name: ``("embed", "layers.*.ffn")``. They are gathered like others, and have neither gradients nor optimizer
            states.
        lora_rank: train nothing but low-rank adapters (LoRA, peft's ``r``) beside the frozen linear layers of the
            blocks; None trains the model.
        lora_targets: the linear layers that have them: ``all-linear``, or names (``wq``, ``ffn.up``, or peft's
            ``q_proj``).
        base_quantization: QLoRA: how the blocks' linear layers are stored, four bits a number. ``nf4``, ``fp4`` and
            these with ``_double_quant`` are bitsandbytes'; ``gptq`` has groups of 128. Each is dequantised before its
            matmul, forward and backward; embeddings, norms and head stay as they are. FSDP gathers the bits.
        kbit_training: what is made fp32 of a quantised model before training: all that is not quantised, by ``peft``'s
            ``prepare_model_for_kbit_training``, or the norms, where ``trl``'s SFTTrainer casts the rest back. What
            bitsandbytes' layers get in fp32 they give back in fp32, so that the residual stream, queries, keys, values
            and the feed-forward are fp32 beside autocast. Neither is for models that FSDP shards.
        fp8: the blocks' linear layers, those of which 16 divides both dimensions, compute in fp8, by one of torchao's
            recipes: ``tensorwise``, ``rowwise``, ``rowwise_with_gw_hp`` or ``mxfp8``.
        fp8_all_gather: fsdp2: their weights are cast before the all-gather (``enable_fsdp_float8_all_gather``), so that
            half of bf16's bytes travel.
        fp8_precompute_scale: the scales of those weights are computed once a step, in one all-reduce after the
            optimizer (``precompute_float8_dynamic_scale_for_fsdp``); else each all-gather has one for each weight.
        loss_chunks: into how many chunks of the sequence the head and the loss are cut, so that logits are never whole:
            of each chunk forward and backward run before the next (torchtitan's ``ChunkedLossWrapper``). It must divide
            ``seq_len``.
        float32_matmul_precision: ``high`` computes fp32 matmuls in TF32 (``torch.set_float32_matmul_precision``).
        save_every: steps between two checkpoints, whose time is shared out among them; None saves none.
        async_save: training waits until a checkpoint is in the CPU's memory, not in the storage (DCP's ``async_save``).
        storage_gb_per_s: what one rank writes to the storage, in 1e9 bytes a second.
        optimizer: what is kept beside each parameter: ``adamw`` two moments, ``adamw_8bit`` two in a byte each, with
            scales (torchao, bitsandbytes), ``adamw_master_weights`` two and the parameter once more, all in fp32
            (DeepSpeed, of parameters in 2 bytes), ``sgd_momentum`` one, ``sgd`` none; ``muon`` (``torch.optim.Muon``)
            one for the matrices of the blocks, which it orthogonalises, and AdamW for the rest.
        optimizer_impl: ``fused`` is one pass over parameters and states, ``foreach`` torch's default on a GPU: a pass
            for each operator, and for AdamW one more number for each parameter while it runs.
        clip_grad_norm: ``clip_grad_norm_`` before the optimizer. fsdp2 reduces the norms of all parameters in one
            all-reduce (torch 2.13).
        reduce_scatter_max_input_buffers: fsdp2, ``set_reduce_scatter_max_input_buffers``.
        separate_reduce_scatter_group: fsdp2, ``set_separate_reduce_scatter_group``: reduce-scatters have a
            communicator of their own.
        post_optim_event: fsdp2, ``set_post_optim_event``: gathers wait for the optimizer, not for all of compute.
        unshard_async_op: fsdp2, ``_set_unshard_async_op``.
        requires_gradient_sync: reduce gradients in every micro-batch (True) or in the last one only (``last``). This
            and the next three take False too, as in torch; but never to reduce, free or wait trains wrongly, and
            `tests/oracles/verify.py` says how.
        requires_all_reduce: HSDP: the same for the all-reduce between replicas.
        reshard_after_backward: free parameters after backward: always, or ``last``.
        is_last_backward: wait for the reductions at the end of every backward, or of the ``last`` only.
        gradient_divide_factor: fsdp2, ``set_gradient_divide_factor``; None divides by the number of ranks.
        torch: fsdp2, the version whose program it is. From 2.15 on gradients without a ``reduce_dtype`` are reduced in
            the dtype of the shards, before in ``param_dtype``: with bf16 parameters twice the bytes.
        bucket_cap_mb: ddp and zero: the size of a bucket of gradients in MiB; None is torch's: 25, and 1 for the first.
        expandable_segments: torch's allocator runs with ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``, and so
            holds less in pieces that nothing fits into.

    Example:
        >>> Plan(forward_prefetch=1).reshard_after_forward is None
        True
        >>> Plan(forward_prefech=1)
        Traceback (most recent call last):
        TypeError: Plan has no field forward_prefech (given forward_prefech=1); did you mean forward_prefetch?
        >>> Plan(grad_accum=0)
        Traceback (most recent call last):
        ValueError: Plan.grad_accum is 0; it must be a whole number >= 1
    """

    # The fields that the stack has set. First, because `dataclasses.replace` passes on what it changes, then this, then
    # what it copies.
    _of_stack: InitVar[tuple[str, ...]] = dataclass_field(default=(), kw_only=True)
    api: Api = field(one_of("fsdp2", "fsdp1", "ddp", "zero1", "zero2"), default="fsdp2")
    reshard_after_forward: bool | int | None = field(one_of(True, False, None) | whole(1, SIZE), default=None)
    forward_prefetch: int | bool | None = field(_DEPTH | _BOOL.explained("fsdp1"), default=None)
    backward_prefetch: Any = field(_DEPTH | _FSDP1_BACKWARD.explained("fsdp1"), default=None)
    limit_all_gathers: bool = field(_BOOL, default=True)
    sharding_strategy: str = field(
        one_of("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"), default="FULL_SHARD"
    )
    param_dtype: str | None = field(DTYPE_OR_NONE, default=None)
    reduce_dtype: str | None = field(DTYPE_OR_NONE, default=None)
    cpu_offload: bool = field(_BOOL, default=False)
    activation_checkpointing: str | int | tuple[str, ...] | None = field(
        one_of(None, "full", "selective") | whole(1, SIZE).explained("every k-th block") | _OPERATORS, default=None
    )
    use_reentrant: bool = field(_BOOL, default=False)
    activation_offload: str | None = field(one_of(None, "save_on_cpu", "streams"), default=None)
    shard_size: int | None = field(one_of(None) | whole(1, SIZE), default=None)
    expert_parallel: int = field(whole(1, SIZE), default=1)
    grad_accum: int = field(whole(1, 10_000), default=1)
    micro_batch: int = field(whole(1, 2**20), default=1)
    seq_len: int = field(whole(1, SIZE), default=1024)
    wrap: str | int | tuple[str, ...] = field(
        one_of("block", "root", "embed_block_head") | whole(1, 2**62) | _NAMES, default="block"
    )
    stack: str = field(one_of(*stack_names()), default="plain")
    compile: bool = field(_BOOL, default=False)
    attention_impl: str = field(one_of("sdpa", "flash1", "math"), default="sdpa")
    cross_entropy: str = field(one_of("torch", "shifted", "shifted_uncast", "compiled", "fused"), default="torch")
    held_logits: str | None = field(one_of(None, "computed", "fp32", "fp32_in_head"), default=None)
    experts_impl: str = field(one_of("grouped", "loop"), default="grouped")
    rms_norm: str = field(one_of("fused", "composed"), default="fused")
    loss_metrics: int = field(whole(0, 10_000), default=0)
    freeze: tuple[str, ...] | None = field(one_of(None) | _NAMES.explained("or of parameters"), default=None)
    lora_rank: int | None = field(one_of(None) | whole(1, 2**20), default=None)
    lora_targets: str | tuple[str, ...] = field(one_of("all-linear") | _NAMES, default="all-linear")
    base_quantization: str | None = field(one_of(None, *QUANTIZATIONS), default=None)
    kbit_training: str | None = field(one_of(None, "peft", "trl"), default=None)
    fp8: str | None = field(one_of(None, "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"), default=None)
    fp8_all_gather: bool = field(_BOOL, default=False)
    fp8_precompute_scale: bool = field(_BOOL, default=False)
    loss_chunks: int = field(whole(1, SIZE), default=1)
    float32_matmul_precision: str = field(one_of("highest", "high"), default="highest")
    save_every: int | None = field(one_of(None) | whole(1, SIZE), default=None)
    async_save: bool = field(_BOOL, default=False)
    storage_gb_per_s: float | None = field(one_of(None) | number(above=True), default=None)
    optimizer: str = field(one_of(*OPTIMIZERS), default="adamw")
    optimizer_impl: str = field(one_of("fused", "foreach"), default="fused")
    clip_grad_norm: bool = field(_BOOL, default=False)
    reduce_scatter_max_input_buffers: int = field(whole(1, SIZE), default=1)
    separate_reduce_scatter_group: bool = field(_BOOL, default=False)
    post_optim_event: bool = field(_BOOL, default=False)
    unshard_async_op: bool = field(_BOOL, default=False)
    requires_gradient_sync: PerMicroBatch = field(_PER_MICRO_BATCH, default=True)
    requires_all_reduce: PerMicroBatch = field(_PER_MICRO_BATCH, default=True)
    reshard_after_backward: PerMicroBatch = field(_PER_MICRO_BATCH, default=True)
    is_last_backward: PerMicroBatch = field(_PER_MICRO_BATCH, default=True)
    gradient_divide_factor: float | None = field(one_of(None) | number(above=True), default=None)
    torch: str = field(one_of(*TORCH_VERSIONS), default="2.13")
    bucket_cap_mb: float | None = field(one_of(None) | number(above=True), default=None)
    expandable_segments: bool = field(_BOOL, default=False)

    @staticmethod
    def __given__(given: dict[str, Any]) -> dict[str, Any]:
        """What is given, and what its stack adds to that. What a copy has of its old stack is not given."""
        names = list(given)
        copied = names[names.index("_of_stack") :] if "_of_stack" in given else []
        own = {name: given[name] for name in names if name not in copied or name not in given["_of_stack"]}
        settings = stack_settings(given.get("stack", "plain"))
        return settings | own | {"_of_stack": tuple(name for name in settings if name not in own)}

    @classmethod
    def from_torchtitan(cls, source: str | Path | Mapping[str, Any], gpus: int | None = None) -> Plan:
        """The plan of a run's TOML for torchtitan 0.2.2, or of what is in one; `Model.from_config` reads its model.

        Args:
            gpus: how many there are; not needed where the file's degrees say it.

        Raises:
            ValueError: a key that torchtitan does not have, or a value that is not simulated; names the key, its value
                and what would be right.
            OSError: there is no such file.

        Example:
            >>> Plan.from_torchtitan({"training": {"global_batch_size": 128}}, gpus=8).grad_accum
            2
        """
        from fsdp_sim.spec.torchtitan import job_of_file, plan_of_job

        table = source if isinstance(source, Mapping) else job_of_file(source)
        return cls(**plan_of_job(table, "the job" if table is source else str(source), gpus))

    def __post_init__(self, _of_stack: tuple[str, ...]) -> None:
        object.__setattr__(self, "_of_stack", _of_stack)
        for name, apis in SETTINGS_OF.items():
            default = type(self).__dataclass_fields__[name].default
            if self.api not in apis and self._changes(name):
                instead = INSTEAD.get((name, self.api), f"leave it {default!r}")
                raise self._error(name, f"a setting of {' and '.join(apis)}; api is {self.api!r}: {instead}")
        if self.wrap == "embed_block_head" and self.api != "fsdp2":
            raise self._error("wrap", f"torchtitan's way with fsdp2; api is {self.api!r}: leave it 'block'")
        for (api, name), allowed in PREFETCH_OF.items():
            if self.api == api and not allowed.test(getattr(self, name)):
                other = "fsdp1" if api == "fsdp2" else "fsdp2"
                raise self._error(name, f"{other}'s; with api={api!r} it must be {allowed.words}")
        for name, (other, is_right, right) in NEEDS.items():
            if self._changes(name) and not is_right(getattr(self, other)):
                raise self._error(name, f"without effect where {other} is {getattr(self, other)!r}; make that {right}")
        for (name, other), why in EXCLUDES.items():
            if self._changes(name) and self._changes(other):
                raise self._error(name, f"not for a plan with {other}={getattr(self, other)!r}: {why}; leave one out")
        if self.seq_len % self.loss_chunks:
            raise self._error("loss_chunks", f"no divisor of seq_len {self.seq_len}; take one that is")
        if self.loss_chunks > 1 and self.loss_metrics:
            raise self._error("loss_chunks", "not for logits that are read again: leave loss_metrics 0")
        if self.optimizer == "muon" and (self.api not in ("fsdp2", "ddp") or self.shard_size or self.cpu_offload):
            raise self._error(
                "optimizer", "for whole matrices on a GPU: take api fsdp2 without shard_size and cpu_offload, or ddp"
            )
        given = "optimizer_impl" not in getattr(self, "_of_stack", ())
        if given and self.optimizer_impl == "foreach" and OPTIMIZERS[self.optimizer].foreach_moves is None:
            raise self._error("optimizer_impl", f"not of {self.optimizer}, which has none; leave it 'fused'")
        if self.fp8_all_gather and type(self.reshard_after_forward) is int:
            raise self._error(
                "reshard_after_forward", "not for weights that are gathered in fp8 (torch has no such code)"
            )
        if self.expert_parallel > 1:
            self._check_expert_parallel()
        if self.api == "fsdp1" and self.shard_size is not None and "HYBRID" not in self.sharding_strategy:
            raise self._error(
                "shard_size",
                f"for hybrid sharding, and sharding_strategy is {self.sharding_strategy!r}; give 'HYBRID_SHARD', or "
                f"leave shard_size None",
            )
        ranks, keep = self.shard_size, self.reshard_after_forward
        if ranks is not None and type(keep) is int and ranks % keep:
            factors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
            raise ValueError(
                f"Plan.reshard_after_forward is {keep}, which does not divide shard_size {ranks}; as a number it must "
                f"be one of {factors}"
            )

    @property
    def loops_experts(self) -> bool:
        """Whether the experts of a mixture compute one after the other, each with linear layers of its own."""
        return self.experts_impl == "loop" or self.base_quantization is not None

    @property
    def unlike_its_stack(self) -> dict[str, Any]:
        """The stack, if it is not the plain one, and each field that has another value than plans of that stack."""
        usual = {**type(self)(stack=self.stack).__dict__, "stack": "plain"}
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in own.items() if value != usual[name]}

    def _check_expert_parallel(self) -> None:
        if self.shard_size is not None and self.shard_size % self.expert_parallel:
            raise self._error("expert_parallel", f"no divisor of shard_size {self.shard_size}; take one")
        for name, allowed in BESIDE_EXPERT_PARALLEL.items():
            if not allowed.test(getattr(self, name)):
                raise self._error(name, f"not for a plan with expert_parallel={self.expert_parallel}: {allowed.words}")

    def _changes(self, name: str) -> bool:
        """Whether a field has another value than its default."""
        value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
        return type(value) is not type(default) or value != default

    def _error(self, field: str, what: str) -> ValueError:
        return ValueError(f"Plan.{field} is {getattr(self, field)!r}, which is {what}")


def takes(api: str, name: str) -> Allowed:
    """The values that a field of `Plan` may have with an API: only the default where the API has no such setting.

    Example:
        >>> takes("fsdp1", "forward_prefetch").test(True), takes("fsdp2", "forward_prefetch").test(True)
        (True, False)
    """
    declared = Plan.__dataclass_fields__[name]
    if api not in SETTINGS_OF.get(name, (api,)):
        return one_of(declared.default)
    return PREFETCH_OF.get((api, name)) or declared.metadata["allowed"]


def shards_of(plan: Plan, world_size: int) -> int:
    """Ranks that share one copy of the parameters.

    Raises:
        ValueError: ``shard_size`` does not divide the ranks.
    """
    if plan.api == "ddp" or (plan.api == "fsdp1" and plan.sharding_strategy == "NO_SHARD"):
        return 1
    shards = plan.shard_size or world_size
    if world_size % shards:
        raise ValueError(
            f"Plan.shard_size is {shards}, which does not divide the world size {world_size}; take a divisor, or None"
        )
    return shards
