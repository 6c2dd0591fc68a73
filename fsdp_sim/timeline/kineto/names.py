"""What names in a trace mean: FSDP's annotations (torch 2.11 to 2.13), kernels, torch.distributed's calls, dtypes."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from fsdp_sim.timeline.kinds import Op

ROOT = "root"  # the unit that FSDP2 names by leaving its name out


class Annotation(NamedTuple):
    """What an annotation says: ``pre_forward`` of a unit, ``all_gather``, ``optimizer``, ``step`` …"""

    kind: str
    unit: str = ""
    number: int = 0  # of a step


_FSDP2 = re.compile(r"FSDP::(\w+?)(?:_prefetch for (?P<target>.+)|(?: \((?P<unit>.*?)\))?(?: \[pg=\d+\])?)", re.DOTALL)
_FSDP1 = re.compile(r"FullyShardedDataParallel\.(\w+)")
_STEP = re.compile(r"ProfilerStep#(\d+)")
_WHOLE_STATE = {  # FSDP2 annotations that name no unit because they belong to the module's state
    "root_pre_forward", "inputs_to_device", "cast_forward_inputs", "cast_forward_outputs",
    "root_post_backward_callback",
}  # fmt: skip


def mark(name: str) -> Annotation | None:
    """The meaning of an annotation; None for a user's own.

    Example:
        >>> mark("FSDP::all_gather (layers.3)")
        Annotation(kind='all_gather', unit='layers.3', number=0)
        >>> mark("FSDP::backward_prefetch for layers.2").kind, mark("FSDP::pre_forward").unit
        ('backward_prefetch', 'root')
    """
    if found := _FSDP2.fullmatch(name):
        if found["target"]:
            return Annotation(f"{found[1]}_prefetch", found["target"])
        return Annotation(found[1], "" if found[1] in _WHOLE_STATE else found["unit"] or ROOT)
    if found := _FSDP1.fullmatch(name):
        return Annotation(f"fsdp1:{found[1].lstrip('_')}")
    if found := _STEP.fullmatch(name):
        return Annotation("step", number=int(found[1]))
    if name.startswith("Optimizer.step#"):
        return Annotation("optimizer")
    if name.startswith("Optimizer.zero_grad#"):
        return Annotation("zero_grad")
    if name.startswith("DistributedDataParallel.forward"):
        return Annotation("ddp_forward")
    return None


_HOST_WORK = (  # what a CPU does besides issuing, by the beginning of an annotation
    ("enumerate(DataLoader)#", "data loader"), ("Python GC", "garbage collection"), ("dataloader", "data loader"),
    ("data_loading", "data loader"), ("batch_generator", "data loader"), ("checkpoint", "checkpoint"),
)  # fmt: skip


def host_work(name: str) -> str:
    """What a CPU does in an annotation besides issuing; empty where it does not say so.

    Example:
        >>> host_work("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
        'data loader'
    """
    return next((what for begin, what in _HOST_WORK if name.lower().startswith(begin.lower())), "")


_COLLECTIVE = (  # in order: the first that fits, in a name without underscores and in small letters
    ("deepep::", Op.ALL_TO_ALL),
    ("reducescatter", Op.REDUCE_SCATTER), ("allgather", Op.ALL_GATHER), ("allreduce", Op.ALL_REDUCE),
    ("broadcast", Op.BROADCAST), ("barrier", Op.BARRIER), ("alltoall", Op.ALL_TO_ALL), ("sendrecv", Op.OTHER),
    ("send", Op.SEND), ("recv", Op.RECV), ("reduce", Op.OTHER), ("gather", Op.OTHER), ("scatter", Op.OTHER),
)  # fmt: skip


def collective(*names: object) -> Op | None:
    """The collective that the first telling name stands for: a kernel's, its ``Collective name``, an operation's.

    Example:
        >>> collective("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)").value
        'REDUCE_SCATTER'
        >>> collective("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", "_allgather_base").value
        'ALL_GATHER'
        >>> collective("void c10d::(anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(...)").value
        'ALL_REDUCE'
    """
    for name in names:
        if isinstance(name, str):
            plain = name.replace("(anonymous namespace)", "").partition("(")[0].replace("_", "").lower()
            for part, op in _COLLECTIVE:
                if part in plain:
                    return op
    return None


_COMMUNICATES = re.compile(
    r"\b[nr]ccl\w*kernel|multimem_(one_shot_)?(all_|reduce)|(one|two)_shot_all_reduce|nvshmem"
    r"|deep_ep::\w+::(cached_notify_|notify_)?(dispatch|combine)",
    re.IGNORECASE,
)


@lru_cache(maxsize=1024)  # a trace has some hundred kernels, each a thousand times
def is_collective_kernel(name: str) -> bool:
    """Whether a kernel communicates: NCCL's or RCCL's (``ncclDevKernel_…``, ``ncclSymkDevKernel_…``, older
    ``ncclKernel_…``), those of torch's symmetric memory, which have its operators' names, NVSHMEM's, DeepEP's.
    """
    return _COMMUNICATES.search(name) is not None


_MATMUL = re.compile(r"gemm|nvjet|xmma|cutlass|cublas|wgmma|fmha|flash|attention|Cijk_|conv\w*_|_mm_|dot_kernel", re.I)


def is_matmul(name: str) -> bool:
    """Whether a kernel multiplies matrices, by what cuBLAS, CUTLASS, cuDNN, hipBLASLt and Triton call theirs."""
    return _MATMUL.search(name) is not None


_ATTENTION = re.compile(r"flash|fmha|attention|sdpa|attn", re.IGNORECASE)


@lru_cache(maxsize=1024)
def kernel_kind(name: str) -> str:
    """What a kernel does: ``matmul``, ``attention`` (fused), or ``memory``, which all others mostly move."""
    return "attention" if _ATTENTION.search(name) else "matmul" if is_matmul(name) else "memory"


_DTYPES = {  # NCCL's and c10's names, in small letters: our name and bytes of an element
    "float": ("fp32", 4), "float32": ("fp32", 4), "bfloat16": ("bf16", 2), "half": ("fp16", 2), "float16": ("fp16", 2),
    "double": ("fp64", 8), "float64": ("fp64", 8), "byte": ("uint8", 1), "unsigned char": ("uint8", 1),
    "uint8": ("uint8", 1), "char": ("int8", 1), "signed char": ("int8", 1), "int8": ("int8", 1), "bool": ("bool", 1),
    "short": ("int16", 2), "int": ("int32", 4), "int32": ("int32", 4), "long": ("int64", 8), "long int": ("int64", 8),
    "int64": ("int64", 8), "float8_e4m3fn": ("float8_e4m3fn", 1), "float8_e5m2": ("float8_e5m2", 1),
}  # fmt: skip


def dtype(name: object) -> tuple[str, int]:
    """Our short name of a dtype of the trace, and its bytes; an unknown one keeps its name and counts 0 bytes.

    Example:
        >>> dtype("c10::BFloat16"), dtype("Float")
        (('bf16', 2), ('fp32', 4))
    """
    plain = str(name or "").removeprefix("c10::").lower()
    return _DTYPES.get(plain, (plain, 0))
