"""The handle of a collective."""

import time

import torch
import torch.distributed as dist

from fsdp_sim.ranks import run


def test_an_output_is_its_owners_once_it_was_waited_for():
    """gloo writes a reduce-scatter's output at every wait, and a thread of ours waits too: it must not come late."""

    def changed_afterwards():
        name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
        outputs = []
        for _ in range(200):
            output = torch.empty(20_000)
            getattr(dist, name)(output, torch.ones(20_000 * dist.get_world_size()))
            output.zero_()
            outputs.append(output)
        time.sleep(0.2)
        return sum(int(output.any()) for output in outputs)

    assert list(run(changed_afterwards, 4, progress=False)) == [0] * 4
