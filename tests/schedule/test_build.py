"""`build` hands a plan to whoever carries it out, and refuses what nobody can."""

from __future__ import annotations

from collections import Counter

import pytest

from fsdp_sim.schedule import Kind, Param, Unit, build, toy
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Lane, Op, Phase
from tests.oracles.verify import verify


def test_a_model_of_one_unit_needs_no_mark_for_its_layers():
    model = Unit("model", (Param("weight", (4, 4)),))
    program = build([model], Plan(), world_size=4)
    verify(program)
    assert [i.what for i in program.ops if i.op in (Op.FWD, Op.BWD)] == ["FWD model", "BWD model"]


def last_twice(units):
    return [*units, units[-1]]


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
    assert sum(i.op is Op.ALL_GATHER and i.phase is Phase.BACKWARD for i in program.ops) == 2
    finalized = next(k for k, i in enumerate(program) if i.what == "finalize_backward(layers.0)")
    assert [(i.kind, i.lane) for i in program][finalized + 1] == (Kind.WAIT, Lane.COMPUTE)
    assert program.instructions[finalized + 2].line == "free        ag_copy_in      ag_output(layers.0)"
    # the input of layers.1 needs no gradient either, so its post-backward runs in the final callback
    hooks = [i.what for i in program if i.kind is Kind.HOOK]
    assert hooks.index("root_post_backward_final_callback") < hooks.index("post_backward(layers.1)")


@pytest.mark.parametrize(
    ("units", "kwargs", "message"),
    [
        (toy(2), {"world_size": 0}, "world_size is 0; it must be a whole number >= 1"),
        (toy(2), {"world_size": True}, "world_size is True"),
        (toy(2), {"steps": 0}, "steps is 0"),
        (toy(2), {"plan": "fsdp2"}, "plan is 'fsdp2'; it must be a Plan"),
        ([], {}, "0 of 0 units are roots"),
        (toy(2)[1:], {}, r"0 of 2 units are roots \(none has ... in its segments\)"),
        ([*toy(1), Unit("other", segments=(...,))], {}, "unit other has ... in its segments, .* begins with 'other.'"),
        ([*toy(1), toy(1)[1]], {}, "two units have the unit name 'layers.0'; each needs its own name .the same object"),
        (last_twice(toy(1)), {"plan": Plan(api="ddp")}, "unit layers.0 is there twice; only programs of fsdp2"),
        (last_twice([toy(0)[0], Unit("a.b"), Unit("a", segments=(...,))]), {}, "a is there twice and has units inside"),
        ([*toy(1), Unit("b", segments=("embed",))], {}, "two units have the segment name 'embed'"),
        ([frozen(u) for u in toy(2)], {"plan": Plan(freeze=("*",))}, r"Plan\.freeze is \('\*',\), which is all"),
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


def test_what_checkpointing_keeps_of_a_block_changes_nothing_that_is_issued_unless_it_is_copied():
    units = tuple(toy(4))
    kept = "full", "selective", ("mm",), ("mm", "scaled_dot_product_attention")

    for api in ("fsdp2", "fsdp1", "ddp"):
        first, *others = (build(units, Plan(api=api, activation_checkpointing=one), 8) for one in kept)
        assert all(other.instructions is first.instructions for other in others)
        assert [program.plan.activation_checkpointing for program in (first, *others)] == list(kept)
        for one in kept[1:]:  # built anew, as lists are
            assert build(list(units), Plan(api=api, activation_checkpointing=one), 8).instructions == first.instructions
    for one in (None, 2):
        assert build(units, Plan(activation_checkpointing=one), 8).instructions != first.instructions
    copied = [build(units, Plan(activation_checkpointing=one, activation_offload="streams"), 8) for one in kept]
    assert copied[0].instructions != copied[1].instructions  # one tensor of a block, or several
