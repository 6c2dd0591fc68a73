"""`fsdp-sim doctor`: every part is really tried, and what is missing comes with its remedy."""

import json
import resource
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from fsdp_sim.cli import doctor as module
from fsdp_sim.cli import doctor_gpus, doctor_system
from fsdp_sim.cli.doctor import CHECKS, DoctorFinding, doctor, examine, package


def test_all_is_well_where_the_tests_run():
    result = CliRunner().invoke(doctor, ["--json"])

    found = {check["part"]: check for check in json.loads(result.stdout)["checks"]}
    assert result.exit_code == 0, found
    assert len(found) == len(CHECKS)
    assert found["ranks on this machine"]["found"] == "2 processes summed a tensor over gloo"
    assert found["torch"]["state"] == "works"
    for check in found.values():
        assert check["remedy"] or check["state"] == "works"


def test_the_table_names_each_part(monkeypatch):
    monkeypatch.setattr(module, "CHECKS", (module.python, package("no_such_package", "nothing")))

    result = CliRunner().invoke(doctor, [])

    assert result.exit_code == 0  # absent is not broken
    assert "Python" in result.stdout
    assert "absent" in result.stdout


def test_what_is_not_installed_says_what_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)

    found = package("pandas", "tables")()

    assert found == DoctorFinding(
        "pandas", "absent", "not installed", "tables",
        "in a checkout of fsdp_sim, run make setup, or pip install -e '.[explore]'",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("version", "state", "found"),
    [
        ("2.10.2", "broken", "2.10.2"),
        ("2.11.0", "works", "2.11.0"),
        ("2.99.0", "works", "2.99.0, newer than those this was tried with"),
    ],
)
def test_a_torch_that_is_too_old_is_broken_and_one_that_is_newer_than_those_tried_is_said_to_be(
    version, state, found, monkeypatch
):
    monkeypatch.setattr(module, "torch_here", lambda: SimpleNamespace(__version__=version))

    build = module.torch_build()
    assert (build.state, build.found.partition(";")[0]) == (state, found)
    assert ("without a reduce_dtype" in build.found) is (version == "2.99.0")  # what 2.15 and later reduce in


def test_a_check_that_raises_has_found_something():
    def ranks() -> DoctorFinding:
        raise OSError("[Errno 98] Address already in use\nand more")

    found = examine(ranks)

    assert (found.part, found.state) == ("ranks", "broken")
    assert found.found == "OSError: [Errno 98] Address already in use"


def test_something_broken_is_exit_status_1(monkeypatch):
    monkeypatch.setattr(
        module, "CHECKS", (lambda: DoctorFinding("wheel", "broken", "flat", "driving", "pump it [hard]"),)
    )

    result = CliRunner().invoke(doctor, [])

    assert result.exit_code == 1
    assert "pump it [hard]" in result.stdout


@pytest.mark.parametrize("version", [(3, 10), (3, 15)])
def test_a_python_that_will_not_do(monkeypatch, version):
    monkeypatch.setattr(sys, "version_info", (*version, 0, "final", 0))

    assert module.python().state == "broken"


class TestSystem:
    def test_a_port_in_use_is_named_with_what_to_do(self, monkeypatch):
        with socket.create_server(("127.0.0.1", 0)) as server:
            taken = server.getsockname()[1]
            monkeypatch.setattr(doctor_system, "TORCHRUN_PORT", taken)
            found = doctor_system.ports()

        assert found.state == "works"
        assert f"in use: {taken}" in found.found
        assert f"{taken} is torchrun's: use --standalone" in found.remedy

    def test_too_few_files_are_found_by_opening_them(self):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        try:
            found = doctor_system.limits()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

        assert found.state == "broken"
        assert "Too many open files" in found.found
        assert "ulimit -n" in found.remedy

    def test_a_folder_that_cannot_be_written_to(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "gone").mkdir()
        monkeypatch.setattr(doctor_system.Path, "cwd", lambda: tmp_path / "gone")
        monkeypatch.setattr(doctor_system.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**40))
        (tmp_path / "gone").rmdir()

        found = doctor_system.disk()

        assert found.state == "broken"
        assert "cannot be written to: No such file or directory" in found.found

    def test_no_compiler_is_absent_and_one_that_compiles_nothing_is_broken(self, monkeypatch):
        monkeypatch.setenv("CXX", "/no/such/compiler")
        absent = doctor_system.compiler()
        monkeypatch.setenv("CXX", "false")
        broken = doctor_system.compiler()

        assert (absent.state, broken.state) == ("absent", "broken")
        assert "aot_eager" in absent.remedy

    def test_a_browser_that_shows_nothing_is_broken(self, monkeypatch):
        monkeypatch.setattr(doctor_system, "BROWSERS", ("true",))

        assert doctor_system.browser().state == "broken"

    def test_the_temporary_folder_is_the_one_that_programs_are_given(self, tmp_path, monkeypatch):
        monkeypatch.setattr(doctor_system.tempfile, "tempdir", str(tmp_path))

        assert str(tmp_path) in doctor_system.temporary_folder().found


# The form of `nvidia-smi topo -m` of a machine with four GPUs, two of them with NVLink, and a network card.
MATRIX = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    "GPU0\t X \tNV4\tSYS\tSYS\tPIX\t0-31\t0\n"
    "GPU1\tNV4\t X \tSYS\tSYS\tNODE\t0-31\t0\n"
    "GPU2\tSYS\tSYS\t X \tPHB\tSYS\t32-63\t1\n"
    "GPU3\tSYS\tSYS\tPHB\t X \tSYS\t32-63\t1\n"
    "NIC0\tPIX\tNODE\tSYS\tSYS\t X \n\nLegend:\n\n  X    = Self\n"
)


class TestGpus:
    def test_the_matrix_of_links_is_read_pair_by_pair(self):
        found = doctor_gpus.topology(MATRIX)

        assert found == {(0, 1): "NV4", (0, 2): "SYS", (0, 3): "SYS", (1, 2): "SYS", (1, 3): "SYS", (2, 3): "PHB"}
        assert doctor_gpus.topology("no GPUs here\n") == {}
        assert doctor_gpus.connection("NV4") == "4 NVLinks"
        assert doctor_gpus.connection("SYS") == "the link between CPU sockets"

    def test_the_all_reduce_of_nccls_check_sums_over_real_processes(self):
        asked = [sys.executable, "-m", "fsdp_sim.cli.doctor_all_reduce", "gloo", "2"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=False)

        assert done.returncode == 0, done.stderr

    @pytest.mark.parametrize(
        ("driver", "cuda", "why", "state", "found", "remedy"),
        [
            (None, None, "", "absent", "torch finds none", "none is needed for the course"),
            ("nvidia-smi", None, "", "absent", "torch is a build for CPU cores", "make TORCH=cuda setup"),
            ("nvidia-smi", "12.8", "torch 2.13.0 can use no GPU here: the driver is too old; fsdp-sim doctor says more",
             "broken", "torch 2.13.0 can use no GPU here: the driver is too old", "update the driver"),
        ],
    )  # fmt: skip
    def test_what_keeps_torch_from_a_gpu_is_said(self, monkeypatch, driver, cuda, why, state, found, remedy):
        def none():
            raise ValueError(why)

        monkeypatch.setattr("fsdp_sim.accelerators.gpus", none)
        monkeypatch.setattr("torch.version.cuda", cuda)
        monkeypatch.setattr(doctor_gpus.shutil, "which", lambda name: driver)
        said = doctor_gpus.gpus()

        assert (said.state, said.found) == (state, found)
        assert remedy in said.remedy

    def test_a_gpu_that_cannot_compute_is_broken_and_no_traceback(self, monkeypatch):
        """This torch has none of its kernels."""
        monkeypatch.setattr("fsdp_sim.accelerators.gpus", lambda: ["NVIDIA GeForce RTX 4060"] * 2)
        said = doctor_gpus.gpus()

        assert said.state == "broken"
        assert said.found.startswith("2 x NVIDIA GeForce RTX 4060 (not in the catalogue: labs estimate its rates")
        assert "ranks and notebooks see none unless device='cuda' asks" in said.found

    @pytest.mark.gpu
    def test_gpus_compute_and_sum_over_nccl(self):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU: sums over NCCL")
        assert doctor_gpus.gpus().state == "works"
        assert doctor_gpus.nccl().state == "works"
        assert f"{torch.cuda.device_count()} rank" in doctor_gpus.nccl().found
