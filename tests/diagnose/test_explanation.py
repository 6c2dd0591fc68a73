"""Why a step takes as long as it does: the critical path, exposed communication, and the patterns behind idle times."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim.cost import Work, Workload
from fsdp_sim.diagnose import Culprit, diagnose, explain
from fsdp_sim.diagnose.critical_path import critical_path_of_run
from fsdp_sim.engine import Contention, exposure, run
from fsdp_sim.schedule import Kind, Param, Unit, build, toy
from fsdp_sim.simulation import simulate
from fsdp_sim.spec import Cluster, Plan
from fsdp_sim.timeline import COLLECTIVES, Lane, Op, Phase
from fsdp_sim.timeline.analysis import exposed_comm_s, overlap
from fsdp_sim.words import human_ms
from tests.engine.programs import anything, by_hand, devices, durations, issuing, layers_only


def explained(plan=None, layers=3, device="gpu", issue_s=0.0, units=None, steps=1, **seconds):
    program = build(units or layers_only(layers), plan or Plan(), 8, steps=steps)
    return explain(run(program, durations(**seconds), device=device, issue_s=issue_s))


def culprits(found):
    return {str(blame.culprit): blame.idle_s for blame in found.culprits}


def said(found, words):
    """The one sentence that has these words."""
    (sentence,) = [s for s in found.sentences if words in s]
    return sentence


def test_what_checkpointed_blocks_keep_and_compute_again_is_said():
    sim = simulate("gpt2-124m", Cluster("A100", gpus=8), Plan(activation_checkpointing=("addmm",)))
    again_s = sum(e.duration_s for e in sim.timeline.events if e.op is Op.RECOMPUTE)

    assert f"keep the outputs of addmm and compute the rest again in backward: {human_ms(again_s)}" in str(
        sim.explain()
    )


# -- what compute waits for


@pytest.mark.parametrize(
    "plan", [{}, {"api": "fsdp1"}, {"shard_size": 4}, {"grad_accum": 2}, {"api": "zero2"}], ids=str
)
@pytest.mark.parametrize("gpu", ["A100-SXM-40GB", "cpu"])
def test_an_explanation_and_a_diagnosis_say_the_same_of_the_same_step(plan, gpu):
    sim = simulate("gpt2-124m", Cluster(gpu, gpus=8), Plan(**plan))

    explanation, diagnosis = sim.explain(), diagnose(sim.timeline)

    assert [blame.culprit for blame in explanation.culprits] == [b.culprit for b in diagnosis.culprits]
    told = [b.sentence for b in diagnosis.culprits if b.idle_s >= 1e-3 * diagnosis.step_s]
    assert told == [sentence for sentence in explanation.sentences if sentence in told]
    assert "diagnosis" not in vars(explanation)  # each collective is put into words when that is asked for
    assert explanation.diagnosis.collectives == diagnosis.collectives
    assert diagnosis.step_s == pytest.approx(explanation.step_time_s, rel=1e-12)
    assert diagnosis.compute_s == pytest.approx(explanation.compute_s, rel=1e-12)
    assert diagnosis.exposed_s == pytest.approx(explanation.exposure.exposed_s, rel=1e-9)


def test_the_first_gather_and_the_last_reduction_cannot_be_hidden():
    found = explained()
    assert culprits(found) == {"first all-gather": 10, "last reductions": 10}
    assert found.exposed_s == {"layers.0": 20}
    assert found.exposure.by_unit == {(Phase.FORWARD, "layers.0"): 10, (Phase.BACKWARD, "layers.0"): 10}
    assert found.sentences[2:4] == [
        "Forward cannot begin before ALL_GATHER(layers.0) arrives, and has nothing to compute meanwhile: 10,000 ms.",
        "The last reductions (layers.0) have no backward left to hide behind: 10,000 ms.",
    ]


def test_an_all_gather_whose_copies_were_issued_late_was_issued_late():
    """The CPU is hardly ahead of the GPU: cast, copy-in and all-gather begin as they are issued."""
    cluster = Cluster("A100-SXM-80GB", gpus=16)
    found = simulate("t5-large", cluster, Plan(seq_len=512, micro_batch=8, param_dtype="bf16")).explain()

    waits_s = {blame.culprit: blame.idle_s for blame in found.culprits}
    assert found.critical_s["CPU"] > 0.9 * found.step_time_s
    assert waits_s[Culprit.CPU_LATE] + waits_s[Culprit.LAUNCHES] > 0.9 * sum(waits_s.values())


def test_small_units_are_bound_by_the_cpu():
    found = explained(forward=0.1, backward=0.1, gather=0.1, scatter=0.1, issue_s=1.0)
    assert max(culprits(found), key=culprits(found).get) == "issued late by the CPU"
    assert set(found.bound.values()) == {"CPU"}
    assert found.gains["cpu"] == pytest.approx(found.step_time_s / 11, rel=0.02)
    assert found.gains["compute"] == pytest.approx(0, abs=0.05)


def test_where_the_cpu_computes_too_no_gpu_is_said_to_wait_for_it():
    issue_s = {op: 20.0 for op in COLLECTIVES}
    found = run(build(layers_only(3), Plan(), 8), durations(), device="cpu", issue_s=lambda i: issue_s.get(i.op, 0.0))
    assert "The thread that computes was busy with something else" in str(explain(found))
    assert "device" not in str(explain(found))


def test_of_ranks_that_differ_the_one_is_explained_on_which_the_step_ends():
    program = build(layers_only(3), Plan(), 8)
    seconds = durations(gather=5.0)
    for k in range(3):
        seconds[Op.FWD, f"layers.{k}"] = np.array([25.0, 60.0])
        seconds[Op.BWD, f"layers.{k}"] = np.array([90.0, 55.0])
    found = explain(run(program, seconds))
    assert found.rank == found.diagnosis.rank == 0
    assert "always for rank 1" in said(found, "the last rank of its group")


@pytest.mark.parametrize("api", ["ddp", "zero1", "zero2", "fsdp1"])
def test_every_way_of_training_in_parallel_can_be_explained(api):
    found = explained(Plan(api=api), units=toy(3), steps=2, scatter=30.0)
    assert sum(culprits(found).values()) == pytest.approx(found.step_time_s - found.exposure.compute_s)
    assert found.sentences


# -- numbers


def test_gains_are_found_by_playing_again():
    found = explained()
    assert found.gains["compute"] == pytest.approx(225 - 225 / 1.1)
    assert found.gains["network"] == pytest.approx(20 - 20 / 1.1)
    assert found.gains["cpu"] == 0


def test_the_caller_may_say_what_faster_means():
    program = build(layers_only(3), Plan(), 8)
    played = run(program, durations())
    found = explain(played, faster={"network": lambda: run(program, durations(gather=5.0, scatter=5.0))})
    assert found.gains["network"] == 10
    assert found.gains["compute"] == pytest.approx(225 - 225 / 1.1)


def test_a_later_step_is_explained_by_itself():
    program = build(layers_only(3), Plan(), 8, steps=3)
    played = run(program, durations())
    assert [played.step_time_s(k) for k in range(3)] == [245, 245, 245]
    for step in range(3):
        found = explain(played, step=step)
        assert found.critical_path[0].start_s == 245 * step
        assert found.step_time_s == 245


def test_a_step_that_is_not_there_is_named():
    played = run(build(layers_only(1), Plan(), 8), durations())
    for ask in (explain, critical_path_of_run, exposure):
        with pytest.raises(ValueError, match="step 1 is not in the program, which has steps 0 to 0"):
            ask(played, step=1)


def test_the_path_crosses_over_to_the_rank_that_came_last():
    program = build(layers_only(1), Plan(), 8)
    seconds = durations()
    seconds[Op.BWD, "layers.0"] = np.array([50.0, 80.0])
    played = run(program, seconds)
    backward = next(p for p in critical_path_of_run(played) if played.ops[p.key[1]].op is Op.BWD)
    assert (backward.rank, backward.seconds) == (1, 80)


def test_an_operation_that_the_cpu_issues_too_slowly_is_on_the_path_from_its_last_kernel():
    program = by_hand({"kind": Kind.OP, "op": Op.FWD, "lane": Lane.COMPUTE, "unit": "a"})
    path = critical_path_of_run(run(program, lambda i: 1.0, issue_s=10.0, launch_s=1.0))
    assert [(piece.cpu, piece.start_s, piece.end_s) for piece in path] == [(True, 0, 10), (False, 10, 10.1)]


def test_units_bound_by_different_things_are_told_apart():
    found = explained(Plan(separate_reduce_scatter_group=True), gather=40.0, scatter=40.0)
    assert found.bound == {"layers.0": "network", "layers.1": "compute", "layers.2": "network"}
    assert said(found, "units on it") == (
        "Of the 3 units on it 2 are bound by the network (layers.0, layers.2; 74% of the step), 1 bound by compute "
        "(layers.1; 26% of the step)."
    )


def test_every_sentence_names_milliseconds_percent_or_units():
    for found in (explained(), explained(gather=40.0, scatter=40.0), explained(scatter=200.0, layers=5)):
        assert str(found) == "\n".join(found.sentences)
        assert all(any(mark in s for mark in ("ms", "%", "layers.")) for s in found.sentences)


# -- on any program


def check_path(played, step):
    path = critical_path_of_run(played, step)
    ends = played.step_ends_s
    begin = ends[step - 1] if step else 0.0
    if ends[step] == begin:
        assert path == []
        return
    assert (path[0].start_s, path[-1].end_s) == (begin, ends[step])
    assert all(a.end_s == b.start_s for a, b in pairwise(path))
    assert sum(piece.seconds for piece in path) == pytest.approx(played.step_time_s(step))


@given(anything, devices, issuing(), st.sampled_from([None, Contention(1.5, 2.0, 1.0)]), st.sampled_from([1.0, 0.1]))
def test_the_critical_path_has_no_gaps_and_is_as_long_as_the_step(case, device, issue, contention, unit_s):
    program, seconds, ranks = case
    issue_s, launch_s = issue
    seconds = {key: [s * unit_s for s in of_rank] for key, of_rank in seconds.items()}
    how = {"device": device, "ranks": ranks, "issue_s": issue_s, "launch_s": launch_s}
    played = run(program, seconds, contention=contention, **how)
    for step in range(len(played.step_ends_s)):
        check_path(played, step)


@given(anything, devices, issuing())
def test_making_what_is_on_the_path_slower_makes_the_run_slower(case, device, issue):
    program, seconds, _ = case
    issue_s, launch_s = issue
    alone = {key: float(s[0]) for key, s in seconds.items()}
    how = {"device": device, "issue_s": issue_s, "launch_s": launch_s}
    played = run(program, alone, **how)
    for piece in critical_path_of_run(played)[:3]:
        if piece.cpu:
            continue
        op = played.ops[piece.key[1]]
        key = (op.op, op.unit)
        assert run(program, alone | {key: alone[key] + 1.0}, **how).span_s > played.span_s


@given(anything, devices, st.integers(0, 2))
def test_exposure_is_that_of_the_timeline(case, device, issue_s):
    program, seconds, ranks = case
    played = run(program, seconds, device=device, ranks=ranks, issue_s=issue_s)
    if len(played.step_ends_s) > 1:
        return  # a timeline's exposure is of all its steps
    timeline = played.timeline()
    for rank in range(ranks):
        found = exposure(played, rank=rank)
        assert found.exposed_s == pytest.approx(exposed_comm_s(timeline, rank))
        assert found.overlap == pytest.approx(overlap(timeline, rank))
        assert sum(found.by_unit.values()) == pytest.approx(found.exposed_s)


@given(anything, devices, issuing())
def test_any_run_can_be_explained(case, device, issue):
    program, seconds, ranks = case
    issue_s, launch_s = issue
    played = run(program, seconds, device=device, ranks=ranks, issue_s=issue_s, launch_s=launch_s)
    if not played.ops:
        with pytest.raises(ValueError, match="has no operations"):
            explain(played)
        return
    found = explain(played)
    assert found.sentences
    assert sum(found.critical_s.values()) == pytest.approx(found.step_time_s)


@pytest.mark.parametrize("api", ["fsdp2", "fsdp1", "ddp", "zero1", "zero2"])
def test_on_one_gpu_nothing_is_reduced_and_nobody_says_so(api):
    sim = simulate("gpt2-124m", Cluster("H100", gpus=1), Plan(api=api, micro_batch=4))

    words = " ".join(sim.explain().sentences)
    assert "reduction" not in words
    assert "network too slow" not in words


def test_units_with_fewer_rows_than_ranks_are_said_to_be_padded():
    root = Unit("root", (Param("embed", (1024, 4)),), ("embed", ..., "head"))
    experts = Unit("layers.0", (Param("experts.up", (8, 64, 64)), Param("norm", (64,))))
    work = dict.fromkeys(("embed", "layers.0", "head"), Work())
    moe = Workload("moe", (root, experts), work, tokens=1, param_count=10**6)

    (said,) = [s for s in simulate(moe, Cluster("H100", gpus=64), Plan()).explain().sentences if "padded" in s]

    assert said.startswith("layers.0 is padded to up to 8.0 times its size")
    assert "experts.up has 8 rows for 64 shards" in said
    for plan in (Plan(shard_size=8), Plan(api="fsdp1")):
        assert not any("padded" in s for s in simulate(moe, Cluster("H100", gpus=64), plan).explain().sentences)
    apart = simulate("mixtral-8x7b", Cluster("H100", gpus=64), Plan(expert_parallel=8))
    assert not any("padded" in s for s in apart.explain().sentences)


@pytest.mark.parametrize(
    ("inter", "checkpointing", "shared"), [("IB NDR x8", "selective", True), ("10GbE", "full", False)]
)
def test_a_network_that_saves_more_than_compute_waits_for_it_is_explained(inter, checkpointing, shared) -> None:
    """A reader who sees 0.4% of network and a gain of 1% from a faster one is told where the rest comes from."""
    plan = Plan(seq_len=4096, activation_checkpointing=checkpointing, param_dtype="bf16", reduce_dtype="fp32")
    found = simulate("llama3-8b", Cluster("H100", gpus=16, inter=inter), plan).explain()
    assert (found.gains["network"] > 0.1 * found.critical_s["network"]) == shared
    assert ("also because collectives in flight slow down what runs beside them" in found.gains_sentence) == shared
