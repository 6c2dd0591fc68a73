"""Peak memory is that of torch: FSDPMemTracker on `fully_shard`, for GPT and Llama shapes and plans of every kind.

Three things are compared with the tracker: a traced workload under the rules of accounting, the analytic workload under
the same rules, and what `fsdp_sim.engine.memory` makes of both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from fsdp_sim.cost import Workload
from fsdp_sim.cost.transformer import workload
from fsdp_sim.engine.memory import memory
from fsdp_sim.measure.model_from_module import model_from_module
from fsdp_sim.schedule import build
from fsdp_sim.spec import Model, Plan
from fsdp_sim.timeline import Memory
from tests.measure.adapters import with_adapters
from tests.measure.llama import Llama
from tests.measure.mem_tracker import WORLD_SIZE, FusedNorm, gpt_of, peak_by_the_rules, tokens_of, tracked, with_layers
from tests.some import some

BF16 = {"param_dtype": "bf16", "reduce_dtype": "fp32"}


class Case(NamedTuple):
    name: str
    layers: int
    plan: Plan
    changes: tuple[tuple[str, int], ...] = ()

    @property
    def model(self) -> Model:
        return with_layers(self.name, self.layers, **dict(self.changes))

    @property
    def build(self) -> Callable[[], nn.Module]:
        model = self.model
        return (
            functools.partial(gpt_of, model) if model.bias is True else functools.partial(Llama, model, norm=FusedNorm)
        )

    def __str__(self) -> str:
        plan = self.plan
        dtype = plan.param_dtype or "fp32"
        return f"{self.name}-{self.layers}-{dtype}-{plan.activation_checkpointing}-{plan.reshard_after_forward}"


def plan(micro_batch: int, seq_len: int, checkpointing: str | None, reshard: bool | None, **more: str) -> Plan:
    return Plan(
        micro_batch=micro_batch, seq_len=seq_len, activation_checkpointing=checkpointing, reshard_after_forward=reshard,
        **(more or BF16),
    )  # fmt: skip


CASES = [
    Case("gpt2-124m", 4, plan(4, 1024, None, True)),
    Case("llama3-8b", 4, plan(1, 2048, None, None)),
    Case("gpt2-124m", 4, plan(4, 1024, "full", None)),
    Case("gpt2-124m", 3, Plan(micro_batch=2, seq_len=512)),  # fp32
    Case("gpt2-350m", 3, plan(4, 1024, None, False)),
    Case("llama2-7b", 4, plan(1, 1024, "full", False)),
    Case("llama3-8b", 4, plan(1, 8192, "full", True)),
]
# torch's attention on a CPU is fused only where values are as wide as keys
DEEPSEEK = (("n_expert", 32), ("vocab", 8192), ("v_head_dim", 192))
OTHERS = [  # experts, latent attention, norms of queries and keys, tied heads, norms of outputs, some biases
    Case("mixtral-8x7b", 2, plan(1, 2048, None, None)),
    Case("deepseek-v3", 5, plan(1, 2048, None, None), DEEPSEEK),
    Case("gemma3-1b", 3, plan(2, 1024, None, None), (("vocab", 8192),)),
    Case("qwen3-30b-a3b", 3, plan(1, 2048, None, None), (("vocab", 8192),)),
    Case("qwen2.5-0.5b", 3, plan(1, 2048, "full", None)),
    Case("olmo2-7b", 3, plan(1, 2048, None, False)),
]


@functools.cache
def torch_says(case: Case) -> dict[str, int]:
    return tracked(case.build, case.plan)


@functools.cache
def traced(case: Case) -> Workload:
    return model_from_module(case.build, tokens_of(case.plan), plan=case.plan, progress=False)


def rules_say(case: Case, work: Workload) -> dict[Memory, int]:
    return peak_by_the_rules(build(work.units, case.plan, WORLD_SIZE), work)


@pytest.mark.parametrize("case", some(CASES, first=2), ids=str)
def test_a_traced_module_has_the_peak_of_torch(case: Case) -> None:
    assert sum(rules_say(case, traced(case)).values()) == pytest.approx(torch_says(case)["Total"], rel=0.001)


@pytest.mark.parametrize("case", some(CASES, first=4), ids=str)
def test_the_analytic_workload_has_the_peak_of_torch(case: Case) -> None:
    peak = rules_say(case, workload(case.model, case.plan))
    assert sum(peak.values()) == pytest.approx(torch_says(case)["Total"], rel=0.005)


@pytest.mark.parametrize("case", some(OTHERS, first=2), ids=str)
def test_so_have_models_with_what_llama_does_not_have(case: Case) -> None:
    truth = torch_says(case)["Total"]
    assert sum(rules_say(case, traced(case)).values()) == pytest.approx(truth, rel=0.001)
    assert sum(rules_say(case, workload(case.model, case.plan)).values()) == pytest.approx(truth, rel=0.002)


@pytest.mark.parametrize("case", some(CASES, first=2), ids=str)
def test_the_engine_has_the_peak_of_torch(case: Case) -> None:
    for work in (traced(case), workload(case.model, case.plan)):
        peak = memory(build(work.units, case.plan, WORLD_SIZE), work).peak_bytes
        assert peak == pytest.approx(torch_says(case)["Total"], rel=0.03)


@pytest.mark.parametrize("case", some(CASES, first=2), ids=str)
def test_what_makes_up_the_peak_is_what_torch_says(case: Case) -> None:
    ours, theirs = rules_say(case, traced(case)), torch_says(case)
    for category, kind in {
        Memory.SHARDED: "Sharded Param",
        Memory.OPTIMIZER: "OptState",
        Memory.UNSHARDED: "Unsharded Param",
        Memory.AG_OUTPUT: "All Gather",
        Memory.RS_INPUT: "Reduce Scatter",
        Memory.RS_OUTPUT: "Sharded Grad",
    }.items():
        assert ours.get(category, 0) == pytest.approx(theirs[kind], rel=0.001, abs=2**20), kind


def test_the_norms_of_the_cpu_keep_more_and_can_be_asked_for() -> None:
    case = Case("llama3-8b", 3, plan(1, 4096, None, True))
    model = dataclasses.replace(case.model, vocab=4096)  # so that the blocks make the peak, not the head
    build_it = functools.partial(Llama, model, norm=nn.RMSNorm)
    truth = tracked(build_it, case.plan)["Total"]
    cpu, gpu = (
        model_from_module(build_it, tokens_of(case.plan), plan=case.plan, device=device, progress=False)
        for device in ("cpu", "gpu")
    )
    assert sum(rules_say(case, cpu).values()) == pytest.approx(truth, rel=0.001)
    assert sum(rules_say(case, gpu).values()) < 0.95 * truth


def frozen(model: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


PARTS = {  # what a plan does to the weights, and the module that it means
    "LoRA": ({"lora_rank": 16}, lambda model: with_adapters(model, 16)),
    "LoRA of q and v": (
        {"lora_rank": 16, "lora_targets": ("wq", "wv")}, lambda model: with_adapters(model, 16, targets=("wq", "wv"))
    ),
    "QLoRA": (
        {"lora_rank": 16, "base_quantization": "nf4"}, lambda model: with_adapters(model, 16, quantised=True)
    ),
    "the first layers frozen": ({"freeze": ("embed", "layers.0")}, lambda model: frozen(model, ("embed", "layers.0"))),
    "every ffn frozen": (
        {"freeze": ("layers.*.ffn",)}, lambda model: frozen(model, tuple(f"layers.{i}.ffn" for i in range(3)))
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "checkpointing"),
    some([pytest.param(p, how) for p, how in zip(PARTS, ("full", "full", None, None, "full"), strict=True)], first=3),
)
def test_weights_that_do_not_train_have_the_peak_of_torch(part: str, checkpointing: str | None) -> None:
    fields, change = PARTS[part]
    asked = dataclasses.replace(plan(2, 1024, checkpointing, None), **fields)
    model = with_layers("llama3-8b", 3, vocab=16384)  # so that the blocks make the peak, not the head
    build_it = lambda: change(Llama(model, norm=FusedNorm))  # noqa: E731

    truth = tracked(build_it, asked)["Total"]
    work = workload(model, asked)

    assert memory(build(work.units, asked, WORLD_SIZE), work).peak_bytes == pytest.approx(truth, rel=0.003)


def test_cases_cover_what_they_should() -> None:
    """GPT and Llama, with and without checkpointing, resharding and not, bf16 and fp32."""
    assert {c.model.bias for c in CASES} == {True, False}
    assert {c.plan.activation_checkpointing for c in CASES} == {None, "full"}
    assert {c.plan.reshard_after_forward for c in CASES} == {True, False, None}
    assert {c.plan.param_dtype for c in CASES} == {"bf16", None}
    assert not torch.distributed.is_initialized()
