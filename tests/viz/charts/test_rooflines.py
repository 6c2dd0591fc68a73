"""Work for each byte: marks lie under their roofs, and what cannot hide communicates longer than it computes."""

import math

import plotly.graph_objects as go
import pytest

from fsdp_sim import Cluster, Plan, Simulation, simulate
from fsdp_sim.cost.costs import MOST_LOST
from fsdp_sim.cost.kernels import kernel_s
from fsdp_sim.timeline import COLLECTIVES, Op, Phase
from fsdp_sim.viz.charts.intensity import kernel_points, network_bytes_per_s, unit_points
from fsdp_sim.viz.charts.rooflines import roofline


def of(
    gpus: int = 16, gpu: str = "A100", model: str = "gpt2-1.5b", gbps: float | None = None, **plan: object
) -> Simulation:
    wanted = {"micro_batch": 2, "seq_len": 1024} | plan
    return simulate(model, Cluster(gpu, gpus=gpus, bandwidth_gbps=gbps), Plan(**wanted))  # type: ignore[arg-type]


CASES = [
    of(param_dtype="bf16", activation_checkpointing="selective", grad_accum=2),
    of(api="fsdp1", forward_prefetch=True),
    of(api="ddp"),
    of(shard_size=8),
    of(gpus=1),
    of(gpus=2, gpu="cpu", model="gpt2-124m"),
]


def marks(figure: go.Figure, panel: str) -> list[go.Scatter]:
    return [t for t in figure.data if t.mode == "markers" and (t.xaxis or "x") == panel]


@pytest.mark.parametrize("sim", CASES, ids=repr)
def test_kernels_lie_under_the_roofs_and_take_as_long_as_the_compute_of_the_step(sim: Simulation) -> None:
    gpu = sim.cluster.gpu
    for p in kernel_points(sim):
        assert p.flops_per_s <= gpu.peak_flops(p.kernel.dtype) * 1.0001 if p.kernel.flops else p.flops_per_s == 0.0
        assert p.flops_per_s <= gpu.mem_bytes_per_s * p.intensity * 1.0001
    last = max(i.step for i in sim.program.ops)
    compute = [i for i in sim.program.ops if i.op in (Op.FWD, Op.BWD, Op.RECOMPUTE) and i.step == last]
    points = kernel_points(sim)
    gap_s = sim.costs.calibration.kernel_gap_s
    gaps = sum(min(p.calls * gap_s, MOST_LOST * p.seconds) for p in points)
    slowest = 1 + sim.costs.calibration.slowest_per_doubling * math.log2(sim.cluster.nodes)
    assert slowest * (sum(p.seconds for p in points) + gaps) == pytest.approx(
        sum(sim.costs.seconds(i) for i in compute)
    )
    assert points == sorted(points, key=lambda p: -p.seconds)
    one = points[0]
    how = {"backward": one.backward, "attention": sim.plan.attention_impl}
    assert one.seconds == pytest.approx(one.calls * kernel_s(one.kernel, sim.cluster.gpu, sim.costs.calibration, **how))


@pytest.mark.parametrize("sim", CASES, ids=repr)
def test_units_account_for_all_that_is_computed_and_communicated(sim: Simulation) -> None:
    last = max(i.step for i in sim.program.ops)
    sent = sum(i.bytes for i in sim.program.ops if i.op in COLLECTIVES and i.step == last)
    units = unit_points(sim)
    assert sum(u.bytes for u in units) == sent
    assert sum(u.flops for u in units) == pytest.approx(sum(p.kernel.flops * p.calls for p in kernel_points(sim)))
    rate = network_bytes_per_s(sim)
    assert (rate > 0) == (sim.cluster.gpus > 1)
    for u in units:
        assert u.hidden == (u.comm_s <= u.compute_s)
        assert u.flops_per_s <= u.intensity * 1.01 * max(rate, sim.cluster.intra_link.bytes_per_s * 2)


@pytest.mark.parametrize("sim", CASES, ids=repr)
def test_every_case_is_drawn_and_told(sim: Simulation) -> None:
    picture = roofline(sim)
    drawn = marks(picture.figure, "x")
    assert sum(len(t.x) for t in drawn) == sum(1 for p in kernel_points(sim) if p.kernel.flops)
    assert "FLOP per byte of memory" in picture.finding
    assert ("Nothing communicates" in picture.finding) == (sim.cluster.gpus == 1)
    assert bool(marks(picture.figure, "x2")) == (sim.cluster.gpus > 1)


def test_a_slow_network_leaves_every_unit_left_of_the_ridge() -> None:
    slow, fast = of(gbps=5, param_dtype="bf16"), of(gpus=8, param_dtype="bf16", micro_batch=16)
    assert not any(u.hidden for u in unit_points(slow) if u.bytes)
    assert all(u.hidden for u in unit_points(fast) if u.bytes)
    assert "No unit can hide" in roofline(slow).finding
    assert "Every unit can hide" in roofline(fast).finding
    shades = [s for s in roofline(slow).figure.layout.shapes if s.name == "left of the ridge"]
    ridge = shades[0].x1
    for trace in marks(roofline(slow).figure, "x2"):
        assert max(trace.x) < ridge


def test_more_tokens_move_units_to_the_right_and_more_bytes_to_the_left() -> None:
    def forward(sim: Simulation) -> float:
        return next(u.intensity for u in unit_points(sim) if u.unit == "layers.1" and u.phase is Phase.FORWARD)

    assert forward(of(micro_batch=4)) == pytest.approx(2 * forward(of(micro_batch=2)), rel=1e-6)
    assert forward(of(param_dtype="bf16")) == pytest.approx(2 * forward(of()), rel=1e-6)


def test_ddps_buckets_are_set_against_the_compute_of_their_phase() -> None:
    backward = [u for u in unit_points(of(api="ddp")) if u.phase is Phase.BACKWARD]
    assert [u.unit for u in backward] == ["all units"]
    assert "first all-gather" not in roofline(of(api="ddp")).finding
