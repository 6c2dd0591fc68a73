"""Layers that are alike are played at once, with the times of those that are played one by one."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_sim.diagnose import RunCauses
from fsdp_sim.engine import Contention, run
from fsdp_sim.engine.dependencies import dependencies
from fsdp_sim.engine.kinds import kinds_of, stretches_of
from fsdp_sim.engine.repetition import Repetition
from fsdp_sim.schedule import Param, Unit, build
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Op, Phase
from tests.engine.programs import devices, plans


def model(kinds):
    """A root and a layer of each kind in turn; layers of one kind are alike."""
    root = Unit("root", (Param("embed", (8, 4)), Param("head", (8, 4))), segments=("embed", ..., "head"))
    layers = [Unit(f"layers.{n}", (Param("weight", (8 * (kind + 1), 4)),)) for n, kind in enumerate(kinds)]
    return [root, *layers], {f"layers.{n}": kind for n, kind in enumerate(kinds)}


def played(units, alike, plan, seconds, device="gpu", issue_s=0.0, launch_s=math.inf, at_once=True):
    """A step with contention, of which a layer's kind says what everything takes."""

    def of_kind(i):
        return seconds[i.op, alike.get(i.unit, 2)]

    def issued(i):
        return issue_s * (1 + alike.get(i.unit, 2)) if i.op in (Op.FWD, Op.BWD) else issue_s / 4

    return run(
        build(units, plan, 4), of_kind, device=device, issue_s=issued, launch_s=launch_s,
        contention=Contention({Op.FWD: 1.2, Op.BWD: 1.4}, 1.1, 0.6), alike=alike if at_once else None,
    )  # fmt: skip


patterns = st.one_of(
    st.integers(8, 16).map(lambda n: [0] * n),
    st.integers(7, 9).map(lambda n: [0, 1] * n),
    st.tuples(st.integers(7, 9), st.integers(1, 8)).map(lambda n: [0] * n[0] + [1] * n[1]),
)
seconds = st.fixed_dictionaries(
    {(op, kind): st.floats(0.01, 1) for op in Op for kind in range(3) if op not in (Op.ALLOC, Op.FREE)}
)


@settings(max_examples=60)
@given(patterns, plans, seconds, devices, st.sampled_from([0.0, 0.05, 0.3, 1.5]), st.sampled_from([math.inf, 0.1]))
def test_layers_at_once_have_the_times_of_layers_one_by_one(kinds, plan, seconds, device, issue_s, launch_s):
    units, alike = model(kinds)
    one_by_one, at_once = [
        played(units, alike, plan, seconds, device, issue_s, launch_s, at_once) for at_once in (False, True)
    ]

    assert at_once.step_time_s() == pytest.approx(one_by_one.step_time_s(), rel=1e-12)
    for name in ("issue_s", "clock_s", "start_s", "end_s"):
        expected = getattr(one_by_one.columns, name)
        assert np.allclose(getattr(at_once.columns, name), expected, rtol=1e-12, atol=1e-12)
    assert at_once.columns.late.keys() == one_by_one.columns.late.keys()
    assert at_once.columns.blocks.keys() == one_by_one.columns.blocks.keys()
    causes, expected = RunCauses(at_once), RunCauses(one_by_one)  # moments that were one are one to the last digit
    assert [causes.own_cause((0, k)) for k in range(len(at_once.ops))] == [
        expected.own_cause((0, k)) for k in range(len(at_once.ops))
    ]


@pytest.mark.parametrize(
    ("issue_s", "forward", "backward", "moves"),
    [(0.0, 1.0, 2.0, 2), (3.0, 1.0, 2.0, 2), (0.35, 1.0, 0.05, 3)],
    ids=["device sets the pace", "CPU is late", "CPU is ahead and is caught up in backward"],
)
def test_most_layers_are_played_at_once(issue_s, forward, backward, moves, monkeypatch):
    units, alike = model([0] * 60)
    moved, move = [], Repetition._moved

    def spy(self, stretch, last, here, periods, *of_a_period):
        moved.append(periods)
        return move(self, stretch, last, here, periods, *of_a_period)

    monkeypatch.setattr(Repetition, "_moved", spy)
    seconds = {(op, kind): {Op.FWD: forward, Op.BWD: backward}.get(op, 0.01) for op in Op for kind in range(3)}
    one_by_one, at_once = [
        played(units, alike, Plan(), seconds, issue_s=issue_s, at_once=at_once) for at_once in (False, True)
    ]

    assert len(moved) == moves
    assert sum(moved) > 2 * 45
    assert np.allclose(at_once.columns.end_s, one_by_one.columns.end_s, rtol=1e-12, atol=0)


def test_stretches_are_the_layers_in_forward_and_in_backward():
    units, alike = model([0, 1] * 10)
    program = build(units, Plan(), 4)
    found = stretches_of(program, kinds_of(program, alike))

    ops = program.ops
    assert [ops[(one.first + one.end) // 2].phase for one in found] == [Phase.FORWARD, Phase.BACKWARD]
    for one in found:
        period = ops[one.first : one.first + one.period]
        assert len({i.unit for i in period if i.op in (Op.FWD, Op.BWD)}) == 2  # a layer of each kind
        for k in range(one.first + one.period, one.end):
            before, here = ops[k - one.period], ops[k]
            assert (before.op, alike[before.unit], before.bytes) == (here.op, alike[here.unit], here.bytes)
    assert stretches_of(program, kinds_of(program, {})) == []


def test_what_bounds_a_stretch_of_many_is_what_comes_after_its_operations():
    """Each micro-batch has stretches of its own; what bounds one is counted here operation by operation."""
    units, alike = model([0] * 40)
    program = build(units, Plan(grad_accum=3), 4)
    after = dependencies(program, on_cpu=False).after
    found = stretches_of(program, kinds_of(program, alike))

    assert len(found) == 6  # forward and backward of each micro-batch
    for one in found:
        beyond = range(one.end, len(after))
        assert one.reach == max(k - before for k in range(one.first, one.end) for before in after[k])
        assert one.outside == tuple(k for k in beyond if any(one.first <= before < one.end for before in after[k]))
        assert one.held == min(max(after[k], default=-1) for k in beyond)
