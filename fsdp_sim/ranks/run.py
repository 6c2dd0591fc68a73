"""``run``: a function on N ranks, from a notebook cell or a script, with an answer whatever happens."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec

from fsdp_sim import accelerators
from fsdp_sim.ranks import launch
from fsdp_sim.ranks.board import Record
from fsdp_sim.ranks.inbox import ErrorMessage, Inbox, MessageError, ResultMessage
from fsdp_sim.ranks.interrupts import Interrupts
from fsdp_sim.ranks.limits import LimitMonitor, Limits, written_bytes
from fsdp_sim.ranks.looks import Look, Looks
from fsdp_sim.ranks.network import Network
from fsdp_sim.ranks.output import Output, ProgressBar, read
from fsdp_sim.ranks.pickling import pack, unpack
from fsdp_sim.ranks.rank import NCCL_TIMEOUT_S, is_rank
from fsdp_sim.ranks.watchdog import EndReason, RankState, RankStatus, Watchdog, how_it_ended, listed, report
from fsdp_sim.timeline import Event, Header, Timeline, remember

MAX_RANKS = 64
DEVICES = ("cpu", "cuda")
CPU_RANKS = 4
POLL_S = 0.02
MAX_EVENTS_BYTES = 16 * 2**20  # of the recorder of a rank with limits
GRACE_S = 0.3  # after the first failure, for the others to fail in their own words
ECHO_GRACE_S = 3.0  # while no more is known than that a peer has gone, for the news of who it was


class RanksError(RuntimeError):
    """A call that could not finish. Its text says which rank waits in which collective, and who never came.

    Attributes:
        output: what each rank printed.
        verdict: the same in parts: headline, why, fix, ranks.
    """

    def __init__(self, message: str, output: Output, verdict: EndReason) -> None:
        super().__init__(message)
        self.output, self.verdict = output, verdict

    def _render_traceback_(self) -> list[str]:
        """IPython shows these lines instead of the launcher's own frames."""
        lines = [f"RanksError: {self}"]
        text = str(self.output)
        return [*lines, "", "what the ranks printed:", text] if text else lines


class Results(list[Any]):
    """What the function returned, by rank.

    Attributes:
        timeline: every rank's collectives, and with the mini-FSDP its compute and memory too.
        output: what each rank printed.
        records: by rank, the collectives that it put on the board (the last 2,048), in order.
        written_bytes: by rank, what its process wrote to sockets and files, without its output and its result, by the
            kernel's count, which the function cannot change; None where the kernel does not say.
        looks: by rank, how large its process was each time that it asked to be looked at.
        ready_s: seconds until all ranks had joined and done one all-reduce; ``wall_s``: until all had returned.
    """

    timeline: Timeline
    output: Output
    records: list[list[Record]]
    written_bytes: list[int | None]
    looks: list[list[Look | None]]
    ready_s: float
    wall_s: float


def run(
    fn: Callable[..., Any],
    world_size: int | None = None,
    *args: Any,
    device: str = "cpu",
    network: Network | None = None,
    timeout_s: float = 15.0,
    serial: bool = False,
    record: bool = True,
    threads: int | None = None,
    each: Sequence[tuple[Any, ...]] | None = None,
    plain: bool = False,
    limits: Limits | None = None,
    progress: bool = True,
    show_output: bool = True,
    title: str = "",
) -> Results:
    """Run ``fn(*args)`` on ``world_size`` ranks and return what each returned.

    The function may be defined in the very cell that calls this and use the notebook's variables; it is sent by
    value. Inside it ``torch.distributed`` is initialised. `track` shows progress.

    Ranks compute on CPU cores with gloo and see no GPU, on any machine. With ``device="cuda"`` (or ROCm) rank N has GPU
    N, set as the current one, and NCCL: real speed, but nothing is recorded, and a collective that lasts longer than
    ``timeout_s``, at least two minutes, ends its rank. Never run on a GPU so far; tests drive it with faked ones.

    Args:
        world_size: by default 4, or one rank for each GPU.
        device: ``cpu`` or ``cuda``.
        network: complete collectives as slowly as this link would.
        timeout_s: how long a rank may wait inside a collective for a rank that does nothing; for twenty times as long
            all ranks may do nothing at all.
        serial: complete every collective before its call returns, so that each piece of a step runs alone.
        record: keep a timeline.
        threads: CPU threads per rank; by default the cores are shared out, at least one each.
        each: more arguments, by rank: a rank gets its own and never sees the others'.
        plain: results are data that cannot execute: numbers, texts, lists, dicts and tensors.
        limits: on time, memory, threads and processes, for code one does not trust.
        show_output: show what the ranks printed when they are done.

    Raises:
        TypeError, ValueError: an argument is wrong, or a GPU is missing; nothing has been started.
        RanksError: a rank raised, exited, was killed, or waits for one that does not come; says which and where.

    Example:
        >>> import torch.distributed as dist
        >>> from fsdp_sim.ranks import run
        >>> list(run(lambda: dist.get_rank() ** 2, world_size=3))
        [0, 1, 4]
    """
    _check(fn, world_size, network, timeout_s, threads)
    each = None if each is None else list(each)
    hardware = _cores() if device == "cpu" else ""
    if device != "cpu":
        gpus = _gpus(world_size, device, network=network, serial=serial, limits=limits)
        world_size, hardware = len(gpus), f"{len(gpus)} x {gpus[0]}, NCCL"
    world_size = world_size or CPU_RANKS
    if each is not None and len(each) != world_size:
        raise ValueError(f"run(each=...): one tuple of arguments for each of {world_size} ranks, not {len(each)}")
    if launch.INSIDE or is_rank():
        raise RuntimeError("run() was called inside a rank; call it from the notebook or script that starts the ranks")
    try:
        works = [pack((fn, (*args, *own))) for own in each] if each else [pack((fn, args))] * world_size
    except Exception as error:
        raise TypeError(
            f"{getattr(fn, '__name__', fn)} cannot be sent to the ranks: {error}; "
            "it, its arguments or a variable it uses holds something that lives in this process only (a file, a lock)"
        ) from error
    threads = threads or max(1, (os.cpu_count() or 1) // world_size)
    start_s = time.monotonic()
    settings: dict[str, Any] = {"network": network, "serial": serial, "record": record, "threads": threads}
    settings |= {"world_size": world_size, "plain": plain, "limits": limits, "device": device, "timeout_s": timeout_s}
    with (
        Interrupts() as interrupts,
        launch.start(works, interrupts, **settings) as ranks,
        contextlib.closing(ProgressBar(ranks.board, title or getattr(fn, "__name__", "run"), progress)) as bar,
    ):
        from fsdp_sim.ranks.plain import MAX_BYTES, decode  # it imports torch, as the ranks' server has just done

        inboxes = [Inbox(control, 2 * MAX_BYTES if limits else None) for control in ranks.controls]
        patience_s = timeout_s if device == "cpu" else max(timeout_s, NCCL_TIMEOUT_S)
        looks = Looks(ranks.board, [process.pid or 0 for process in ranks.processes])
        messages = _collect_messages(ranks, inboxes, patience_s, bar, interrupts, looks)
        written = [written_bytes(process.pid or 0) for process in ranks.processes]
        output = Output(read(ranks.job.folder, rank) for rank in range(world_size))
        packed = [message.result for message in messages]
        results = Results(map(decode, packed) if plain else _unpacked(packed, output))
        results.output = output
        # The first record is the all-reduce with which a rank joined.
        results.records = [ranks.board.latest(rank, first=1) for rank in range(world_size)]
        results.written_bytes = [_on_the_wire(ranks, r, n, inboxes[r]) for r, n in enumerate(written)]
        results.looks = looks.seen
        results.ready_s = float(ranks.board.status["ready_s"].max()) - start_s
    events = [event for message in messages for event in _events(message.events, limits)]
    if not limits:  # else it is another's code, which may name any file
        remember(events)
    results.timeline = Timeline(_header(world_size, device, hardware, network, title), events)
    results.wall_s = time.monotonic() - start_s
    if show_output:
        results.output.show()
    return results


def _check(fn: object, world_size: object, network: object, timeout_s: object, threads: object) -> None:
    if not callable(fn):
        raise TypeError(f"run(fn={fn!r}): the first argument must be a function, for example run(train, world_size=4)")
    if isinstance(world_size, bool) or not isinstance(world_size, int | None):
        raise TypeError(f"run(world_size={world_size!r}): must be a whole number of ranks, for example 4")
    if world_size is not None and not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"run(world_size={world_size}): must be between 1 and {MAX_RANKS} ranks, for example 4")
    if network is not None and not isinstance(network, Network):
        raise TypeError(f"run(network={network!r}): must be None or Network(bandwidth_gbps=..., latency_us=...)")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
        raise ValueError(f"run(timeout_s={timeout_s!r}): must be a number of seconds above 0, for example 15")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise ValueError(f"run(threads={threads!r}): must be None or a whole number of CPU threads per rank from 1")


def _gpus(world_size: int | None, device: str, **for_cores: object) -> list[str]:
    """The names of the GPUs on which ranks are to run, one each.

    Raises:
        ValueError: another device, too few GPUs, or a setting that only ranks on CPU cores have.
    """
    if device not in DEVICES:
        raise ValueError(f"run(device={device!r}): must be one of {', '.join(DEVICES)}")
    for name, value in for_cores.items():
        if value:
            raise ValueError(
                f"run({name}=..., device='cuda'): only ranks on CPU cores have {name}; leave one of them out"
            )
    try:
        found = accelerators.gpus()
    except ValueError as error:
        raise ValueError(f"run(device='cuda'): {error}; leave device out to run on CPU cores") from None
    if world_size and world_size > len(found):
        raise ValueError(
            f"run(world_size={world_size}, device='cuda'): NCCL takes one rank for each GPU, and here "
            f"{'is 1' if len(found) == 1 else f'are {len(found)}'} ({found[0]}); use world_size={len(found)}, or leave "
            "device out to run on CPU cores"
        )
    return found[:world_size]


def _collect_messages(
    ranks: launch.Ranks, inboxes: list[Inbox], timeout_s: float, bar: ProgressBar, interrupts: Interrupts, looks: Looks
) -> list[ResultMessage]:
    """Wait for every rank's message, watching the board.

    Raises:
        RanksError: when the watchdog, a rank's exception or a rank's death ends the call.
    """
    views = [RankStatus(rank, process.pid or 0) for rank, process in enumerate(ranks.processes)]
    watchdog = Watchdog(ranks.board, views, timeout_s)
    messages: dict[int, ResultMessage] = {}
    failed_s = 0.0
    limits = ranks.job.limits
    monitor = LimitMonitor(limits, [process.pid or 0 for process in ranks.processes]) if limits else None
    while len(messages) < len(views):
        waitables: list[Any] = [c for r, c in enumerate(ranks.controls) if views[r].state is RankState.RUNNING]
        waitables += [p.sentinel for r, p in enumerate(ranks.processes) if views[r].state is RankState.RUNNING]
        wait(waitables, timeout=POLL_S)
        interrupts.check()
        for view in views:
            if view.state is RankState.RUNNING:
                _receive(ranks.processes[view.rank], inboxes[view.rank], view, messages)
        verdict = watchdog.check()
        looks.update()
        bar.update()
        if verdict is None and monitor is not None and (exceeded := monitor.exceeded()):
            verdict = _limit_verdict(*exceeded, views)
        if verdict is None and (failed := [view for view in views if view.state in (RankState.RAISED, RankState.GONE)]):
            failed_s = failed_s or time.monotonic()
            all_in = all(view.state is not RankState.RUNNING for view in views)
            grace_s = ECHO_GRACE_S if all(map(_is_echo, failed)) else GRACE_S
            if all_in or time.monotonic() - failed_s > grace_s:
                verdict = watchdog.check() or _failure_verdict(views)
        if verdict is not None:
            raise _error(verdict, ranks, views)
    if verdict := watchdog.final():
        raise _error(verdict, ranks, views)
    return [messages[view.rank] for view in views]


def _receive(process: BaseProcess, inbox: Inbox, view: RankStatus, messages: dict[int, ResultMessage]) -> None:
    """Take a rank's message if it sent one, else note whether it is gone."""
    gone = not process.is_alive()  # asked first: a message sent before the end is still in the pipe
    message: ResultMessage | ErrorMessage | None = None
    try:
        with contextlib.suppress(EOFError, OSError):
            message = inbox.take()
    except MessageError as error:
        message = ErrorMessage("ValueError", f"what it sent is no message of a rank: {error}", "")
    if isinstance(message, ResultMessage):
        view.state, messages[view.rank] = RankState.RETURNED, message
    elif message is not None:
        view.state, view.error = RankState.RAISED, (message.kind, message.text, message.traceback)
    elif gone:
        process.join()
        view.state, view.exit_code = RankState.GONE, process.exitcode


def _unpacked(packed: list[bytes], output: Output) -> Iterator[Any]:
    """What each rank returned.

    Raises:
        RanksError: it cannot be made again here.
    """
    for rank, data in enumerate(packed):
        try:
            yield unpack(data)
        except (Exception, SystemExit) as error:
            verdict = EndReason(
                headline=f"rank {rank} returned what cannot be made again in this process ({error!r})",
                why="a result travels by pickle, which calls whatever its class says, here",
                fix="return numbers, strings, lists, dicts or tensors",
                ranks=(rank,),
            )
            text = f"{verdict.headline}\n\nwhy: {verdict.why}.\nfix: {verdict.fix}."
            raise RanksError(text, output, verdict) from error


def _limit_verdict(what: str, rank: int, views: list[RankStatus]) -> EndReason:
    """The verdict on ranks that used more than their limits."""
    ranks = [view.rank for view in views if view.state is RankState.RUNNING and rank in (view.rank, -1)] or [
        max(rank, 0)
    ]
    return EndReason(
        headline=f"{listed(ranks)} {what}",
        why="code that is checked has limits on time, memory, threads and processes",
        fix="look for a loop that does not end, or that starts something each time round",
        ranks=tuple(ranks),
    )


def _events(data: bytes, limits: Limits | None) -> list[Event]:
    """What a rank recorded.

    Raises:
        ValueError: it is none of the recorder's, or more than code with limits may record.
    """
    if limits is not None and len(data) > MAX_EVENTS_BYTES:
        raise ValueError(f"{len(data):,} bytes of recorded events; at most {MAX_EVENTS_BYTES:,} can be sent back")
    try:
        return msgspec.msgpack.decode(data, type=list[Event])
    except msgspec.MsgspecError as error:
        raise ValueError(f"what it recorded is no list of events: {error}") from None


def _on_the_wire(ranks: launch.Ranks, rank: int, written: int | None, inbox: Inbox) -> int | None:
    """Of the bytes that a rank wrote, those that are neither its message nor its output."""
    if written is None:
        return None
    path = ranks.job.folder / f"rank{rank}.out"
    printed = path.stat().st_size if path.exists() else 0
    return written - printed - inbox.received_bytes


def _failure_verdict(views: list[RankStatus]) -> EndReason:
    """The verdict on ranks that raised or died. A rank that died is the cause of what others raise about it."""
    gone = [view for view in views if view.state is RankState.GONE]
    raised = [view for view in views if view.state is RankState.RAISED]
    first = (gone or [v for v in raised if not _is_echo(v)] or raised)[0]
    if gone:
        return EndReason(
            headline=f"{listed([view.rank for view in gone])} {how_it_ended(first.exit_code)}",
            why="a rank that ends without returning leaves the others waiting for it",
            fix="let the function return on every rank; what the rank printed last is below or in .output",
            ranks=tuple(view.rank for view in gone),
        )
    kind, text, _ = first.error or ("", "", "")
    same = [view.rank for view in raised if view.error and view.error[:2] == (kind, text)]
    return EndReason(
        headline=f"{listed(same)} raised {kind}: {text}",
        why="the traceback is below" + ("" if len(same) == len(views) else "; the other ranks were stopped"),
        fix="mend the line it names",
        ranks=tuple(same),
    )


def _is_echo(view: RankStatus) -> bool:
    """Whether a rank's error is only gloo noticing that a peer has gone."""
    return view.error is not None and "onnection" in view.error[1] and "gloo" in view.error[1].lower()


def _error(verdict: EndReason, ranks: launch.Ranks, views: list[RankStatus]) -> RanksError:
    output = Output(read(ranks.job.folder, view.rank) for view in views)
    return RanksError(report(verdict, views, ranks.board), output, verdict)


def _cores() -> str:
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), gloo"


def _header(world_size: int, device: str, hardware: str, network: Network | None, title: str) -> Header:
    import torch

    wire = f", network {network.bandwidth_gbps:g} Gbit/s + {network.latency_us:g} us" if network else ""
    return Header(
        producer="mini",
        clock="measured",
        world_size=world_size,
        title=title,
        hardware=hardware + wire,
        device="cpu" if device == "cpu" else "gpu",
        versions={"torch": str(torch.__version__), "python": platform.python_version()},
    )
