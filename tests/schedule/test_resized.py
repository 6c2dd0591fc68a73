"""A program for another number of ranks has the sizes that it would have if it were built."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fsdp_sim.schedule import Param, Unit, build
from fsdp_sim.spec import Plan
from tests.laws.draws import requests
from tests.laws.law import Request

LAYER = (
    Param("norm.weight", (20,)),
    Param("attn.weight", (36, 20)),
    Param("mlp.weight", (20, 52), requires_grad=False),
)
ROOT = (Param("embed.weight", (100, 20)), Param("head.weight", (100, 20)))


def model(layers: int) -> tuple[Unit, ...]:
    """Layers that share their parameters' descriptions."""
    return (
        Unit("root", ROOT, segments=("embed", ..., "head")),
        *(Unit(f"layers.{i}", LAYER) for i in range(layers)),
    )


SHARED = {
    "bf16": Plan(param_dtype="bf16", reduce_dtype="fp32", forward_prefetch=2, backward_prefetch=1),
    "fp16, which divides by the ranks": Plan(param_dtype="fp16", reduce_dtype="fp16", activation_checkpointing="full"),
    "hybrid": Plan(shard_size=8, grad_accum=2, requires_all_reduce="last"),
    "a slice after forward": Plan(reshard_after_forward=4, activation_checkpointing=2),
    "offload": Plan(param_dtype="bf16", cpu_offload=True, grad_accum=2, requires_gradient_sync="last"),
}


@pytest.mark.parametrize("name", SHARED)
def test_sizes_are_those_of_the_program_that_is_built(name: str) -> None:
    units, plan = model(12), SHARED[name]
    first = build(units, plan, 16)
    for ranks in (24, 256):
        built = build(list(units), plan, ranks)  # of a list it is built anew
        made = build(units, plan, ranks)
        assert made.shape == first
        assert tuple(map(made.instruction, range(len(made)))) == built.instructions
        assert made == built
        assert made.issues_as(built)


def test_what_is_issued_otherwise_is_built() -> None:
    """One rank gathers nothing; and clipping reads all parameters, of which a few layers do not tell."""
    for plan, ranks in ((Plan(), 1), (Plan(clip_grad_norm=True), 8)):
        units = model(12)
        build(units, plan, 16)
        made = build(units, plan, ranks)
        assert made.resized is None
        assert made.instructions == build(list(units), plan, ranks).instructions


def test_of_any_plan_they_are_those_of_the_program_that_is_built() -> None:
    units, shared = model(12), 0

    @settings(max_examples=100, phases=[Phase.generate], derandomize=True, deadline=None)
    @given(requests(), st.sampled_from([2, 3, 8, 12, 100]), st.sampled_from([4, 5, 16, 24, 1000]))
    def holds(request: Request, ranks: int, others: int) -> None:
        nonlocal shared
        try:
            build(units, request.plan, ranks)
            built = build(list(units), request.plan, others)
        except ValueError:  # not on so many ranks
            return
        made = build(units, request.plan, others)
        assert made == built
        shared += made.resized is not None

    holds()
    assert shared > 10
