"""The twins: equal numbers, bit by bit, and the differences in order that each of them claims."""

import difflib
import inspect
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fsdp_sim.mini.readings.one_loop import TWINS, Layer, ShardedLayer, ddp, fsdp, overlapped
from tests.mini.models import mean_over_ranks, my_part
from tests.mini.siblings.training import AFTER_ADAMW


def stack():
    torch.manual_seed(0)
    rows = (4, 7, 15, 17)
    return [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(rows)]


def data(steps):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(12, 4, generator=generator), torch.randn(12, 17, generator=generator)) for _ in range(steps)]


def train(twin, steps):
    """Losses of this rank, and every whole parameter at the end."""
    step, make = TWINS[twin]
    layers = [make(module) for module in stack()]
    optimizer = torch.optim.AdamW([layer.param for layer in layers], lr=1e-2)
    losses = []
    for x, y in data(steps):
        losses.append(step(layers, my_part(x), lambda output, y=y: F.mse_loss(output, my_part(y))))
        optimizer.step()
        optimizer.zero_grad()
    parameters = []
    for layer in layers:
        if isinstance(layer, ShardedLayer):
            layer.gather()
            layer.wait_for_gather()
        parameters += [p.detach().clone() for p in layer.params]
    return losses, parameters


def train_in_one_process(steps):
    model = nn.Sequential(*stack())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in data(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, list(model.parameters())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_twins_are_equal_bit_by_bit_and_train_as_one_process(ranks, world_size):
    """On three ranks and more gloo adds up an all-reduce in another order than a reduce-scatter."""

    def run():
        expected, plain = train_in_one_process(5)
        losses, parameters = train("fsdp", 5)
        of_overlapped, of_ddp = train("overlapped", 5), train("ddp", 5)
        assert of_overlapped[0] == losses
        assert all(map(torch.equal, of_overlapped[1], parameters))
        for of_it in (parameters, of_ddp[1]):
            for a, b in zip(of_it, plain, strict=True):
                torch.testing.assert_close(a, b.detach(), **AFTER_ADAMW)
        return [[mean_over_ranks(loss) for loss in of_it] for of_it in (losses, of_ddp[0])], expected

    for of_twins, expected in ranks(world_size, run):
        for losses in of_twins:
            assert losses == pytest.approx(expected, rel=1e-6)
            assert losses[-1] < losses[0]


def step_of(ranks, twin):
    """What a rank did, in order, and the most bytes of whole parameters that it had."""

    def run():
        step, make = TWINS[twin]
        layers = [make(module) for module in stack()]
        numbers = {layer.whole.numel(): i for i, layer in enumerate(layers)}
        log, bytes_of_whole = [], []

        def note(what):
            log.append(what)
            bytes_of_whole.append(sum(layer.whole.untyped_storage().nbytes() for layer in layers))

        def collective(name, buffer):
            original = getattr(dist, name)

            def issue(*args, **kwargs):
                number = numbers[args[buffer].numel()]
                note(f"{name}({number})")
                work = original(*args, **kwargs)

                class Work:
                    def wait(self):
                        note(f"wait({number})")
                        work.wait()

                return Work()

            return patch.object(dist, name, issue)

        def compute(name):
            original = getattr(Layer, name)

            def run(layer, *args):
                note(f"{name}({numbers[layer.whole.numel()]})")
                return original(layer, *args)

            return patch.object(Layer, name, run)

        with (
            collective("all_gather_into_tensor", 0), collective("reduce_scatter_tensor", 1),
            collective("all_reduce", 0), compute("forward"), compute("backward"),
        ):  # fmt: skip
            step(layers, torch.randn(2, 4), lambda output: output.sum())
        return log, max(bytes_of_whole), bytes_of_whole[-1]

    (one, other) = ranks(2, run)
    assert one == other
    return one


def test_ddp_reduces_each_layer_after_its_backward(ranks):
    log, *_ = step_of(ranks, "ddp")
    assert log == [
        "forward(0)", "forward(1)", "forward(2)",
        "backward(2)", "all_reduce(2)", "wait(2)",
        "backward(1)", "all_reduce(1)", "wait(1)",
        "backward(0)", "all_reduce(0)", "wait(0)",
    ]  # fmt: skip


def test_fsdp_issues_a_collective_only_to_wait_for_it(ranks):
    log, *_ = step_of(ranks, "fsdp")
    assert log == [
        "all_gather_into_tensor(0)", "wait(0)", "forward(0)",
        "all_gather_into_tensor(1)", "wait(1)", "forward(1)",
        "all_gather_into_tensor(2)", "wait(2)", "forward(2)",
        "all_gather_into_tensor(2)", "wait(2)", "backward(2)", "reduce_scatter_tensor(2)", "wait(2)",
        "all_gather_into_tensor(1)", "wait(1)", "backward(1)", "reduce_scatter_tensor(1)", "wait(1)",
        "all_gather_into_tensor(0)", "wait(0)", "backward(0)", "reduce_scatter_tensor(0)", "wait(0)",
    ]  # fmt: skip


def test_overlapped_issues_the_same_and_computes_before_it_waits(ranks):
    log, *_ = step_of(ranks, "overlapped")
    assert log == [
        "all_gather_into_tensor(0)", "wait(0)",
        "all_gather_into_tensor(1)", "forward(0)", "wait(1)",
        "all_gather_into_tensor(2)", "forward(1)", "wait(2)",
        "forward(2)",
        "all_gather_into_tensor(2)", "wait(2)",
        "all_gather_into_tensor(1)", "backward(2)", "reduce_scatter_tensor(2)", "wait(1)",
        "all_gather_into_tensor(0)", "backward(1)", "wait(2)", "reduce_scatter_tensor(1)", "wait(0)",
        "backward(0)", "wait(1)", "reduce_scatter_tensor(0)",
        "wait(0)",
    ]  # fmt: skip


def test_how_much_of_the_parameters_has_memory(ranks):
    whole = [4 * 2 * -(-n // 2) for n in (4 * 7 + 7, 7 * 15 + 15, 15 * 17 + 17)]
    assert {twin: step_of(ranks, twin)[1:] for twin in TWINS} == {
        "ddp": (sum(whole), sum(whole)),
        "fsdp": (whole[2], 0),
        "overlapped": (whole[1] + whole[2], 0),
    }


@pytest.mark.parametrize(("before", "after"), [(ddp, fsdp), (fsdp, overlapped)])
def test_lines_that_a_twin_adds_are_marked_and_no_others(before, after):
    def body(twin):
        code = inspect.getsource(twin).split('"""')[2]
        return [line.rstrip() for line in code.splitlines() if line.strip()]

    def unmarked(lines):
        return [line.split("  #")[0] for line in lines]

    first, second = body(before), body(after)
    added = [
        second[j]
        for tag, _, _, j1, j2 in difflib.SequenceMatcher(None, unmarked(first), unmarked(second)).get_opcodes()
        for j in range(j1, j2)
        if tag != "equal"
    ]
    assert added
    assert all("# <--" in line for line in added), added


def test_integer_inputs_and_accumulation(ranks):
    def run():
        torch.manual_seed(0)
        modules = [nn.Embedding(17, 5), nn.Linear(5, 3)]
        layers = [ShardedLayer(module) for module in modules]
        ids = torch.arange(12) % 17
        for _ in range(2):
            overlapped(layers, my_part(ids), lambda output: output.pow(2).mean())
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Embedding(17, 5), nn.Linear(5, 3))
        (2 * plain(ids).pow(2).mean()).backward()
        n = layers[1].param.numel()
        flat = torch.cat([p.grad.flatten() for p in plain[1].parameters()])
        torch.testing.assert_close(layers[1].param.grad, flat[n * dist.get_rank() :][:n])

    ranks(3, run)


def test_errors_say_what_is_wrong(ranks):
    def run():
        with pytest.raises(ValueError, match=r"parameters of one dtype.*float64"):
            Layer(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64)))
        with pytest.raises(ValueError, match="none"):
            Layer(nn.ReLU())

    ranks(1, run)
