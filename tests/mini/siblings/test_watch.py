"""Compute in the timeline, for modules that know nothing of it."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_sim.mini.siblings import watch
from fsdp_sim.timeline import RECORDER, Memory, Phase
from tests.mini.models import Toy, Transformer, batches, token_loss
from tests.mini.siblings.training import labels


def record(run):
    RECORDER.start(0)
    run()
    return RECORDER.stop()


FORWARD = ["FWD root", "FWD layers.0", "FWD layers.1", "FWD root"]
BACKWARD = ["BWD root", "BWD layers.1", "BWD layers.0", "BWD root"]


@pytest.mark.parametrize("grad_of_input", [False, True])
def test_each_block_is_a_piece_and_the_root_is_what_is_before_and_after(grad_of_input):
    model = watch(Toy(2))
    events = record(lambda: model(torch.randn(4, 4, requires_grad=grad_of_input)).sum().backward())
    assert labels(events) == FORWARD + BACKWARD
    assert [e.phase for e in events if e.op == "BWD"] == [Phase.BACKWARD] * 4


def test_pieces_follow_each_other():
    model = watch(Transformer(2))
    pieces = [e for e in record(lambda: token_loss(model, batches(1)[0]).backward()) if not e.is_memory]
    assert labels(pieces) == FORWARD + BACKWARD
    for before, after in pairwise(pieces):
        assert before.start_s <= before.end_s <= after.start_s


def test_a_module_without_blocks_is_one_piece():
    model = watch(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert labels(record(lambda: model(torch.ones(1, 2)).sum().backward())) == ["FWD root", "BWD root"]


def test_the_last_blocks_output_may_be_the_roots():
    class Headless(Toy):
        def forward(self, x):
            return self.layers[1](self.layers[0](self.embed(x)))

    model = watch(Headless(2))
    assert labels(record(lambda: model(torch.ones(1, 4)).sum().backward())) == [*FORWARD, *BACKWARD[1:]]


def test_a_recomputed_forward_is_part_of_the_backward():
    class Checkpointed(Toy):
        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.head(x)

    model = watch(Checkpointed(2))
    assert labels(record(lambda: model(torch.ones(1, 4)).sum().backward())) == FORWARD + BACKWARD


def test_steps_and_micro_batches_count_themselves_and_parameters_are_written_once_per_recording():
    model = watch(Toy(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        for _ in range(2):
            for _ in range(2):
                model(torch.ones(1, 4)).sum().backward()
            optimizer.step()

    for _ in range(2):
        events = record(train)
        assert [(e.step, e.micro_batch) for e in events if e.label == "BWD layers.0"] == [
            (0, 0),
            (0, 1),
            (1, 0),
            (1, 1),
        ]
        assert [e.bytes for e in events if e.category is Memory.UNSHARDED] == [3 * 16 * 4]


def test_a_failed_forward_leaves_nothing_open():
    model = watch(Toy(2))

    def fail():
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(1, 3))

    record(fail)
    assert labels(record(lambda: model(torch.ones(1, 4)).sum().backward())) == FORWARD + BACKWARD


def test_watching_twice_records_once():
    model = watch(watch(Toy(2)))
    assert labels(record(lambda: model(torch.ones(1, 4)).sum().backward())) == FORWARD + BACKWARD
