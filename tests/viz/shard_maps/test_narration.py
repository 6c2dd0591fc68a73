"""What happens at each moment, in words that are true of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_sim.schedule import Param, Unit, build, toy_program
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Op, Phase
from fsdp_sim.viz.shard_maps.cast import cast_of, events_of
from fsdp_sim.viz.shard_maps.holdings import HoldingsMoment, moments
from fsdp_sim.viz.shard_maps.narration import a_part, briefly, part, parts, ranks_text, sentence


def story(ranks: int = 4, layers: int = 1, **plan: object) -> list[str]:
    program = toy_program(layers, ranks, plan=Plan(**plan))  # type: ignore[arg-type]
    cast = cast_of(program.timeline)
    return [sentence(cast, moment) for moment in moments(cast, events_of(program.timeline, 0, cast), 0)]


def test_a_step_of_fsdp2_reads_as_a_story() -> None:
    assert story(layers=1) == [
        "At rest: each of 4 ranks holds a quarter of every unit, and the optimizer state of that quarter.",
        "Ranks 0 to 3 all-gather root: each sends its quarter, and each now holds all four.",
        "Forward of embed: every rank computes on its own micro-batch, with the whole parameters.",
        "Ranks 0 to 3 all-gather layers.0: each sends its quarter, and each now holds all four.",
        "Forward of layers.0: every rank computes on its own micro-batch, with the whole parameters.",
        "layers.0 reshards after forward: three quarters of it are freed, and each rank keeps its own.",
        "Forward of head: every rank computes on its own micro-batch, with the whole parameters.",
        "Ranks 0 to 3 all-gather layers.0: each sends its quarter, and each now holds all four. Ahead of time: head is "
        "computed first.",
        "Backward of head: every rank now has a whole gradient, from its own data alone: no two are alike.",
        "Backward of layers.0: every rank now has a whole gradient, from its own data alone: no two are alike.",
        "layers.0 reshards after backward: three quarters of it are freed, and each rank keeps its own.",
        "Ranks 0 to 3 reduce-scatter layers.0: each receives its quarter of the gradient, averaged over all four.",
        "Backward of embed: every rank now has a whole gradient, from its own data alone: no two are alike.",
        "root reshards after backward: three quarters of it are freed, and each rank keeps its own.",
        "Ranks 0 to 3 reduce-scatter root: each receives its quarter of the gradient, averaged over all four.",
        "Optimizer: each rank updates its own quarter of every unit, with its own state. Nothing is sent.",
        "zero_grad: the gradients are dropped. Every rank holds what it held before the step, with new values.",
    ]


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"shard_size": 2}, "2 groups of 2 ranks hold the same"),
        ({"shard_size": 2}, "All-gather of layers.0 within ranks 0 and 1 and within ranks 2 and 3"),
        ({"shard_size": 2}, "between groups (ranks 0 and 2; ranks 1 and 3): each shard is now the mean over all 4"),
        ({"reshard_after_forward": 2}, "but not all the way: each rank keeps a half, not a quarter"),
        ({"reshard_after_forward": 2}, "from the halves kept after forward"),
        ({"api": "ddp"}, "every rank now holds the same whole gradient"),
        ({"api": "ddp"}, "all 4 ranks make the same update"),
        ({"api": "zero1"}, "the optimizer state of only a quarter of every bucket"),
        ({"api": "zero2"}, "three quarters of its copy are now stale"),
        ({"api": "zero2"}, "every rank sends the quarter it has updated"),
        ({"cpu_offload": True}, "each copies its quarter from the CPU and sends it"),
        ({"cpu_offload": True}, "It goes to the CPU's memory."),
        ({"grad_accum": 2, "requires_gradient_sync": "last"}, "Backward of layers.0: every rank adds to the whole"),
        ({"optimizer": "sgd"}, "and no optimizer state"),
        ({"activation_checkpointing": "full"}, "layers.0 is computed again: its activations were not kept"),
    ],
)
def test_every_way_to_shard_has_its_words(plan: dict[str, object], says: str) -> None:
    assert says in " | ".join(story(**plan))


def test_with_sync_no_whole_gradient_is_kept_to_add_to() -> None:
    assert "adds to" not in " | ".join(story(grad_accum=2))


def test_one_rank_neither_sends_nor_shares() -> None:
    told = " | ".join(story(ranks=1))
    assert "one rank holds all parameters" in told
    assert not any(word in told for word in ("all-gather", "no two", "quarter", "reduce-scatter", "every rank"))


def test_uneven_shards_are_not_called_a_sixth() -> None:
    told = " | ".join(story(ranks=6))
    assert "sixth" not in told
    assert "ranks 4 and 5 have nothing of root" in told
    even = build([Unit("root", (Param("w", (12, 4)),))], Plan(), 6)
    cast = cast_of(even.timeline)
    assert "a sixth of every unit" in sentence(cast, HoldingsMoment(None))


def test_what_a_record_does_not_say_is_not_told() -> None:
    cast = replace(cast_of(toy_program(1, 4).timeline), optimizer=None)
    assert sentence(cast, HoldingsMoment(None)) == "At rest: each of 4 ranks holds a quarter of every unit."


def test_fractions_and_ranks_read_as_people_say_them() -> None:
    assert [part(2), part(8), part(64)] == ["half", "eighth", "1/64"]
    assert [a_part(2), a_part(8), a_part(64)] == ["a half", "an eighth", "1/64"]
    assert [parts(1, 2), parts(3, 4), parts(63, 64)] == ["one half", "three quarters", "63/64"]
    assert [ranks_text(r) for r in ([3], [0, 4], range(8), [0, 2, 4, 6, 8], [0, 1, 2, 64, 65, 66])] == [
        "rank 3", "ranks 0 and 4", "ranks 0 to 7", "ranks 0, 2, 4 to 8", "ranks 0 to 2 and 64 to 66",
    ]  # fmt: skip


def test_a_unit_that_is_called_by_a_number_is_called_a_unit() -> None:
    program = build([Unit("root", (), segments=(...,)), Unit("0", (Param("w", (4, 4)),))], Plan(), 2)
    cast = cast_of(program.timeline)
    told = [sentence(cast, moment) for moment in moments(cast, events_of(program.timeline, 0, cast), 0)]
    assert "Forward of unit 0: every rank computes on its own micro-batch, with the whole parameters." in told


def test_a_moment_in_a_few_words() -> None:
    moment = HoldingsMoment(Op.BWD, band="root", name="head", phase=Phase.BACKWARD)
    assert briefly(moment) == "in backward of head"
    assert briefly(HoldingsMoment(None)) == "at rest"
