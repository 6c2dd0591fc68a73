"""What a group holds when, and what it does to gradients."""

import time
import weakref

import torch
from torch import nn

from fsdp_sim.mini import TrainingState, fully_shard
from tests.mini.models import Matrix, Toy, shard


def group_of(module):
    return module._get_fsdp_state()._fsdp_param_group


def stays(reference):
    """Whether the object lives on. gloo's threads may hold a buffer a moment longer than the caller that waited."""
    for _ in range(300):
        if reference() is None:
            return False
        time.sleep(0.01)
    return True


def test_a_gathered_buffer_outlives_its_unit_in_forward_by_one(ranks):
    """[Note: who keeps G alive], seen through a weak reference."""

    def run():
        model = shard(Toy())
        model(torch.ones(2, 4)).sum().backward()  # lazy init
        comm, seen = model._get_fsdp_state()._comm_ctx, []

        def after_layer_0(*_):
            seen.append(weakref.ref(comm.all_gather_state.result.output.untyped_storage()))
            seen.append(seen[0]() is not None)

        model.layers[0].register_forward_hook(after_layer_0)
        model.layers[1].register_forward_pre_hook(lambda *_: seen.append(stays(seen[0])))  # after its copy-out
        model(torch.ones(2, 4))
        return seen[1:], comm.all_gather_state

    assert ranks(2, run) == [([True, False], None)] * 2


def test_one_reduce_scatter_input_at_a_time(ranks):
    """[Note: who keeps I alive], with K = 1: the one before is waited for, and gone, before the next is issued."""

    def run():
        model = shard(Toy())
        states, under_way = model._get_fsdp_state()._comm_ctx.reduce_scatter_states, []
        for layer in model.layers:  # a sharded gradient is there when its reduce-scatter has been waited for
            layer.w.register_post_accumulate_grad_hook(lambda _: under_way.append(len(states)))
            layer.register_full_backward_pre_hook(lambda *_: under_way.append(f"BWD {len(states)}"))
        model(torch.ones(2, 4)).sum().backward()
        return under_way, len(states)

    assert ranks(2, run) == [(["BWD 0", "BWD 1", 0, "BWD 1", 0, 0], 0)] * 2


def test_a_unit_has_one_reduction_under_way_however_many_inputs_there_may_be(ranks):
    """Its last one is waited for before the next is issued, where backward did not end with a wait for all."""

    def run():
        model, arrived = shard(Toy()), []
        model.set_reduce_scatter_max_input_buffers(20)
        for p in model.parameters():  # five in four units: the hook fires when a reduction has been waited for
            p.register_post_accumulate_grad_hook(lambda p: arrived.append(p))
        found = []
        for last in (False, False, True):
            model.set_is_last_backward(last)
            model(torch.ones(2, 4)).sum().backward()
            found.append(len(arrived))
        return found

    assert ranks(2, run) == [[0, 5, 15]] * 2


def test_gradients_arrive_sharded_and_hooks_fire_once_per_parameter(ranks):
    def run():
        model, fired = shard(Toy()), []
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, n=name: fired.append((n, tuple(p.grad.to_local().shape))))
        model(torch.ones(2, 4)).sum().backward()
        return fired

    layers = [(f"layers.{i}.w", (2, 4)) for i in (2, 1, 0)]
    assert ranks(2, run) == [[*layers, ("embed.w", (2, 4)), ("head.w", (2, 4))]] * 2


def test_parameters_without_a_gradient_are_left_out_of_the_reduce(ranks):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = Matrix(), Matrix()

        def forward(self, x):
            return self.used(x)

    def run():
        model = fully_shard(Half())
        model(torch.ones(2, 4)).sum().backward()
        return model.used.w.grad is not None, model.spare.w.grad is None

    assert ranks(2, run) == [(True, True)] * 2


def test_states_over_a_step(ranks):
    def run():
        model = shard(Toy())
        group, states = group_of(model.layers[1]), []

        def note(*_):
            states.append((group._training_state, group.is_unsharded))

        model.layers[1].register_forward_pre_hook(note)
        model.layers[2].register_forward_pre_hook(note)
        model.layers[1].w.register_post_accumulate_grad_hook(note)
        out = model(torch.ones(2, 4))
        out.sum().backward()
        note()
        return states

    in_forward, after_forward = (TrainingState.FORWARD, True), (TrainingState.IDLE, False)
    reduced, after_backward = (TrainingState.POST_BACKWARD, False), (TrainingState.IDLE, False)
    assert ranks(2, run) == [[in_forward, after_forward, reduced, after_backward]] * 2
