"""`calibrate` fits what it measures: known links are found again, and this machine's becomes a cluster."""

import dataclasses
import re
import socket

import numpy as np
import pytest
import torch

from fsdp_sim.cost.collectives import collective_s
from fsdp_sim.measure.calibrate import _core, calibrate, cores, fit_link, least_squares_above_zero, processor_name
from fsdp_sim.measure.on_rank import CollectiveTime, KernelTime
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


def test_ranks_that_are_more_than_the_cores_take_turns():
    kernels = [KernelTime("matmul", dtype, (2, 2, 2), 1e9, 1.0, 0.1) for dtype in ("fp32", "bf16", "fp16")]
    kernels += [KernelTime("attention", "fp32", (), 1e9, 1.0, 0.1), KernelTime("memory", "fp32", (), 0.0, 1e9, 0.1)]
    kernels += [KernelTime("launch", "fp32", (), 0.0, 0.0, 1e-6)]
    alone, crowded = _core(1, kernels), _core(8 * cores(), kernels)

    assert alone.peak_flops("fp32") == 1e10
    assert crowded.peak_flops("fp32") == alone.peak_flops("fp32") / 8
    assert crowded.mem_bytes_per_s == alone.mem_bytes_per_s / 8
    assert crowded.launch_s == alone.launch_s * 8


def test_one_rank_alone_has_kernels_and_no_link_of_its_own():
    found = calibrate(1, device="cpu", quick=True)

    assert found.collectives == ()
    assert found.cluster.intra is None
    assert found.cluster.gpu.peak_flops("fp32") > 1e9
    assert 1e8 < found.cluster.gpu.mem_bytes_per_s < 1e13
    assert found.cluster.gpu.launch_s < 1e-3
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
