"""Built on the meta device and filled shard by shard, a model has bit for bit the weights of the one built whole."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

import labs.wrapping.meta_init
from fsdp_sim.ranks import run
from labs.model import build
from tests.labs.wrapping.training import QUIET, SEED, SHAPES, each, wrapped_of
from tests.some import some


class Collectives(TorchDispatchMode):
    """Counts collectives of any kind."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += "c10d" in str(func)
        return func(*args, **(kwargs or {}))


CASES: list[dict[str, Any]] = [
    {"api": "ddp"},
    {"api": "ddp", "activation_checkpointing": "full"},
    {"api": "fsdp2"},
    {"api": "fsdp2", "activation_checkpointing": "full", "wrap": "Attention,MLP"},
    {"api": "fsdp2", "cpu_offload": True},
    {"api": "hsdp"},
    {"api": "mini"},
    {"api": "mini", "wrap": "root"},
    {"api": "fsdp1"},
    {"api": "fsdp1", "activation_checkpointing": "full"},
    {"api": "fsdp1", "use_orig_params": False, "weight_decay": 0.0},
]


def differing(shape: str, settings: dict[str, Any]) -> list[str]:
    """Names of the parameters and buffers that are not those of the whole model."""
    wrapped, _ = wrapped_of(shape, settings)
    whole = build(SHAPES[shape], SEED)
    state = get_model_state_dict(wrapped.model, options=StateDictOptions(full_state_dict=True))
    assert set(state) == set(whole.state_dict())
    found = [name for name, tensor in whole.state_dict().items() if not torch.equal(state[name], tensor)]
    buffers = wrapped.model.named_buffers(remove_duplicate=False)
    tables = [buffer for name, buffer in buffers if name.endswith("rope")]
    assert len(tables) == (SHAPES[shape].n_layer if shape == "llama" else 0)
    expected = dict(whole.named_buffers()).get("layers.0.attn.rope")
    found += ["rope" for table in tables if expected is None or not torch.equal(table, expected)]
    assert len({id(table) for table in tables}) <= 1  # one table for all blocks
    if "use_orig_params" not in settings:
        assert set(wrapped.named_parameters()) == {name for name, _ in whole.named_parameters()}  # still tied
    return found


@pytest.mark.parametrize("world", some([2, 1, 3], first=2))
def test_meta_init_has_the_weights_of_the_seed(world: int) -> None:
    cases = [
        (shape, settings | {"meta_init": meta_init})
        for shape in SHAPES
        for settings in CASES
        for meta_init in (True, False)
        if (shape == "gpt" and meta_init) or settings == {"api": settings["api"]}
        if not (world == 3 and settings["api"] == "hsdp")  # no two equal halves
    ]
    results = run(each, world, differing, cases, **QUIET)
    for rank in results:
        assert {str(one): found for one, found in zip(cases, rank, strict=True) if found} == {}


def test_one_process_needs_no_group() -> None:
    for shape in SHAPES:
        for meta_init in (True, False):
            wrapped, _ = wrapped_of(shape, {"api": "single", "meta_init": meta_init})
            whole = build(SHAPES[shape], SEED)
            state = wrapped.model.state_dict()
            assert all(torch.equal(state[name], tensor) for name, tensor in whole.state_dict().items())
            assert {n for n, _ in wrapped.model.named_parameters()} == {n for n, _ in whole.named_parameters()}


def test_filling_holds_one_whole_parameter_at_a_time_and_communicates_nothing() -> None:
    """Of what was made whole before, nothing is alive when the next is made."""

    def alive() -> tuple[int, int]:
        made: list[weakref.ref[torch.Tensor]] = []
        most = 0
        original = labs.wrapping.meta_init.whole_of

        def watched(*args: Any) -> torch.Tensor:
            nonlocal most
            most = max(most, sum(ref() is not None for ref in made) + 1)
            whole = original(*args)
            made.append(weakref.ref(whole))
            return whole

        labs.wrapping.meta_init.whole_of = watched
        with Collectives() as counted:
            wrapped_of("gpt", {"api": "fsdp2", "meta_init": True})
        return most, counted.n

    assert run(alive, 2, **QUIET)[0] == (1, 0)
