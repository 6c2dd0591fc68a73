"""Where a training's numbers go: a JSON line per step, TensorBoard, a progress bar, and lines above it. Rank 0 only."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec
from tqdm import tqdm

from fsdp_sim.packages import missing
from fsdp_sim.words import human_bytes
from labs.config import TrainConfig

Record = Mapping[str, Any]
"""Of a step: ``step``, ``loss``, ``step_s``, ``tokens_per_s``; where known ``lr``, ``grad_norm``, ``val_loss``,
``memory_bytes``, ``mfu``."""


class Metrics:
    """To be used as a context manager.

    A line of the file is ``{"step": 0, "loss": 5.5, ...}``, or of something that happened ``{"kind": "saved", ...}``.
    What is not a finite number is null. Each line is there as soon as the step is done. When nothing can be written (a
    full disk), that is said once and training goes on.

    Args:
        jsonl: the file. Its folder exists.
        tensorboard: the folder for TensorBoard's events.
        steps: of the whole training, for the bar.
        first_step: the first that will be done here, see `rewind`.
        log_every: print a line every so many steps, after the last, and with each evaluation.
        bar: show one, on a terminal.
        rank: any but 0 shows and writes nothing.

    Raises:
        ValueError: TensorBoard is not installed; or on entering, as `rewind`.
    """

    def __init__(
        self,
        jsonl: Path | None = None,
        tensorboard: Path | None = None,
        *,
        steps: int,
        first_step: int = 0,
        log_every: int = 1,
        bar: bool = True,
        rank: int = 0,
    ) -> None:
        if tensorboard:
            check_tensorboard()
        self._on = rank == 0
        self._jsonl, self._tensorboard = (jsonl, tensorboard) if self._on else (None, None)
        self._steps, self._log_every = steps, log_every
        self._first_step = first_step
        # disable=None: a bar on a terminal only
        self._bar = tqdm(total=steps, initial=first_step, unit="step", disable=None if bar and self._on else True)
        self._file: IO[bytes] | None = None
        self._writer: Any = None

    @classmethod
    def of(cls, config: TrainConfig, first_step: int, rank: int) -> Metrics:
        """Those of a run: in its folder, or where it says."""
        out = Path(config.out) if config.out else None
        tensorboard = out / "tensorboard" if out and config.tensorboard else None
        return cls(
            metrics_file(config), tensorboard, steps=config.steps, first_step=first_step, log_every=config.log_every,
            rank=rank,
        )  # fmt: skip

    def __enter__(self) -> Metrics:
        self.rewind(self._first_step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()
        self._close()

    def rewind(self, step: int) -> None:
        """Go on with ``step``: what earlier runs have written of it and of later steps will be repeated, and goes.

        What happened (`event`) stays. Step 0 begins anew: an older file is replaced. TensorBoard hides what is
        repeated.

        Raises:
            ValueError: the file holds something else than metrics.
            OSError: it cannot be read or written.
        """
        self._close()
        self._bar.initial = self._bar.n = step
        if self._jsonl:
            if step > 0 and self._jsonl.exists():
                _keep_before(self._jsonl, step)
            self._file = open(self._jsonl, "ab" if step > 0 else "wb")  # noqa: SIM115 - open as long as this is
        if self._tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # an extra of the installation

            self._writer = SummaryWriter(str(self._tensorboard), purge_step=step)

    def step(self, record: Record) -> None:
        """A step is done."""
        if not self._on:
            return
        step = record["step"]
        self._write(record)
        if self._writer is not None:
            for key, value in record.items():
                if key != "step" and isinstance(value, (int, float)):
                    self._writer.add_scalar(key, value, step)
        self._bar.set_postfix_str(_postfix(record), refresh=False)
        self._bar.update()
        if step % self._log_every == 0 or step == self._steps - 1 or "val_loss" in record:
            self.say(_line(record))

    def event(self, kind: str, **fields: Any) -> None:
        """Something happened: ``saved``, ``resumed``, ``stopped`` ... It goes to the file alone."""
        if self._on:
            self._write({"kind": kind, **fields})
            if self._writer is not None:
                self._writer.flush()

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._on:
            try:
                self._bar.write(text)
                sys.stdout.flush()
            except OSError:  # nobody reads any more, as when a notebook's kernel was killed: no reason to stop
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - to the end of the process

    def _write(self, record: Record) -> None:
        if self._file is None:
            return
        try:
            self._file.write(msgspec.json.encode(record) + b"\n")
            self._file.flush()
        except OSError as error:
            self._abandon()
            print(f"labs.train: no more metrics in {self._jsonl}: {error}; training goes on", file=sys.stderr)

    def _abandon(self) -> None:
        """Close a file that cannot be written; what it still holds back would fail again."""
        file, self._file = self._file, None
        try:
            assert file is not None
            file.close()
        except OSError:
            pass

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._writer is not None:
            self._writer.close()
        self._file = self._writer = None


def check_tensorboard() -> None:
    """To be called before anything is started.

    Raises:
        ValueError: TensorBoard is not installed; says how to.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError(missing("tensorboard", "tensorboard=true"))


def metrics_file(config: TrainConfig) -> Path | None:
    """Where a run writes its metrics; None if it keeps none."""
    return Path(config.metrics) if config.metrics else Path(config.out, "metrics.jsonl") if config.out else None


def is_line(line: bytes) -> bool:
    """Whether this is a line of metrics, or the beginning of one that a kill cut short."""
    try:
        record = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return line.startswith((b'{"step"', b'{"kind"')) and not line.endswith(b"\n")
    return "kind" in record or "step" in record


def _keep_before(path: Path, step: int) -> None:
    """Rewrite the file without the lines of this step and later ones, and without a last line that a kill cut short.

    The new file takes the place of the old one when it is complete.
    """
    shorter = path.with_name(f"{path.name}.tmp")
    with open(path, "rb") as old, open(shorter, "wb") as new:
        for number, line in enumerate(old, 1):
            if not line.endswith(b"\n"):
                break
            try:
                record = msgspec.json.decode(line, type=dict[str, Any])
                is_kept = "kind" in record or record["step"] < step
            except (msgspec.DecodeError, KeyError, TypeError, RecursionError):
                shorter.unlink()
                raise ValueError(
                    f"{path}, line {number} is not a line of metrics; give metrics= another file, or move this one"
                ) from None
            if is_kept:
                new.write(line)
        new.flush()
        os.fsync(new.fileno())
    os.replace(shorter, path)


def _line(record: Record) -> str:
    """Only what is the same on every machine."""
    text = f"step {record['step']:3d}  loss {record['loss']:.4f}"
    return text + (f"  val_loss {record['val_loss']:.4f}" if record.get("val_loss") is not None else "")


def _postfix(record: Record) -> str:
    """What the bar says beside its own count and time to go."""
    parts = [f"loss {record['loss']:.4f}", f"{record['tokens_per_s']:,.0f} tokens/s"]
    if record.get("mfu") is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    if record.get("memory_bytes") is not None:
        parts.append(human_bytes(record["memory_bytes"]))
    return ", ".join(parts)
