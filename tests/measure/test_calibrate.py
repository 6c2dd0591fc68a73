"""`calibrate` measures: this machine's cores and collectives become a cluster."""

import re
import socket

import pytest
import torch

from fsdp_sim.measure.calibrate import _kernels, calibrate, processor_name
from fsdp_sim.measure.train_probe import SHAPES


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


@pytest.mark.parametrize(("own", "dtype"), [(True, "bf16"), (False, "fp16")])
def test_a_gpu_is_measured_in_bf16_only_where_it_does_not_emulate_that(monkeypatch, own, dtype):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: own or including_emulation)
    assert {case.dtype for case in _kernels("cuda", quick=True) if case.kind == "attention"} == {dtype}


@pytest.mark.tail
def test_one_rank_alone_has_kernels_and_no_link_of_its_own():
    found = calibrate(1, device="cpu", quick=True)

    assert found.collectives == ()
    assert found.cluster.intra is None
    assert found.cluster.gpu.peak_flops("fp32") > 1e9
    assert 1e8 < found.cluster.gpu.mem_bytes_per_s < 1e13
    assert 0 < found.cluster.gpu.launch_s < 1  # of a machine that may do other things too
    assert (found.sharded, found.cluster.gpu.collective_s) == ((), None)
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
