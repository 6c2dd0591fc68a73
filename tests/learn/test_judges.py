"""The judges, given results that no learner had to produce: units, orders, accounts that cannot be true, exposure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.learn.apart import Trial, TrialRun
from fsdp_sim.learn.compare import difference
from fsdp_sim.learn.exercise import Wrong
from fsdp_sim.learn.find import load
from fsdp_sim.learn.folders import folders_in
from fsdp_sim.learn.judges import BytesSent, CollectiveOrder, ExposedTime, Numbers, OperationOrder
from fsdp_sim.learn.judges.account import dishonest, sent_bytes
from fsdp_sim.learn.judges.plans import BestPlan
from fsdp_sim.learn.quantity import in_unit
from fsdp_sim.learn.verdict import Grade
from fsdp_sim.ranks import Network
from fsdp_sim.ranks.board import Record
from fsdp_sim.schedule import toy_program
from fsdp_sim.timeline import Event, Header, Lane, Op, Timeline


def ran(answers: list[list[Any]] | None = None, **more: Any) -> TrialRun:
    """What came back from as many ranks as there are answers, or records."""
    ranks = len(answers or more.get("records", [[]]))
    given: dict[str, Any] = {
        "answers": answers or [[None]] * ranks,
        "records": [[]] * ranks,
        "written_bytes": [None] * ranks,
        "peak_bytes": [0] * ranks,
        "grown_bytes": [None] * ranks,
        "replaced": [],
        "timeline": Timeline(Header(producer="tests", clock="measured", world_size=ranks), []),
        "printed": "",
    }
    return TrialRun(**given | more)


def record(op: str, numel: int = 1000, detail: str = "", ranks: int = 4, **more: Any) -> Record:
    fields: dict[str, Any] = {"unit": "", "dtype": "fp32", "source": "", "group": 0, "group_seq": 0}
    fields |= {"members": tuple(range(ranks)), "issue_s": 0.0, "cost_s": 0.0}
    return Record(op=op, numel=numel, detail=detail, **fields | more)


# ---------------------------------------------------------------------- numbers with units


@pytest.mark.parametrize(
    ("answer", "unit", "number"),
    [
        ("7.9 GB", "bytes", 7.9e9),
        ("7.4GiB", "bytes", 7.4 * 2**30),
        ("1,024 bytes", "bytes", 1024),
        ("3 ms", "s", 0.003),
        ("1.1k tokens", "tokens", 1100),
        ("12 tokens", "tokens", 12),
        ("1.5e9", "elements", 1.5e9),
        (5, "bytes", 5),
    ],
)
def test_a_quantity_is_read_as_people_write_it(answer: Any, unit: str, number: float) -> None:
    assert in_unit(answer, unit) == pytest.approx(number)


@pytest.mark.parametrize(
    ("answer", "unit"),
    [("7 s", "bytes"), ("3 GB", "s"), ("many", "bytes"), ("9" * 10**6 + "!", "bytes"), ("5 cats", "s")],
)
def test_another_unit_or_no_quantity_is_refused(answer: str, unit: str) -> None:
    with pytest.raises(ValueError, match=r"asked for are|is no quantity"):
        in_unit(answer, unit)


BYTES = Numbers(truth=lambda n: 16 * n, source="computed", cases=((10**9,), (2 * 10**9,)), unit="bytes", rel=0.01)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (["16 GB", "32.1 GB"], ""),
        ([torch.tensor(16e9), torch.tensor(32e9)], ""),
        ([torch.tensor([16e9]), torch.tensor([32e9])], "a number is asked for"),
        ([16e9, 32e9], ""),
        ([16.0, 32.0], "that is in GB; asked for are bytes"),
        ([14.9012, 29.8023], "that is in GiB"),
        ([128e9, 256e9], "that is in bits"),
        (["16 s", "32 s"], "has another unit"),
        ([True, True], "a number is asked for"),
        ([float("nan"), 32e9], "found nan"),
    ],
)
def test_numbers_may_carry_a_unit_and_a_wrong_unit_is_named(answers: list[Any], said: str) -> None:
    finding = BYTES.grade(BYTES.trial(0), ran([answers]), ())

    assert (finding.grade is Grade.PASS) == (not said)
    assert said in finding.whole


def test_a_known_wrong_formula_is_answered_with_its_cause() -> None:
    wrong = (Wrong(lambda n: 1 / 0, "never"), Wrong(lambda n: 8 * n, "you forgot the moments"))
    finding = BYTES.grade(BYTES.trial(0), ran([[8e9, 16e9]]), wrong)

    assert finding.whole.endswith("The cause: you forgot the moments.")


def test_the_first_difference_within_a_nested_answer_is_named() -> None:
    expected = {"a": [1, 2, {"b": torch.ones(3)}]}

    assert difference(expected, {"a": [1, 2, {"b": torch.ones(3)}]}) is None
    assert str(difference(expected, {"a": [1, 3, {}]})) == "a place 2: expected 2, found 3"
    assert "its shape should be (3,), not (4,)" in str(difference(expected, {"a": [1, 2, {"b": torch.ones(4)}]}))
    assert "there is no 'a'" in str(difference(expected, {}))


# ---------------------------------------------------------------------- order


def test_the_first_place_that_differs_is_named_with_why_it_is_so() -> None:
    order = OperationOrder(lambda: ["gather 1", "forward 1"], "so it is", {"forward": "it needs what was gathered"})

    finding = order.grade(order.trial(0), ran([[["gather 1", "gather 2"]]]), ())

    assert finding.whole == (
        "place 2 of 2: expected forward 1, found gather 2 (so it is). The cause: it needs what was gathered."
    )


@pytest.mark.parametrize("answer", [["gather 1"], ["gather 1", "forward 1", "more"]])
def test_too_few_and_too_many_operations_are_named(answer: list[str]) -> None:
    order = OperationOrder(lambda: ["gather 1", "forward 1"], "so it is", {})

    assert "nothing more" in order.grade(order.trial(0), ran([[answer]]), ()).message


def test_the_order_on_ranks_is_held_against_a_built_program() -> None:
    words = {Op.ALL_GATHER: "all_gather", Op.REDUCE_SCATTER: "reduce_scatter"}
    program = [f"{words[i.op]}({i.unit})" for i in toy_program(2, world_size=2).ops if i.op in words]
    check = CollectiveOrder(lambda trial: program, "so torch issues them")
    records = [record(*label.rstrip(")").split("(")[:1], unit=label.rstrip(")").split("(")[1]) for label in program]
    trial = Trial((((),), ((),)))

    assert check.look(trial, ran(records=[records, records])).grade is Grade.OPTIMAL
    late = check.look(trial, ran(records=[records, [*records[:-2], records[-1], records[-2]]]))
    assert late.message == (
        f"rank 1, collective {len(program) - 1}: expected reduce_scatter(layers.0), "
        "found reduce_scatter(root) (so torch issues them)."
    )
    assert "found nothing more" in check.look(trial, ran(records=[records[:-1], records])).message


# ---------------------------------------------------------------------- accounts


def test_what_a_rank_sends_follows_from_its_account() -> None:
    assert sent_bytes([record("all_gather"), record("reduce_scatter")]) == 2 * 3000
    assert sent_bytes([record("all_reduce")]) == 6000
    assert sent_bytes([record("send"), record("recv"), record("barrier", 0)]) == 4000


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, ""),
        ({"replaced": ["Board.post"]}, "your code replaced Board.post"),
        ({"written_bytes": [4_010_000, 200]}, ""),
        ({"written_bytes": [100, 200]}, "rank 0's account shows 4,000,000 bytes sent; the kernel saw 100 leave"),
        ({"written_bytes": [4_000_000, 9_000_000]}, "rank 1's account shows 0 bytes sent; the kernel saw 9,000,000"),
        ({"received": 999_999}, "rank 0 sent 4,000,000 bytes to rank 1, which received 3,999,996"),
    ],
)
def test_an_account_is_held_against_the_other_ranks_and_against_the_kernel(more: dict[str, Any], said: str) -> None:
    sends = [record("send", 1_000_000, "peer=1", 2)]
    receives = [record("recv", more.pop("received", 1_000_000), "peer=0", 2)]

    assert said in dishonest(ran(records=[sends, receives], **more))
    assert said or not dishonest(ran(records=[sends, receives], **more))


@pytest.mark.parametrize(
    ("numel", "grade"), [(1000, Grade.OPTIMAL), (1200, Grade.GOOD), (1900, Grade.PASS), (2100, Grade.NOT_YET)]
)
def test_bytes_are_graded_against_the_lower_bound(numel: int, grade: Grade) -> None:
    check = BytesSent(lambda trial: 4000, proof="it must", good=1.5, passes=2, cure="send less")

    assert check.look(Trial((((),),)), ran(records=[[record("send", numel)]])).grade is grade


def test_less_than_the_lower_bound_is_no_record_but_a_fraud() -> None:
    check = BytesSent(lambda trial: 4000, proof="it must", good=1.5, passes=2, cure="send less")
    finding = check.look(Trial((((),),)), ran(records=[[record("send", 10)]]))

    assert finding.grade is Grade.NOT_YET
    assert "no right result can come from less (it must)" in finding.message


# ---------------------------------------------------------------------- exposure

COST = Network(bandwidth_gbps=8.0, latency_us=0)  # an all-gather of 2 MB on 2 ranks: 1 MB, 1 ms
EXPOSED = ExposedTime(COST, compute_s=0.002, least=1, good=2, passes=2.5, cure="ask earlier")


def events(*what: str) -> list[Event]:
    """Of one rank: ``g`` issues an all-gather, ``w2`` waits for the event with number 2, ``f`` computes."""
    found = []
    for seq, word in enumerate(what):
        common = {"seq": seq, "rank": 0}
        if word == "g":
            found.append(Event(op=Op.ALL_GATHER, lane=Lane.ALL_GATHER, bytes=2_000_000, group_size=2, **common))
        elif word == "f":
            found.append(Event(op=Op.FWD, lane=Lane.COMPUTE, unit="a", **common))
        else:
            waits_on = (int(word[1:]),)
            found.append(Event(op=Op.OTHER, lane=Lane.OTHER_COMM, unit="wait", waits_on=waits_on, **common))
    return found


@pytest.mark.parametrize(
    ("what", "exposed", "grade"),
    [
        (["g", "w0", "g", "f", "w2", "f"], 1.0, Grade.OPTIMAL),
        (["g", "w0", "f", "g", "w3", "f"], 2.0, Grade.GOOD),
        (["g", "w0", "g", "w2", "f", "f"], 2.0, Grade.GOOD),
        (["g", "w0", "f", "g", "w3", "f", "g", "w6", "f"], 3.0, Grade.NOT_YET),
        (["g", "g", "g", "w0", "f", "w1", "f", "w2", "f"], 1.0, Grade.OPTIMAL),
        (["f"], float("inf"), Grade.NOT_YET),
    ],
)
def test_exposure_follows_from_the_order_of_asking_waiting_and_computing(
    what: list[str], exposed: float, grade: Grade
) -> None:
    timeline = Timeline(Header(producer="tests", clock="measured", world_size=1), events(*what))
    finding = EXPOSED.look(Trial((((),),)), ran(answers=[[None]], timeline=timeline))

    assert EXPOSED.exposed(events(*what))[0] == pytest.approx(exposed)
    assert finding.grade is grade


def test_the_culprit_is_named() -> None:
    assert EXPOSED.exposed(events("g", "w0", "f", "g", "w3", "f"))[1] == (
        "after FWD a a collective was issued and waited for at once; "
    )


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["case_17", "case_18", "case_19", "load_onto_other_shards"])
def test_a_right_result_counts_when_what_it_should_come_from_is_on_the_disk(name: str) -> None:
    judge: Any = load(name).judge
    trial = judge.trial(3)
    inputs = [cases[0] for cases in trial.each]
    right, saved = ran([[answer] for answer in judge.truth(inputs)]), judge.checks[0].saved(inputs)
    folder = Path(next(folders_in(inputs)))
    (folder / "link").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe")  # which nobody ever writes into
    for rank, tensors in enumerate(saved):
        found = judge.grade(trial, right, ())
        assert found.grade is Grade.NOT_YET
        assert f" of rank {rank}: it has to come from the disk" in found.message
        torch.save(tensors, folder / f"rank-{rank}.pt")
    assert judge.grade(trial, right, ()).grade is Grade.PASS


# ---------------------------------------------------------------------- plans


def test_a_plan_fits_where_the_simulator_says_so() -> None:
    """Of fp32 on a card of 24 GB all tensors would fit, but not into what the allocator holds in pieces."""
    space: dict[str, tuple[Any, ...]] = {"param_dtype": (None, "bf16")}
    fixed: dict[str, Any] = {
        "micro_batch": 16,
        "seq_len": 1024,
        "activation_checkpointing": "full",
        "reshard_after_forward": False,
    }
    cluster = Cluster("RTX-4090", gpus=8)
    judge = BestPlan("gpt2-1.5b", cluster, space, fixed)
    for param_dtype, grade in ((None, Grade.NOT_YET), ("bf16", Grade.OPTIMAL)):
        sim = simulate("gpt2-1.5b", cluster, Plan(param_dtype=param_dtype, **fixed))
        found = judge.grade(judge.trial(0), ran([[{"param_dtype": param_dtype}]]), ())
        assert sim.peak_memory_bytes < sim.memory_limit_bytes
        assert (found.grade, sim.fits) == (grade, grade is Grade.OPTIMAL)
