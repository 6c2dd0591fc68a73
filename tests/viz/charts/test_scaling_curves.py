"""Throughput over the number of GPUs: every point a simulation, the ideal a level line, what is impossible left out."""

from dataclasses import replace

import plotly.graph_objects as go
import pytest

from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.viz.charts.scaling_curves import scaling

H100 = Cluster("H100", gpus=8)
PLAN = Plan(micro_batch=2, seq_len=1024, param_dtype="bf16", activation_checkpointing="full")
GPUS = [8, 16, 64, 256]


def curves(figure: go.Figure, axis: str = "y") -> dict[str, go.Scatter]:
    return {t.name: t for t in figure.data if (t.yaxis or "y") == axis}


def test_every_point_is_a_simulation() -> None:
    figure = scaling("llama3-8b", H100, PLAN, gpus=GPUS).figure
    sims = [simulate("llama3-8b", replace(H100, gpus=n), PLAN) for n in GPUS]
    (line,), (exposed,) = curves(figure).values(), curves(figure, "y2").values()
    assert list(line.x) == GPUS
    assert list(line.y) == pytest.approx([s.tokens_per_s_per_gpu for s in sims])
    assert list(exposed.y) == pytest.approx([s.exposed_comm_s / s.step_time_s for s in sims])


def test_the_ideal_is_what_the_first_point_does_and_the_edge_of_a_node_is_marked() -> None:
    figure = scaling("llama3-8b", H100, PLAN, gpus=[8, 64]).figure
    (line,) = curves(figure).values()
    (ideal,) = (s for s in figure.layout.shapes if s.name == "ideal")
    assert (ideal.y0, ideal.y1, ideal.x0, ideal.x1) == (line.y[0], line.y[0], 8, 64)
    (edge,) = (s for s in figure.layout.shapes if s.name == "node")
    assert 8 < edge.x0 < 16
    within = scaling("llama3-8b", H100, PLAN, gpus=[1, 2, 4, 8]).figure
    assert [s.name for s in within.layout.shapes] == ["ideal"]


def test_the_finding_says_what_is_kept() -> None:
    first, last = (simulate("llama3-8b", replace(H100, gpus=n), PLAN) for n in (8, 256))
    kept = last.tokens_per_s_per_gpu / first.tokens_per_s_per_gpu
    picture = scaling("llama3-8b", H100, PLAN, gpus=GPUS)
    assert picture.figure.layout.title.text.replace("<br>", " ").startswith(
        f"On 256 GPUs each does {kept:.0%} of what it does on 8"
    )
    assert f"on 256 GPUs {last.tokens_per_s_per_gpu:,.0f} ({kept:.0%} of that)" in picture.finding


def test_several_lines_have_a_name_a_sign_and_a_dash_each() -> None:
    slow = replace(H100, bandwidth_gbps=50)
    lines = {
        "fast": ("llama3-8b", H100, PLAN),
        "<i>slow</i>": ("llama3-8b", slow, PLAN),
        "HSDP": ("llama3-8b", slow, replace(PLAN, shard_size=8)),
    }
    picture = scaling(lines, gpus=GPUS)
    found = curves(picture.figure)
    assert list(found) == list(lines)
    assert len({t.line.dash for t in found.values()}) == len({t.marker.color for t in found.values()}) == 3
    texts = [note.text for note in picture.figure.layout.annotations]
    assert any("&lt;i&gt;slow" in text for text in texts)
    assert not any("<i>slow" in text for text in [*texts, picture.figure.layout.title.text])
    ends = {name: t.y[-1] / t.y[0] for name, t in found.items()}
    assert max(ends, key=lambda n: ends[n]) in picture.figure.layout.title.text


def test_what_does_not_fit_is_hollow_and_said() -> None:
    picture = scaling("llama3-8b", H100, replace(PLAN, activation_checkpointing=None, micro_batch=8), gpus=[1, 8, 64])
    (line,) = curves(picture.figure).values()
    assert [symbol.endswith("-open") for symbol in line.marker.symbol] == [True, False, False]
    assert "It does not fit on 1 GPUs" in picture.finding


def test_what_is_impossible_is_left_out_with_its_reason() -> None:
    picture = scaling("gpt2-124m", H100, replace(PLAN, shard_size=16), gpus=[8, 16, 32])
    (line,) = curves(picture.figure).values()
    assert list(line.x) == [16, 32]
    assert "Not possible on 8 GPUs: Plan.shard_size is 16, which does not divide the 8 GPUs" in picture.finding


def test_strong_scaling_shares_the_sequences_of_a_step() -> None:
    plan = replace(PLAN, micro_batch=4, grad_accum=4)  # 128 sequences on 8 GPUs
    picture = scaling("gpt2-124m", H100, plan, gpus=[8, 16, 64, 128, 256], kind="strong")
    (line,) = curves(picture.figure).values()
    settings = {8: (4, 4), 16: (4, 2), 64: (2, 1), 128: (1, 1)}
    sims = [
        simulate("gpt2-124m", replace(H100, gpus=n), replace(plan, micro_batch=m, grad_accum=a))
        for n, (m, a) in settings.items()
    ]
    assert list(line.x) == list(settings)
    assert list(line.y) == pytest.approx([s.tokens_per_s_per_gpu for s in sims])
    assert "128 sequences of a step cannot be shared by 256 GPUs" in picture.finding


def test_one_process_on_a_cpu_and_one_point_are_enough() -> None:
    picture = scaling("gpt2-124m", Cluster("cpu", gpus=1), Plan(seq_len=32), gpus=[1])
    assert "On 1 rank each does" in picture.figure.layout.title.text
    assert scaling("gpt2-124m", Cluster("cpu", gpus=1), Plan(seq_len=32), gpus=[1, 2, 3]).finding


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"kind": "odd"}, "kind is 'odd'; it must be weak or strong"),
        ({"gpus": []}, "give at least one number of GPUs"),
        ({"cluster": None}, "scaling needs a cluster"),
        ({"gpus": [12, 20]}, "none of the numbers of GPUs .12, 20. is possible; Cluster.gpus is 20"),
        ({"model": {}}, "a dict of name to"),
    ],
)
def test_what_cannot_be_drawn_says_why(asked: dict[str, object], words: str) -> None:
    plain = {"model": "gpt2-124m", "cluster": H100, "plan": PLAN, "gpus": GPUS}
    with pytest.raises(ValueError, match=words):
        scaling(**plain | asked)  # type: ignore[arg-type]
