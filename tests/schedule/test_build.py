"""The program equals what torch issues where it was recorded, and has torch's properties everywhere else."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_sim.schedule import Kind, Param, Unit, build, toy, verify
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Lane, Memory, Op, Phase

RECORDINGS = Path(__file__).parent / "recordings"


@pytest.mark.parametrize(
    ("name", "layers", "plan", "steps"),
    [
        ("default_raf_none", 3, Plan(), 2),
        ("raf_true_everywhere", 3, Plan(reshard_after_forward=True), 1),
        ("raf_false", 3, Plan(reshard_after_forward=False), 1),
        ("forward_prefetch_1", 4, Plan(forward_prefetch=1), 1),
        ("grad_acc_no_sync", 2, Plan(grad_accum=2, requires_gradient_sync="last"), 1),
    ],
)
def test_the_program_is_line_by_line_what_torch_issued(name, layers, plan, steps):
    recorded = [line for line in (RECORDINGS / f"{name}.txt").read_text().splitlines() if not line.startswith("#")]
    assert build(toy(layers), plan, world_size=8, steps=steps).lines() == recorded


def counts(program, op, phase=None):
    return sum(i.op is op and (phase is None or i.phase is phase) for i in program.ops)


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize(
    ("reshard", "gathers_in_backward"),
    [(True, lambda groups: groups), (None, lambda groups: groups - 1), (False, lambda groups: 0)],
)
def test_collectives_per_step(layers, reshard, gathers_in_backward):
    program = build(toy(layers), Plan(reshard_after_forward=reshard), world_size=4)
    groups = layers + 1
    assert counts(program, Op.ALL_GATHER, Phase.FORWARD) == groups
    assert counts(program, Op.ALL_GATHER, Phase.BACKWARD) == gathers_in_backward(groups)
    assert counts(program, Op.REDUCE_SCATTER) == groups


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_collectives_under_accumulation(micro_batches):
    groups = 4

    def program(**fields):
        return build(toy(groups - 1), Plan(grad_accum=micro_batches, **fields), world_size=4)

    everywhere = program(reshard_after_forward=True)
    assert counts(everywhere, Op.ALL_GATHER) == 2 * groups * micro_batches
    assert counts(everywhere, Op.REDUCE_SCATTER) == groups * micro_batches
    no_sync = program(reshard_after_forward=True, requires_gradient_sync="last")
    assert counts(no_sync, Op.ALL_GATHER) == 2 * groups * micro_batches
    assert counts(no_sync, Op.REDUCE_SCATTER) == groups
    assert counts(program(reshard_after_forward=False), Op.ALL_GATHER) == groups * micro_batches


def unshards(program, phase):
    """For each hook that gathers, the unshards issued inside it, in order."""
    found, inside = {}, ""
    for i in program:
        if i.phase is not phase:
            continue
        if i.hook in ("pre_forward", "pre_backward"):
            inside = i.unit
            found[inside] = []
        elif i.hook == "unshard":
            found[inside].append(i.unit)
    return found


def test_explicit_forward_prefetch_unshards_the_next_k_layers():
    assert unshards(build(toy(4), Plan(forward_prefetch=2), 8), Phase.FORWARD) == {
        "root": ["root"],
        "layers.0": ["layers.0", "layers.1", "layers.2"],
        "layers.1": ["layers.1", "layers.2", "layers.3"],
        "layers.2": ["layers.2", "layers.3"],
        "layers.3": ["layers.3"],
    }


def test_explicit_backward_prefetch_unshards_the_k_layers_before():
    assert unshards(build(toy(4), Plan(backward_prefetch=2), 8), Phase.BACKWARD) == {
        "root": ["root", "layers.3"],  # the root has no list, so the default applies
        "layers.3": ["layers.3", "layers.2", "layers.1"],
        "layers.2": ["layers.2", "layers.1", "layers.0"],
        "layers.1": ["layers.1", "layers.0"],
        "layers.0": ["layers.0"],
    }


def test_explicit_backward_prefetch_of_depth_1_issues_what_the_default_does():
    assert build(toy(4), Plan(backward_prefetch=1), 8).lines() == build(toy(4), Plan(), 8).lines()


def test_world_size_1_issues_no_collective():
    program = build(toy(3), Plan(), world_size=1, steps=2)
    verify(program)
    assert {str(i.op) for i in program.ops} == {"FWD", "BWD", "OPTIM", "ag_copy_out", "rs_copy_in"}
    assert Memory.AG_OUTPUT not in {i.category for i in program}


def frozen(unit):
    return Unit(unit.name, tuple(Param(p.name, p.shape, p.dtype, False) for p in unit.params), unit.segments)


def test_a_frozen_unit_is_gathered_and_not_reduced():
    root, first, second, third = toy(3)
    program = build([root, first, frozen(second), third], Plan(), world_size=4)
    verify(program)
    of = Counter((i.op, i.unit) for i in program.ops)
    assert of[Op.ALL_GATHER, "layers.1"] == 2  # its input needs gradients, so its backward needs its weights
    assert of[Op.BWD, "layers.1"] == 1
    assert of[Op.REDUCE_SCATTER, "layers.1"] == 0
    assert of[Op.REDUCE_SCATTER, "layers.0"] == 1


def test_a_frozen_parameter_is_gathered_and_left_out_of_the_reduce():
    unit = Unit("layers.0", (Param("weight", (8, 4)), Param("bias", (4,), requires_grad=False)))
    program = build([Unit("root", segments=(...,)), unit], Plan(), world_size=4)
    size = {i.op: i.bytes for i in program.ops if i.communicator}
    assert size == {Op.ALL_GATHER: (8 * 4 + 4) * 4, Op.REDUCE_SCATTER: 8 * 4 * 4}


def test_below_the_first_trained_parameter_there_is_no_backward():
    root, first, second = toy(2)
    embed, head = root.params
    root = Unit("root", (Param("embed", embed.shape, requires_grad=False), head), root.segments)
    program = build([root, frozen(first), second], Plan(), world_size=4)
    verify(program)
    assert [i.what for i in program.ops if i.op is Op.BWD] == ["BWD head", "BWD layers.1"]
    # layers.1 prefetches layers.0 by habit; the final callback waits for that gather and drops it
    assert counts(program, Op.ALL_GATHER, Phase.BACKWARD) == 2
    finalized = next(k for k, i in enumerate(program) if i.what == "finalize_backward(layers.0)")
    assert [(i.kind, i.lane) for i in program][finalized + 1] == (Kind.WAIT, Lane.COMPUTE)
    assert program.instructions[finalized + 2].line == "free        ag_copy_in      ag_output(layers.0)"
    # the input of layers.1 needs no gradient either, so its post-backward runs in the final callback
    hooks = [i.what for i in program if i.kind is Kind.HOOK]
    assert hooks.index("root_post_backward_final_callback") < hooks.index("post_backward(layers.1)")


def test_accumulated_sharded_gradients_keep_one_output_alive():
    program = build(toy(1), Plan(grad_accum=3), world_size=4)
    alive, most = Counter(), Counter()
    for i in program:
        if i.category is Memory.RS_OUTPUT:
            alive[i.unit] += 1 if i.kind is Kind.ALLOC else -1
            most[i.unit] = max(most[i.unit], alive[i.unit])
    assert most == {"root": 2, "layers.0": 2}
    assert not +alive


def test_collectives_carry_their_whole_message():
    program = build(toy(1), Plan(), world_size=8)
    layer = [i for i in program if i.unit == "layers.0"]
    padded = 8 * 4 * 4  # 4 rows on 8 ranks: one row each, half of it padding
    assert {i.bytes for i in layer if i.communicator} == {padded}
    assert {(i.group_size, i.dtype) for i in layer if i.communicator} == {(8, "fp32")}
    assert {i.bytes for i in layer if i.category is Memory.RS_OUTPUT} == {padded // 8}
    assert {i.bytes for i in layer if i.category is Memory.UNSHARDED_GRAD} == {4 * 4 * 4}


@pytest.mark.parametrize(
    ("units", "kwargs", "message"),
    [
        (toy(2), {"world_size": 0}, "world_size is 0; it must be a whole number >= 1"),
        (toy(2), {"steps": 0}, "steps is 0"),
        (toy(2), {"plan": "fsdp2"}, "plan is 'fsdp2'; it must be a Plan"),
        (toy(2)[1:], {}, r"0 of 2 units are roots \(none\)"),
        ([*toy(1), Unit("other", segments=(...,))], {}, r"2 of 3 units are roots \(root, other\)"),
        ([*toy(1), toy(1)[1]], {}, "two units have the unit name 'layers.0'"),
        ([frozen(u) for u in toy(2)], {}, "none of the 3 units has a parameter that requires gradients"),
        (
            [Unit("root", (Param("a", (4,)), Param("b", (4,), "bf16")), segments=("root", ...))],
            {},
            "unit root trains parameters of dtypes bf16, fp32",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(units, kwargs, message):
    with pytest.raises(ValueError, match=message):
        build(units, **{"plan": Plan(), "world_size": 4} | kwargs)


@st.composite
def models(draw):
    """Any root and layers with something to train: frozen, mixed, empty and many-segment units."""

    def params(names):
        shapes = st.sampled_from([(1,), (3, 2), (8, 4)])
        return tuple(Param(name, draw(shapes), requires_grad=draw(st.booleans())) for name in names)

    layers = [
        Unit(
            f"layers.{i}",
            params(["weight", "bias"][: draw(st.integers(0, 2))]),
            segments=draw(st.sampled_from([(), (f"attn.{i}", f"mlp.{i}")])),
        )
        for i in range(draw(st.integers(0, 5)))
    ]
    segments = draw(st.sampled_from([("embed", ..., "head"), (..., "head"), ("embed", ...)]))
    root = Unit("root", params(["embed", "head"][: draw(st.integers(0, 2))]), segments)
    # one trained layer at a random place, so that there is a backward
    layers.insert(draw(st.integers(0, len(layers))), Unit("trained", (Param("weight", (4, 4)),)))
    return [root, *layers]


plans = st.builds(
    Plan,
    reshard_after_forward=st.sampled_from([True, False, None]),
    forward_prefetch=st.sampled_from([None, 1, 2, 9]),
    backward_prefetch=st.sampled_from([None, 1, 2, 9]),
    grad_accum=st.integers(1, 3),
    requires_gradient_sync=st.sampled_from([True, "last"]),
)


@settings(deadline=None)
@given(models(), plans, st.integers(1, 5), st.integers(1, 3))
def test_any_program_is_right(units, plan, world_size, steps):
    program = build(units, plan, world_size, steps)
    verify(program)
    trained = [u for u in units if any(p.requires_grad for p in u.params)]
    reduces = plan.grad_accum if plan.requires_gradient_sync is True else 1
    expected = {u.name: reduces * steps for u in trained} if world_size > 1 else {}
    assert Counter(i.unit for i in program.ops if i.op is Op.REDUCE_SCATTER) == expected
    gathers = Counter((i.unit, i.phase) for i in program.ops if i.op is Op.ALL_GATHER)
    for unit in units:
        per_forward = gathers[unit.name, Phase.FORWARD]
        assert per_forward == (plan.grad_accum * steps if unit.params and world_size > 1 else 0)
        assert gathers[unit.name, Phase.BACKWARD] <= per_forward
        if plan.reshard_after_forward is False:
            assert gathers[unit.name, Phase.BACKWARD] == 0


@settings(deadline=None)
@given(models(), plans, st.integers(1, 5))
def test_every_step_issues_the_same(units, plan, world_size):
    program = build(units, plan, world_size, steps=2)
    first, second = ([(i.kind, i.op, i.unit, i.hook, i.lane) for i in program if i.step == step] for step in (0, 1))
    assert first == second
