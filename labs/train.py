"""Train a GPT with torch's own FSDP: gloo on CPUs, NCCL where every rank has a GPU.

    torchrun --standalone --nproc_per_node=2 -m labs.train
    torchrun --standalone --nproc_per_node=4 -m labs.train --config labs/configs/teaching.toml --steps=50 --lr=3e-4
    torchrun --standalone --nproc_per_node=2 -m labs.train --data=my_texts/ --metrics=losses.jsonl
    python -m labs.train                        (one rank, no torchrun)

The pieces (`build`, `shard`, `make_optimizer`, `train_step`, `mean_over_ranks`) do not care which `fully_shard`
they are given: trained with the mini-FSDP the same GPT has the same losses.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm

from labs.config import TrainConfig, read_config
from labs.data import Corpus, check_batch, load_corpus, local_batch
from labs.gpt import GPT, GPTConfig

USAGE = (__doc__ or "").partition("\n\nThe pieces")[0].replace("\n\n", "\n")

# ---- The training, in five pieces -----------------------------------------------------------------------------------


def build(config: GPTConfig, seed: int = 0) -> GPT:
    """The GPT with the weights that belong to the seed: the same on every rank, whatever their number."""
    torch.manual_seed(seed)
    return GPT(config)


def shard(model: GPT, fully_shard: Callable[..., Any], **options: Any) -> GPT:
    """Shard in place: each block is a unit, then the root takes what is left (embeddings, last norm, head)."""
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def make_optimizer(model: nn.Module, lr: float = 1e-3) -> torch.optim.AdamW:
    """AdamW with torch's defaults. Make it after sharding: it is to hold the shards, not the whole parameters."""
    return torch.optim.AdamW(model.parameters(), lr=lr)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One step on this rank's rows, x and y of shape (rows, seq). Returns this rank's loss, a scalar tensor."""
    optimizer.zero_grad()
    loss = model(x, y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The mean over ranks, elementwise (ranks have equally many rows, so it is the loss of the whole batch)."""
    mean = values.clone()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean


# ---- One run --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Place:
    """Which rank this process is, from the variables that torchrun sets; without torchrun the only one."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    torchrun: bool = False

    @classmethod
    def read(cls, env: Mapping[str, str]) -> Place:
        if "TORCHELASTIC_RUN_ID" not in env:
            return cls()
        rank, world, local_rank, local_world = (
            int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
        return cls(rank, world, local_rank, local_world, torchrun=True)


@dataclasses.dataclass(frozen=True)
class Run:
    """A TrainConfig found to be possible here: everything that can be wrong was looked at before a group starts."""

    config: TrainConfig
    gpt: GPTConfig
    corpus: Corpus
    place: Place
    device: torch.device

    @property
    def backend(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"

    @classmethod
    def prepare(cls, config: TrainConfig, place: Place) -> Run:
        """Check what is asked for against the model, the data and the machine.

        Raises:
            ValueError: the batch does not divide, seq_len exceeds the context or the text, too few GPUs.
            OSError: the data cannot be read or cached.
        """
        gpt = GPTConfig.preset(config.model)
        check_batch(config.global_batch, place.world_size)
        if config.seq_len > gpt.context:
            raise ValueError(
                f"seq_len={config.seq_len}: {config.model} has a context of {gpt.context}; use seq_len <= {gpt.context}"
            )
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        enough = gpus >= place.local_world_size
        if config.device == "cuda" and not enough:
            raise ValueError(
                f"device=cuda: NCCL needs a GPU for each of the {place.local_world_size} ranks here, and {gpus} can be "
                "used; start fewer ranks or use device=cpu"
            )
        on_gpu = enough and config.device != "cpu"
        device = torch.device("cuda", place.local_rank) if on_gpu else torch.device("cpu")
        if config.metrics and not Path(config.metrics).absolute().parent.is_dir():
            raise ValueError(f"metrics={config.metrics}: there is no folder {Path(config.metrics).absolute().parent}")
        corpus = load_corpus(config.data)
        corpus.check(config.seq_len)
        return cls(config, gpt, corpus, place, device)


@contextmanager
def process_group(run: Run) -> Iterator[None]:
    """The process group of all ranks; on one machine it listens on loopback only."""
    place = run.place
    if place.local_world_size == place.world_size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    on_gpu = run.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(run.device)
    bound: dict[str, Any] = {"device_id": run.device} if on_gpu else {}
    alone: dict[str, Any] = {} if place.torchrun else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(run.backend, **alone, **bound)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def ctrl_c() -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C asks for a stop at the end of the step; the third time it interrupts as usual.

    A rank that left in the middle of a step would make the others fail in their next collective.
    """
    pressed = 0

    def press(signum: int, frame: Any) -> None:
        nonlocal pressed
        pressed += 1
        if pressed > 2:  # torchrun may pass on what the terminal has sent already
            signal.default_int_handler(signum, frame)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed > 0
    finally:
        signal.signal(signal.SIGINT, before)


def train(run: Run) -> int:
    """Train, print on rank 0, write metrics; 0 when all steps were done, 130 when Ctrl-C stopped it."""
    config, place = run.config, run.place
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // place.local_world_size))
    losses: list[float] = []
    times_s: list[float] = []
    stopped = False
    with ExitStack() as stack:
        stop_asked = stack.enter_context(ctrl_c())
        wanted = config.metrics if place.rank == 0 else None
        metrics = stack.enter_context(open(wanted, "w")) if wanted else None
        stack.enter_context(process_group(run))
        mesh = init_device_mesh(run.device.type, (place.world_size,))
        model = build(run.gpt, config.seed).to(run.device)
        shard(model, fully_shard, mesh=mesh, reshard_after_forward=config.reshard_after_forward)
        optimizer = make_optimizer(model, config.lr)
        # disable=None: a bar on a terminal only
        bar = stack.enter_context(tqdm(total=config.steps, unit="step", disable=True if place.rank else None))
        for step in range(config.steps):
            start_s = time.perf_counter()
            batch = run.corpus.batch(step, config.global_batch, config.seq_len, seed=config.seed)
            x, y = (local_batch(t, place.rank, place.world_size).to(run.device) for t in batch)  # (rows, seq) each
            loss = train_step(model, optimizer, x, y)
            # The wish to stop travels with the loss, so that all ranks stop after the same step.
            mean, stop = mean_over_ranks(torch.stack([loss, torch.full_like(loss, stop_asked())])).tolist()
            losses.append(mean)
            times_s.append(time.perf_counter() - start_s)
            bar.update()
            if place.rank == 0 and (step % config.log_every == 0 or step == config.steps - 1):
                bar.write(f"step {step:3d}  loss {mean:.4f}")
                sys.stdout.flush()
            if metrics:
                rate = config.global_batch * config.seq_len / times_s[-1]
                line = {"step": step, "loss": mean, "step_s": times_s[-1], "tokens_per_s": rate}
                print(json.dumps(line), file=metrics, flush=True)
            if stop > 0:
                stopped = step < config.steps - 1
                break
        bar.close()
        if place.rank == 0:
            print(_summary(run, model.num_params(), losses, times_s, stopped), flush=True)
    return 130 if stopped else 0


def _summary(run: Run, n_params: int, losses: list[float], times_s: list[float], stopped: bool) -> str:
    ranks = run.place.world_size
    where = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else "cpu"
    # The first step pays for starting up (buffers, threads), so it is left out where there are others.
    rate = run.config.global_batch * run.config.seq_len / statistics.median(times_s[1:] or times_s)
    done = f"stopped by Ctrl-C after {len(losses)}" if stopped else f"{len(losses)}"
    return (
        f"{done} steps of {run.config.model} ({n_params:,} parameters), loss {losses[0]:.4f} to {losses[-1]:.4f}; "
        f"{ranks} rank{'s' * (ranks != 1)} on {where}, {run.backend}, torch {torch.__version__}, {rate:,.0f} tokens/s"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0, 2 for what was asked wrongly, 130 after Ctrl-C."""
    place = Place.read(os.environ)
    try:
        config = read_config(sys.argv[1:] if arguments is None else arguments, USAGE, quiet=place.rank > 0)
        run = Run.prepare(config, place)
    except (ValueError, OSError, SystemExit) as error:
        asked_for_help = isinstance(error, SystemExit) and not error.code
        if place.rank and not asked_for_help:
            # torchrun ends all ranks when one fails: let rank 0 speak. Who is still here has a trouble of its own.
            time.sleep(10)
        if not isinstance(error, SystemExit):
            print(f"labs.train: {f'rank {place.rank}: ' * (place.rank > 0)}{error}", file=sys.stderr, flush=True)
        return 0 if asked_for_help else 2
    return train(run)


if __name__ == "__main__":
    try:
        status = main()
    except KeyboardInterrupt:
        status = 130
    sys.stdout.flush()
    sys.stderr.flush()
    # Leave without shutting Python down. A gloo thread takes the GIL to let go of the last collective's tensor
    # (TensorImpl::decref_pyobject in ProcessGroupGloo::runLoop); one that asks for it while Python shuts down aborts
    # the process: "terminate called without an active exception", seen with torch 2.13 on a busy machine.
    os._exit(status)
