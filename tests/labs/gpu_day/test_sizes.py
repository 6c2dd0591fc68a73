"""On any GPU the labs and the training are given what has room there and what it computes in. The GPUs are faked."""

import pytest

from tests.faked_gpus import ROOT, python
from tests.faked_gpus.decisions import COUNTS, Decisions, decided, table
from tests.faked_gpus.sitecustomize import MACHINES

OLD = {"T4", "V100"}  # which have no bf16


@pytest.fixture(scope="module")
def all_decided() -> list[Decisions]:
    return decided()


def test_each_gpu_has_a_rank(all_decided):
    assert [(one.machine, one.ranks) for one in all_decided] == [(name, n) for name in MACHINES for n in COUNTS]


def test_what_is_trained_has_room(all_decided):
    for one in all_decided:
        assert one.most_bytes < 0.8 * MACHINES[one.machine][1] * 2**30, one
    by_memory = sorted((one for one in all_decided if one.gpus == 1), key=lambda one: MACHINES[one.machine][1])
    assert by_memory[0].training_model == "gpt2-medium"
    assert by_memory[-1].training_model == "gpt2-xl"


def test_nothing_is_emulated(all_decided):
    for one in all_decided:
        half = "fp16" if one.machine in OLD else "bf16"
        assert (one.dtype, one.half) == ("fp32" if one.machine in OLD else "bf16", f"param_dtype={half}")
        assert ("bf16" in one.lab_5) == (one.machine not in OLD)


def test_the_page_has_what_is_decided(all_decided):
    assert table(all_decided) in (ROOT / "docs" / "gpu_day.md").read_text()


def test_a_part_of_a_gpu_has_a_part_of_its_rates(all_decided):
    assert {one.rates_of for one in all_decided if one.machine == "MIG"} == {"H100-SXM-80GB MIG 1g.10gb"}


def test_without_nccl_gpus_are_refused_by_name(tmp_path):
    code = """
from labs.cluster.process_group import RankPlace, find_device
try:
    find_device("cuda", RankPlace())
except ValueError as error:
    print(error)
print(find_device("auto", RankPlace()))
"""
    said = python(code, 2, tmp_path / "log", FAKED_NCCL="no").splitlines()
    assert "is built without NCCL" in said[0]
    assert "use device=cpu" in said[0]
    assert said[1] == "cpu"
