"""Where a process stands: its rank, its device, its process groups.

[Note: a store that remembers the dead]  Ranks find each other through a key-value store, where each writes the address
it listens at. torchrun's agent keeps one store for all its restarts (torch 2.13: `DynamicRendezvousHandler` builds it
once, `_create_c10d_store` adds no prefix), so a rank that was started anew may read the address of one that was killed,
and gloo's connectFullMesh fails ("Connection refused"). The restart count is no prefix either: agents of several nodes
count for themselves. So the ranks that are alive agree on a new prefix first, see `call_roll`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdp_sim.accelerators import gpus

SAVE_TIMEOUT_S = 600.0
"""In the group of checkpoints ranks wait for the one that writes longest."""


NO_NCCL = (
    f"device=cuda: torch {torch.__version__} is built without NCCL, through which GPUs meet; install a build that has "
    "it (on Linux every CUDA build does) or use device=cpu"
)


START_TIMEOUT_S = 300.0
"""Before ranks meet each reads text and files at its own pace."""


@dataclasses.dataclass(frozen=True)
class RankPlace:
    """Which rank this process is, from the variables that torchrun sets; without torchrun the only one.

    Attributes:
        restarts: how often torchrun has started the ranks anew.
        restarts_left: how often it still would.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    torchrun: bool = False
    restarts: int = 0
    restarts_left: int = 0

    @classmethod
    def read(cls, env: Mapping[str, str]) -> RankPlace:
        if "TORCHELASTIC_RUN_ID" not in env:
            if int(env.get("WORLD_SIZE", 1)) > 1:
                raise ValueError(f"WORLD_SIZE={env['WORLD_SIZE']}, but not by torchrun; start it with torchrun")
            return cls()
        rank, world, local_rank, local_world = (
            int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
        restarts = int(env.get("TORCHELASTIC_RESTART_COUNT", 0))
        left = int(env.get("TORCHELASTIC_MAX_RESTARTS", restarts)) - restarts
        return cls(rank, world, local_rank, local_world, torchrun=True, restarts=restarts, restarts_left=left)


def n_ranks(n: int) -> str:
    """As people say it: 1 rank, 2 ranks."""
    return f"{n} rank{'s' * (n != 1)}"


def find_device(wanted: str, place: RankPlace) -> torch.device:
    """The device of this rank: a GPU of its own, or the CPU.

    Raises:
        ValueError: GPUs are asked for and there are fewer than ranks here (NCCL refuses two ranks on one GPU).
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    enough = gpus >= place.local_world_size and dist.is_nccl_available()
    if wanted == "cuda" and gpus and not dist.is_nccl_available():
        raise ValueError(NO_NCCL)
    if wanted == "cuda" and not enough:
        raise ValueError(
            f"device=cuda: NCCL needs a GPU for each of the {place.local_world_size} ranks here, and {gpus} can be "
            "used; start fewer ranks or use device=cpu"
        )
    return torch.device("cuda", place.local_rank) if enough and wanted != "cpu" else torch.device("cpu")


def ranks_on(device: str, ranks: int | None = None, *, rows: int = 0) -> int:
    """How many ranks a lab starts: as many as are asked for, else 2 on CPU cores, or one on each GPU.

    Args:
        device: ``cpu`` or ``cuda``.
        rows: of a batch: what is not asked for divides it, if that leaves GPUs idle.

    Raises:
        ValueError: GPUs are asked for, and there are none or too few, or this process does not see them.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device}: must be cpu or cuda")
    if device == "cpu":
        return 2 if ranks is None else ranks
    found = len(gpus())
    if ranks is not None and ranks > found:
        raise ValueError(f"device=cuda: NCCL needs a GPU for each of {n_ranks(ranks)}, and {found} can be used here")
    if not torch.cuda.is_available():
        raise ValueError(
            "device=cuda: notebooks see no GPU; run the lab in a terminal, or with "
            "labs.experiments.gpu_results.result_of, which gives it a process of its own"
        )
    return ranks or max(n for n in range(1, found + 1) if rows % n == 0)


def use_threads(place: RankPlace) -> None:
    """Share the cores of this machine among its ranks. torchrun's own OMP_NUM_THREADS=1 would leave cores idle."""
    if not place.torchrun and "OMP_NUM_THREADS" in os.environ:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // place.local_world_size))


def call_roll(store: dist.Store, rank: int, ranks: int, timeout_s: float) -> str:
    """A new name that all living ranks know, and only they, whatever earlier ranks left in the store.

    Rank 0 calls with a new name; the others answer to the newest call with a new name of their own; rank 0 repeats the
    answers to its own call. Who finds its own name there was heard by the rank 0 that is alive.

    Raises:
        TimeoutError: a rank did not come. RefusedError: one will not, see `tell_refusal`.
    """
    me, give_up_s = uuid.uuid4().hex, time.monotonic() + timeout_s

    def read(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    heard = [me]
    if rank == 0:
        store.set("roll/call", me)
    while time.monotonic() < give_up_s:
        if rank == 0:
            while len(heard) < ranks and (answer := read(f"roll/answer/{len(heard)}")).startswith(me):
                heard.append(answer)
            if len(heard) == ranks:
                store.set("roll/heard", " ".join(heard))
                return me
        elif call := read("roll/call"):
            store.set(f"roll/answer/{rank}", f"{call}/{me}")
            if f"{call}/{me}" in read("roll/heard").split():
                return call
        if read(_REFUSED):
            store.set(f"{_REFUSED}/{rank}", "")
            raise RefusedError
        time.sleep(0.01)
    missing = len(heard) if rank == 0 else 0
    raise TimeoutError(f"rank {missing} did not come within {timeout_s:g} s of the start")


class RefusedError(Exception):
    """Another rank has said that this run cannot be, and why."""


_REFUSED = "roll/refused"
_LISTEN_S = 10.0


def tell_refusal(place: RankPlace) -> None:
    """Tell the ranks of other nodes that this run cannot be; wait a while until they have heard it."""
    first = place.rank - place.local_rank
    others = [rank for rank in range(place.world_size) if not first <= rank < first + place.local_world_size]
    give_up_s = time.monotonic() + _LISTEN_S
    if others:
        with suppress(dist.DistError, RuntimeError):  # the store is gone: so is who waits at it
            store = _store(_LISTEN_S)[0]
            store.set(_REFUSED, "1")
            while time.monotonic() < give_up_s and not store.check([f"{_REFUSED}/{rank}" for rank in others]):
                time.sleep(0.01)


def _store(timeout_s: float) -> tuple[dist.Store, int, int]:
    """Where torchrun's ranks meet, this rank, and how many there are."""
    return next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))


@contextmanager
def process_group(place: RankPlace, device: torch.device, timeout_s: float) -> Iterator[dist.ProcessGroup]:
    """The default group of all ranks; on one machine it listens on loopback only.

    Yields:
        A gloo group of its own for checkpoints: what they agree on never meets a collective of the training.
    """
    if place.local_world_size == place.world_size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    store: dist.Store = dist.HashStore()
    if place.torchrun:
        start_s = max(timeout_s, START_TIMEOUT_S)
        found, rank, ranks = _store(start_s)
        store = dist.PrefixStore(call_roll(found, rank, ranks, start_s), found)
    # Offloaded gradients are reduced to one norm on the CPU, so GPUs need gloo beside NCCL. No device_id: with it
    # torch's meshes split this group, which not every torch can where it has two backends (issue 159200).
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, timeout=timeout, store=store, rank=place.rank, world_size=place.world_size)
    try:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=max(timeout_s, SAVE_TIMEOUT_S)))
        assert group is not None
        yield group
    except BaseException:
        if not on_gpu:  # NCCL would wait here for ranks that do not come; the process is about to end
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


@contextmanager
def deterministic(wanted: bool, device: torch.device) -> Iterator[None]:
    """Inside, only algorithms that give the same bits each time (`torch.use_deterministic_algorithms`)."""
    if not wanted:
        yield
        return
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS starts
    import torch._inductor.config as inductor  # takes seconds

    if hasattr(inductor, "deterministic"):  # else it may choose kernels by timing them; not in torch 2.11
        inductor.deterministic = True
    # Nothing here reads memory that it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
