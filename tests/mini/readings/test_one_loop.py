"""The twins: equal numbers, bit by bit, and the differences in order that each of them claims."""

import difflib
import inspect
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fsdp_sim.mini.readings.one_loop import TWINS, Layer, backward_prefetch, forward_prefetch, naive
from fsdp_sim.ranks import Network
from fsdp_sim.ranks import run as run_ranks
from fsdp_sim.timeline import RECORDER, Lane, Memory
from tests.mini.models import mean_over_ranks, my_part
from tests.mini.siblings.training import AFTER_ADAMW, counts, labels, record, timeline_of, waited_for

N = 3


def stack():
    torch.manual_seed(0)
    rows = (4, 7, 15, 17)
    return [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(rows)]


def make_layers():
    return [Layer(module, str(i)) for i, module in enumerate(stack())]


def data(steps):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(12, 4, generator=generator), torch.randn(12, 17, generator=generator)) for _ in range(steps)]


def train(twin, steps):
    """Losses of this rank, and every whole parameter at the end."""
    layers = make_layers()
    optimizer = torch.optim.AdamW([layer.shard for layer in layers], lr=1e-2)
    losses = []
    for x, y in data(steps):
        losses.append(twin(layers, my_part(x), lambda output, y=y: F.mse_loss(output, my_part(y))))
        optimizer.step()
        optimizer.zero_grad()
    parameters = []
    for layer in layers:
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
    def run():
        expected, plain = train_in_one_process(5)
        of_twins = [train(twin, 5) for twin in TWINS.values()]
        first_losses, first_parameters = of_twins[0]
        for losses, parameters in of_twins[1:]:
            assert losses == first_losses
            assert all(map(torch.equal, parameters, first_parameters))
        for a, b in zip(first_parameters, plain, strict=True):
            torch.testing.assert_close(a, b.detach(), **AFTER_ADAMW)
        return [mean_over_ranks(loss) for loss in first_losses], expected

    for losses, expected in ranks(world_size, run):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert losses[-1] < losses[0]


def events_of(ranks, twin):
    def run():
        layers = make_layers()
        return record(lambda: twin(layers, torch.randn(2, 4), lambda output: output.sum()))

    return ranks(2, run)


def test_naive_issues_a_collective_only_to_wait_for_it(ranks):
    for events in events_of(ranks, naive):
        assert labels(events) == [
            "ALL_GATHER(0)", "FWD 0", "ALL_GATHER(1)", "FWD 1", "ALL_GATHER(2)", "FWD 2",
            "ALL_GATHER(2)", "BWD 2", "REDUCE_SCATTER(2)",
            "ALL_GATHER(1)", "BWD 1", "REDUCE_SCATTER(1)",
            "ALL_GATHER(0)", "BWD 0", "REDUCE_SCATTER(0)",
        ]  # fmt: skip
        waits = waited_for(events)
        assert waits["FWD 1"] == waits["BWD 1"] == ["ALL_GATHER(1)"]
        assert waits["ALL_GATHER(1)"] == ["REDUCE_SCATTER(2)"], "in backward"


def test_forward_prefetch_issues_a_gather_before_the_forward_of_the_layer_before(ranks):
    for events in events_of(ranks, forward_prefetch):
        assert labels(events) == [
            "ALL_GATHER(0)", "ALL_GATHER(1)", "FWD 0", "ALL_GATHER(2)", "FWD 1", "FWD 2",
            "ALL_GATHER(2)", "BWD 2", "REDUCE_SCATTER(2)",
            "ALL_GATHER(1)", "BWD 1", "REDUCE_SCATTER(1)",
            "ALL_GATHER(0)", "BWD 0", "REDUCE_SCATTER(0)",
        ]  # fmt: skip
        assert waited_for(events)["FWD 1"] == ["ALL_GATHER(1)"]


def test_backward_prefetch_waits_for_a_reduce_scatter_one_layer_later(ranks):
    for events in events_of(ranks, backward_prefetch):
        assert labels(events) == [
            "ALL_GATHER(0)", "ALL_GATHER(1)", "FWD 0", "ALL_GATHER(2)", "FWD 1", "FWD 2",
            "ALL_GATHER(2)", "ALL_GATHER(1)", "BWD 2", "REDUCE_SCATTER(2)",
            "ALL_GATHER(0)", "BWD 1", "REDUCE_SCATTER(1)",
            "BWD 0", "REDUCE_SCATTER(0)",
        ]  # fmt: skip
        waits = waited_for(events)
        assert waits["BWD 1"] == ["ALL_GATHER(1)"], "not the reduce-scatter of layer 2, which it runs beside"
        assert waits["REDUCE_SCATTER(1)"] == ["REDUCE_SCATTER(2)"]
        assert waits["REDUCE_SCATTER(0)"] == ["REDUCE_SCATTER(1)"]


def test_all_send_the_same(ranks):
    expected = {"ALL_GATHER": 2 * N, "REDUCE_SCATTER": N}
    for twin in TWINS.values():
        assert [counts(events) for events in events_of(ranks, twin)] == [expected] * 2

    def run():
        return counts(record(lambda: naive(make_layers(), torch.randn(2, 4), lambda output: output.sum())))

    assert ranks(1, run) == [{}]


def test_what_each_pays_in_memory(ranks):
    """Bytes of whole parameters and of whole gradients at the peak: W * n elements of the largest neighbours."""
    whole = [4 * 2 * -(-n // 2) for n in (4 * 7 + 7, 7 * 15 + 15, 15 * 17 + 17)]
    peaks = {}
    for name, twin in TWINS.items():
        for rank, events in enumerate(events_of(ranks, twin)):
            _, live = timeline_of(events).live_bytes(rank)
            peaks[name] = int(live[Memory.UNSHARDED].max()), int(live[Memory.RS_INPUT].max())
            assert live[Memory.UNSHARDED][-1] == live[Memory.RS_INPUT][-1] == live[Memory.UNSHARDED_GRAD][-1] == 0
    assert peaks == {
        "naive": (whole[2], whole[2]),
        "forward_prefetch": (whole[1] + whole[2], whole[2]),
        "backward_prefetch": (whole[1] + whole[2], whole[2]),
    }


def test_on_a_slow_network_the_naive_one_never_computes_while_it_sends_and_the_others_do():
    """What began to compute while a collective was under way, on either rank."""

    def compare():
        torch.set_num_threads(1)
        beside = {}
        for name, twin in TWINS.items():
            layers = make_layers()
            first = len(RECORDER.events())
            twin(layers, torch.randn(2, 4), lambda output: output.sum())
            ops = [e for e in RECORDER.events()[first:] if not e.is_memory]
            beside[name] = {
                (str(c.op), str(s.op))
                for c in ops
                for s in ops
                if c.lane is Lane.COMPUTE and s.lane is not Lane.COMPUTE and s.issue_s <= c.start_s < s.end_s
            }
        return beside

    slow = Network(bandwidth_gbps=1, latency_us=50_000)
    results = run_ranks(compare, 2, network=slow, progress=False, show_output=False)
    beside = {name: results[0][name] | results[1][name] for name in TWINS}
    assert beside["naive"] == set()
    assert beside["forward_prefetch"] == {("FWD", "ALL_GATHER")}
    assert beside["backward_prefetch"] == {
        ("FWD", "ALL_GATHER"),
        ("BWD", "ALL_GATHER"),
        ("BWD", "REDUCE_SCATTER"),
    }


@pytest.mark.parametrize(("before", "after"), [(naive, forward_prefetch), (forward_prefetch, backward_prefetch)])
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
        layers = [Layer(module, str(i)) for i, module in enumerate(modules)]
        ids = torch.arange(12) % 17
        for _ in range(2):
            backward_prefetch(layers, my_part(ids), lambda output: output.pow(2).mean())
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Embedding(17, 5), nn.Linear(5, 3))
        (2 * plain(ids).pow(2).mean()).backward()
        n = layers[1].shard.numel()
        flat = torch.cat([p.grad.flatten() for p in plain[1].parameters()])
        torch.testing.assert_close(layers[1].shard.grad, flat[n * dist.get_rank() :][:n])

    ranks(3, run)


def test_errors_say_what_is_wrong(ranks):
    def run():
        with pytest.raises(ValueError, match="layer 'x' must have parameters of one dtype"):
            Layer(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64)), "x")

    ranks(1, run)
