"""Checks of ``fsdp-sim doctor``: GPUs, the links between them, and NCCL."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from itertools import combinations

from fsdp_sim.cli.doctor_finding import DoctorFinding, torch_here
from fsdp_sim.packages import in_checkout

NEEDED_FOR = "labs on GPUs, fsdp-sim calibrate --device cuda"
NCCL_TIMEOUT_S = 120.0
# `nvidia-smi topo -m`, in the words of its legend.
CONNECTIONS = {
    "PIX": "one PCIe switch", "PXB": "several PCIe switches", "PHB": "the CPU's PCIe host bridge",
    "NODE": "host bridges of one NUMA node", "SYS": "the link between CPU sockets",
}  # fmt: skip


def gpus() -> DoctorFinding:
    from fsdp_sim import accelerators
    from fsdp_sim.spec import gpu

    torch = torch_here()
    try:
        names = accelerators.gpus()
    except ValueError as error:
        if shutil.which("nvidia-smi") is None:
            return DoctorFinding("GPUs", "absent", "torch finds none", NEEDED_FOR, "none is needed for the course")
        if torch.version.cuda is None:
            build = in_checkout(
                "make TORCH=cuda setup", "pip install --force-reinstall torch, from an index with its build"
            )
            remedy = f"there is a driver: {build}"
            return DoctorFinding("GPUs", "absent", "torch is a build for CPU cores", NEEDED_FOR, remedy)
        remedy = "update the driver; none is needed for the course, which runs on CPU cores"
        return DoctorFinding(
            "GPUs", "broken", str(error).removesuffix("; fsdp-sim doctor says more"), NEEDED_FOR, remedy
        )
    try:
        known = gpu(names[0]).name
    except ValueError:
        known = "not in the catalogue: labs estimate its rates, fsdp-sim calibrate --device cuda measures them"
    found = f"{len(names)} x {names[0]} ({known}); ranks and notebooks see none unless device='cuda' asks"
    try:
        total = sum(float(torch.ones(4, device=f"cuda:{i}").sum()) for i in range(len(names)))
    except (RuntimeError, AssertionError) as error:
        return DoctorFinding(
            "GPUs", "broken", f"{found}; {error}".partition("\n")[0], NEEDED_FOR, "look at nvidia-smi -q"
        )
    good = total == 4.0 * len(names)
    remedy = "" if good else "they compute wrongly: look at nvidia-smi -q, and at dmesg for Xid errors"
    return DoctorFinding("GPUs", "works" if good else "broken", found, NEEDED_FOR, remedy)


def gpu_links() -> DoctorFinding:
    """How GPUs here reach each other: what the driver says, and whether each may read another's memory."""
    torch = torch_here()
    n = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if n < 2:
        found = "one GPU has no link to another" if n else "no GPUs"
        return DoctorFinding(
            "GPU links", "absent", found, "fast collectives", "needed only where there are several GPUs"
        )
    pairs = list(combinations(range(n), 2))
    closed = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    answer = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60, check=False)
    kinds = Counter(topology(answer.stdout).values())
    found = ", ".join(f"{count} pairs over {connection(kind)}" for kind, count in kinds.most_common())
    found = f"{found or 'nvidia-smi topo -m says nothing'}; {len(pairs) - len(closed)} of {len(pairs)} with peer access"
    remedy = ""
    if closed:
        remedy = (
            "NCCL copies through the host there: see NCCL_DEBUG=INFO; virtual machines and IOMMU settings forbid it"
        )
    return DoctorFinding("GPU links", "works", found, "fast collectives", remedy)


def topology(matrix: str) -> Mapping[tuple[int, int], str]:
    """The kind of connection of each pair of GPUs, from what ``nvidia-smi topo -m`` prints.

    Example:
        >>> topology("\\tGPU0\\tGPU1\\tNIC0\\nGPU0\\t X \\tNV18\\tPIX\\nGPU1\\tNV18\\t X \\tSYS\\n")
        {(0, 1): 'NV18'}
    """
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in matrix.splitlines()]
    header = next((line for line in lines if line[:1] == ["GPU0"] and "X" not in line), [])
    found = {}
    for line in lines:
        if line and re.fullmatch(r"GPU\d+", line[0]) and line != header:
            row = int(line[0][3:])
            for name, kind in zip(header, line[1:], strict=False):
                if re.fullmatch(r"GPU\d+", name) and row < int(name[3:]):
                    found[row, int(name[3:])] = kind
    return found


def connection(kind: str) -> str:
    """A kind of connection in words.

    Example:
        >>> connection("NV18"), connection("PHB")
        ('18 NVLinks', "the CPU's PCIe host bridge")
    """
    links = re.fullmatch(r"NV(\d+)", kind)
    return f"{links[1]} NVLinks" if links else CONNECTIONS.get(kind, kind)


def nccl() -> DoctorFinding:
    """All GPUs of this machine sum a tensor over NCCL, a process each."""
    torch = torch_here()
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return DoctorFinding(
            "NCCL", "absent", "needs GPUs and torch's CUDA build", NEEDED_FOR, "none is needed on CPU cores"
        )
    n = torch.cuda.device_count()
    asked = [sys.executable, "-m", "fsdp_sim.cli.doctor_all_reduce", "nccl", str(n)]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=NCCL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        remedy = "run it again with NCCL_DEBUG=INFO; NCCL_P2P_DISABLE=1 shows whether it is peer access"
        return DoctorFinding(
            "NCCL", "broken", f"no all-reduce of {n} ranks in {NCCL_TIMEOUT_S:g} s", NEEDED_FOR, remedy
        )
    version = ".".join(map(str, torch.cuda.nccl.version()))
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1][:160]
        return DoctorFinding("NCCL", "broken", f"{version}: {last}", NEEDED_FOR, "run it again with NCCL_DEBUG=INFO")
    found = f"{version}, {n} rank{'s' * (n != 1)} summed a tensor"
    return DoctorFinding("NCCL", "works", found, NEEDED_FOR)
