"""What a block is for, from the calls that allocated and freed it: the rules one by one."""

from __future__ import annotations

import inspect

import pytest
import torch.distributed.fsdp._flat_param as flat_param
import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param
import torch.distributed.fsdp._fully_shard._fsdp_param_group as fsdp_param_group
import torch.distributed.fsdp._fully_shard._fsdp_state as fsdp_state
import torch.distributed.fsdp._runtime_utils as runtime_utils
import torch.nn.parallel.distributed as ddp

from fsdp_sim.mini import accumulation, modules, param, precision, state
from fsdp_sim.mini import collectives as mini_collectives
from fsdp_sim.timeline import Memory, Phase
from fsdp_sim.timeline.snapshot import (
    ALLOCATES,
    INPUT_FIRST,
    REDUCES,
    AllocationMoment,
    Block,
    Frame,
    phase_of,
    purposes,
)

MODULE = Frame("/lib/torch/nn/modules/module.py", 1776, "_call_impl")
USER = Frame("/home/train.py", 5, "forward")
ENGINE = Frame("/lib/torch/autograd/graph.py", 824, "_engine_run_backward")
OPTIM = Frame("/lib/torch/optim/optimizer.py", 480, "wrapper")
CHECKPOINT = Frame("/lib/torch/utils/checkpoint.py", 495, "checkpoint")
AGAIN = Frame("/lib/torch/utils/checkpoint.py", 1110, "unpack_hook")
REDUCE = Frame("/lib/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 520, "foreach_reduce")
FORWARD, BACKWARD, STEP, ELSEWHERE = (USER, MODULE), (ENGINE,), (OPTIM,), (USER,)


def fsdp(name, line=1, file="/lib/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"):
    return Frame(file, line, name)


def block(born, died=None):
    return Block(8, AllocationMoment(1, 0.1, born), None if died is None else AllocationMoment(2, 0.2, died))


def purpose(born, died=None):
    return purposes([block(born, died)])[0]


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        (FORWARD, Phase.FORWARD),
        (BACKWARD, Phase.BACKWARD),
        ((MODULE, AGAIN, ENGINE), Phase.BACKWARD),
        (STEP, Phase.OPTIMIZER),
        (ELSEWHERE, Phase.NONE),
        ((), Phase.BACKWARD),  # autograd's thread for a GPU, recorded with Python's calls alone
        ((Frame("??", 0, "torch::autograd::Engine::thread_init(int, ...)"),), Phase.BACKWARD),  # with those of C++
        ((Frame("/home/train.py", 9, "backward"),), Phase.NONE),  # somebody else's function of that name
    ],
)
def test_the_phase_of_a_call(frames, phase):
    assert phase_of(frames) is phase


@pytest.mark.parametrize(
    ("born", "died", "category"),
    [
        (FORWARD, FORWARD, Memory.TEMPORARY),
        (FORWARD, BACKWARD, Memory.ACTIVATION),
        (FORWARD, (), Memory.ACTIVATION),
        ((USER, CHECKPOINT, MODULE), BACKWARD, Memory.CHECKPOINT),
        ((USER, CHECKPOINT, MODULE), FORWARD, Memory.TEMPORARY),
        ((USER, MODULE, AGAIN, ENGINE), BACKWARD, Memory.ACTIVATION),
        ((USER, MODULE, AGAIN, ENGINE), (USER, MODULE, AGAIN, ENGINE), Memory.TEMPORARY),
        (BACKWARD, BACKWARD, Memory.TEMPORARY),
        (BACKWARD, (REDUCE, ENGINE), Memory.UNSHARDED_GRAD),
        (BACKWARD, STEP, Memory.UNSHARDED_GRAD),  # zero_grad
        (BACKWARD, None, Memory.UNSHARDED_GRAD),
        (STEP, STEP, Memory.TEMPORARY),
        (STEP, None, Memory.OPTIMIZER),
        (ELSEWHERE, ELSEWHERE, Memory.TEMPORARY),
        (ELSEWHERE, None, Memory.NONE),
    ],
)
def test_of_compute_the_end_tells(born, died, category):
    assert purpose(born, died) is category


@pytest.mark.parametrize(
    ("frame", "category"),
    [
        (Frame("/lib/torch/nn/functional.py", 3, "cross_entropy"), Memory.LOGITS),
        (Frame("", 0, "op::aten._log_softmax.default"), Memory.LOGITS),
        (Frame("??", 0, "at::_ops::nll_loss_forward::call"), Memory.LOGITS),
        (Frame("/home/train.py", 3, "cross_entropy"), Memory.ACTIVATION),
    ],
)
def test_the_loss_is_torchs(frame, category):
    assert purpose((frame, *FORWARD), BACKWARD) is category


@pytest.mark.parametrize(
    ("name", "died", "category"),
    [
        ("foreach_all_gather", FORWARD, Memory.AG_OUTPUT),
        ("foreach_all_gather_copy_out", FORWARD, Memory.UNSHARDED),
        ("foreach_all_gather_copy_out", (fsdp("foreach_all_gather_copy_out"), MODULE), Memory.TEMPORARY),
        ("to_sharded_post_forward", BACKWARD, Memory.SHARDED),
        ("_alloc_padded_unsharded_flat_param", BACKWARD, Memory.UNSHARDED),
        ("_use_low_precision_shard", FORWARD, Memory.TEMPORARY),
    ],
)
def test_a_buffer_of_fsdp_is_known_by_who_allocates_it(name, died, category):
    assert purpose((fsdp(name), MODULE), died) is category
    assert purpose((fsdp(name, file="/home/train.py"), MODULE), FORWARD) is Memory.TEMPORARY


def test_the_innermost_function_counts():
    cast = (fsdp("_get_param_all_gather_inputs"), fsdp("foreach_all_gather"), MODULE)
    assert purpose(cast, FORWARD) is Memory.TEMPORARY


def test_the_input_of_the_reduce_scatter_is_allocated_first():
    """Two units: the line decides, not how long a buffer lives or how large it is."""
    blocks = [block((fsdp("foreach_reduce", line), ENGINE), BACKWARD) for line in (410, 422, 460, 410, 422)]
    first, output = Memory.RS_INPUT, Memory.RS_OUTPUT
    assert purposes(blocks) == [first, output, output, first, output]


def test_fsdp1_pads_into_an_input():
    tensors = fsdp("_get_reduce_scatter_tensors", file="/lib/torch/distributed/fsdp/_runtime_utils.py")
    pad = Frame("/lib/torch/nn/functional.py", 5000, "pad")
    assert purposes([block((pad, tensors, ENGINE), BACKWARD), block((tensors, ENGINE), STEP)]) == [
        Memory.RS_INPUT, Memory.RS_OUTPUT,
    ]  # fmt: skip


def test_what_was_there_before_is_what_it_was():
    assert purposes([Block(8, AllocationMoment(0, 0.0), None, Memory.OPTIMIZER)]) == [Memory.OPTIMIZER]


def test_every_function_named_exists():
    """In this torch or in the mini-FSDP: a function with another name would be seen as somebody else's."""
    sources = "".join(
        inspect.getsource(module)
        for module in (
            flat_param, runtime_utils, collectives, fsdp_param, fsdp_param_group, fsdp_state, ddp,
            accumulation, modules, param, precision, state, mini_collectives,
        )
    )  # fmt: skip
    names = {*ALLOCATES, *INPUT_FIRST, *REDUCES}
    assert {name for name in names if f"def {name}(" not in sources} == set()
