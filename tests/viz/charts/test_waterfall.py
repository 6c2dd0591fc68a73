"""What memory is made of: every byte of the peak is in the picture once, and what does not fit is said and cured."""

from collections.abc import Callable
from dataclasses import replace

import plotly.graph_objects as go
import pytest

from fsdp_sim import Cluster, Model, Plan, Simulation, simulate
from fsdp_sim.cost import workload
from fsdp_sim.requests import on_the_edge
from fsdp_sim.timeline import Event, Header, Lane, Memory, Op, Phase, Timeline
from fsdp_sim.viz import theme
from fsdp_sim.viz.charts.alive import alive_at
from fsdp_sim.viz.charts.waterfall import memory_waterfall
from fsdp_sim.viz.charts.waterfall_words import remedies
from fsdp_sim.words import human_bytes

Run = Callable[..., Timeline]
GIB = 2**30


def llama(**plan: object) -> Simulation:
    wanted = {"micro_batch": 1, "seq_len": 8192, "param_dtype": "bf16"} | plan
    return simulate("llama3-8b", Cluster("H100", gpus=8), Plan(**wanted))  # type: ignore[arg-type]


def drawn(figure: go.Figure) -> dict[str, float]:
    """GiB of each category."""
    found: dict[str, float] = {}
    for trace in figure.data:
        found[trace.name] = found.get(trace.name, 0.0) + sum(trace.x)
    return found


@pytest.mark.parametrize("plan", [{}, {"activation_checkpointing": "full"}, {"api": "ddp"}, {"cpu_offload": True}])
def test_the_parts_sum_to_the_peak_the_simulator_reports(plan: dict[str, object]) -> None:
    sim = llama(**plan)
    alive = alive_at(sim, "sim", "peak", None)
    assert alive.total_bytes == sim.peak_memory_bytes
    assert {c: sum(p.bytes for p in parts) for c, parts in alive.by_category.items()} == sim.memory.peak_by_category
    assert alive.limit_bytes == int(sim.memory_limit_bytes)


def test_a_waterfall_has_each_category_once_from_where_the_one_before_ends() -> None:
    sim = llama()
    figure = memory_waterfall(sim).figure
    *categories, whole = figure.data
    reached = 0.0
    for trace in categories:
        for base, width in zip(trace.base, trace.x, strict=True):
            assert base == pytest.approx(reached)
            reached += width
    assert reached == pytest.approx(sim.peak_memory_bytes / GIB)
    assert list(whole.x) == pytest.approx([reached])
    assert [t.name for t in categories] == [
        theme.MEMORY[c].name for c in theme.MEMORY if c in sim.memory.peak_by_category
    ]
    (activations,) = (t for t in categories if t.name == "activations")
    assert len(activations.x) == 33  # a part for each block, and what is too small to see


def test_what_fits_says_what_stays_free() -> None:
    sim = llama(seq_len=4096)
    words = memory_waterfall(sim).finding
    assert words.startswith(
        f"At the peak, during backward head, {human_bytes(sim.peak_memory_bytes)} are alive on rank 0."
    )
    assert "is activations: 32 units, layers.0 to layers.31, have 657 MiB each." in words
    free = sim.memory_limit_bytes - sim.peak_memory_bytes
    assert f"{human_bytes(free)} of the device's {human_bytes(sim.memory_limit_bytes)} stay free." in words


def test_what_is_on_the_edge_says_what_the_allocator_holds_and_what_gives_a_margin() -> None:
    """Less is alive than the device has, and yet that much is not free."""
    sim = llama()
    picture = memory_waterfall(sim)
    assert sim.fit == "on the edge"
    assert picture.figure.layout.title.text.replace("<br>", " ").startswith(
        f"The peak is {human_bytes(sim.peak_memory_bytes)} of {human_bytes(sim.memory_limit_bytes)}, on the edge:"
    )
    assert f"{on_the_edge(sim)}." in picture.finding
    assert "stay free" not in picture.finding
    assert "What would make it fit, the fastest first" in picture.finding
    fits = llama(seq_len=4096)
    assert memory_waterfall([sim, fits]).figure.layout.title.text.replace("<br>", " ").endswith("1 of 2 on the edge.")


def test_what_does_not_fit_names_changes_that_were_simulated() -> None:
    sim = llama(micro_batch=2)
    picture = memory_waterfall(sim)
    assert not sim.fits
    assert "What would make it fit, the fastest first: compute every block again in backward" in picture.finding
    assert any("What would make it fit" in note.text for note in picture.figure.layout.annotations)
    cures = remedies(sim)
    assert cures
    for cure in cures:
        assert simulate("llama3-8b", sim.cluster, replace(sim.plan, **cure.set)).fit == "fits"


def test_of_a_model_that_is_not_the_catalogues_no_cure_is_made_up() -> None:
    wider = replace(Model.preset("llama3-8b"), d_ffn=20_000)
    sim = simulate(wider, Cluster("H100", gpus=8), Plan(micro_batch=4, seq_len=8192, param_dtype="bf16"))
    traced = simulate(workload(wider, sim.plan), sim.cluster, sim.plan)
    for one in (sim, traced):
        assert remedies(one) is None
        assert "What would make it fit" not in memory_waterfall(one).finding


def test_several_are_stacked_beside_each_other() -> None:
    sims = {"all kept": llama(micro_batch=2), "checkpointing": llama(micro_batch=2, activation_checkpointing="full")}
    picture = memory_waterfall(sims)
    assert sum(drawn(picture.figure).values()) == pytest.approx(sum(s.peak_memory_bytes for s in sims.values()) / GIB)
    assert list(picture.figure.layout.yaxis.ticktext) == list(sims)
    assert picture.figure.layout.title.text.replace("<br>", " ").endswith("1 of 2 does not fit.")
    assert [text.split(":")[0] for text in picture.finding.split("\n\n")] == list(sims)


def test_a_recorded_timeline_will_do_and_any_of_its_ranks(training_run: Run) -> None:
    timeline = training_run(ranks=3)
    for rank in timeline.ranks:
        alive = alive_at(timeline, "run", "peak", rank)
        assert alive.total_bytes == timeline.peak_bytes(rank)
        assert alive.limit_bytes == 0
    picture = memory_waterfall({"run": timeline, "again": timeline}, rank=2)
    assert "rank 2" in picture.finding
    assert "unknown" in picture.tables[0].to_html()


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER])
def test_the_peak_of_a_phase(phase: Phase) -> None:
    sim = llama()
    alive = alive_at(sim, "sim", str(phase), None)
    assert alive.total_bytes == sim.memory.peak_of(phase=phase)
    assert f"the peak of {phase}" in memory_waterfall(sim, moment=str(phase)).finding


def test_a_moment_in_seconds_is_what_the_device_has_then(training_run: Run) -> None:
    timeline = training_run(ranks=1, steps=1)
    times_s, live = timeline.live_bytes(0)
    half = len(times_s) // 2
    last = max(n for n, t in enumerate(times_s) if t <= times_s[half])
    alive = alive_at(timeline, "run", float(times_s[half]) - timeline.start_s, 0)
    assert alive.total_bytes == sum(int(n_bytes[last]) for n_bytes in live.values())


def test_names_of_units_are_text() -> None:
    bad = "<b onclick=x>"
    events = [
        Event(seq=0, rank=0, op=Op.ALLOC, lane=Lane.COMPUTE, unit=bad, category=Memory.SHARDED, bytes=100),
        Event(seq=1, rank=0, op=Op.FWD, lane=Lane.COMPUTE, unit=bad, end_s=1.0),
    ]
    figure = memory_waterfall(Timeline(Header(producer="tests", clock="measured", world_size=1), events)).figure
    texts = [note.text for note in figure.layout.annotations] + [t for trace in figure.data for t in trace.hovertext]
    assert any("&lt;b onclick" in text for text in texts)
    assert not any("<b onclick" in text for text in texts)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"moment": "noon"}, "moment is 'noon'; it must be peak, forward, backward, optimizer, or seconds"),
        ({"rank": 7}, "rank 7 is not in 'tests"),
    ],
)
def test_what_is_not_there_is_named(training_run: Run, asked: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        memory_waterfall({"tests": training_run()}, **asked)  # type: ignore[arg-type]


def test_without_memory_there_is_no_picture() -> None:
    only = Event(seq=0, rank=0, op=Op.FWD, lane=Lane.COMPUTE, end_s=1.0)
    with pytest.raises(ValueError, match="recorded no memory"):
        memory_waterfall(Timeline(Header(producer="tests", clock="measured", world_size=1), [only]))
    with pytest.raises(ValueError, match="nothing was given"):
        memory_waterfall({})
    with pytest.raises(ValueError, match="'x' is of type int"):
        memory_waterfall({"x": 3})  # type: ignore[dict-item]
