"""`verify` accepts torch's programs and rejects each way to break one."""

from dataclasses import replace

import pytest

from fsdp_sim.schedule import Kind, ProgramError, build, toy, verify
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Lane, Memory, Op

PROGRAM = build(toy(3), Plan(), world_size=8, steps=2)


def without(drop):
    """The program less the instructions for which ``drop`` says yes."""
    kept = tuple(i for i in PROGRAM if not drop(i))
    assert len(kept) < len(PROGRAM)
    return replace(PROGRAM, instructions=kept)


def test_what_torch_issues_is_right():
    verify(PROGRAM)


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        (
            lambda i: i.kind is Kind.WAIT and (i.lane, i.event_lane) == (Lane.COMPUTE, Lane.ALL_GATHER),
            r"ag_copy_out\(root\) does not wait for ALL_GATHER\(root\) n=8 on all_gather",
        ),
        (
            lambda i: i.kind is Kind.WAIT and i.lane is Lane.AG_COPY_IN,
            r"alloc ag_output\(.*\) does not wait for .* which used memory that this may be given",
        ),
        (
            lambda i: i.kind is Kind.WAIT_STREAM and (i.lane, i.other) == (Lane.ALL_GATHER, Lane.AG_COPY_IN),
            r"ALL_GATHER\(root\) n=8 does not wait for ag_copy_in\(root\)",
        ),
        (
            lambda i: i.kind is Kind.WAIT_STREAM and (i.lane, i.other) == (Lane.AG_COPY_IN, Lane.COMPUTE),
            r"step 1 .* ag_copy_in\(root\) does not wait for OPTIM on compute, which writes the shards",
        ),
        (
            lambda i: i.kind is Kind.WAIT_STREAM and i.lane is Lane.REDUCE_SCATTER,
            r"REDUCE_SCATTER\(layers.2\) .* does not wait for rs_copy_in\(layers.2\)",
        ),
        (
            lambda i: i.kind is Kind.WAIT and (i.lane, i.event_lane) == (Lane.COMPUTE, Lane.REDUCE_SCATTER),
            r"alloc .* does not wait for REDUCE_SCATTER\(layers.2\)",
        ),
        (
            lambda i: i.op is Op.AG_COPY_OUT and i.unit == "layers.1",
            r"forward: op FWD layers.1 reads unsharded\(layers.1\), which nothing has written",
        ),
        (
            lambda i: i.kind is Kind.ALLOC and i.category is Memory.RS_INPUT,
            r"rs_copy_in\(layers.2\) needs rs_input\(layers.2\), which is not allocated",
        ),
        (
            lambda i: i.kind is Kind.FREE and i.category is Memory.RS_OUTPUT,
            r"rs_output\(.*\) is still alive at the end",
        ),
        (lambda i: i.kind is Kind.RECORD, "waits for e1, which nothing has recorded"),
    ],
)
def test_a_program_that_lacks_something_is_an_error(drop, message):
    with pytest.raises(ProgramError, match=message):
        verify(without(drop))


def test_the_optimizer_must_wait_for_the_last_reduce_scatter():
    last = max(k for k, i in enumerate(PROGRAM) if i.op is Op.REDUCE_SCATTER and i.step == 0)
    tail = {k for k, i in enumerate(PROGRAM) if k > last and i.kind is Kind.WAIT and i.step == 0}
    broken = tuple(i for k, i in enumerate(PROGRAM) if k not in tail)
    with pytest.raises(ProgramError, match=r"OPTIM does not wait for REDUCE_SCATTER\(root\)"):
        verify(replace(PROGRAM, instructions=broken))


def test_freeing_twice_is_an_error():
    k = next(k for k, i in enumerate(PROGRAM) if i.kind is Kind.FREE and i.category is Memory.AG_OUTPUT)
    instructions = (*PROGRAM.instructions[: k + 1], PROGRAM.instructions[k], *PROGRAM.instructions[k + 1 :])
    with pytest.raises(ProgramError, match=r"free ag_output\(root\) needs ag_output\(root\), which is not allocated"):
        verify(replace(PROGRAM, instructions=instructions))


def test_freeing_the_weights_before_the_forward_is_an_error():
    items = list(PROGRAM.instructions)
    k = next(k for k, i in enumerate(items) if i.kind is Kind.FREE and i.category is Memory.UNSHARDED)
    forward = next(k for k, i in enumerate(items) if i.op is Op.FWD and i.unit == "layers.0")
    items.insert(forward, items.pop(k))
    with pytest.raises(ProgramError, match=r"FWD layers.0 needs unsharded\(layers.0\), which is not allocated"):
        verify(replace(PROGRAM, instructions=tuple(items)))
