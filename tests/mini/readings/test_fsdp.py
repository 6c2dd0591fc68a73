"""The file that stands alone does what torch's `fully_shard` does: the same numbers, the same collectives."""

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_sim.measure.recording_streams import Device, Log
from fsdp_sim.mini.readings.fsdp import FSDPModule, fully_shard
from tests.mini.models import Toy, Transformer, batches, my_part, token_loss
from tests.mini.networks import NETWORKS
from tests.mini.parity.tools import Issued

pytestmark = pytest.mark.filterwarnings("ignore:.*returned a view")

BF16, FP32 = torch.bfloat16, torch.float32
LEFT_OUT = {"two layers in a list", "embed and head in a list", "a list of which one is unused", "ignored parameters"}
LEFT_OUT |= {"frozen in another dtype"}  # travels in bytes in torch; here the parameters of a unit have one dtype


@dataclass
class Setting:
    """How to shard and train; each of the steps has as many micro-batches."""

    options: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    sync_in_the_last: bool = False
    root_options: dict[str, Any] = field(default_factory=dict)


def train(fsdp, network, setting, steps=2):
    """Losses, gradients and parameters of each step, whole ones, and the collectives."""
    torch.manual_seed(0)
    model = network.build()
    for unit in network.units(model):
        fsdp(unit, **setting.options)
    fsdp(model, **setting.options | setting.root_options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    numbers = []
    with Issued() as issued:
        for _ in range(steps):
            for number in range(setting.micro_batches):
                if setting.sync_in_the_last:
                    model.set_requires_gradient_sync(number == setting.micro_batches - 1)
                loss = network.loss(model) * (1 + number + dist.get_rank())
                loss.backward()
                numbers.append(loss.detach())
            parameters = list(model.parameters())
            assert all(isinstance(p, DTensor) for p in parameters)
            local = [t for p in parameters for t in (p.grad, p) if t is not None]
            assert all(a.grad is None or a.grad.dtype == a.dtype for a in parameters)
            numbers += [t.detach().to_local().clone() for t in local]
            optimizer.step()
            optimizer.zero_grad()
    return numbers, [(c.name, c.numel, c.dtype) for c in issued.log]


def assert_as_torch(ranks, network, setting, world_size=2):
    def run():
        numbers, collectives = train(fully_shard, NETWORKS[network], setting)
        of_torch, collectives_of_torch = train(torch.distributed.fsdp.fully_shard, NETWORKS[network], setting)
        assert collectives == collectives_of_torch
        assert len(numbers) == len(of_torch)
        for number, (a, b) in enumerate(zip(numbers, of_torch, strict=True)):
            assert torch.equal(a, b), f"number {number} of {len(numbers)}: {a} instead of {b}"
        return len(collectives)

    assert all(ranks(world_size, run))


@pytest.mark.parametrize("network", [name for name in NETWORKS if name not in LEFT_OUT])
def test_networks(ranks, network):
    assert_as_torch(ranks, network, Setting())


SETTINGS = {
    "default": Setting(),
    "reshard": Setting({"reshard_after_forward": True}),
    "keep": Setting({"reshard_after_forward": False}),
    "keep all but the root": Setting({"reshard_after_forward": False}, root_options={"reshard_after_forward": True}),
    "bf16, reduced in fp32": Setting({"mp_policy": MixedPrecisionPolicy(BF16, FP32)}),
    "bf16, reduced in bf16": Setting({"mp_policy": MixedPrecisionPolicy(BF16, BF16)}),
    "reduced in bf16": Setting({"mp_policy": MixedPrecisionPolicy(reduce_dtype=BF16)}),
    "bf16 and back": Setting(
        {"mp_policy": MixedPrecisionPolicy(BF16, FP32)},
        root_options={"mp_policy": MixedPrecisionPolicy(BF16, FP32, output_dtype=FP32)},
    ),
    "bf16, inputs as they are": Setting({"mp_policy": MixedPrecisionPolicy(FP32, BF16, cast_forward_inputs=False)}),
    "micro-batches": Setting(micro_batches=3),
    "micro-batches, sync in the last": Setting(micro_batches=3, sync_in_the_last=True),
    "micro-batches of bf16": Setting({"mp_policy": MixedPrecisionPolicy(BF16, FP32)}, 3, sync_in_the_last=True),
}


@pytest.mark.parametrize("name", list(SETTINGS)[1:])
def test_settings(ranks, name):
    assert_as_torch(ranks, "uneven", SETTINGS[name])


@pytest.mark.parametrize("name", ["keep", "bf16, reduced in fp32", "micro-batches of bf16"])
def test_settings_where_a_layer_is_called_twice(ranks, name):
    assert_as_torch(ranks, "a layer twice", SETTINGS[name])


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("name", ["default", "bf16, reduced in fp32"])
def test_ranks_that_divide_few_dimensions(ranks, world_size, name):
    assert_as_torch(ranks, "transformer", SETTINGS[name], world_size)


def test_freezing_between_steps(ranks):
    def train(fsdp):
        torch.manual_seed(0)
        model = Toy(2)
        for layer in model.layers:
            fsdp(layer)
        fsdp(model)
        found = []
        for frozen in (False, True, False):
            model.layers[1].w.requires_grad_(not frozen)
            model(torch.ones(2, 4)).sum().backward()
            found.append([None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()])
            model.zero_grad()
        return found

    def run():
        ours, theirs = train(fully_shard), train(torch.distributed.fsdp.fully_shard)
        assert str(ours) == str(theirs)
        return [[grad is None for grad in grads] for grads in ours]

    nothing = [False] * 4
    assert ranks(2, run) == [[nothing, [False, False, True, False], nothing]] * 2


def shard(model):
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def test_whole_parameters_have_memory_only_while_they_compute(ranks):
    def run():
        model = shard(Toy(2))
        units = {"root": model, "0": model.layers[0], "1": model.layers[1]}

        def in_memory():
            return [
                name for name, m in units.items() if all(p.gathered.untyped_storage().nbytes() for p in m.unit.params)
            ]

        found = {"sharded": in_memory()}
        model.layers[1].register_forward_pre_hook(lambda *_: found.update(forward=in_memory()))
        loss = model(torch.ones(2, 4)).sum()
        model.layers[0].unit.params[0].unsharded.register_hook(lambda _: found.update(backward=in_memory()))
        found["between"] = in_memory()
        loss.backward()
        return found | {"after": in_memory()}

    expected = {"sharded": [], "forward": ["root", "1"], "between": ["root"], "backward": ["root", "0"], "after": []}
    assert ranks(2, run) == [expected] * 2


def test_activations_go_when_backward_has_read_them(ranks):
    """And not when garbage is collected."""

    def run():
        model = shard(Toy(2))
        activations = []
        for layer in model.layers:
            layer.register_forward_hook(lambda _, args, out: activations.extend(map(weakref.ref, (*args, out))))
        gc.disable()
        try:
            model(torch.ones(2, 4)).sum().backward()
            return len(activations), sum(activation() is not None for activation in activations)
        finally:
            gc.enable()

    assert ranks(2, run) == [(4, 0)] * 2


def program_of_a_step(model, units):
    """What a GPU would be told in forward and in backward: a line is a stream, and what it is told.

    Args:
        units: by name; no two have as many elements.
    """
    log = Log()
    device = Device(log)
    names = {sum(p.gathered.numel() for p in module.unit.params): name for name, module in units.items()}

    def collective(name, short, buffer):
        original = getattr(dist, name)

        def issue(*args, **kwargs):
            unit, work = names[args[buffer].numel()], original(*args, **kwargs)
            log.write_op(f"{short} {unit}")

            class Work:
                def wait(self):
                    log.write_op(f"wait for {short} {unit}")
                    work.wait()

            return Work()

        return patch.object(dist, name, issue)

    with (
        patch.object(torch, "get_device_module", lambda _: device),
        collective("all_gather_into_tensor", "AG", 0), collective("reduce_scatter_tensor", "RS", 1),
    ):  # fmt: skip
        loss = model(torch.ones(2, 4)).sum()
        for name, layer in enumerate(model.layers):
            layer.unit.params[0].unsharded.register_hook(lambda _, name=name: log.write_op(f"backward {name}"))
        log.write("---", None, "backward")
        loss.backward()
    model.unit.context.copy_in_stream.name = "copy-in"
    lines = [" ".join(line.removeprefix("op ").split()) for line in log.text(str)]
    return lines[: lines.index("--- backward")], lines[lines.index("--- backward") + 1 :]


def test_the_program_of_a_step(ranks):
    """Backward computes beside the all-gather of the unit before it, and the reduce-scatter of the one after it."""

    def run():
        model = shard(Toy(sizes=(5, 3, 7)))
        return program_of_a_step(model, {"root": model, "0": model.layers[0], "1": model.layers[1]})

    waits = "wait_stream copy-in compute"  # for the optimizer, then for each copy-out
    forward = [
        waits,
        "copy-in AG root", "compute wait for AG root", waits,
        "copy-in AG 0", "compute wait for AG 0", waits,
        "copy-in AG 1", "compute wait for AG 1", waits,
    ]  # fmt: skip
    backward = [
        "copy-in AG 1", "compute wait for AG 1", waits,
        "copy-in AG 0", "compute backward 1", "compute RS 1",
        "compute wait for AG 0", waits, "compute backward 0", "compute wait for RS 1", "compute RS 0",
        "compute wait for RS 0", "compute RS root", "compute wait for RS root",
    ]  # fmt: skip
    assert ranks(2, run) == [(forward, backward)] * 2


def test_state_dicts_have_shards_at_any_time(ranks):
    def run():
        torch.manual_seed(0)
        plain, model = Transformer(2), shard(Transformer(2))
        whole = {name: torch.full_like(value, 2.0) for name, value in plain.state_dict().items()}
        shards = {name: distribute_tensor(value, model.unit.mesh, [Shard(0)]) for name, value in whole.items()}
        model(batches(1)[0])  # after a forward the root is whole
        model.load_state_dict(shards)
        model(batches(1)[0])
        for name, value in model.state_dict().items():
            assert isinstance(value, DTensor)
            assert torch.equal(value.full_tensor(), whole[name])

    ranks(2, run)


def test_a_step_after_evaluation_is_that_of_one_process(ranks):
    def run():
        torch.manual_seed(0)
        plain = Transformer(2)
        torch.manual_seed(0)
        model = shard(Transformer(2))
        (batch,) = batches(1)
        with torch.no_grad():
            token_loss(model, batch)
        token_loss(model, my_part(batch)).backward()
        token_loss(plain, batch).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)

    ranks(2, run)


def test_what_it_makes_of_a_module(ranks):
    def run():
        model = fully_shard(nn.Linear(3, 5))
        assert isinstance(model, FSDPModule)
        assert isinstance(model, nn.Linear)
        return type(model).__name__, [tuple(p.to_local().shape) for p in model.parameters()]

    assert ranks(2, run) == [("FSDPLinear", [(3, 3), (3,)]), ("FSDPLinear", [(2, 3), (2,)])]


def test_errors_say_what_to_do(ranks):
    def run():
        tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        tied[1].weight = tied[0].weight
        fully_shard(tied[0])
        with pytest.raises(ValueError, match="weight is in another unit already; tied weights must be in the same one"):
            fully_shard(tied)
        with pytest.raises(ValueError, match=r"travel together.*float64"):
            fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64)))
        scalar = nn.Module()
        scalar.scale = nn.Parameter(torch.tensor(1.0))
        with pytest.raises(ValueError, match=r"scale is a scalar.*\(1,\)"):
            fully_shard(scalar)
        model = shard(Toy(2))
        model.layers[0](torch.ones(2, 4))
        with pytest.raises(RuntimeError, match="ran its forward before the root did"):
            model(torch.ones(2, 4))

    ranks(1, run)
