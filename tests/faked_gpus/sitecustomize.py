"""GPUs that are not there: on PYTHONPATH of a process it makes torch find as many as FAKED_GPUS says.

Only what one can ask is faked: how many there are and what they are called; whoever computes on one is refused as by
the CPU build that this is. As with a driver CUDA_VISIBLE_DEVICES counts when something asks first. Of NCCL only the
asking is kept: gloo takes its place. FAKED_GPUS=broken is a machine whose driver is too old. FAKED_GPU=T4 is another
one of `MACHINES`, FAKED_NCCL=no a torch without NCCL.

Each process writes to the file FAKED_GPUS_LOG what it did: ``saw N`` when it found GPUs, ``set_device N``, ``nccl``.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import sys
from types import SimpleNamespace

MACHINES = {  # what the driver says: its name, GiB, compute capability, multiprocessors
    "T4": ("Tesla T4", 14.6, (7, 5), 40),
    "V100": ("Tesla V100-SXM2-32GB", 31.7, (7, 0), 80),
    "A10": ("NVIDIA A10", 22.0, (8, 6), 72),
    "RTX 4090": ("NVIDIA GeForce RTX 4090", 23.5, (8, 9), 128),
    "A100": ("NVIDIA A100-SXM4-40GB", 39.4, (8, 0), 108),
    "H100": ("NVIDIA H100 80GB HBM3", 80.0, (9, 0), 132),
    "H100 NVL": ("NVIDIA H100 NVL", 93.1, (9, 0), 132),
    "MIG": ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.8, (9, 0), 16),
    "B200": ("NVIDIA B200", 178.4, (10, 0), 148),
    "RTX 5090": ("NVIDIA GeForce RTX 5090", 31.4, (12, 0), 170),
}
BROKEN = "The NVIDIA driver on your system is too old (found version 11040)."


def note(what):
    with open(os.environ["FAKED_GPUS_LOG"], "a") as file:
        file.write(f"{what}\n")


@functools.cache
def count():
    asked, visible = os.environ["FAKED_GPUS"], os.environ.get("CUDA_VISIBLE_DEVICES")
    found = 0 if asked == "broken" else int(asked)
    if visible is not None:
        ids = visible.split(",")
        found = next((n for n, one in enumerate(ids) if not one.isdigit() or int(one) >= found), len(ids))
    if found:
        note(f"saw {found}")
    return found


def properties():
    name, memory_gib, (major, minor), sms = MACHINES[os.environ.get("FAKED_GPU", "H100")]
    total = int(memory_gib * 2**30)
    return SimpleNamespace(name=name, total_memory=total, major=major, minor=minor, multi_processor_count=sms)


def fake(torch):
    cuda, here = torch.cuda, SimpleNamespace(device=0, set=False)

    def init():
        if os.environ["FAKED_GPUS"] == "broken":
            raise RuntimeError(f"{BROKEN} Please update your GPU driver")
        if not count():
            raise RuntimeError("No CUDA GPUs are available")

    def set_device(device):
        here.device, here.set = torch.device("cuda", device).index if isinstance(device, int) else device.index, True
        if here.device >= count():
            raise RuntimeError(f"CUDA error: invalid device ordinal {here.device}")
        note(f"set_device {here.device}")

    torch.version.cuda = "12.8"
    cuda.is_available = lambda: count() > 0
    cuda.device_count = count
    cuda.init = init
    cuda.set_device = set_device
    cuda.current_device = lambda: here.device
    cuda.is_initialized = lambda: here.set
    cuda.get_device_name = lambda device=0: init() or properties().name
    cuda.get_device_capability = lambda device=0: (properties().major, properties().minor)
    cuda.get_device_properties = lambda device=0: init() or properties()
    cuda.is_bf16_supported = lambda including_emulation=True: including_emulation or properties().major >= 8
    torch.distributed.is_nccl_available = lambda: os.environ.get("FAKED_NCCL") != "no"
    torch._C._get_accelerator = lambda check=None: torch.device("cuda")  # torch's own answer is that of its build
    torch._C._accelerator_getAccelerator = lambda: torch.device("cuda")
    torch.accelerator.current_stream = lambda device=None: SimpleNamespace(is_capturing=lambda: False)  # optimizers ask

    c10d = torch.distributed.distributed_c10d
    real, barrier = c10d.init_process_group, c10d.barrier

    def init_process_group(backend=None, *args, **kwargs):
        if backend is None or "nccl" in backend:
            init()
            note("nccl")
            backend = "gloo"
        return real(backend, *args, **kwargs)

    c10d.init_process_group = torch.distributed.init_process_group = init_process_group
    torch.distributed.barrier = lambda *args, device_ids=None, **kwargs: barrier(*args, **kwargs)


class AfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), fake(module))
        return spec


if "FAKED_GPUS" in os.environ:
    sys.meta_path.insert(0, AfterTorch())
