"""FSDP as one autograd function: the numbers of one process, nothing kept between forward and backward."""

import copy
import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_sim.mini.readings.one_idea import FSDPUnit, whole_parameters
from fsdp_sim.mini.siblings import watch
from fsdp_sim.timeline import RECORDER, Memory
from tests.mini.models import Toy, Transformer, batches, my_part, token_loss
from tests.mini.siblings.training import (
    AFTER_ADAMW,
    assert_equal_to,
    counts,
    labels,
    my_part_of_it,
    record,
    timeline_of,
    whole_batch,
)


def wrap(model):
    """Each layer, then the root."""
    for i, layer in enumerate(model.layers):
        model.layers[i] = FSDPUnit(layer)
    return FSDPUnit(model)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
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


@pytest.mark.parametrize("world_size", [2, 4])
def test_rows_that_no_number_of_ranks_divides(ranks, world_size):
    def run():
        model = Toy(sizes=(7, 15, 17, 2))
        plain = copy.deepcopy(model)
        model = wrap(model)
        x = torch.randn(12, 4)
        model(my_part(x)).pow(2).mean().backward()
        plain(x).pow(2).mean().backward()
        assert_equal_to(plain, whole_parameters(model, grads=True), grads=True)
        return [unit.shard.numel() for unit in model.modules() if isinstance(unit, FSDPUnit)]

    sizes = [4 * 7 + 2 * 4, 7 * 15, 15 * 17, 17 * 2]  # of the root and the layers
    assert ranks(world_size, run) == [[-(-n // world_size) for n in sizes]] * world_size


def test_the_only_parameters_are_shards(ranks):
    def run():
        return [name for name, _ in wrap(Toy(2)).named_parameters()]

    names = ["shard", "module.layers.0.shard", "module.layers.1.shard"]
    assert ranks(2, run) == [names] * 2


def test_each_unit_is_gathered_in_forward_and_in_backward_and_reduced_once(ranks):
    def run():
        model = wrap(Toy(2))
        return record(lambda: model(torch.randn(4, 4)).sum().backward())

    for events in ranks(2, run):
        assert labels(events) == [
            "ALL_GATHER(root)", "ALL_GATHER(layers.0)", "ALL_GATHER(layers.1)",
            "ALL_GATHER(root)",
            "ALL_GATHER(layers.1)", "REDUCE_SCATTER(layers.1)",
            "ALL_GATHER(layers.0)", "REDUCE_SCATTER(layers.0)",
            "REDUCE_SCATTER(root)",
        ]  # fmt: skip


def test_whole_parameters_do_not_survive_the_forward(ranks):
    def run():
        model = wrap(Toy(4))
        out = []

        def live_bytes_after(step):
            """Of whole parameters. gloo's thread may hold on to a buffer a moment longer than we do."""
            RECORDER.start(dist.get_rank())
            step()
            for _ in range(100):
                time.sleep(0.01)
                _, live = timeline_of(RECORDER.events()).live_bytes(dist.get_rank())
                if not live[Memory.UNSHARDED][-1]:
                    break
            return int(live[Memory.UNSHARDED].sum() > 0), int(live[Memory.UNSHARDED][-1])

        forward = live_bytes_after(lambda: out.append(model(torch.randn(4, 4))))
        return forward, live_bytes_after(lambda: out[0].sum().backward())

    assert ranks(2, run) == [((1, 0), (1, 0))] * 2


def test_one_rank_sends_nothing(ranks):
    def run():
        model = wrap(Transformer())
        return counts(record(lambda: token_loss(model, batches(1)[0]).backward()))

    assert ranks(1, run) == [{}]


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
        model.layers[0] = Toy(1)
        plain = copy.deepcopy(model)
        model.layers[0] = wrap(model.layers[0])
        model = FSDPUnit(model)
        x = torch.randn(4, 4)
        events = record(lambda: model(my_part(x)).pow(2).mean().backward())
        plain(x).pow(2).mean().backward()
        assert_equal_to(plain, whole_parameters(model, grads=True), grads=True)
        return labels(events)[:3]

    gathers = ["ALL_GATHER(root)", "ALL_GATHER(layers.0)", "ALL_GATHER(layers.0.layers.0)"]
    assert ranks(2, run) == [gathers] * 2


def test_no_graph_without_gradients(ranks):
    def run():
        model = Toy(2)
        plain = copy.deepcopy(model)
        model = wrap(model)
        x = torch.randn(4, 4)
        with torch.no_grad():
            return torch.equal(model(x), plain(x))

    assert ranks(3, run) == [True] * 3


def test_watched_it_shows_that_nothing_overlaps(ranks):
    def run():
        model = watch(wrap(Toy(2)))
        events = record(lambda: model(torch.randn(4, 4)).sum().backward())
        ops = [e for e in events if not e.is_memory]
        return [a.label for a, b in pairwise(ops) if a.end_s > b.start_s], labels(events)[:4]

    # each unit's pieces are cut in two by its gather, which is waited for where it is issued
    expected = ["FWD root", "ALL_GATHER(root)", "FWD root", "FWD layers.0"]
    assert ranks(2, run) == [([], expected)] * 2


def test_errors_say_what_to_do(ranks):
    def run():
        with pytest.raises(ValueError, match=r"those of ReLU are .*: none"):
            FSDPUnit(nn.ReLU())
        with pytest.raises(ValueError, match=r"of one dtype.*float64"):
            FSDPUnit(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64)))
        with pytest.raises(ValueError, match=r"all trained.*False"):
            FSDPUnit(nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)))

    ranks(2, run)
