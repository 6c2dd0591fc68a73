"""`Weights`: what becomes of each weight of a model under a plan: trained or frozen, adapted, quantised, in fp8.

Names are those of `fsdp_sim.spec.block_shapes`: the linear layer ``attn.wq`` has the parameter ``attn.wq.weight``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import lru_cache

from fsdp_sim.schedule import DTYPE_BYTES, Param
from fsdp_sim.spec import GATED, QUANTIZATIONS, Model, Plan, Quantization
from fsdp_sim.words import in_brief, nearest

HUGGING_FACE_NAMES = {  # of linear layers, in peft's target_modules
    "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo", "gate_proj": "gate", "up_proj": "up",
    "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down", "c_attn": "qkv", "query_key_value": "qkv",
    "Wqkv": "qkv", "c_fc": "ffn.up",
}  # fmt: skip
FP8_MULTIPLE = 16  # of both dimensions, for torch._scaled_mm; torchao and torchtitan leave other layers as they are


@dataclass(frozen=True)
class Weights:
    """The rules of a plan for the weights of a model.

    Attributes:
        compute_dtype: of matmuls that are not in fp8, and of what a quantised weight becomes before its matmul.
        composed_norm: an RMS norm is several kernels.
        freeze, lora_rank: of the plan.
        lora_targets: linear layers of the blocks that have adapters; None is all.
        quantization: of the blocks' linear layers.
        fp8: the recipe of the blocks' linear layers.
        looped: the linear layers of one expert (name, rows, columns), where experts are such, one after the other.
        kbit_training: who makes fp32 of what is not quantised.
        norm: of the model.
        prefix: what the names of a block's parameters begin with in the model: ``layers.3.``.
    """

    compute_dtype: str
    compiled: bool = False
    composed_norm: bool = False
    freeze: tuple[str, ...] = ()
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] | None = None
    quantization: Quantization | None = None
    fp8: str | None = None
    fp8_all_gather: bool = False
    looped: tuple[tuple[str, int, int], ...] = ()
    kbit_training: str | None = None
    norm: str = ""
    prefix: str = ""

    @property
    def stream_dtype(self) -> str:
        """Of the residual stream, and of what quantised layers make of it.

        Models with quantised layers are trained beside autocast. Under it a layer norm puts out fp32 (it is in torch's
        list of CUDA operators that autocast to fp32; Hugging Face's RMS norms cast back), and bitsandbytes'
        `Linear4bit` puts out the dtype that it was given.
        """
        widened = self.norm == "layernorm" and self.quantization is not None and self.quantization.gives_back
        return "fp32" if self.kbit_training or widened else self.compute_dtype

    def of_block(self, name: str) -> Weights:
        """The rules for what a block calls its own."""
        return replace(self, prefix=f"{name}.") if self.freeze else self

    def trains(self, name: str) -> bool:
        """Whether a parameter of the model itself is trained; of experts, gate and up are one (``experts.up``)."""
        name = name.replace("experts.gate", "experts.up")
        return self.lora_rank is None and not (self.freeze and _any_of(self.freeze)(self.prefix + name))

    def adapts(self, linear: str) -> bool:
        """Whether a linear layer of a block has an adapter."""
        targets = self.lora_targets
        return self.lora_rank is not None and (targets is None or any(_is(target, linear) for target in targets))

    def recipe(self, rows: int, columns: int) -> str | None:
        """In which fp8 a linear layer of a block computes; None in none."""
        return None if rows % FP8_MULTIPLE or columns % FP8_MULTIPLE else self.fp8

    def quantises(self, param: str, columns: int) -> bool:
        """Whether a parameter of a block is stored in few bits: the weights of linear layers, experts among them.

        What quantises replaces `nn.Linear`, so quantised experts are linear layers, one after the other (transformers
        4.45, models/mixtral/modeling_mixtral.py); transformers 5 has one tensor of all experts, which stays whole.
        """
        return self.quantization is not None and bool(_linear(param, columns) or _expert(param))

    def param(self, name: str, rows: int, columns: int, dtype: str, used_by: tuple[str, ...] = ()) -> Param:
        """A parameter as the model has it."""
        if self.kbit_training == "peft" or (self.kbit_training and "norm" in name):
            dtype = "fp32"
        return Param(name, (rows,) if columns == 1 else (rows, columns), dtype, self.trains(name), used_by)

    def params_of_block(self, name: str, rows: int, columns: int, dtype: str) -> tuple[Param, ...]:
        """A parameter of a block as it is stored, and the adapter of a linear layer.

        The bits of a quantised weight are packed into a column of numbers of the dtype of compute, which FSDP shards
        like any other and does not cast (``bnb_4bit_quant_storage`` of bitsandbytes).
        """
        if self.looped and _expert(name):
            return self._params_of_experts(name, rows, columns, dtype)
        param = self.param(name, rows, columns, dtype)
        linear = _linear(name, columns)
        if self.quantises(name, columns):
            param = self._packed(param)
        elif linear and self.fp8_all_gather and self.recipe(rows, columns):
            param = replace(param, gather_dtype="fp8")
        return (param, *(self._adapter(linear, linear, rows, columns, dtype) if linear else ()))

    def _packed(self, param: Param) -> Param:
        stored, bits = DTYPE_BYTES[self.compute_dtype], self.quantization.bits if self.quantization else 0
        packed = -(-math.prod(param.shape) * bits // (8 * stored))
        return replace(param, shape=(packed, 1), dtype=self.compute_dtype)

    def _adapter(self, linear: str, name: str, rows: int, columns: int, dtype: str) -> tuple[Param, ...]:
        """The two matrices beside a linear layer, which a plan may call otherwise than the model does."""
        if not self.adapts(linear):
            return ()
        rank = self.lora_rank or 0
        dtype = "fp32" if self.kbit_training == "peft" else dtype
        adapter = {f"{name}.lora_A.weight": (rank, columns), f"{name}.lora_B.weight": (rows, rank)}
        return tuple(Param(of, shape, dtype) for of, shape in adapter.items())

    def _params_of_experts(self, name: str, experts: int, columns: int, dtype: str) -> tuple[Param, ...]:
        """Each expert's own linear layers, which FSDP cuts by their rows; of quantised ones the bits as one column."""
        param = self.param(name, experts, columns, dtype)
        quantised = self.quantises(name, columns)
        found = [self._packed(param)] if quantised else []
        for e in range(experts):
            for of, n, k in self.looped:
                if (of == "down") != (name == "experts.down"):
                    continue
                if not quantised:
                    of_gather = "fp8" if self.fp8_all_gather and self.recipe(n, k) else None
                    found.append(replace(param, name=f"experts.{e}.{of}.weight", shape=(n, k), gather_dtype=of_gather))
                found += self._adapter(f"experts.{of}", f"experts.{e}.{of}", n, k, dtype)
        return tuple(found)

    def buffer_bytes(self, name: str, rows: int, columns: int) -> int:
        """What a parameter of a block has beside it on every rank: the scales of a quantised weight."""
        quantised = self.quantises(name, columns)
        return round(rows * columns * self.quantization.scale_bytes) if quantised and self.quantization else 0


def weights_of(model: Model, plan: Plan) -> Weights:
    """The rules that a plan makes for a model."""
    return Weights(
        compute_dtype=plan.param_dtype or model.dtype,
        compiled=plan.compile,
        composed_norm=plan.rms_norm == "composed" and not plan.compile,
        freeze=plan.freeze or (),
        lora_rank=plan.lora_rank,
        lora_targets=None if plan.lora_targets == "all-linear" else tuple(
            HUGGING_FACE_NAMES.get(target, target) for target in plan.lora_targets
        ),
        quantization=QUANTIZATIONS[plan.base_quantization] if plan.base_quantization else None,
        fp8=plan.fp8,
        fp8_all_gather=plan.fp8_all_gather,
        looped=_linears_of_an_expert(model) if plan.loops_experts else (),
        kbit_training=plan.kbit_training,
        norm=model.norm,
    )  # fmt: skip


def _linears_of_an_expert(model: Model) -> tuple[tuple[str, int, int], ...]:
    d, width = model.d_model, model.d_expert or model.d_ffn
    gate = (("gate", width, d),) if model.ffn_type in GATED else ()
    return (*gate, ("up", width, d), ("down", d, width)) if model.n_expert else ()


def check_names(model: str, plan: Plan, params: Iterable[str], linears: Iterable[str]) -> None:
    """Refuse names of a plan that mean nothing in a model.

    Args:
        params: of the whole model.
        linears: of its blocks, as a block calls them.

    Raises:
        ValueError: a pattern of ``freeze`` that no parameter matches, a target of LoRA that is no linear layer.
    """
    params, linears = list(params), list(dict.fromkeys(linears))
    for pattern in plan.freeze or ():
        if not any(map(_any_of((pattern,)), params)):
            near = nearest(pattern, params, most=3) or params[:4]
            raise ValueError(
                f"Plan.freeze names {in_brief(pattern)}, which matches no parameter of {model}; it has "
                f"{', '.join(near)}, and a * stands for any part of a name: 'layers.*.attn'"
            )
    if isinstance(plan.lora_targets, str):
        return
    for target in plan.lora_targets:
        if not any(_is(HUGGING_FACE_NAMES.get(target, target), name) for name in linears):
            raise ValueError(
                f"Plan.lora_targets names {in_brief(target)}, which is no linear layer of a block of {model}; it has "
                f"{', '.join(linears)}"
            )


def _linear(param: str, columns: int) -> str:
    """The linear layer whose weight a parameter is; empty if it is none."""
    return param.removesuffix(".weight") if columns > 1 and param.endswith(".weight") else ""


def _expert(param: str) -> bool:
    return param in ("experts.up", "experts.down")


@lru_cache(maxsize=64)
def _any_of(patterns: tuple[str, ...]) -> Callable[[str], object]:
    """What matches a parameter that one of the patterns is, or that is in a module which one of them is."""
    return re.compile("|".join(translate(form) for of in patterns for form in (of, f"{of}.*"))).match


def _is(target: str, linear: str) -> bool:
    """peft's rule: the whole name, or its last parts."""
    return linear == target or linear.endswith(f".{target}")
