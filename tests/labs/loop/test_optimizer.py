"""Decay is for matrices under every api, and the learning rate rises, stays or falls as asked."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_sim.ranks import run
from labs.config import TrainConfig
from labs.loop.optimizer import lr_at, make_optimizer
from labs.model import build
from labs.wrapping import WRAPPERS
from tests.labs.wrapping.training import QUIET, SHAPES, each, wrapped_of

MATRICES = {
    shape: {name for name, p in build(config).named_parameters() if p.ndim == 2} for shape, config in SHAPES.items()
}


def groups(shape: str, settings: dict[str, Any]) -> dict[float, set[str]]:
    """Names of the parameters by their weight decay."""
    wrapped, config = wrapped_of(shape, settings | {"weight_decay": 0.1, "beta1": 0.8, "beta2": 0.95})
    optimizer = make_optimizer(wrapped, config)
    assert optimizer.defaults["betas"] == (0.8, 0.95)
    assert optimizer.defaults["fused"]
    names = {id(p): name for name, p in wrapped.named_parameters().items()}
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(names)
    return {g["weight_decay"]: {names[id(p)] for p in g["params"]} for g in optimizer.param_groups}


@pytest.mark.parametrize("world", [1, 2])
def test_matrices_decay_and_vectors_do_not(world: int) -> None:
    apis = WRAPPERS if world == 1 else [api for api in WRAPPERS if api != "single"]
    cases = [(shape, {"api": api}) for shape in SHAPES for api in apis]
    cases += [(shape, {"api": "fsdp1", "activation_checkpointing": "full"}) for shape in SHAPES]
    results = run(each, world, groups, cases, **QUIET)[-1]
    for (shape, settings), found in zip(cases, results, strict=True):
        assert not isinstance(found, str), found
        assert found[0.1] == MATRICES[shape], settings
        assert found[0.0] == {name for name, _ in build(SHAPES[shape]).named_parameters()} - MATRICES[shape]


def test_flat_parameters_have_one_group_and_no_decay() -> None:
    def decays() -> list[float]:
        wrapped, config = wrapped_of("gpt", {"api": "fsdp1", "use_orig_params": False, "weight_decay": 0.0})
        found = [group["weight_decay"] for group in make_optimizer(wrapped, config).param_groups]
        with pytest.raises(ValueError, match="_flat_param holds both what decays and what does not"):
            make_optimizer(wrapped, TrainConfig(weight_decay=0.1))
        return found

    assert run(decays, 2, **QUIET)[0] == [0.0]


def test_step_0_has_its_share_of_the_warm_up() -> None:
    config = TrainConfig(lr=1.0, warmup_steps=4, steps=6)
    assert [lr_at(step, config) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert lr_at(0, TrainConfig(lr=0.5, warmup_steps=0)) == 0.5


@pytest.mark.parametrize(("warmup", "steps"), [(0, 10), (3, 10), (9, 10), (0, 2)])
def test_cosine_falls_from_lr_to_min_lr_at_the_last_step(warmup: int, steps: int) -> None:
    config = TrainConfig(lr=1.0, min_lr=0.2, schedule="cosine", warmup_steps=warmup, steps=steps)
    rates = [lr_at(step, config) for step in range(steps)]
    peak = max(warmup - 1, 0)
    assert rates[peak] == 1.0
    assert rates[-1] == pytest.approx(0.2)
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert lr_at(steps + 5, config) == pytest.approx(0.2)  # a run that goes on beyond its schedule


def test_min_lr_is_a_tenth_by_default() -> None:
    config = TrainConfig(lr=1.0, schedule="cosine", steps=3)
    assert [lr_at(step, config) for step in range(3)] == pytest.approx([1.0, 0.55, 0.1])
