"""The catalogue of GPUs: names, aliases, dense peaks, and what a part does not have."""

import pytest

from fsdp_sim.spec import Cluster, Gpu, gpu, gpu_names, link, link_names


def test_memory_bound_kernels_reach_a_measured_copy_or_the_share_of_others() -> None:
    assert gpu("H100").copy_bytes_per_s == 2.9e12
    assert gpu("A100-SXM-40GB").copy_bytes_per_s == pytest.approx(0.85 * 1.555e12)
    assert gpu("cpu").copy_bytes_per_s == gpu("cpu").mem_bytes_per_s


@pytest.mark.parametrize(
    ("name", "part"),
    [
        # the parts of published FSDP measurements, as their tables name them
        ("A100-SXM-40GB", "A100-SXM-40GB"), ("A100-SXM-80GB", "A100-SXM-80GB"), ("RTX-3090", "RTX-3090"),
        ("H100-SXM-96GB-HBM2e-500W", "H100-SXM-96GB-HBM2e-500W"),
        ("H100", "H100-SXM-80GB"),  # the part is not stated; the common one is taken
        # in any case, and as a driver says it
        ("a100", "A100-SXM-80GB"), ("H200", "H200-SXM-141GB"), ("b200", "B200-SXM-180GB"), ("4090", "RTX-4090"),
        ("mi300x", "MI300X"), ("v100", "V100-SXM2-32GB"), ("rtx 3090", "RTX-3090"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"), ("Tesla T4", "T4"), ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"), ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA H100 NVL", "H100-NVL-94GB"), ("H20", "H20-SXM-96GB"), ("h800", "H800-SXM-80GB"),
        ("B300", "B300-SXM-270GB"), ("GB300", "GB300"), ("MI325X", "MI325X"),
        ("AMD Instinct MI355X", "MI355X"), ("NVIDIA A10", "A10"),
        ("5090", "RTX-5090"), ("4070", "RTX-4070"), ("NVIDIA GeForce RTX 3060", "RTX-3060"),
        ("RTX PRO 6000", "RTX-PRO-6000"), ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"), ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "A100-SXM-80GB MIG 3g.40gb"),
    ],
)  # fmt: skip
def test_aliases_any_case_and_a_drivers_name(name, part):
    assert gpu(name).name == part


@pytest.mark.parametrize(("name", "nearest"), [("H1000", "H100-SXM-80GB"), ("RTX-4099", "RTX-4090")])
def test_an_unknown_name_gives_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=rf"no GPU is called '{name}'; the nearest names are .*{nearest}"):
        gpu(name)


def test_peaks_are_dense():
    h100 = gpu("H100")
    assert (h100.peak_flops("bf16"), h100.peak_flops("tf32"), h100.peak_flops("fp8")) == (989.4e12, 494.7e12, 1978.9e12)
    assert gpu("RTX-3090").peak_flops("bf16") == 71e12  # with fp32 accumulation


def test_a_dtype_that_a_gpu_lacks_is_named_with_those_it_has():
    assert not gpu("V100").supports_bf16
    with pytest.raises(ValueError, match="T4 has no bf16; it has fp16, fp32"):
        gpu("T4").peak_flops("bf16")


@pytest.mark.parametrize("name", gpu_names())
def test_every_part_is_whole(name):
    part = gpu(name)
    assert part.sources
    assert part.mem_bytes >= 12 * 2**30
    assert 0.45 <= part.matmul_fraction <= 0.9
    assert (link(part.intra).kind, link(part.inter).kind) == ("intra", "inter")
    assert link(part.host).kind in ("intra", "host")  # PCIe is both
    assert Gpu.from_table(name, part.to_table()) == part


def test_the_best_matmul_is_the_measured_one_or_that_of_the_architecture():
    assert gpu("H100").matmul_flops("bf16") == pytest.approx(708e12)
    a10g = gpu("A10G")  # none was measured: the median of the A100s'
    assert a10g.matmul_flops("bf16") / a10g.peak_flops("bf16") == pytest.approx(265 / 312 / 2 + 247 / 312 / 2, 0.04)
    assert gpu("L4").matmul_fraction == 0.7  # one of its architecture, an L40S, does not speak for it


def test_a_gpu_with_as_much_power_for_its_peak_as_an_a100_sustains_as_much_of_it():
    a100 = gpu("A100")
    for name in ("RTX-4090", "RTX-5090", "H20", "V100"):
        assert gpu(name).matmul_fraction == pytest.approx(a100.matmul_fraction, rel=0.01), name
    assert gpu("H100-PCIe-80GB").matmul_fraction < a100.matmul_fraction


def test_an_upper_bound_for_a_peak_is_said_to_be_one():
    part = gpu("H100-SXM-96GB-HBM2e-500W")
    assert part.peak_flops("bf16") == gpu("H100").peak_flops("bf16")
    assert part.matmul_flops("bf16") < gpu("H100").matmul_flops("bf16")
    assert "upper bound" in part.notes


def test_a_mig_instance_sustains_as_much_of_its_peak_as_the_whole():
    for name, profile in (("H100-PCIe-80GB", "1g.10gb"), ("H100", "3g.40gb"), ("A100-PCIe-40GB", "1g.5gb")):
        assert gpu(f"{name} MIG {profile}").matmul_fraction == pytest.approx(gpu(name).matmul_fraction)


def test_a_mig_instance_is_its_share_of_the_gpu():
    whole, part = gpu("H100"), gpu("H100 MIG 3g.40gb")
    assert part.peak_flops("bf16") == pytest.approx(whole.peak_flops("bf16") * 3 / 7)
    assert (part.mem_bytes, part.mem_bytes_per_s) == (whole.mem_bytes / 2, whole.mem_bytes_per_s / 2)
    assert part.intra == "PCIe5"  # no NVLink between instances
    assert part.gpus_per_node == 2 * whole.gpus_per_node


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("H100 MIG 3g.30gb", r"H100-SXM-80GB MIG 3g.30gb: there is no such instance; there are 1g.10gb, 1g.20gb"),
        ("H100 MIG half", r"there is no such instance"),
        ("RTX-4090 MIG 1g.3gb", r"RTX-4090 cannot be cut into MIG instances"),
        ("MI300X MIG 1g.24gb", r"MI300X cannot be cut into MIG instances"),
    ],
)
def test_a_mig_instance_that_does_not_exist_is_refused(name, says):
    with pytest.raises(ValueError, match=says):
        gpu(name)


def test_what_has_no_source_is_said_to_users():
    assert Cluster("H100", gpus=8).notes == []
    (note,) = Cluster("5090", gpus=2).notes
    assert note.startswith("Of RTX-5090 this is unverified: its matmul rates")


def test_every_link_is_whole():
    for name in link_names():
        assert link(name).sources, name
        assert link(name.upper()) == link(name)


def test_a_gpu_with_no_peak_is_refused():
    with pytest.raises(ValueError, match="Gpu x has no peak; give at least one of bf16_flops"):
        Gpu(name="x", arch="y", mem_bytes=1e9, mem_bytes_per_s=1e9)
