"""FSDP as one autograd function: the numbers of one process, nothing kept between forward and backward."""

import copy
import time

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_sim.mini.readings.one_idea import FSDPUnit, whole_parameters
from tests.mini.models import GATHER, REDUCE, Collectives, Toy, Transformer, my_part
from tests.mini.siblings.training import AFTER_ADAMW, assert_equal_to, my_part_of_it, whole_batch


def wrap(model):
    """Each layer, then the root."""
    for i, layer in enumerate(model.layers):
        model.layers[i] = FSDPUnit(layer)
    return FSDPUnit(model)


@pytest.mark.parametrize("world_size", [1, 3])
def test_ten_adamw_steps_are_those_of_one_process(ranks, world_size):
    def run():
        model = Transformer(tied=True)
        expected, plain = whole_batch(model, 10, lr=1e-2)
        model = wrap(model)
        losses = my_part_of_it(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 10)
        assert_equal_to(plain, whole_parameters(model, grads=True), grads=True)
        assert_equal_to(plain, whole_parameters(model), **AFTER_ADAMW)
        return losses, expected

    for losses, expected in ranks(world_size, run):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert losses[-1] < losses[0]


def test_the_only_parameters_are_shards(ranks):
    def run():
        return [name for name, _ in wrap(Toy(2)).named_parameters()]

    names = ["shard", "module.layers.0.shard", "module.layers.1.shard"]
    assert ranks(2, run) == [names] * 2


def test_each_unit_is_gathered_in_forward_and_in_backward_and_reduced_once(ranks):
    def run():
        model = wrap(Toy(sizes=(3, 5, 2)))
        with Collectives() as collectives:
            model(torch.randn(4, 4)).sum().backward()
        return collectives.issued

    root, first, second = 20, 16, 10  # elements, padding included
    in_order = [
        (GATHER, root), (GATHER, first), (GATHER, second),
        (GATHER, root),
        (GATHER, second), (REDUCE, second // 2),
        (GATHER, first), (REDUCE, first // 2),
        (REDUCE, root // 2),
    ]  # fmt: skip
    assert ranks(2, run) == [in_order] * 2


class Gathered(Collectives):
    """Which buffers of all-gathers are alive."""

    def __init__(self):
        super().__init__()
        self.buffers = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname == GATHER:
            self.buffers.append(StorageWeakRef(args[0].untyped_storage()))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def alive(self):
        """gloo's thread may hold on to a buffer a moment longer than we do."""
        for _ in range(100):
            if not (alive := sum(not buffer.expired() for buffer in self.buffers)):
                break
            time.sleep(0.01)
        return len(self.buffers), alive


def test_whole_parameters_do_not_survive_the_forward(ranks):
    def run():
        model = wrap(Toy(4))
        with Gathered() as gathered:
            out = model(torch.randn(4, 4))
            after_forward = gathered.alive()
            out.sum().backward()
            return after_forward, gathered.alive()

    assert ranks(2, run) == [((5, 0), (10, 0))] * 2


def test_micro_batches_and_modules_called_twice_need_no_code(ranks):
    class Twice(Toy):
        def forward(self, x):
            return super().forward(super().forward(x))

    def run():
        model = Twice(2)
        plain = copy.deepcopy(model)
        model = wrap(model)
        for seed in (1, 2):
            torch.manual_seed(seed)
            x = torch.randn(4, 4)
            model(my_part(x)).pow(2).mean().backward()
            plain(x).pow(2).mean().backward()
        assert_equal_to(plain, whole_parameters(model, grads=True), grads=True)

    ranks(2, run)


def test_units_inside_units(ranks):
    def run():
        model = Toy(1)
        model.layers[0] = Toy(sizes=(3, 5))
        plain = copy.deepcopy(model)
        model.layers[0] = wrap(model.layers[0])
        model = FSDPUnit(model)
        x = torch.randn(4, 4)
        with Collectives() as collectives:
            model(my_part(x)).pow(2).mean().backward()
        plain(x).pow(2).mean().backward()
        assert_equal_to(plain, whole_parameters(model, grads=True), grads=True)
        return collectives.issued[:3]

    root, inside, inside_of_that = 2 * 4 * 4, 4 * 3 + 5 * 4, 16
    assert ranks(2, run) == [[(GATHER, root), (GATHER, inside), (GATHER, inside_of_that)]] * 2


def test_names_are_those_of_the_module(ranks):
    """Also where one of its own is called nearly as the units call what they wrap."""

    def run():
        plain = nn.ModuleDict({"submodule": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
        model = copy.deepcopy(plain)
        model["other"] = FSDPUnit(model["other"])
        assert_equal_to(plain, whole_parameters(FSDPUnit(model)))

    ranks(2, run)


def test_no_graph_without_gradients(ranks):
    def run():
        model = Toy(2)
        plain = copy.deepcopy(model)
        model = wrap(model)
        x = torch.randn(4, 4)
        with torch.no_grad():
            return torch.equal(model(x), plain(x))

    assert ranks(3, run) == [True] * 3


def test_errors_say_what_to_do(ranks):
    def run():
        with pytest.raises(ValueError, match="those of ReLU are: none"):
            FSDPUnit(nn.ReLU())
        with pytest.raises(ValueError, match=r"of one dtype.*float64"):
            FSDPUnit(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64)))
        with pytest.raises(ValueError, match=r"all trained.*frozen"):
            FSDPUnit(nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)))
        with pytest.raises(ValueError, match=r"all trained.*frozen"):
            FSDPUnit(nn.Linear(2, 2).requires_grad_(False))

    ranks(2, run)
