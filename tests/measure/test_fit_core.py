"""The rates of a core in training, fitted to times that a known core would take."""

import dataclasses

import numpy as np
import pytest

from fsdp_sim.measure.fit_core import (
    amounts_of_probe,
    fit_collective_s,
    fit_rates,
    probe_s,
    sharded_s,
)
from fsdp_sim.measure.train_probe import SHAPES, SHARDED, ProbeShape, ProbeTime, ShardedTime
from fsdp_sim.spec import Cluster, gpu

ATTENTION_FLOPS, COPY = 4e10, 4e10
TRUTH = dataclasses.replace(
    gpu("cpu"), fp32_flops=8e10, bf16_flops=8e10, sustained_matmul_flops=8e10, matmul_ramp=30.0, mem_bytes_per_s=1e10,
    attention_flops=ATTENTION_FLOPS, launch_s=3e-5, backward_launch_s=1e-5,
)  # fmt: skip
UNSEEN = [ProbeShape(1, 32, 96, 512), ProbeShape(16, 64, 256, 256), ProbeShape(3, 128, 512, 300, 2)]


def probes(shapes=SHAPES, noise: float = 0.0) -> list[ProbeTime]:
    """What `TRUTH` takes."""
    random = np.random.default_rng(1)

    def seconds(of, launch_s) -> float:
        edges_s = 30.0 * of.matmul_edges / 8e10
        exact = of.matmul_flops / 8e10 + edges_s + of.attention_flops / 4e10 + of.bytes / 1e10 + of.launches * launch_s
        return exact * (1 + random.uniform(-noise, noise))

    return [ProbeTime(shape, *map(seconds, amounts_of_probe(shape), (3e-5, 1e-5))) for shape in shapes]


def test_what_a_probe_computes_follows_from_its_shape():
    rows, seq, width, vocab, layers = shape = ProbeShape(2, 64, 96, 512, 3)
    forward, backward = amounts_of_probe(shape)

    tokens = rows * seq
    assert forward.matmul_flops == 2 * tokens * width * layers * (3 + 1 + 4 + 4) * width + 2 * tokens * width * vocab
    assert backward.matmul_flops == 2 * forward.matmul_flops  # of weights and of inputs
    assert forward.attention_flops == pytest.approx(layers * 2 * rows * seq**2 * width, rel=0.05)  # half of the square
    assert forward.bytes < backward.bytes
    assert 10 < forward.launches < backward.launches


def test_twice_the_rows_are_twice_the_work_in_as_many_kernels():
    once, twice = (amounts_of_probe(ProbeShape(rows, 32, 64, 128))[0] for rows in (2, 4))

    assert twice.matmul_flops == 2 * once.matmul_flops
    assert twice.attention_flops == 2 * once.attention_flops
    assert twice.launches == once.launches


def test_the_rates_of_a_core_are_found_again():
    found = fit_rates(probes(), ATTENTION_FLOPS, COPY)

    assert found == pytest.approx((8e10, 30.0, 1e10, 3e-5, 1e-5), rel=1e-6)


def test_the_simulator_makes_the_measured_times_of_them():
    for probe in probes():
        assert probe_s(probe.shape, Cluster(TRUTH, gpus=2)) == pytest.approx(probe[1:], rel=0.02)


def test_shapes_that_were_left_out_are_predicted_although_the_rest_is_noisy():
    for seen in (SHAPES[:-1], SHAPES[1:]):
        rates = fit_rates(probes(seen, noise=0.05), ATTENTION_FLOPS, COPY)
        part = dataclasses.replace(TRUTH, fp32_flops=rates.matmul_flops, bf16_flops=rates.matmul_flops,
            sustained_matmul_flops=rates.matmul_flops, matmul_ramp=rates.matmul_ramp,
            mem_bytes_per_s=rates.bytes_per_s, launch_s=rates.launch_s or 0.0,
            backward_launch_s=rates.backward_launch_s or 0.0)  # fmt: skip
        for probe in probes(UNSEEN):
            assert probe_s(probe.shape, Cluster(part, gpus=2)) == pytest.approx(probe[1:], rel=0.15)


def test_nothing_that_moves_bytes_is_faster_than_a_copy():
    assert fit_rates(probes(), ATTENTION_FLOPS, 5e9).bytes_per_s == pytest.approx(5e9, rel=1e-6)


def test_times_that_no_core_has_are_refused():
    wild = [ProbeTime(shape, 10.0 ** (-9 * (i % 2)), 1.0) for i, shape in enumerate(SHAPES)]
    with pytest.raises(ValueError, match=r"no rate.*measure on an idle machine"):
        fit_rates(wild, ATTENTION_FLOPS, COPY)


def test_what_a_collective_costs_beside_its_wire_is_found_again():
    cluster = Cluster(TRUTH, gpus=2)
    times = []
    for shape in SHARDED:
        others_s, collectives = sharded_s(shape, cluster)
        assert collectives == 3 * shape.layers + 2  # the root is not gathered again
        times.append(ShardedTime(shape, others_s + collectives * 2e-3))
    assert fit_collective_s(times, cluster) == pytest.approx(2e-3)


def test_sharded_steps_faster_than_their_parts_cost_nothing_more():
    assert fit_collective_s([ShardedTime(SHARDED[0], 1e-9)], Cluster(TRUTH, gpus=2)) == 0.0
