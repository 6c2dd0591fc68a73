"""`calibrate` fits what it measures: known links are found again, and this machine's becomes a cluster."""

import dataclasses
import re
import socket

import numpy as np
import pytest
import torch

from fsdp_sim.cost.collectives import collective_s
from fsdp_sim.measure.calibrate import (
    Found,
    _core,
    calibrate,
    cores,
    fit_link,
    fit_rates,
    least_squares_above_zero,
    processor_name,
)
from fsdp_sim.measure.on_rank import CollectiveTime, KernelTime
from fsdp_sim.measure.train_probe import SHAPES, ProbeShape, ProbeTime, amounts_of_probe
from fsdp_sim.spec import Cluster, Gpu, Link, gpu, link

CORE, H100 = gpu("cpu"), gpu("H100")
OPS = ("all_gather", "reduce_scatter", "all_reduce")


def times(truth: Link, part: Gpu, ops: tuple[str, ...] = OPS, noise: float = 0.0) -> list[CollectiveTime]:
    """What collectives over that link take, each up to ``noise`` more or less."""
    random = np.random.default_rng(0)
    found = []
    for op in ops:
        for n in (2, 4, 8):
            for n_bytes in (2**12, 2**16, 2**20, 2**24, 2**28):
                seconds = collective_s(op, n_bytes, n, Cluster(part, gpus=n, intra=truth))
                found.append(CollectiveTime(op, n, n_bytes, seconds * (1 + random.uniform(-noise, noise))))
    return found


TRUTH = Link(
    "gloo", 3e9, "gloo", kind="intra", base_s=2e-4, hop_s=5e-5, fill_s=3e-5,
    reduce_scatter_fraction=0.5, all_reduce_fraction=0.8,
)  # fmt: skip


def assert_same_link(found: Link, truth: Link, within: float) -> None:
    for name in ("bytes_per_s", "base_s", "hop_s", "fill_s", "reduce_scatter_fraction", "all_reduce_fraction"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=within), name


def test_a_link_between_processes_is_found_again():
    assert_same_link(fit_link(times(TRUTH, CORE), link("gloo"), CORE), TRUTH, within=0.01)


def test_it_is_found_roughly_where_the_times_are_noisy():
    found = fit_link(times(TRUTH, CORE, noise=0.1), link("gloo"), CORE)
    for op in OPS:
        for size in (2**16, 2**22):
            a, b = (collective_s(op, size, 4, Cluster(CORE, gpus=4, intra=one)) for one in (found, TRUTH))
            assert a == pytest.approx(b, rel=0.1)


def test_a_link_between_gpus_keeps_its_datasheet_and_gets_a_fraction_of_it():
    truth = dataclasses.replace(link("NVLink4"), fraction=0.7, base_s=2e-5, hop_s=3e-6, fill_s=1e-6)
    found = fit_link(times(truth, H100, ("all_gather", "reduce_scatter")), link("NVLink4"), H100)

    assert (found.bytes_per_s, found.fraction) == (450e9, pytest.approx(0.7, rel=0.01))
    assert (found.base_s, found.hop_s) == (pytest.approx(2e-5, rel=0.01), pytest.approx(3e-6, rel=0.01))
    assert collective_s("all_reduce", 1e9, 8, Cluster(H100, gpus=8, intra=found)) < 2 * collective_s(
        "all_gather", 1e9, 8, Cluster(H100, gpus=8, intra=found)
    )  # the switch still reduces


def test_times_that_do_not_grow_with_the_messages_are_refused():
    with pytest.raises(ValueError, match="the measured times fit no link"):
        fit_link([CollectiveTime("all_gather", 2, 2**k, 1.0 / 2**k) for k in range(10, 24)], link("NVLink4"), H100)


def test_least_squares_leaves_out_what_would_be_negative():
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    # An intercept of -0.5 fits exactly; the best one that is not negative is 0.
    assert least_squares_above_zero(matrix, np.array([0.5, 1.5, 2.5]), 1)[0] == 0.0


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"device": "tpu"}, "there is no device 'tpu'; there are auto, cpu and cuda"),
        ({"ranks": 65, "device": "cpu"}, "65 ranks: this machine takes 1 to 64 on cpu"),
    ],
)
def test_what_this_machine_does_not_have_is_refused_before_anything_starts(asked, words):
    with pytest.raises(ValueError, match=words):
        calibrate(**asked)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a GPU to be absent")
def test_gpus_are_asked_for_where_there_are_none():
    with pytest.raises(ValueError, match="torch finds no GPU on this machine; take device cpu"):
        calibrate(device="cuda")


KERNELS = [KernelTime("matmul", dtype, (2, 2, 2), 1e10, 1.0, 0.1) for dtype in ("fp32", "bf16", "fp16")]
KERNELS += [KernelTime("attention", "fp32", (), 4e9, 1.0, 0.1), KernelTime("memory", "fp32", (), 0.0, 4e9, 0.1)]
KERNELS += [KernelTime("launch", "fp32", (), 0.0, 0.0, 1e-6)]


def probes(shapes=SHAPES, noise: float = 0.0) -> list[ProbeTime]:
    """What a core takes that multiplies at 8e10 FLOP/s, does attention at 4e10, moves 1e10 bytes/s and takes 8 us for
    each kernel."""
    random = np.random.default_rng(1)

    def seconds(of) -> float:
        exact = of.matmul_flops / 8e10 + of.attention_flops / 4e10 + of.bytes / 1e10 + of.kernels * 8e-6
        return exact * (1 + random.uniform(-noise, noise))

    return [ProbeTime(shape, *map(seconds, amounts_of_probe(shape))) for shape in shapes]


def test_the_rates_of_a_core_in_training_are_found_again():
    found = fit_rates(KERNELS, probes())

    assert found == pytest.approx((8e10, 4e10, 1e10, 8e-6), rel=1e-6)


def test_shapes_that_were_left_out_are_predicted_although_the_rest_is_noisy():
    unseen = [ProbeShape(1, 32, 96, 512), ProbeShape(16, 64, 256, 256), ProbeShape(3, 128, 512, 300)]
    for seed_shapes in (SHAPES[:-1], SHAPES[1:]):
        part = _core(cores(), KERNELS, probes(seed_shapes, noise=0.05))
        found = Found(Cluster(part, gpus=cores()), (), (), tuple(probes(unseen)))
        assert max(map(abs, found.probe_errors)) < 0.15


def test_times_that_no_core_has_are_refused():
    wild = [ProbeTime(shape, 10.0 ** (-9 * (i % 2)), 1.0) for i, shape in enumerate(SHAPES)]
    with pytest.raises(ValueError, match=r"no rate.*measure on an idle machine"):
        fit_rates(KERNELS, wild)


def test_a_rank_that_has_several_cores_computes_on_all_and_issues_on_one():
    on_all = [kernel._replace(flops=kernel.flops * cores()) for kernel in KERNELS]  # alone, a kernel has all cores
    part = _core(1, on_all, probes())

    assert part.peak_flops("fp32") == pytest.approx(8e10 * cores(), rel=0.01)
    assert part.mem_bytes_per_s == pytest.approx(1e10 * cores(), rel=0.01)
    assert part.launch_s == pytest.approx(8e-6, rel=0.01)


def test_ranks_that_are_more_than_the_cores_take_turns():
    one_each, crowded = _core(cores(), KERNELS, probes()), _core(8 * cores(), KERNELS, probes())

    assert one_each.peak_flops("fp32") == pytest.approx(8e10, rel=0.01)
    assert crowded.peak_flops("fp32") == pytest.approx(one_each.peak_flops("fp32") / 8, rel=0.01)
    assert crowded.mem_bytes_per_s == pytest.approx(one_each.mem_bytes_per_s / 8, rel=0.01)
    assert crowded.launch_s == pytest.approx(one_each.launch_s * 8, rel=0.01)


def test_one_rank_alone_has_kernels_and_no_link_of_its_own():
    found = calibrate(1, device="cpu", quick=True)

    assert found.collectives == ()
    assert found.cluster.intra is None
    assert found.cluster.gpu.peak_flops("fp32") > 1e9
    assert 1e8 < found.cluster.gpu.mem_bytes_per_s < 1e13
    assert found.cluster.gpu.launch_s < 1e-3
    assert [probe.shape for probe in found.probes] == list(SHAPES)
    assert len(found.probe_errors) == 2 * len(SHAPES)
    assert found.as_dict()["collective_error"] is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: measures its kernels")
def test_gpus_are_measured_over_nccl():
    found = calibrate(device="cuda", quick=True)

    part = found.cluster.gpu
    assert 0.3 < part.matmul_fraction <= 1
    assert 0.3 < part.stream_bytes_per_s / part.mem_bytes_per_s <= 1
    assert found.cluster.host_link.fraction <= 1


def test_the_processor_is_named_and_the_machine_is_not():
    name = processor_name()
    assert re.search(r"\w", name)
    assert socket.gethostname() not in name
