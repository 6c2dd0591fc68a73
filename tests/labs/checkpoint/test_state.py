"""A state has the names, shapes and dtypes of the plain model, and its tensors are the model's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_sim.ranks import RanksError, run
from labs.checkpoint.state import local, read_state, write_state
from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.model.gpt import GPT, GPTConfig
from labs.wrapping import wrap

MODEL = GPTConfig(n_layer=1, n_head=2, d_model=6, vocab_size=11, context=8)
TOKENS = torch.arange(8).view(1, 8)

WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"api": "ddp"},
    "fsdp2": {"api": "fsdp2"},
    "mini": {"api": "mini"},
    "hsdp": {"api": "hsdp", "shard_size": 1},
    "fsdp1": {"api": "fsdp1"},
    "fsdp1-flat": {"api": "fsdp1", "use_orig_params": False, "weight_decay": 0.0},
    "fsdp1-hybrid": {"api": "fsdp1", "sharding_strategy": "HYBRID_SHARD", "shard_size": 2},
    "fsdp1-none": {"api": "fsdp1", "sharding_strategy": "NO_SHARD"},
}
LAYERED: dict[str, dict[str, Any]] = {
    f"{way} {name}": WAYS[way] | layers
    for way in ("ddp", "fsdp2", "fsdp1", "mini")
    for name, layers in {
        "checkpointed": {"activation_checkpointing": "full"},
        "and compiled": {"activation_checkpointing": "selective", "compile": True, "compile_backend": "aot_eager"},
    }.items()
}


def wrapped(options: dict[str, Any], model: GPTConfig = MODEL) -> tuple[nn.Module, torch.optim.Optimizer]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1: deprecated
        made = wrap(TrainConfig(**options), model, RankPlace(rank, ranks, rank, ranks), torch.device("cpu")).model
    return made, torch.optim.AdamW(made.parameters(), lr=1e-2)


def on_ranks(fn: Callable[[], Any], ranks: int = 2) -> list[Any]:
    return list(run(fn, ranks, progress=False, record=False, threads=1))


def test_names_shapes_and_dtypes_are_those_of_the_plain_model() -> None:
    plain = GPT(MODEL)
    expected = {f"model.{name}": (p.shape, p.dtype) for name, p in plain.named_parameters()}
    for name, param in plain.named_parameters():
        expected |= {f"optim.{name}.{key}": (param.shape, param.dtype) for key in ("exp_avg", "exp_avg_sq")}
        expected[f"optim.{name}.step"] = (torch.Size(), torch.float32)
    assert "model.head.weight" not in expected  # tied: there once

    def forms() -> dict[str, Any]:
        found = {}
        for way, options in (WAYS | LAYERED).items():
            state = read_state(*wrapped(options))
            found[way] = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
        return found

    for found in on_ranks(forms):
        for way, state in found.items():
            assert state == expected, way


def test_an_optimizer_that_never_stepped_has_the_zeros_of_its_first_step_and_parameters_stay() -> None:
    def look() -> None:
        for way, options in WAYS.items():
            model, optimizer = wrapped(options)
            before = [local(param.detach()).clone() for param in model.parameters()]
            state = read_state(model, optimizer)
            assert all(not local(t).any() for name, t in state.items() if name.startswith("optim.")), way
            assert all(torch.equal(local(p.detach()), b) for p, b in zip(model.parameters(), before, strict=True)), way
            # and it steps as one that was never looked at
            twin, twins_optimizer = wrapped(options)
            for m, o in ((model, optimizer), (twin, twins_optimizer)):
                m(TOKENS, TOKENS).backward()
                o.step()
            for a, b in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.equal(local(a.detach()), local(b.detach())), way

    on_ranks(look)


def test_what_is_filled_in_place_is_what_the_model_computes_with() -> None:
    """Also after a forward without backward, when a root still holds whole parameters."""

    def fill() -> None:
        for way, options in WAYS.items():
            model, optimizer = wrapped(options)
            with torch.no_grad():
                model(TOKENS, TOKENS)
            state = read_state(model, optimizer)
            with torch.no_grad():
                model(TOKENS, TOKENS)
            for name, tensor in state.items():
                local(tensor).fill_(0.5 if name.endswith("norm.weight") else 0.0)
            write_state(model, optimizer, state)
            with torch.no_grad():
                loss = model(TOKENS, TOKENS).item()
            assert loss == pytest.approx(torch.tensor(11.0).log().item()), way  # all logits are 0
            again = read_state(model, optimizer)
            for name, tensor in again.items():
                assert torch.equal(local(tensor), local(state[name])), (way, name)

    on_ranks(fill)


def test_nothing_is_copied_but_for_fsdp1() -> None:
    def look() -> None:
        for way, options in WAYS.items():
            if not way.startswith("fsdp1"):
                model, optimizer = wrapped(options)
                state = read_state(model, optimizer)
                params = dict((model.module if way == "ddp" else model).named_parameters())
                for name, param in params.items():
                    assert local(state[f"model.{name}"]).data_ptr() == local(param.detach()).data_ptr(), (way, name)
                    for key, value in optimizer.state[param].items():
                        own = local(state[f"optim.{name}.{key}"])
                        assert own.data_ptr() == local(value).data_ptr(), (way, name, key)

    on_ranks(look)


def test_a_rank_of_fsdp_has_its_rows_and_of_ddp_all() -> None:
    def shapes() -> dict[str, tuple[bool, tuple[int, ...]]]:
        found = {}
        for way, options in WAYS.items():
            tensor = read_state(wrapped(options)[0])["model.tok_emb.weight"]
            found[way] = (isinstance(tensor, DTensor), tuple(local(tensor).shape))
        return found

    for rank, found in enumerate(on_ranks(shapes)):
        rows = (6, 5)[rank]  # 11 rows
        assert found == {
            "ddp": (False, (11, 6)),
            "fsdp2": (True, (rows, 6)),
            "mini": (True, (rows, 6)),
            "hsdp": (True, (11, 6)),
            "fsdp1": (True, (rows, 6)),
            "fsdp1-flat": (True, (rows, 6)),
            "fsdp1-hybrid": (True, (rows, 6)),
            "fsdp1-none": (False, (11, 6)),
        }


def test_a_tied_weight_stays_tied_and_an_untied_head_has_its_own() -> None:
    def look() -> None:
        for way, options in WAYS.items():
            for tied in (True, False):
                model, _ = wrapped(options, GPTConfig(1, 2, 6, vocab_size=11, context=8, tied=tied))
                state = read_state(model)
                assert ("model.head.weight" in state) is not tied, way
                local(state["model.tok_emb.weight"]).fill_(0.0)
                write_state(model, None, state)
                with torch.no_grad():
                    logits = model(TOKENS)
                assert (not logits.any()) is tied, way

    on_ranks(look)


def test_persistent_buffers_belong_to_the_state_and_others_do_not() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    model.register_buffer("table", torch.ones(2), persistent=False)
    assert set(read_state(model)) == {f"model.{name}" for name in model.state_dict()}


def test_parameters_that_are_not_trained_have_no_optimizer_state() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(True)
    model[0].requires_grad_(False)
    state = read_state(model, torch.optim.AdamW(model[1].parameters()))
    assert {name.split(".")[1] for name in state if name.startswith("optim.")} == {"1"}


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    with pytest.raises(
        ValueError, match=r"parameter of shape \(3, 2\) that the model does not have; make the optimizer"
    ):
        read_state(model, torch.optim.AdamW(other.parameters()))


@pytest.mark.parametrize(
    "optimizer",
    [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.AdamW(p, amsgrad=True)],
    ids=["sgd", "amsgrad"],
)
def test_other_state_than_adamws_is_refused(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    model = nn.Linear(2, 3)
    with pytest.raises(ValueError, match="keeps other state than AdamW; use AdamW without amsgrad"):
        read_state(model, optimizer(model.parameters()))


def test_a_flat_parameter_has_one_step() -> None:
    def write() -> None:
        model, optimizer = wrapped(WAYS["fsdp1-flat"])
        state = read_state(model, optimizer)
        state["optim.norm.bias.step"].fill_(7.0)
        write_state(model, optimizer, state)

    with pytest.raises(RanksError, match=r"norm.bias 7 times, but they are one flat tensor; use use_orig_params=true"):
        on_ranks(write)
