"""Answers about the interface, computed in another way than the templates do: mostly by asking torch itself."""

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode, _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_sim.learn.drill.draws import NAMES
from tests.learn.drill.oracles.shapes import shapes_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHORT = {dtype: name for name, dtype in DTYPES.items()}


@contextlib.contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """This process is rank 0 of many that are not there: torch's FSDP runs, and its collectives move nothing."""
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    _clear_sharding_prop_cache()  # DTensor's answers name process groups that are gone
    try:
        yield
    finally:
        _clear_sharding_prop_cache()
        dist.destroy_process_group()


@functools.cache
def ranks_without_rows(rows: int, ranks: int) -> int:
    return ranks - len(torch.empty(rows).chunk(ranks))


@functools.cache
def parameters_of_a_unit(
    calls: tuple[str, ...], asked: str, layers: int, sizes: tuple[tuple[str, float], ...]
) -> float:
    """torch's own units, of models of two and of three blocks: each further one adds as much."""
    two, three = ({name: _parts(calls, asked, n).count(name) for name, _ in sizes} for n in (2, 3))
    return 1e6 * sum((two[name] + (layers - 2) * (three[name] - two[name])) * millions for name, millions in sizes)


@functools.cache
def _parts(calls: tuple[str, ...], asked: str, layers: int) -> tuple[str, ...]:
    """The parts of a model whose parameters torch puts into a unit."""
    names = ("embedding", "attention", "feed-forward", "head")

    def part(name: str) -> nn.Module:
        return nn.Linear(1 + names.index(name), 8, bias=False)  # known again by its width

    blocks = [nn.Sequential(part("attention"), part("feed-forward")) for _ in range(layers)]
    model = nn.Sequential(part("embedding"), *blocks, part("head"))
    named: dict[str, list[Any]] = {
        "every block": blocks,
        "the model": [model],
        "[embedding, head]": [[model[0], model[-1]]],
        "the head": [model[-1]],
        "every attention": [block[0] for block in blocks],
        "every feed-forward": [block[1] for block in blocks],
    }
    with fake_ranks(4):
        for module in itertools.chain.from_iterable(named[call] for call in calls):
            fully_shard(module)
        group = fully_shard.state(named[asked][-1])._fsdp_param_group
        return tuple(names[param._orig_size[1] - 1] for param in group.fsdp_params)


@functools.cache
def dtype_of_what(stored: str, param_dtype: str, reduce_dtype: str | None, asked: str) -> str:
    return _dtypes(stored, param_dtype, reduce_dtype)[asked]


@functools.cache
def _dtypes(stored: str, param_dtype: str, reduce_dtype: str | None) -> dict[str, str]:
    """A step of torch's FSDP, with what its collectives are given."""
    moved: dict[str, torch.dtype] = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "c10d":
                moved[func.overloadpacket.__name__] = args[0].dtype
            return func(*args, **(kwargs or {}))

    policy = MixedPrecisionPolicy(DTYPES[param_dtype], DTYPES.get(reduce_dtype or ""))
    with fake_ranks(2), Watch():
        model = nn.Sequential(nn.Linear(4, 4)).to(DTYPES[stored])
        for module in (model[0], model):
            fully_shard(module, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters())
        activation = model(torch.ones(2, 4)) * 1
        activation.sum().backward()
        optimizer.step()
        weight = model[0].weight
        seen = {
            "the shard that a rank keeps": weight.to_local().dtype,
            "what the all-gathers move": moved["_allgather_base_"],
            "an activation inside a block": activation.dtype,
            "what the reduce-scatters move": moved["_reduce_scatter_base_"],
            "the gradient that the optimizer reads": weight.grad.dtype,
            "Adam's first moment": optimizer.state[weight]["exp_avg"].dtype,
        }
    return {name: SHORT[dtype] for name, dtype in seen.items()}


@functools.cache
def change_behind_the_counts(
    blocks: int, micro_batches: int, profile: tuple[int, int, int, int], options: tuple[str, ...]
) -> str:
    """By formulas: units and bytes of gathers and reduces, with a root of two blocks."""
    m, units, size, root = micro_batches, blocks + 1, blocks + 2, 2
    gathers, reduces, gathered, reduced = m * (2 * units - 1), m * units, m * (2 * size - root), m * size
    after = {
        "reshard_after_forward=False in every call": (m * units, reduces, m * size / gathered, 1.0),
        "set_requires_gradient_sync(False) but for the last micro-batch": (gathers, units, 1.0, 1 / m),
        "param_dtype=bf16 with reduce_dtype=fp32": (gathers, reduces, 0.5, 1.0),
        "reduce_dtype=bf16 alone": (gathers, reduces, 1.0, 0.5),
        "one call on the whole model, none on its blocks": (m, m, m * size / gathered, reduced / (m * size)),
    }
    (found,) = (
        change
        for change in options
        if after[change][:2] == profile[:2]
        and all(abs(100 * share - shown) < 0.51 for share, shown in zip(after[change][2:], profile[2:], strict=True))
    )
    return found


@functools.cache
def setters_of_accumulation(blocks: int, micro_batches: int, limits: tuple[str, ...]) -> str:
    """By what each setter keeps and skips."""
    units = blocks + 1
    allowed = {}
    for keeps_forward, sync_last, keeps_backward in itertools.product((False, True), repeat=3):
        if keeps_backward > (keeps_forward and sync_last):
            continue  # no such loop is offered
        broken = {
            "whole gradients are kept from one micro-batch to the next": sync_last,
            "whole parameters are kept from one micro-batch to the next": keeps_backward,
            "whole parameters of a block are kept from its forward to its backward": keeps_forward,
        }
        gathers = units * (1 if keeps_backward else micro_batches * (1 if keeps_forward else 2))
        setters = ["set_requires_gradient_sync(is_last)"] * sync_last
        setters += ["set_reshard_after_backward(is_last)"] * keeps_backward
        name = f"{' and '.join(setters) or 'no setter'}; reshard_after_forward={not keeps_forward}"
        if not any(broken[limit] for limit in limits):
            allowed[gathers + units * (1 if sync_last else micro_batches)] = name
    return allowed[min(allowed)]


BEFORE = {  # what must come before what, each for its own reason
    ("build", "wrap"), ("build", "compile"), ("build", "fully_shard"), ("wrap", "compile"), ("wrap", "fully_shard"),
    ("compile", "fully_shard"), ("fully_shard each", "fully_shard the"), ("fully_shard", "create"),
    ("create", "the first"), ("the first", "clip"), ("clip", "optimizer.step"), ("the first", "optimizer.step"),
    ("fully_shard", "to_empty"), ("to_empty", "load the weights"), ("load the weights", "create"),
    ("create", "load the opt"), ("load the", "the first"),
}  # fmt: skip


@functools.cache
def order_around_sharding(things: tuple[str, ...]) -> tuple[str, ...]:
    """The only order that breaks no rule, directly or over steps that are not asked about."""
    before = {(a, b) for a, b in itertools.permutations(things, 2) if any(_leads(a, b, seen=frozenset()) for _ in (0,))}
    right = [
        order
        for order in itertools.permutations(things)
        if not any((b, a) in before for a, b in itertools.combinations(order, 2))
    ]
    assert len(right) == 1, right
    return right[0]


def _leads(a: str, b: str, seen: frozenset[str]) -> bool:
    nexts = {second for first, second in BEFORE if a.startswith(first)} - seen
    return any(b.startswith(second) or _leads(second, b, seen | nexts) for second in nexts)


order_from_meta = order_around_sharding


@functools.cache
def called_on_rank_0(call: str, ranks: int) -> str:
    """Run on the one rank that there is, watching for collectives and for local shards in what is used."""
    with fake_ranks(ranks):
        model = nn.Module()
        model.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
        model.forward = model.layers.forward
        for module in (*model.layers, model):
            fully_shard(module)
        optimizer = torch.optim.AdamW(model.parameters())
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        used: list[Any] = []

        class Torch:
            nn = torch.nn

            @staticmethod
            def save(state: dict[str, Any], _: str) -> None:
                used.extend(state.values())

        scope = {
            "model": model, "optimizer": optimizer, "torch": Torch, "get_model_state_dict": get_model_state_dict,
            "StateDictOptions": StateDictOptions, "path": "", "validation_batch": torch.ones(2, 64),
            "print": lambda names: None,
        }  # fmt: skip
        real = DTensor.to_local

        def to_local(tensor: DTensor, **kwargs: Any) -> torch.Tensor:
            used.append(tensor)
            return real(tensor, **kwargs)

        with CommDebugMode() as watched:
            if "to_local" in call:
                with patch.object(DTensor, "to_local", to_local):
                    eval(call, scope)  # the line that the question shows
            else:
                eval(call, scope)
        if watched.get_total_counts():
            return "rank 0 waits for ranks that never come"
        if any(isinstance(tensor, DTensor) and real(tensor).numel() < tensor.numel() for tensor in used):
            return "nobody waits, and only rank 0's own rows are in it"
    return "nobody waits, and it is right for the whole model"


@functools.cache
def strategy_in_fsdp2(strategy: str, nodes: int, gpus_per_node: int) -> str:
    """By what the names mean."""
    mesh = f"{nodes}, {gpus_per_node}" if "HYBRID" in strategy else f"{nodes * gpus_per_node},"
    keeps = strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
    return f"mesh of ({mesh}), reshard_after_forward" + ("=False" if keeps else " left at its default")


@functools.cache
def gradient_after_division(gradients: tuple[int, ...], micro_batches: int, factor: int | None) -> float:
    """Around a ring, with torch's own choice of when to divide by what."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    with fake_ranks(len(gradients)):
        before, after, op, _ = _get_gradient_divide_factors(
            dist.group.WORLD, None, torch.float32, "cpu", factor, factor is not None
        )
    divides = len(gradients) if op == dist.ReduceOp.AVG else 1
    grad = 0.0
    for _ in range(micro_batches):
        chunk = 0.0
        for of_rank in gradients:
            chunk += of_rank / (before or 1)
        grad += chunk / divides / (after or 1)
    return grad


@functools.cache
def argument_in_fsdp2(argument: str, options: tuple[str, ...]) -> str:
    """From the new interface to the old one, and what is named must be in torch."""
    new = set(inspect.signature(fully_shard).parameters)
    assert argument in inspect.signature(FullyShardedDataParallel).parameters
    arguments = {"mp_policy": "mixed_", "offload_policy": "cpu_", "ignored_params": "ignored_", "mesh": "process_group"}
    assert set(arguments) <= new
    starts = {f"the argument {name}": old for name, old in arguments.items()}
    starts["a loop that calls fully_shard on each block"] = "auto_wrap"
    starts["set_model_state_dict with broadcast_from_rank0=True"] = "sync_module"
    starts["to_empty after sharding, then your initialisation"] = "param_init"
    starts["nothing: parameters are never flattened"] = "use_orig"
    starts["nothing: events bound the memory without blocking the CPU"] = "limit_"
    if any(argument in name for name in vars(FSDPModule) if name.startswith("set_modules_to_")):
        return "a method of the modules"
    return next(option for option in options if argument.startswith(starts.get(option, "-")))


@functools.cache
def state_dict_on_a_rank(model: str, ranks: int, full: bool, adam: bool) -> int:
    assert model in NAMES.values()
    copies = 3 if adam else 1  # the weight, exp_avg, exp_avg_sq
    return sum(
        4 * copies * (shape[0] if full else math.ceil(shape[0] / ranks)) * math.prod(shape[1:])
        for shape in shapes_of(model)
    )
