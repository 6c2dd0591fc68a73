"""Bands are quantiles over ranks of the very times in the record, from events and from arrays alike."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from fsdp_sim import Cluster, Plan, Simulation, simulate
from fsdp_sim.engine import jitter, straggler
from fsdp_sim.timeline import Event, Lane, Op, Timeline
from fsdp_sim.viz.steps.bands import (
    ALL,
    Bands,
    ManyRanks,
    bands_of,
    bands_of_run,
    bands_sentence,
    bands_table,
    many_ranks,
)
from fsdp_sim.viz.steps.timelines import rank_bands
from fsdp_sim.words import human_bytes

Run = Callable[..., Timeline]
RANKS, SLOW = 16, 11


def skewed(slow: float = 1.3, ranks: int = RANKS, model: str = "gpt2-124m") -> Simulation:
    def skew(seconds: object, n: int) -> object:
        return straggler(jitter(seconds, n, sigma=0.02), n, rank=SLOW, factor=slow)

    plan = Plan(micro_batch=8, seq_len=1024, param_dtype="bf16")
    return simulate(model, Cluster("H100-SXM-80GB", gpus=ranks), plan, skew=skew)


@pytest.fixture(scope="module")
def simulated() -> Simulation:
    return skewed()


def test_events_and_arrays_give_the_same_bands(simulated: Simulation) -> None:
    from_run, from_events = bands_of_run(simulated.run), bands_of(simulated.timeline, 0)
    assert from_run.ops == from_events.ops
    assert from_run.ranks == from_events.ranks == tuple(range(RANKS))
    np.testing.assert_allclose(from_run.start_s, from_events.start_s)
    np.testing.assert_allclose(from_run.end_s, from_events.end_s)


def test_the_median_and_most_ranks_are_drawn_for_each_operation(simulated: Simulation) -> None:
    bands = bands_of_run(simulated.run)
    q = bands.quantiles_ms()
    k = next(k for k, o in enumerate(bands.ops) if (o.op, o.unit) == (Op.FWD, "layers.5"))
    ends = sorted(e.end_s for e in simulated.timeline.ops if e.label == "FWD layers.5")
    assert q["end"][k] == pytest.approx((ends[7] + ends[8]) / 2 * 1e3 - bands.origin_s * 1e3)
    starts = [e.start_s for e in simulated.timeline.ops if e.label == "FWD layers.5"]
    most = [np.percentile(times, part) * 1e3 - bands.origin_s * 1e3 for times, part in ((starts, 5), (ends, 95))]
    assert [q["early"][k], q["late"][k]] == pytest.approx(most)
    assert np.all(q["early"] <= q["start"])
    assert np.all(q["end"] <= q["late"])
    drawn = rank_bands(simulated).figure
    solid = next(
        t for t in drawn.data if t.type == "bar" and "median rank" in (t.hovertemplate or "") and t.name == "forward"
    )
    number = list(solid.text).index("5")
    assert solid.base[number] + solid.x[number] == pytest.approx(q["end"][k], rel=1e-5)


def test_a_straggler_is_named_and_drawn_below_the_bands(simulated: Simulation) -> None:
    picture = rank_bands(simulated)
    assert picture.finding.startswith(f"Rank {SLOW} keeps 15 ranks waiting: it computes ")
    labels = picture.figure.layout.yaxis.ticktext
    assert labels[0] == "<b>16 ranks</b> · compute"
    assert labels[-2] == f"<b>rank {SLOW}</b> · slowest"
    assert labels[-1].endswith("· typical")
    (computing, waiting, _) = picture.tables[0].rows
    assert computing[0] == "computing"
    assert computing[-1] == str(SLOW)
    assert waiting[-1] != str(SLOW)


def test_a_thousand_ranks_take_no_more_bars_than_a_few() -> None:
    few, many = (rank_bands(skewed(ranks=ranks)).figure for ranks in (16, 1024))
    count = [sum(len(t.x) for t in figure.data if t.type == "bar") for figure in (few, many)]
    assert count[1] == pytest.approx(count[0], rel=0.2)
    assert "1,024 ranks" in many.layout.yaxis.ticktext[0]


def test_ranks_that_are_alike_are_said_to_be(simulated: Simulation) -> None:
    view = many_ranks(skewed(slow=1.0), "even", -1)
    assert view.bands.alike
    assert "exposed" in bands_sentence(view)
    assert view.groups()[-1].label.endswith("an example")
    assert "no rank is much slower" in rank_bands(skewed(slow=1.0)).finding


def test_a_run_has_no_memory_to_show_and_a_simulation_has(simulated: Simulation) -> None:
    assert "live memory" not in str(rank_bands(simulated.run).figure.layout.annotations)
    heading = next(a.text for a in rank_bands(simulated).figure.layout.annotations if "live memory" in a.text)
    assert human_bytes(simulated.peak_memory_bytes) in heading


def test_an_operation_that_a_rank_lacks_leaves_the_others_their_quantiles(training_run: Run) -> None:
    run = training_run(ranks=9, clock="measured")
    extra = Event(seq=9_000, rank=4, step=1, op=Op.OPTIM, lane=Lane.COMPUTE, unit="only here", issue_s=1.2,
                  start_s=1.2, end_s=1.201)  # fmt: skip
    bands = bands_of(Timeline(run.header, [*run.events, extra]), 1)
    row = next(k for k, o in enumerate(bands.ops) if o.unit == "only here")
    assert np.isnan(bands.start_s[row]).sum() == 8
    q = bands.quantiles_ms()
    assert all(np.isfinite(column).all() for column in q.values())
    rank_bands(Timeline(run.header, [*run.events, extra]), step=1)


def test_the_same_operation_in_a_step_twice_is_told_apart_by_its_order(training_run: Run) -> None:
    run = training_run(ranks=2)
    again = [msgspec.structs.replace(e, seq=e.seq + 5_000, start_s=e.start_s + 0.5, end_s=e.end_s + 0.5)
             for e in run.select(step=1).ops]  # fmt: skip
    bands = bands_of(Timeline(run.header, [*run.events, *again]), 1)
    assert len(bands.ops) == 2 * len(run.select(step=1, rank=0).ops)
    assert not np.isnan(bands.start_s).any()


def test_steps_count_from_the_end_and_unknown_ones_are_named(training_run: Run, simulated: Simulation) -> None:
    run = training_run(ranks=9)
    assert "step 2" in " ".join(a.text for a in rank_bands(run).figure.layout.annotations)
    with pytest.raises(ValueError, match=r"step 7 is not in timeline 'predicted'; it has steps \[0, 1, 2\]"):
        rank_bands(run, step=7)
    with pytest.raises(ValueError, match="step 3 is not in the program, which has steps 0 to 0"):
        rank_bands(simulated, step=3)


def test_the_table_gives_quantiles_of_computing_and_waiting() -> None:
    ops = many_ranks(skewed(), "a", -1).bands.ops[:1]
    bands = Bands(
        (ops[0]._replace(op=Op.FWD, lane=Lane.COMPUTE),),
        (3, 5),
        np.array([[0.0, 0.0]]),
        np.array([[0.1, 0.3]]),
        np.zeros((1, 2)),
    )
    assert bands_table(bands).rows[0] == ("computing", "100 ms", "110 ms", "200 ms", "290 ms", "300 ms", "5")
    assert bands_table(bands).rows[1][1:] == ("0.00 ms", "10.0 ms", "100.0 ms", "190 ms", "200 ms", "3")
    assert (bands.slowest, bands.alike) == (5, False)
    assert isinstance(many_ranks(skewed(), "a", -1), ManyRanks)
    assert ALL < 0
