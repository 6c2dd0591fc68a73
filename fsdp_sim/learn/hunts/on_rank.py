"""What stands around a training on its ranks: what shuts it off from the course, and what watches it."""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_sim.ranks.pickling import pack, unpack

COURSE = "fsdp_sim.learn"
FOLDER = os.path.realpath(Path(__file__).parents[1]) + os.sep
PATHS = ("open", "os.link", "os.rename")  # events of Python that name files
STARTS = ("os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen")
COMPUTES_S = {"FORWARD": 0.2e-6, "BACKWARD": 0.4e-6}  # for each parameter: more than it takes on a busy machine
IDLE_S = 1.0  # without a collective, after which a rank counts as hanging
SEEN_S = 0.05  # between looks whether all ranks have written their dump


@dataclass(frozen=True)
class Alone:
    """A training that cannot see the course, in which the sound one stands: whatever it and what it calls import, open
    or start, `fsdp_sim.learn` is not there. It is unpacked after that has gone, so it brings nothing of it along."""

    packed: bytes

    def __call__(self, seed: int) -> Any:
        for name in [name for name in sys.modules if f"{name}.".startswith(f"{COURSE}.")]:
            del sys.modules[name]
        vars(sys.modules["fsdp_sim"]).pop("learn", None)
        gc.collect()
        sys.addaudithook(shut_off)  # which nothing can take away again
        return unpack(self.packed)(seed)


def shut_off(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuses to import the course, to open its files, and to start a process that might."""
    if event == "import" and f"{arguments[0]}.".startswith(f"{COURSE}."):
        raise ImportError(f"{arguments[0]} is not there for a training that is handed in: write it with torch alone")
    if event in PATHS and any(isinstance(of, str | bytes) and in_course(of) for of in arguments):
        raise PermissionError(f"{COURSE} is not there for a training that is handed in: write it with torch alone")
    if event in STARTS:
        raise PermissionError("a training that is handed in starts no process")


def in_course(path: str | bytes) -> bool:
    """Whether a file is one of the course's, by whatever way."""
    return os.path.realpath(os.fsdecode(path)).startswith(FOLDER)


def alone(training: Callable[..., Any]) -> Alone:
    """Raises ValueError if it cannot be sent to another process."""
    try:
        return Alone(pack(training))
    except Exception as error:
        raise ValueError(f"your function cannot be sent to a process of its own: {error}") from None


def counted(training: Callable[[int], Any], seed: int) -> dict[str, Any]:
    """The bytes alive on this rank: after every allocation and release, and the places at which a step had ended."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from fsdp_sim.measure.live_bytes import CPUMeter

    steps: list[int] = []
    with CPUMeter(()) as meter:
        hook = register_optimizer_step_post_hook(lambda *_: steps.append(len(meter.history()) - 1))
        answer = training(seed)
        hook.remove()
    return {"answer": answer, "alive_bytes": meter.history(), "steps": steps}


def with_compute(training: Callable[[int], Any], seed: int) -> Any:
    """Record, beside the collectives, when each unit computes and which step it is.

    A unit computes for as long as `COMPUTES_S` says: it sleeps through what is left of that time.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from fsdp_sim.timeline import RECORDER, Op, Phase

    open_: dict[int, tuple[int, float]] = {}  # by unit: its event, and when it will have computed

    def begins(op: Op, phase: Phase, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(group, *args, **kwargs)
            RECORDER.phase = phase
            event = RECORDER.begin(op, group._module_fqn or "root")
            computes_s = COMPUTES_S[phase.name] * sum(of._orig_size.numel() for of in group.fsdp_params)
            open_[id(group)] = event, time.perf_counter() + computes_s
            return result

        return call

    def ends(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if id(group) in open_:
                event, until_s = open_.pop(id(group))
                time.sleep(max(0.0, until_s - time.perf_counter()))
                RECORDER.end(event)
            return method(group, *args, **kwargs)

        return call

    def next_step(*_: object) -> None:
        RECORDER.step += 1

    group = FSDPParamGroup
    group.pre_forward = begins(Op.FWD, Phase.FORWARD, group.pre_forward)  # type: ignore[method-assign]
    group.post_forward = ends(group.post_forward)  # type: ignore[method-assign]
    group.pre_backward = begins(Op.BWD, Phase.BACKWARD, group.pre_backward)  # type: ignore[method-assign]
    group.post_backward = ends(group.post_backward)  # type: ignore[method-assign]
    register_optimizer_step_post_hook(next_step)
    return training(seed)


def dumped(training: Callable[[int], Any], folder: str, seed: int) -> None:
    """Run it over torch's own process group, without the watchdog that would see a hang before it is one. Every rank
    writes its flight recorder's dump when it hangs or has returned; when all have, they end."""
    import torch.distributed as dist

    from fsdp_sim.measure.flight_recorder import recorded, write

    rank, ranks = dist.get_rank(), dist.get_world_size()
    paths = [Path(folder, f"rank{of}.json") for of in range(ranks)]
    _over_gloo(Path(folder, "store"), rank, ranks)
    threading.Thread(target=_end_with, args=(paths,), daemon=True).start()
    with recorded(Path(folder), rank, idle_s=IDLE_S):
        training(seed)
        write(paths[rank])
    threading.Event().wait()


def _end_with(paths: list[Path]) -> None:
    while not all(path.exists() for path in paths):
        time.sleep(SEEN_S)
    os._exit(0)


def _over_gloo(store: Path, rank: int, ranks: int) -> None:
    """Another default process group, torch's own: what goes through it is not on the ranks' board."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    from fsdp_sim.ranks.group import PlainGroup

    dist.destroy_process_group()
    c10d.ProcessGroup = PlainGroup  # type: ignore[misc]
    dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
