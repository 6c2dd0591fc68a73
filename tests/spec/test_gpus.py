"""The catalogue of GPUs: names, aliases, dense peaks, and what a part does not have."""

import pytest

from fsdp_sim.spec import Gpu, gpu, gpu_names, link, link_names

# The parts of published FSDP measurements, as their tables name them, and what each is.
MEASURED = {
    "A100-SXM-40GB": "A100-SXM-40GB",
    "A100-SXM-80GB": "A100-SXM-80GB",
    "H100-SXM-80GB": "H100-SXM-80GB",
    "H100-SXM-96GB-HBM2e-500W": "H100-SXM-96GB-HBM2e-500W",
    "H100": "H100-SXM-80GB",  # the part is not stated; the common one is taken
    "RTX-3090": "RTX-3090",
    "MI300X": "MI300X",
    "B200-SXM-180GB": "B200-SXM-180GB",
}


@pytest.mark.parametrize(("name", "part"), MEASURED.items())
def test_every_measured_gpu_resolves(name, part):
    assert gpu(name).name == part


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("a100", "A100-SXM-80GB"), ("H200", "H200-SXM-141GB"), ("b200", "B200-SXM-180GB"), ("4090", "RTX-4090"),
        ("mi300x", "MI300X"), ("v100", "V100-SXM2-32GB"), ("rtx 3090", "RTX-3090"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"), ("Tesla T4", "T4"), ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"), ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
    ],
)  # fmt: skip
def test_aliases_any_case_and_a_drivers_name(name, part):
    assert gpu(name).name == part


@pytest.mark.parametrize(
    ("name", "nearest"), [("H1000", "H100-SXM-80GB"), ("RTX-4080", "RTX-4090"), ("zzz", "A100-SXM-40GB")]
)
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
    assert part.mem_bytes >= 16 * 2**30
    assert 0.5 <= part.matmul_fraction <= 0.9
    assert (link(part.intra).kind, link(part.inter).kind) == ("intra", "inter")
    assert link(part.host).kind in ("intra", "host")  # PCIe is both
    assert Gpu.from_table(name, part.to_table()) == part


def test_the_best_matmul_is_the_measured_one_or_that_of_the_architecture():
    assert gpu("H100").matmul_flops("bf16") == pytest.approx(794.5e12)
    a10g = gpu("A10G")  # none was measured: the median of the A100s'
    assert a10g.matmul_flops("bf16") / a10g.peak_flops("bf16") == pytest.approx(271.2 / 312 / 2 + 252.9 / 312 / 2, 0.04)


def test_an_upper_bound_for_a_peak_is_said_to_be_one():
    part = gpu("H100-SXM-96GB-HBM2e-500W")
    assert part.peak_flops("bf16") == gpu("H100").peak_flops("bf16")
    assert part.matmul_flops("bf16") < gpu("H100").matmul_flops("bf16")
    assert "upper bound" in part.notes


def test_every_link_is_whole():
    for name in link_names():
        assert link(name).sources, name
        assert link(name.upper()) == link(name)


def test_a_gpu_with_no_peak_is_refused():
    with pytest.raises(ValueError, match="Gpu x has no peak; give at least one of bf16_flops"):
        Gpu(name="x", arch="y", mem_bytes=1e9, mem_bytes_per_s=1e9)
