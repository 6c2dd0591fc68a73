"""Who holds what at telling moments, for every way to shard, of programs and of timelines."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from fsdp_sim import Cluster, simulate
from fsdp_sim.schedule import Param, Program, Unit, build, toy_program
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Event, Header, Lane, Op, Phase, Timeline
from fsdp_sim.viz.shard_maps.cast import COMPUTE, cast_of, events_of
from fsdp_sim.viz.shard_maps.cells import CellState, cells
from fsdp_sim.viz.shard_maps.holdings import HoldingsMoment, moments
from tests.oracles.verify import ProgramError, verify

Run = Callable[..., Timeline]
SIGNS = dict(zip(list(CellState)[1:], ".0Ogs!/~hRAc", strict=True))
FORWARD, BACKWARD, OPTIMIZER = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER


def find(
    told: list[HoldingsMoment], op: Op | None, name: str = "", phase: Phase | None = None, last: bool = False
) -> HoldingsMoment:
    fitting = [m for m in told if m.op is op and m.name == name and phase in (None, m.phase)]
    assert fitting, f"no {op} {name} {phase} in {[(m.op, m.name, m.phase) for m in told]}"
    return fitting[-1 if last else 0]


def recorded(source: Program | Timeline) -> Timeline:
    return source if isinstance(source, Timeline) else source.timeline


def held(source: Program | Timeline, moment: HoldingsMoment, band: str, rank: int) -> str:
    """Parameters, gradients and optimizer state of a rank, a sign for each row."""
    cast = cast_of(recorded(source))
    found = next(one for one in cast.bands if one.name == band)
    rows = [cells(cast, found, moment.of(band), rank, row) for row in range(len(found.parts))]
    return " ".join("".join(SIGNS[h] for h in column) for column in zip(*rows, strict=True))


def told(source: Program | Timeline, rank: int = 0, step: int = 0) -> list[HoldingsMoment]:
    timeline = recorded(source)
    cast = cast_of(timeline)
    return moments(cast, events_of(timeline, rank, cast), step)


def test_fsdp2_gathers_computes_reshards_reduces_and_steps() -> None:
    program = toy_program(2, 4)
    story = told(program)
    assert held(program, story[0], "layers.0", 0) == "O... .... A..."
    assert held(program, story[0], "layers.0", 3) == "...O .... ...A"
    gathered = find(story, Op.ALL_GATHER, "layers.0", FORWARD)
    assert held(program, gathered, "layers.0", 1) == "gOgg .... .A.."
    assert held(program, gathered, "layers.1", 1) == ".O.. .... .A.."
    resharded = find(story, Op.FREE, "layers.0", FORWARD)
    assert held(program, resharded, "layers.0", 1) == ".O.. .... .A.."
    computed = find(story, Op.BWD, "layers.1")
    assert held(program, computed, "layers.1", 2) == "ggOg //// ..A."
    reduced = find(story, Op.REDUCE_SCATTER, "layers.1")
    assert held(program, reduced, "layers.1", 2) == "..O. ~~R~ ..A."  # its buffer lives until the next reduction
    later = find(story, Op.REDUCE_SCATTER, "layers.0")
    assert held(program, later, "layers.1", 2) == "..O. ..R. ..A."
    assert held(program, find(story, Op.OPTIM), "root", 0) == "O... R... A..."
    assert held(program, story[-1], "root", 0) == "O... .... A..."


def test_a_gradient_is_not_there_before_its_backward() -> None:
    program = toy_program(2, 4)
    story = told(program)
    before = story[story.index(find(story, Op.BWD, "layers.1")) - 1]
    assert held(program, before, "layers.1", 0).split()[1] == "...."


def test_a_prefetched_gather_says_what_is_computed_first() -> None:
    story = told(toy_program(3, 4))
    assert find(story, Op.ALL_GATHER, "layers.1", FORWARD).ahead == ""
    assert find(story, Op.ALL_GATHER, "layers.1", BACKWARD).ahead == "layers.2"
    explicit = told(toy_program(3, 4, plan=Plan(forward_prefetch=1)))
    assert find(explicit, Op.ALL_GATHER, "layers.1", FORWARD).ahead == "layers.0"


def test_without_reshard_after_forward_parameters_stay_whole_until_backward() -> None:
    program = toy_program(2, 4, plan=Plan(reshard_after_forward=False))
    story = told(program)
    assert held(program, find(story, Op.FWD, "head"), "layers.0", 1) == "gOgg .... .A.."
    assert not any(m.op is Op.ALL_GATHER and m.phase is BACKWARD for m in story)


def test_reshard_to_a_number_keeps_a_slice_and_gathers_it_in_small_groups() -> None:
    program = toy_program(2, 4, plan=Plan(reshard_after_forward=2))
    story = told(program)
    kept = find(story, Op.FREE, "layers.0", FORWARD)
    assert [held(program, kept, "layers.0", rank).split()[0] for rank in range(4)] == ["Os..", ".Oss", "ssO.", "..sO"]
    again = find(story, Op.ALL_GATHER, "layers.0", BACKWARD)
    assert (again.from_slice, again.group_size) == (True, 2)
    assert held(program, again, "layers.0", 0).split()[0] == "Oggg"
    assert held(program, find(story, Op.FREE, "layers.0", BACKWARD), "layers.0", 0).split()[0] == "O..."


def test_hsdp_reduces_within_a_group_and_then_between_replicas() -> None:
    program = toy_program(1, 4, plan=Plan(shard_size=2))
    story = told(program)
    assert cast_of(program.timeline).replicas == 2
    assert held(program, story[0], "layers.0", 0) == held(program, story[0], "layers.0", 2) == "O. .. A."
    assert held(program, find(story, Op.REDUCE_SCATTER, "layers.0"), "layers.0", 3) == ".O ~h .A"
    assert held(program, find(story, Op.ALL_REDUCE, "layers.0"), "layers.0", 3) == ".O ~R .A"


def test_uneven_rows_leave_some_ranks_empty_shards() -> None:
    units = [
        Unit("root", (Param("w", (5, 2)),)),
    ]
    program = build(units, Plan(), 4)
    assert cast_of(program.timeline).bands[0].part_bytes == (16, 16, 8, 0)
    story = told(program)
    assert held(program, story[0], "root", 3) == "...0 .... ...."
    assert held(program, find(story, Op.FWD, "root"), "root", 3) == "ggg0 .... ...."
    assert held(program, find(story, Op.BWD, "root"), "root", 0) == "Ogg. ///. A..."


def test_the_flat_parameter_of_fsdp1_is_cut_across_its_parameters() -> None:
    units = [Unit("root", (Param("w", (5, 2)), Param("b", (1,))))]
    program = build(units, Plan(api="fsdp1"), 4)
    assert cast_of(program.timeline).bands[0].part_bytes == (12, 12, 12, 8)  # 11 elements in chunks of 3
    assert held(program, find(told(program), Op.BWD, "root"), "root", 2) == "ggOg //// ..A."


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_fsdp1_reshards_after_forward_or_not(strategy: str) -> None:
    program = toy_program(1, 4, plan=Plan(api="fsdp1", sharding_strategy=strategy))
    after = find(told(program), Op.FWD, "head")
    assert held(program, after, "layers.0", 0).split()[0] == ("O..." if strategy == "FULL_SHARD" else "Oggg")


def test_gradients_stay_whole_and_partial_through_micro_batches_without_sync() -> None:
    program = toy_program(1, 4, plan=Plan(grad_accum=2, requires_gradient_sync="last"))
    story = told(program)
    second = next(m for m in story if m.op is Op.FWD and m.name == "layers.0" and m.micro_batch == 1)
    assert held(program, second, "layers.0", 1) == "gOgg //// .A.."
    assert held(program, find(story, Op.OPTIM), "layers.0", 1) == ".O.. .R.. .A.."


def test_with_sync_every_micro_batch_adds_to_the_sharded_gradient() -> None:
    program = toy_program(1, 4, plan=Plan(grad_accum=2))
    second = next(m for m in told(program) if m.op is Op.BWD and m.name == "layers.0" and m.micro_batch == 1)
    assert held(program, second, "layers.0", 1) == "gOgg /R// .A.."


def test_ddp_holds_everything_and_fills_a_bucket_segment_by_segment() -> None:
    program = toy_program(2, 4, plan=Plan(api="ddp"))
    (band,) = cast_of(program.timeline).bands
    assert band.parts == ("head", "layers.1", "layers.0", "embed")
    story = told(program)
    assert held(program, story[0], "bucket.0", 2) == "OOOO .... AAAA"
    assert held(program, find(story, Op.BWD, "layers.1"), "bucket.0", 2) == "OOOO //.. AAAA"
    assert held(program, find(story, Op.ALL_REDUCE, "bucket.0"), "bucket.0", 2) == "OOOO RRRR AAAA"
    assert held(program, story[-1], "bucket.0", 2) == "OOOO .... AAAA"


@pytest.mark.parametrize(("api", "mean"), [("zero1", "RRRR"), ("zero2", ".R..")])
def test_zero_cuts_the_optimizer_and_gathers_what_was_updated(api: str, mean: str) -> None:
    program = toy_program(2, 4, plan=Plan(api=api))
    story = told(program)
    assert held(program, story[0], "bucket.0", 1) == "gOgg .... .A.."
    assert held(program, find(story, Op.BWD, "embed"), "bucket.0", 1) == "gOgg //// .A.."
    assert held(program, find(story, Op.OPTIM), "bucket.0", 1) == f"!O!! {mean} .A.."
    assert held(program, find(story, Op.ALL_GATHER, "bucket.0"), "bucket.0", 1) == f"gOgg {mean} .A.."


def test_zero_on_one_rank_fills_a_bucket_segment_by_segment_as_ddp_does() -> None:
    program = toy_program(1, 1, plan=Plan(api="zero1"))
    assert held(program, find(told(program), Op.BWD, "layers.0"), "bucket.0", 0) == "OOO //. AAA"


def test_offloaded_shards_rest_in_the_memory_of_the_cpu() -> None:
    program = toy_program(1, 4, plan=Plan(cpu_offload=True))
    story = told(program)
    assert held(program, story[0], "layers.0", 1) == ".c.. .... .c.."
    assert held(program, find(story, Op.FWD, "layers.0"), "layers.0", 1) == "gOgg .... .c.."
    assert held(program, find(story, Op.OPTIM), "layers.0", 1) == ".c.. .c.. .c.."
    assert held(program, story[-1], "layers.0", 1) == ".c.. .... .c.."


@pytest.mark.parametrize("api", ["ddp", "zero1"])
def test_casting_a_reduced_gradient_back_does_not_make_it_partial(api: str) -> None:
    program = toy_program(1, 2, plan=Plan(api=api, param_dtype="bf16", grad_accum=2))
    story = told(program)
    assert set(held(program, find(story, Op.OPTIM), "bucket.0", 0).split()[1]) == {"R"}
    assert set(held(program, story[-1], "bucket.0", 0).split()[1]) == {"."}


@pytest.mark.parametrize(("offload", "sign"), [(False, "R"), (True, "c")])
def test_fsdp1_without_shards_reduces_whole_gradients(offload: bool, sign: str) -> None:
    plan = Plan(api="fsdp1", sharding_strategy="NO_SHARD", param_dtype="bf16", cpu_offload=offload)
    program = toy_program(1, 4, plan=plan)
    assert held(program, find(told(program), Op.OPTIM), "layers.0", 1).split()[1] == sign


def any_plan(choose: random.Random) -> dict[str, object]:
    plan: dict[str, object] = {
        "api": choose.choice(["fsdp2", "fsdp2", "fsdp1", "ddp", "zero1", "zero2"]),
        "param_dtype": choose.choice([None, "bf16"]),
        "reduce_dtype": choose.choice([None, "fp32"]),
        "grad_accum": choose.choice([1, 2, 3]),
        "requires_gradient_sync": choose.choice([True, "last"]),
        "activation_checkpointing": choose.choice([None, "full"]),
    }
    if plan["api"] == "fsdp2":
        plan |= {
            "reshard_after_forward": choose.choice([None, True, False, 2]),
            "forward_prefetch": choose.choice([None, 1, 2]),
            "backward_prefetch": choose.choice([None, 1, 2]),
            "shard_size": choose.choice([None, 2, 4]),
            "reshard_after_backward": choose.choice([True, "last"]),
            "requires_all_reduce": choose.choice([True, "last"]),
            "cpu_offload": choose.random() < 0.2,
        }
    elif plan["api"] == "fsdp1":
        plan["sharding_strategy"] = choose.choice(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
    return plan


def test_in_any_right_program_compute_has_whole_parameters_and_the_optimizer_reduced_gradients() -> None:
    choose, seen = random.Random(5), 0
    while seen < 150:
        plan, ranks = any_plan(choose), choose.choice([2, 4, 8])
        try:
            program = toy_program(choose.choice([0, 1, 3]), ranks, plan=Plan(**plan))  # type: ignore[arg-type]
            verify(program)
        except (ValueError, ProgramError):
            continue
        seen += 1
        cast = cast_of(program.timeline)
        bands = {band.name: band for band in cast.bands}
        story = told(program)
        for moment in story:
            assert min(moment.bytes.values()) >= 0, plan
            cut = moment.band and not bands[moment.band].replicated and bands[moment.band].shards > 1
            assert not (cut and moment.op in COMPUTE) or moment.of(moment.band).whole, (plan, moment)
        for band in cast.bands:
            for rank in range(ranks):
                gradients = held(program, find(story, Op.OPTIM), band.name, rank).split()[1]
                own = {sign for row, sign in enumerate(gradients) if band.owns(rank, row) and band.part_bytes[row]}
                assert own <= {"R", "c"}, (plan, band.name, gradients)
            assert set(held(program, story[-1], band.name, 0).split()[1]) == {"."}, plan


def test_one_rank_holds_all_it_has() -> None:
    program = toy_program(1, 1)
    story = told(program)
    assert held(program, story[0], "layers.0", 0) == "O . A"
    assert held(program, find(story, Op.OPTIM), "layers.0", 0) == "O R A"


def test_frozen_units_have_neither_gradients_nor_states() -> None:
    units = [
        Unit("root", (Param("head", (4, 4)),), segments=(..., "head")),
        Unit("frozen", (Param("w", (4, 4), requires_grad=False),)),
    ]
    program = build(units, Plan(), 2)
    assert held(program, find(told(program), Op.BWD, "head"), "frozen", 0).split()[1:] == ["..", ".."]


@pytest.mark.parametrize("api", ["fsdp2", "fsdp1", "ddp", "zero2"])
def test_a_simulated_timeline_says_what_its_program_says(api: str) -> None:
    sim = simulate("gpt2-124m", Cluster("A100-SXM-40GB", gpus=4), Plan(api=api, param_dtype="bf16"))
    assert cast_of(sim.timeline) == cast_of(sim.program.timeline)
    assert told(sim.timeline) == told(sim.program)


def test_bytes_are_those_of_the_step_s_memory() -> None:
    sim = simulate("gpt2-124m", Cluster("A100-SXM-40GB", gpus=4), Plan(param_dtype="bf16"))
    story = told(sim.program)
    assert sum(story[0].bytes.values()) == sim.memory.state_bytes
    categories = set(story[0].bytes)
    assert max(sum(m.bytes.values()) for m in story) <= sim.memory.peak_of(categories)


def test_a_recorded_run_tells_the_same_story_on_each_rank(training_run: Run) -> None:
    run = training_run(prefetch=True)
    stories = [told(run, rank, step=1) for rank in run.ranks]
    assert len({tuple(m.key for m in story) for story in stories}) == 1
    assert held(run, find(stories[2], Op.FWD, "layers.0"), "layers.0", 2) == "ggOg .... ..A."
    assert held(run, find(stories[2], Op.REDUCE_SCATTER, "layers.0"), "layers.0", 2).split()[1] == "~~R~"


def test_a_record_without_memory_is_understood_from_its_collectives() -> None:
    def event(seq: int, op: Op, unit: str, phase: Phase, **more: object) -> Event:
        lane = Lane.ALL_GATHER if op is Op.ALL_GATHER else Lane.COMPUTE
        return Event(seq=seq, rank=0, op=op, lane=lane, unit=unit, phase=phase, start_s=seq, end_s=seq + 1, **more)

    wire = {"bytes": 64, "group_size": 2}
    what = [
        (Op.ALL_GATHER, "a", FORWARD, wire), (Op.FWD, "a", FORWARD, {}), (Op.ALL_GATHER, "b", FORWARD, wire),
        (Op.FWD, "b", FORWARD, {}), (Op.BWD, "b", BACKWARD, {}), (Op.REDUCE_SCATTER, "b", BACKWARD, wire),
        (Op.ALL_GATHER, "a", BACKWARD, wire), (Op.BWD, "a", BACKWARD, {}), (Op.REDUCE_SCATTER, "a", BACKWARD, wire),
        (Op.OPTIM, "", OPTIMIZER, {}),
    ]  # fmt: skip
    events = [event(seq, op, unit, phase, **more) for seq, (op, unit, phase, more) in enumerate(what)]
    run = Timeline(Header(producer="kineto", clock="measured", world_size=2), events)
    story = told(run)
    assert held(run, find(story, Op.FWD, "a"), "a", 0).split()[0] == "Og"
    assert held(run, find(story, Op.FWD, "b"), "a", 0).split()[0] == "O."  # it was gathered again: so it was freed
    assert held(run, find(story, Op.BWD, "b"), "b", 0).split()[:2] == ["Og", "//"]
    assert held(run, find(story, Op.REDUCE_SCATTER, "a"), "b", 0).split()[:2] == ["O.", "R."]
    assert held(run, story[-1], "b", 0).split()[1] == ".."


def test_what_a_record_without_memory_implies_is_what_the_program_holds() -> None:
    sim = simulate("gpt2-124m", Cluster("A100-SXM-40GB", gpus=4), Plan(param_dtype="bf16"))
    inferred = {m.key: m for m in told(sim.timeline.select(lambda e: not e.is_memory))}
    for moment in told(sim.program):
        if moment.op in (Op.FWD, Op.BWD, Op.OPTIM):
            same = inferred[moment.key]
            for band in ("root", "layers.3", "layers.11"):
                assert moment.of(band).whole == same.of(band).whole, (moment, band)
                assert (moment.of(band).gradient == 1) == (same.of(band).gradient == 1), (moment, band)
                assert moment.of(band).shard == same.of(band).shard, (moment, band)


def test_a_timeline_without_any_shard_is_refused() -> None:
    event = Event(seq=0, rank=0, op=Op.FWD, lane=Lane.COMPUTE, unit="layers.0")
    empty = Timeline(Header(producer="tests", clock="measured", world_size=1), [event])
    with pytest.raises(ValueError, match="no unit that is gathered, reduced or held"):
        cast_of(empty)
