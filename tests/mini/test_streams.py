"""The shared context, on a device handle that writes down what is asked of it."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from fsdp_sim.mini import CPUOffloadPolicy, MixedPrecisionPolicy, TrainingState
from fsdp_sim.mini.collectives import AllGatherResult
from fsdp_sim.mini.comm_context import AllGatherState, FSDPCommContext
from tests.mini.models import Transformer, batches, my_part, shard, token_loss


class Handle:
    """`torch.cuda`'s interface to streams."""

    def __init__(self):
        self.made = []

    def Stream(self, priority=0):  # noqa: N802  torch's name
        self.made.append(Stream(f"stream {len(self.made)}", priority))
        return self.made[-1]

    def current_stream(self):
        return COMPUTE


class Stream:
    def __init__(self, name, priority=0):
        self.name, self.priority, self.waited = name, priority, []

    def wait_event(self, event):
        self.waited.append(event)


COMPUTE = Stream("compute")


def on_a_device():
    ctx = FSDPCommContext(torch.device("cpu"))
    ctx.device_handle, ctx.on_cpu = Handle(), False
    ctx.lazy_init()
    return ctx


def test_on_cpu_there_are_no_streams_to_wait_for():
    ctx = FSDPCommContext(torch.device("cpu"))
    assert ctx.on_cpu
    ctx.lazy_init()
    assert isinstance(ctx.all_gather_stream, torch.cpu.Stream)


def test_communication_goes_before_compute_but_the_all_reduce():
    ctx = on_a_device()
    assert [s.priority for s in ctx.device_handle.made] == [-1, -1, -1, 0]
    before = ctx.all_gather_stream
    ctx.lazy_init()
    assert ctx.all_gather_stream is before, "two roots may share a context"


def test_gathers_of_a_step_have_streams_of_their_own_and_others_the_current_one():
    ctx = on_a_device()
    own = (ctx.all_gather_copy_in_stream, ctx.all_gather_stream)
    assert ctx.get_all_gather_streams(False, TrainingState.FORWARD) == own
    assert ctx.get_all_gather_streams(False, TrainingState.PRE_BACKWARD) == own
    assert ctx.get_all_gather_streams(True, TrainingState.FORWARD) == (COMPUTE, COMPUTE)
    assert ctx.get_all_gather_streams(False, TrainingState.IDLE) == (COMPUTE, COMPUTE)


def test_letting_go_of_a_gathered_buffer_orders_later_copy_ins_behind_its_copy_out():
    ctx = on_a_device()
    state = AllGatherState(result=None, event="copied out")
    ctx.all_gather_state = state
    assert ctx.release_all_gather_state() is state
    assert ctx.all_gather_copy_in_stream.waited == ctx.all_gather_stream.waited == ["copied out"]
    assert (ctx.all_gather_state, ctx.release_all_gather_state()) == (None, None)


def test_a_collective_is_waited_for_by_event_on_a_device_and_by_work_on_cpu():
    class Work:
        waits = 0

        def wait(self):
            self.waits += 1

    def under_way(work, event):
        return AllGatherResult(torch.empty(4), [], [], work, event, async_op=False)

    stream, work = Stream("compute"), Work()
    under_way(None, "gathered").wait(stream)
    assert (work.waits, stream.waited) == (0, ["gathered"])
    under_way(work, None).wait(stream)
    assert (work.waits, stream.waited) == (1, ["gathered"])


OPTIONS = {
    "default": {},
    "keep": {"reshard_after_forward": False},
    "a slice": {"reshard_after_forward": 2},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "fp16": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)},
    "hybrid": {"mesh": (2, 2)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def parameters_after_training(options, on_cpu):
    """With the code path of a device, whose streams do nothing here, or with that of the CPU."""
    if "mesh" in options:
        options = options | {"mesh": init_device_mesh("cpu", options["mesh"], mesh_dim_names=("replicate", "shard"))}
    names = ("Stream", "Event", "stream", "current_stream")
    device = SimpleNamespace(**{name: getattr(torch.cpu, name) for name in names})  # torch.cpu, but not itself
    with patch("fsdp_sim.mini.streams._get_device_handle", lambda _: torch.cpu if on_cpu else device):
        torch.manual_seed(0)
        model = shard(Transformer(), **options)
    assert model._get_fsdp_state()._comm_ctx.on_cpu is on_cpu
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i, batch in enumerate(batches(4)):
        model.set_requires_gradient_sync(i != 1)
        token_loss(model, my_part(batch)).backward()
        if i != 1:
            optimizer.step()
            optimizer.zero_grad()
    return [p.full_tensor().detach() for p in model.parameters()]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_device_computes_what_the_cpu_does(ranks, name):
    """On a device the sharded gradients are handed out behind the reduce-scatter, on CPU when it is waited for."""

    def run():
        ours, cpus = (parameters_after_training(OPTIONS[name], on_cpu) for on_cpu in (False, True))
        return all(torch.equal(a, b) for a, b in zip(ours, cpus, strict=True))

    assert ranks(4, run) == [True] * 4
