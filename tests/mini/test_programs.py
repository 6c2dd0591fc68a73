"""The mini issues the program that torch's own `fully_shard` issues: every network, every setting, combinations."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from fsdp_sim.measure.record import ProgramRecorder
from fsdp_sim.mini.versions import TORCH as TORCH_VERSION
from tests.mini.networks import NETWORKS, Network
from tests.mini.programs import MARKS, MINI, TORCH, Fsdp, Run, assert_same_program, program
from tests.some import some

pytestmark = MARKS

# One axis each; the first value of an axis is the default


@dataclass(frozen=True)
class Setting:
    """What one value of an axis changes.

    Attributes:
        options: of `fully_shard`.
        set_up: called once, with the model, the first module of each unit but the root, and the recorder.
        each: called before each micro-batch, with the model and "is it the last".
        micro_batches: how many at least.
    """

    options: dict[str, Any] = field(default_factory=dict)
    set_up: Callable[[Any, list[Any], ProgramRecorder], None] = lambda model, units, recorder: None
    each: Callable[[Any, bool], None] = lambda model, last: None
    micro_batches: int = 1
    sizes: tuple[int, ...] = (8,)  # of the mesh: shards, or replicas and shards


def prefetch(forward: int = 0, backward: int = 0) -> Setting:
    def set_up(model, units, recorder):
        for number, unit in enumerate(units):
            if forward:
                unit.set_modules_to_forward_prefetch(units[number + 1 : number + 1 + forward])
            if backward:
                unit.set_modules_to_backward_prefetch(units[max(0, number - backward) : number][::-1])

    return Setting(set_up=set_up)


def accumulation(*setters: str, micro_batches: int = 2) -> Setting:
    def each(model, last):
        for setter in setters:
            getattr(model, setter)(last)

    return Setting(each=each, micro_batches=micro_batches)


def on_all(setter: str, *args: Any) -> Setting:
    """A setter that does not recurse by itself, on every unit."""

    def set_up(model, units, recorder):
        for module in (*units, model):
            getattr(module, setter)(*args)

    return Setting(set_up=set_up)


def precision(param: Any = None, reduce: Any = None) -> Setting:
    return Setting({"mp_policy": MixedPrecisionPolicy(param, reduce)})


def all_reduce_hook(model, units, recorder):
    for module in (*units, model):
        module.set_all_reduce_hook(lambda gradient: dist.all_reduce(gradient))


def all_reduce_hook_on_a_stream(model, units, recorder):
    stream = recorder.device.Stream(name="mine")
    for module in (*units, model):
        module.set_all_reduce_hook(lambda gradient: dist.all_reduce(gradient), stream=stream)


def optimizer_in_backward(model, units, recorder):
    def step(parameter):
        recorder.op("OPTIM")
        parameter.grad = None

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(step)


def post_optim_event(model, units, recorder):
    event = recorder.device.Event()
    event.record()
    model.set_post_optim_event(event)


DEFAULT = Setting()
AXES: dict[str, dict[str, Setting]] = {
    "reshard": {
        "reshard None": DEFAULT,
        "reshard True": Setting({"reshard_after_forward": True}),
        "reshard False": Setting({"reshard_after_forward": False}),
        "reshard to 2": Setting({"reshard_after_forward": 2}),
        "reshard to 1": Setting({"reshard_after_forward": 1}),
        "set_reshard_after_forward True": Setting(set_up=lambda model, *_: model.set_reshard_after_forward(True)),
        "set_reshard_after_forward False": Setting(
            set_up=lambda model, units, _: [unit.set_reshard_after_forward(False, recurse=False) for unit in units[:1]]
        ),
    },
    "mesh": {
        "8 shards": DEFAULT,
        "2 x 4": Setting(sizes=(2, 4)),
        "8 x 1": Setting(sizes=(8, 1)),
        "1 x 8": Setting(sizes=(1, 8)),
        "one rank": Setting(sizes=(1,)),
        "3 shards": Setting(sizes=(3,)),
    },
    "precision": {
        "float32": DEFAULT,
        "bfloat16, reduced in float32": precision(torch.bfloat16, torch.float32),
        "bfloat16": precision(torch.bfloat16),
        "float16": precision(torch.float16),
        "float16, reduced in float32": precision(torch.float16, torch.float32),
        "reduced in bfloat16": precision(None, torch.bfloat16),
        "reduced in float16": precision(None, torch.float16),
    },
    "prefetch": {
        "implicit prefetch": DEFAULT,
        "forward prefetch of 1": prefetch(1),
        "forward prefetch of 2": prefetch(2),
        "backward prefetch of 1": prefetch(0, 1),
        "backward prefetch of 2": prefetch(0, 2),
        "prefetch of 1 in both": prefetch(1, 1),
        "prefetch of 3 in both": prefetch(3, 3),
    },
    "accumulation": {
        "one micro-batch": DEFAULT,
        "reduced every time": accumulation(),
        "gradient sync in the last": accumulation("set_requires_gradient_sync", micro_batches=3),
        "all-reduce in the last": accumulation("set_requires_all_reduce", micro_batches=3),
        "reshard after backward in the last": accumulation("set_reshard_after_backward"),
        "sync and reshard in the last": accumulation("set_requires_gradient_sync", "set_reshard_after_backward"),
        "last backward marked": accumulation("set_is_last_backward", micro_batches=3),
        "sync and all-reduce in the last": accumulation("set_requires_gradient_sync", "set_requires_all_reduce"),
        "everything in the last": accumulation(
            "set_requires_gradient_sync", "set_reshard_after_backward", "set_is_last_backward", micro_batches=3
        ),
    },
    "buffers": {
        "1 input buffer": DEFAULT,
        "2 input buffers": Setting(set_up=lambda model, *_: model.set_reduce_scatter_max_input_buffers(2)),
        "3 input buffers": Setting(set_up=lambda model, *_: model.set_reduce_scatter_max_input_buffers(3)),
        "2 buffers, one unit asks": Setting(
            set_up=lambda model, units, _: [unit.set_reduce_scatter_max_input_buffers(2) for unit in units[:1]]
        ),
    },
    "reduction": {
        "mean": DEFAULT,
        "divided by 3": on_all("set_gradient_divide_factor", 3.0),
        "divided by 8": on_all("set_gradient_divide_factor", 8.0),
        "sums only": on_all("set_force_sum_reduction_for_comms", True),
        "all-reduce hook": Setting(set_up=all_reduce_hook),
        "all-reduce hook on a stream": Setting(set_up=all_reduce_hook_on_a_stream),
        "separate reduce-scatter group": Setting(set_up=lambda model, *_: model.set_separate_reduce_scatter_group()),
        "unused parameters reduced": Setting(set_up=lambda model, *_: model.set_reduce_scatter_unused_params(True)),
        "optimizer in backward": Setting(set_up=optimizer_in_backward),
    },
    "offload": {
        "no offload": DEFAULT,
        "offload": Setting({"offload_policy": CPUOffloadPolicy()}),
        "offload, not pinned": Setting({"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    },
    "unshard": {
        "own streams": DEFAULT,
        "asynchronous unshard": Setting(set_up=lambda model, *_: model._set_unshard_async_op(True)),
        "post-optimizer event": Setting(set_up=post_optim_event),
    },
}


def train(network: Network, settings: list[Setting], steps: int = 2) -> tuple[Run, int]:
    """A training run, and the number of ranks it needs."""
    sizes = next((setting.sizes for setting in settings if setting.sizes != (8,)), (8,))
    micro_batches = max(setting.micro_batches for setting in settings)

    def run(recorder: ProgramRecorder, fsdp: Fsdp) -> object:
        torch.manual_seed(0)
        model = network.build()
        for name, module in model.named_modules():
            if not any(True for _ in module.children()):
                recorder.watch(module, name)
        options = network.options(model)
        for setting in settings:
            options |= setting.options
        if len(sizes) == 2:
            options["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        units = network.units(model)
        for unit in units:
            fsdp.fully_shard(unit, **options)
        fsdp.fully_shard(model, **options)
        assert isinstance(model, fsdp.FSDPModule)
        heads = [unit[0] if isinstance(unit, list) else unit for unit in units]
        for setting in settings:
            setting.set_up(model, heads, recorder)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            for micro_batch in range(micro_batches):
                for setting in settings:
                    setting.each(model, micro_batch == micro_batches - 1)
                recorder.mark(f"step {step} microbatch {micro_batch}: forward")
                loss = network.loss(model)
                recorder.mark(f"step {step} microbatch {micro_batch}: backward")
                loss.backward()
            recorder.mark(f"step {step}: optimizer")
            optimizer.step()
            optimizer.zero_grad()
        return model

    ranks = 1
    for size in sizes:
        ranks *= size
    return run, ranks


@pytest.mark.parametrize("network", NETWORKS)
def test_network(network):
    assert_same_program(*train(NETWORKS[network], [DEFAULT]))


@pytest.mark.parametrize("name", [name for axis in AXES.values() for name in islice(axis, 1, None)])
def test_setting(name):
    setting = next(axis[name] for axis in AXES.values() if name in axis)
    assert_same_program(*train(NETWORKS["toy"], [setting]))


PAIRS = [  # settings that act on one another
    ("2 x 4", "reduced every time"),
    ("2 x 4", "all-reduce in the last"),
    ("2 x 4", "sync and all-reduce in the last"),
    ("2 x 4", "last backward marked"),
    ("2 x 4", "bfloat16, reduced in float32"),
    ("2 x 4", "reduced in bfloat16"),
    ("2 x 4", "all-reduce hook"),
    ("2 x 4", "separate reduce-scatter group"),
    ("2 x 4", "reshard to 2"),
    ("reshard False", "sync and reshard in the last"),
    ("reshard False", "everything in the last"),
    ("reshard to 2", "bfloat16, reduced in float32"),
    ("bfloat16, reduced in float32", "gradient sync in the last"),
    ("bfloat16, reduced in float32", "offload"),
    ("offload", "reduced every time"),
    ("2 input buffers", "last backward marked"),
    ("prefetch of 1 in both", "asynchronous unshard"),
]


@pytest.mark.parametrize("names", PAIRS, ids="; ".join)
def test_pair(names):
    settings = [axis[name] for axis in AXES.values() for name in names if name in axis]
    assert_same_program(*train(NETWORKS["toy"], settings))


def combinations(n: int, seed: int = 0) -> list[tuple[str, tuple[str, ...]]]:
    """n random networks, each with a value from some of the axes; (network, names of settings)."""
    chosen = random.Random(seed)
    return [
        (
            chosen.choice(list(NETWORKS)),
            tuple(chosen.choice(list(axis)[1:]) for axis in AXES.values() if chosen.random() < 0.5),
        )
        for _ in range(n)
    ]


@pytest.mark.parametrize(
    ("network", "names"), some([pytest.param(n, s, id="; ".join((n, *s))) for n, s in combinations(40)], first=16)
)
def test_combination(network, names):
    settings = [axis[name] for axis in AXES.values() for name in names if name in axis]
    steps = 2 if max((setting.micro_batches for setting in settings), default=1) == 1 else 1
    assert_same_program(*train(NETWORKS[network], settings or [DEFAULT], steps), may_raise=True)


def test_where_torch_slips_the_mini_trains():
    """Without gradient sync torch looks for the gradient of a unit that was never gathered, if it is to be cast."""
    settings = [AXES["precision"]["bfloat16, reduced in float32"], AXES["accumulation"]["gradient sync in the last"]]
    run, world_size = train(NETWORKS["an unused layer"], settings)

    if TORCH_VERSION < (2, 15):  # which mended it
        assert program(run, TORCH, world_size) == ["raises AttributeError"]
    else:
        assert_same_program(run, world_size)
    assert len([line for line in program(run, MINI, world_size) if "REDUCE_SCATTER" in line]) == 2 * 3
