"""What is asked of the trainer: defaults, a TOML file, and --key=value, checked before anything is started."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import tomllib
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import tyro

from labs.gpt import GPTConfig, did_you_mean


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """What to train, on what, for how long. Keys on the command line win over those of the config file."""

    config: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """A TOML file with any of the keys below."""
    model: str = "teaching"
    """A preset: teaching, gpt2, gpt2-medium, gpt2-large, gpt2-xl."""
    data: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """A text file or a folder of text files; by default the source of torch.distributed."""
    steps: int = 20
    """Optimizer steps."""
    global_batch: int = 8
    """Rows per step over all ranks; the number of ranks divides it."""
    seq_len: int = 128
    """Tokens per row, at most the model's context."""
    lr: float = 1e-3
    """AdamW's learning rate."""
    seed: int = 0
    """Of the weights and of the order of the data."""
    reshard_after_forward: bool = True
    """Free a block's whole parameters after its forward (fully_shard's argument)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda (NCCL) when every rank of this machine has a GPU of its own, else cpu (gloo)."""
    log_every: int = 1
    """Print every so many steps."""
    metrics: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write a JSON line per step to this file: step, loss, step_s, tokens_per_s."""

    def __post_init__(self) -> None:
        for field in ("steps", "global_batch", "seq_len", "log_every"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)}: it is a whole number, at least 1")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: it is a whole number, at least 0")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr={self.lr}: a learning rate is a positive number, such as 1e-3")
        GPTConfig.preset(self.model)


def read_toml(path: str | Path) -> TrainConfig:
    """A TrainConfig from a TOML file.

    Raises:
        FileNotFoundError: no such file. ValueError: not TOML, an unknown key, or a bad value (named).
    """
    try:
        table = tomllib.loads(Path(path).read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"no config file at {path}; there is labs/configs/teaching.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    known = [field.name for field in dataclasses.fields(TrainConfig) if field.name != "config"]
    for key in table:
        if key not in known:
            raise ValueError(f"{path}: unknown key {key!r}{did_you_mean(key, known)}")
    try:
        return msgspec.convert(table | {"config": str(path)}, TrainConfig)
    except ValueError as error:  # msgspec's names the key; ours names it too
        raise ValueError(f"{path}: {error}") from error


def read_config(arguments: Sequence[str], usage: str = "", *, quiet: bool = False) -> TrainConfig:
    """Defaults, then the file named by --config, then --key=value.

    Args:
        usage: what --help prints above the keys.
        quiet: print nothing (the ranks but one).

    Raises:
        ValueError, FileNotFoundError: as `read_toml`, and for an unknown key.
        SystemExit: with 2 for a bad value, which tyro has then printed; with 0 after --help.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--config", nargs="?")
    path = first.parse_known_args(arguments)[0].config
    default = read_toml(path) if path else TrainConfig()
    with ExitStack() as stack:
        if quiet:  # tyro's console_outputs=False still prints what a dataclass refuses
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        config, unknown = tyro.cli(
            TrainConfig,
            prog="torchrun --standalone --nproc_per_node=N -m labs.train",
            description=usage,
            args=arguments,
            default=default,
            use_underscores=True,
            return_unknown_args=True,
            config=(tyro.conf.FlagConversionOff,),
        )
    if unknown:
        keys = [f"--{field.name}" for field in dataclasses.fields(TrainConfig)]
        raise ValueError(f"unknown argument {unknown[0]!r}{did_you_mean(unknown[0].partition('=')[0], keys)}")
    return config
