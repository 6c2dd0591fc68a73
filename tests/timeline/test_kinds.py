"""Each operation has one lane, and the words are those of the recorded torch programs."""

import re
from pathlib import Path

import pytest

from fsdp_sim.timeline import COMM_LANES, Lane, Memory, Op, lane_of

RECORDINGS = Path(__file__).parents[1] / "schedule" / "recordings"


@pytest.mark.parametrize("op", Op)
def test_every_operation_has_a_lane(op: Op) -> None:
    assert lane_of(op) in Lane


def test_collectives_have_lanes_of_their_own() -> None:
    own = {op: lane_of(op) for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE)}
    assert own == {op: Lane(op.lower()) for op in own}
    assert set(own.values()) < COMM_LANES


@pytest.mark.parametrize("op", [Op.BROADCAST, Op.BARRIER, Op.SEND, Op.RECV, Op.OTHER])
def test_all_other_communication_shares_one(op: Op) -> None:
    assert lane_of(op) is Lane.OTHER_COMM


@pytest.mark.parametrize("op", [Op.FWD, Op.BWD, Op.OPTIM, Op.AG_COPY_OUT, Op.RS_COPY_IN, Op.ALLOC, Op.FREE])
def test_what_is_left_computes_but_the_copy_in_of_an_all_gather(op: Op) -> None:
    assert lane_of(op) is Lane.COMPUTE
    assert lane_of(Op.AG_COPY_IN) is Lane.AG_COPY_IN
    assert not COMM_LANES & {Lane.COMPUTE, Lane.AG_COPY_IN}


def test_the_recorded_torch_programs_use_these_words_and_lanes() -> None:
    others = ("fsdp1", "mixed")  # FSDP1's streams and casts: no producer of timelines tells them apart yet
    paths = [path for path in RECORDINGS.glob("*.txt") if not path.name.startswith(others)]
    recording = "\n".join(path.read_text() for path in paths)
    ops = set(re.findall(r"^op +(\w+) +(\w+)", recording, re.MULTILINE))
    assert ops
    for lane, word in ops:
        assert lane_of(Op(word)) is Lane(lane)
    buffers = set(re.findall(r"^(?:alloc|free) +.*?(\w+)\(", recording, re.MULTILINE))
    assert buffers
    assert buffers <= set(Memory)
