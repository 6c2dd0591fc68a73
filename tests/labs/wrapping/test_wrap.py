"""However a model is wrapped, its training has the losses and norms of one plain process on the whole batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_sim.ranks import run
from labs.loop.optimizer import make_optimizer
from labs.wrapping import WRAPPERS
from tests.labs.wrapping.training import (
    MICRO_BATCHES,
    QUIET,
    Numbers,
    by_hand,
    each,
    forward_backward,
    train,
    wrapped_of,
)
from tests.some import tail

FULLY_SHARD = ("fsdp2", "hsdp", "mini")
SHARDED = (*FULLY_SHARD, "fsdp1")


def case(api: str, **settings: Any) -> dict[str, Any]:
    return {"api": api} | settings


def among(apis: Iterable[str], **settings: Any) -> list[dict[str, Any]]:
    """The same settings for several APIs: the first of them is for ``make test``."""
    return [case(api, **settings) for api in apis]


COPIES = [api for api in WRAPPERS if api != "single"]
KINDS: dict[tuple[int, str], list[list[dict[str, Any]]]] = {
    (1, "gpt"): [
        *([case(api)] for api in WRAPPERS),
        among(("fsdp2", "fsdp1"), meta_init=True),
        [case("fsdp1", requires_gradient_sync="last", param_dtype="bf16")],
    ],
    (2, "gpt"): [
        *([case(api)] for api in COPIES),
        *([case(api, requires_gradient_sync="last")] for api in ("ddp", "fsdp2", "fsdp1")),
        among(("hsdp", "mini"), requires_gradient_sync="last"),
        among(("fsdp2", "ddp"), activation_checkpointing="full"),
        among(("fsdp1", "mini"), activation_checkpointing="selective"),
        among(("mini", "fsdp1"), wrap="root"),
        among(("fsdp2", "fsdp1"), wrap="Embedding,Linear"),
        [case("mini", wrap="600")],
        among(("fsdp1", "mini"), wrap="Attention,MLP", activation_checkpointing="full"),
        *([case(api, reshard_after_forward=keep)] for api, keep in (("fsdp2", False), ("mini", 1))),
        among(("mini", "fsdp2"), forward_prefetch=2, backward_prefetch=1),
        [case("mini", cpu_offload=True)],
        [case("fsdp2", cpu_offload=True, meta_init=True, requires_gradient_sync="last")],
        *([case("fsdp1", sharding_strategy=strategy)] for strategy in ("SHARD_GRAD_OP", "NO_SHARD")),
        *([case("fsdp1", backward_prefetch=when, forward_prefetch=True)] for when in ("BACKWARD_POST", "off")),
        [case("fsdp1", limit_all_gathers=False, use_orig_params=False, weight_decay=0.0)],
        among(("fsdp2", "ddp", "mini"), param_dtype="bf16"),
        among(("fsdp1", "ddp", "fsdp2"), param_dtype="fp16"),
        [case("fsdp2", param_dtype="bf16", reduce_dtype="bf16", wrap="Attention,MLP")],
    ],
    (2, "llama"): [
        among(("fsdp2", "ddp"), activation_checkpointing="selective"),
        among(("mini", "fsdp1"), wrap="600", param_dtype="bf16"),
    ],
    (4, "gpt"): [
        [case("hsdp", reshard_after_forward=2)],
        [case("hsdp", requires_gradient_sync="last", meta_init=True, param_dtype="bf16")],
        [case("fsdp1", sharding_strategy="HYBRID_SHARD")],
        among(("fsdp2", "mini"), reshard_after_forward=2),
    ],
}  # fmt: skip
"""By the number of ranks and the model."""
SOON = [(*on, alike[0]) for on, kinds in KINDS.items() for alike in kinds]
LATER = [(*on, one) for on, kinds in KINDS.items() for alike in kinds for one in alike if (*on, one) not in SOON]
RUNS = SOON + [tail(pytest.param(*one)) for one in LATER]


@functools.cache
def runs_of(world: int, soon: bool) -> dict[str, list[Numbers | str]]:
    """By case, what each rank has: all cases of a number of ranks in one start."""
    cases = [(shape, settings) for n, shape, settings in (SOON if soon else LATER) if n == world]
    ranks = run(each, world, train, cases, **QUIET)
    return {str(one): [results[i] for results in ranks] for i, one in enumerate(cases)}


@functools.cache
def expected(shape: str, weight_decay: float) -> Numbers:
    return by_hand(shape, weight_decay)


@pytest.mark.parametrize(("world", "shape", "settings"), RUNS, ids=str)
def test_training_has_the_numbers_of_one_process(world: int, shape: str, settings: dict[str, Any]) -> None:
    ranks = runs_of(world, (world, shape, settings) in SOON)[str((shape, settings))]
    for numbers in ranks:
        assert isinstance(numbers, Numbers), numbers
        assert numbers == ranks[0]  # equal on all ranks, to the bit
    plain = expected(shape, settings.get("weight_decay", 0.01))
    rtol = {"fp32": 1e-5, "bf16": 5e-2, "fp16": 5e-3}[settings.get("param_dtype", "fp32")]
    assert ranks[0].losses == pytest.approx(plain.losses, rel=min(rtol, 1e-2))
    assert ranks[0].norms == pytest.approx(plain.norms, rel=rtol)
    in_fp32 = ranks[0].norms == pytest.approx(plain.norms, rel=1e-5)
    assert in_fp32 == (settings.get("param_dtype", "fp32") == "fp32")


COMPILED = [
    case("ddp"),
    case("fsdp2", activation_checkpointing="selective"),
    case("fsdp1", activation_checkpointing="full"),
    case("mini", forward_prefetch=1),
]


def compiled(settings: dict[str, Any]) -> tuple[Numbers, int, list[float]]:
    """Training, how many graphs it took, and the loss in evaluation, with and without torch.compile."""
    torch._dynamo.reset()  # compiled code is kept per class, and the variants of it are limited
    torch._dynamo.utils.counters.clear()
    settings = settings | {"compile_backend": "aot_eager"}
    numbers = train("gpt", settings | {"compile": True})
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    losses, tokens = [], torch.arange(16)[None]
    for wanted in (True, False):
        wrapped, _ = wrapped_of("gpt", settings | {"compile": wanted})
        with wrapped.evaluation():
            losses.append(wrapped.model(tokens, tokens).item())
    return numbers, graphs, losses


@functools.cache
def compiled_runs() -> list[Any]:
    cases = [(settings,) for settings in COMPILED]
    return run(each, 2, compiled, cases, **QUIET)[0]


@pytest.mark.parametrize("settings", COMPILED, ids=str)
@pytest.mark.tail
def test_compiled_blocks_train_and_evaluate_alike(settings: dict[str, Any]) -> None:
    result = compiled_runs()[COMPILED.index(settings)]
    assert not isinstance(result, str), result
    numbers, graphs, (compiled_loss, eager_loss) = result
    plain = expected("gpt", 0.01)
    assert numbers.losses == pytest.approx(plain.losses, rel=1e-5)
    assert numbers.norms == pytest.approx(plain.norms, rel=1e-5)
    assert compiled_loss == pytest.approx(eager_loss, rel=1e-5)
    assert graphs == 2  # one block's code, whole, serves all of them; and what follows the blocks


COUNTED = [(api, sync) for api in SHARDED for sync in (True, "last")]


class Reductions(TorchDispatchMode):
    """Counts reduce-scatters."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def test_only_the_last_micro_batch_reduces_gradients_where_asked() -> None:
    def reductions(api: str, sync: bool | str) -> int:
        settings = {"api": api, "requires_gradient_sync": sync} | ({"shard_size": 2} if api == "hsdp" else {})
        wrapped, _ = wrapped_of("gpt", settings)
        with Reductions() as counted:
            forward_backward(wrapped, 0)
        return counted.n

    counts = run(each, 2, reductions, COUNTED, **QUIET)[0]
    units = 4  # three blocks and the root
    assert dict(zip(COUNTED, counts, strict=True)) == {
        (api, sync): units * (1 if sync == "last" else MICRO_BATCHES) for api, sync in COUNTED
    }


def test_ddp_keeps_gradients_to_itself_until_the_last_micro_batch() -> None:
    def differences() -> list[bool]:
        found = []
        for sync in ("last", True):
            wrapped, _ = wrapped_of("gpt", {"api": "ddp", "requires_gradient_sync": sync})
            tokens = torch.full((1, 16), torch.distributed.get_rank())
            with wrapped.micro_batch(is_last=False):
                wrapped.model(tokens, tokens).backward()
            grad = wrapped.named_parameters()["norm.weight"].grad
            assert grad is not None
            both = [torch.empty_like(grad) for _ in range(2)]
            torch.distributed.all_gather(both, grad)
            found.append(not torch.equal(*both))
        return found

    assert run(differences, 2, **QUIET)[0] == [True, False]


@pytest.mark.parametrize("world", [1, 2])
def test_evaluation_has_the_same_loss_and_leaves_the_model_as_it_was(world: int) -> None:
    cases = [("single",)] if world == 1 else []
    cases += [("ddp",), ("fsdp2",), ("fsdp1",), ("hsdp",), ("mini",)]

    def evaluate(api: str) -> tuple[float, list[str], bool, bool]:
        wrapped, _ = wrapped_of("llama", {"api": api})
        tokens = torch.arange(32).view(2, 16)
        with wrapped.evaluation():
            loss = wrapped.model(tokens, tokens)
            was_training = wrapped.model.training
        params = wrapped.named_parameters()
        kinds = sorted({type(p).__name__ for p in params.values()})
        return loss.item(), kinds, was_training, wrapped.model.training and not loss.requires_grad

    results = run(each, world, evaluate, cases, **QUIET)[0]
    for (api,), result in zip(cases, results, strict=True):
        assert not isinstance(result, str), result
        loss, kinds, was_training, training_without_graph = result
        assert loss == pytest.approx(results[0][0], rel=1e-6)
        assert (was_training, training_without_graph) == (False, True)
        # FSDP2's root would stay gathered without a backward: then an optimizer or a checkpoint sees no shards
        assert kinds == (["DTensor"] if api in FULLY_SHARD else ["Parameter"]), api


def test_counts_and_names_are_those_before_wrapping() -> None:
    cases = [(case(api, activation_checkpointing="full"),) for api in WRAPPERS if api != "single"]

    def names(one: dict[str, Any]) -> tuple[int, set[str], int, str]:
        wrapped, _ = wrapped_of("gpt", one)
        return wrapped.n_params, set(wrapped.named_parameters()), wrapped.replicas, wrapped.label

    results = run(each, 2, names, cases, **QUIET)[0]
    single, _ = wrapped_of("gpt", {"api": "single"})
    plain = dict(single.model.named_parameters())
    for (one,), result in zip(cases, results, strict=True):
        assert not isinstance(result, str), result
        n_params, found, replicas, label = result
        assert n_params == sum(p.numel() for p in plain.values()) == single.n_params
        assert found == set(plain)
        assert replicas == 2
        assert label.startswith(f"{one['api']}: ")
    assert (single.replicas, single.label) == (1, "single: one process, fp32")


def test_labels_say_what_it_is() -> None:
    def labels() -> list[str]:
        settings = [
            {"api": "hsdp", "param_dtype": "bf16"},
            {"api": "fsdp1", "sharding_strategy": "SHARD_GRAD_OP", "wrap": "Embedding"},
            {"api": "ddp", "param_dtype": "bf16"},
        ]
        return [wrapped_of("gpt", one)[0].label for one in settings]

    assert run(labels, 4, **QUIET)[0] == [
        "hsdp: 2 copies, each shared by 2 ranks, 4 units, bf16, reduced in fp32",
        "fsdp1: SHARD_GRAD_OP, shared by 4 ranks, 2 units (tok_emb not a unit of its own: a weight is tied), fp32",
        "ddp: a copy on each of 4 ranks, autocast bf16",
    ]


@pytest.mark.parametrize("api", ["fsdp2", "mini"])
def test_explicit_prefetch_lists_the_next_units_and_none_for_the_root(api: str) -> None:
    def lists() -> list[tuple[list[int], list[int]]]:
        wrapped, _ = wrapped_of("gpt", {"api": api, "forward_prefetch": 2, "backward_prefetch": 1})
        model: Any = wrapped.model
        states = [module._get_fsdp_state() for module in (*model.layers, model)]
        return [
            ([states.index(s) for s in state._states_to_forward_prefetch],
             [states.index(s) for s in state._states_to_backward_prefetch])
            for state in states
        ]  # fmt: skip

    assert run(lists, 2, **QUIET)[0] == [
        ([1, 2], []), ([2], [0]), ([], [1]), ([], []),
    ]  # fmt: skip


CLIPPED = [(case(api),) for api in ("ddp", "fsdp2", "mini", "fsdp1")]
CLIPPED += [(case("hsdp", shard_size=2),), (case("fsdp2", cpu_offload=True),)]


class TestClipping:
    """`clip_grad_norm` is of all ranks' gradients, and the same for every api."""

    def test_none_only_measures(self) -> None:
        def grads_change(one: dict[str, Any]) -> tuple[bool, bool, float]:
            wrapped, _ = wrapped_of("gpt", one)
            forward_backward(wrapped, 0)
            before = _local_grads(wrapped)
            norm = wrapped.clip_grad_norm(None)
            measured = all(torch.equal(a, b) for a, b in zip(before, _local_grads(wrapped), strict=True))
            wrapped.clip_grad_norm(norm.item() / 10)
            after = wrapped.clip_grad_norm(None)
            assert type(norm) is torch.Tensor
            assert norm.ndim == 0
            return measured, norm.isfinite().item(), (after / norm).item()

        for result in run(each, 2, grads_change, CLIPPED, **QUIET)[1]:
            assert result == (True, True, pytest.approx(0.1, rel=1e-4))


def test_fp16_ranks_skip_a_step_together_when_one_has_a_nan() -> None:
    """A scaler that looks at its own shards only lets one rank skip and the other step."""

    def two_steps(settings: dict[str, Any]) -> tuple[float, bool, bool]:
        wrapped, config = wrapped_of("gpt", settings)
        optimizer = make_optimizer(wrapped, config)
        assert wrapped.scaler is not None
        params = list(wrapped.named_parameters().values())
        changed = []
        for bad in (True, False):
            before = [_local(p).clone() for p in params]
            optimizer.zero_grad()
            forward_backward(wrapped, 0)
            if bad and (settings["api"] == "ddp" or torch.distributed.get_rank() == 1):
                _local_grads(wrapped)[-1].fill_(math.nan)
            wrapped.scaler.unscale_(optimizer)
            wrapped.clip_grad_norm(1.0)
            wrapped.scaler.step(optimizer)
            wrapped.scaler.update()
            changed.append(any(not torch.equal(a, _local(b)) for a, b in zip(before, params, strict=True)))
        return wrapped.scaler.get_scale(), *changed

    cases = [(settings | {"param_dtype": "fp16"},) for (settings,) in CLIPPED]
    for rank in run(each, 2, two_steps, cases, **QUIET):
        assert rank == [(2.0**15, False, True)] * len(cases)  # the scale is halved once


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _local_grads(wrapped: Any) -> list[torch.Tensor]:
    """This rank's parts of the gradients that are not empty, as they are in memory."""
    grads = [_local(p.grad) for p in wrapped.named_parameters().values() if p.grad is not None]
    return [grad for grad in grads if grad.numel()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("settings", [case("single"), case("single", param_dtype="bf16", meta_init=True)], ids=str)
def test_on_a_gpu_the_numbers_are_those_of_the_cpu(settings: dict[str, Any]) -> None:
    numbers = train("llama", settings, torch.device("cuda", 0))
    plain = expected("llama", 0.01)
    rtol = 1e-3 if "param_dtype" not in settings else 5e-2
    assert numbers.losses == pytest.approx(plain.losses, rel=rtol)
    assert numbers.norms == pytest.approx(plain.norms, rel=rtol)
