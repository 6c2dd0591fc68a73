"""What a group holds when."""

from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_sim.mini import versions
from tests.mini.models import Toy, shard


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


def test_whole_gradients_are_gone_when_their_reduction_is_issued(ranks):
    """They were copied; else a unit's gradients would be there twice while they travel."""

    def run():
        model, grads, alive = shard(Toy(1)), [], []
        model(torch.ones(2, 4)).sum().backward()
        (param,) = model.layers[0]._get_fsdp_state()._fsdp_param_group.fsdp_params
        param.unsharded_param.register_post_accumulate_grad_hook(
            lambda p: grads.append(StorageWeakRef(p.grad.untyped_storage()))
        )
        issue = getattr(dist, versions.REDUCE_SCATTER)

        def look(*args, **kwargs):
            alive.extend(not grad.expired() for grad in grads)
            return issue(*args, **kwargs)

        with patch.object(dist, versions.REDUCE_SCATTER, look):
            model(torch.ones(2, 4)).sum().backward()
        return alive

    assert ranks(2, run) == [[False, False]] * 2  # at the layer's reduction and at the root's
