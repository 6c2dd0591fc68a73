"""Train a GPT with torch's own FSDP (DDP, FSDP1, HSDP, the mini-FSDP): gloo on CPUs, NCCL where every rank has a GPU.

    torchrun --standalone --nproc_per_node=2 -m labs.train
    torchrun --standalone --nproc_per_node=4 -m labs.train --config labs/configs/teaching.toml --steps=50 --lr=3e-4
    torchrun --standalone --nproc_per_node=2 --max-restarts=3 -m labs.train --out=runs/a --save_every=10
    torchrun --standalone --nproc_per_node=2 -m labs.train --api=fsdp1 --data=my_texts/ --metrics=losses.jsonl
    python -m labs.train --api=single           (one rank, no torchrun)

With --out, the same command goes on where the last one stopped, with any number of ranks and any --api.
Exit status: 0 all steps done; 2 asked wrongly; 75 told to leave (SIGTERM), saved; 130 Ctrl-C, saved; 1 failed.
torchrun's own status is 1 for all of these but 0. What was asked wrongly it is told not to start again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from fsdp_sim.measure.heap import keep_freed_memory
from labs.checkpoint import RunLock
from labs.cluster.process_group import RankPlace, RefusedError, deterministic, process_group, use_threads
from labs.config import read_config
from labs.loop.end_of_run import EndOfRun
from labs.loop.evaluation import evaluate
from labs.loop.failpoints import failpoint
from labs.loop.failure import WholeErrorFile, failed, refused
from labs.loop.metrics import Metrics
from labs.loop.nonfinite import check_update
from labs.loop.optimizer import make_optimizer
from labs.loop.preflight import CheckedRun, prepare
from labs.loop.report import header
from labs.loop.run_state import NoGoodCheckpointError, RunState, checkpointer
from labs.loop.saving import report_failed_saves, save
from labs.loop.speed import Speed
from labs.loop.step import train_step
from labs.loop.stopping import PREEMPTED, StopRequest, mark_preempted, stopping
from labs.wrapping import wrap

USAGE = __doc__ or ""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status, see the top of this file."""
    place, parent = RankPlace(), os.getppid()
    with ExitStack() as stack:
        try:
            place = RankPlace.read(os.environ)
            config = read_config(sys.argv[1:] if arguments is None else arguments, USAGE, quiet=place.rank > 0)
            run = prepare(config, place)  # what cannot work is refused here
            if config.out and place.rank == 0:
                stack.enter_context(RunLock(Path(config.out)))
        except (ValueError, OSError, SystemExit) as error:
            return refused(error, place, parent)
        try:
            return record(train, WholeErrorFile())(run) or 0  # record is typed to return None after an error; it raises
        except (RefusedError, NoGoodCheckpointError) as error:
            return refused(error, place, parent)
        except Exception as error:
            return failed(error, place)


def train(run: CheckedRun) -> int:
    """Train on all ranks; returns the exit status."""
    config, place, device = run.config, run.place, run.device
    use_threads(place)
    launcher = os.getppid() if place.torchrun else None  # now: it may be killed while the model is built
    with ExitStack() as stack:
        stack.enter_context(deterministic(config.deterministic, device))
        group = stack.enter_context(process_group(place, device, config.timeout_s))
        wrapped = wrap(config, run.model, place, device)  # the model, built and sharded
        training = RunState(run, wrapped, make_optimizer(wrapped, config), checkpointer(run, group))
        stop_request = stack.enter_context(stopping(launcher))
        resumed = training.resume()
        metrics = stack.enter_context(Metrics.of(config, training.step, place.rank))
        for line in [*header(run, wrapped), *resumed]:
            metrics.say(line)
        if training.resumed_from is not None:
            metrics.event("resumed", step=training.step, ranks=place.world_size, api=config.api)
        own_folder = config.out if place.rank == 0 else None
        mark_preempted(own_folder, False)
        end = EndOfRun(training)
        stop = _steps(training, stop_request, metrics, end)
        with stop_request.longer_than_a_step():
            saved = save(training, metrics, last=True)
            if stop == PREEMPTED and saved:
                mark_preempted(own_folder, True)
            end.measure(metrics, stopped=stop_request.reason(stop))
            status = stop or (0 if saved else 1)
            if status:  # torchrun ends all ranks when the first leaves with it, so rank 0 reports before
                end.report()
                dist.barrier(group)
    if not status:
        end.report()
    return status


def _steps(training: RunState, stop_request: StopRequest, metrics: Metrics, end: EndOfRun) -> int:
    """Step until the last step, or until a rank is asked to stop; returns the exit status that this asks for."""
    run, config, wrapped = training.run, training.run.config, training.wrapped
    loader, validation = run.loader("train"), run.loader("val") if config.eval_every else None
    if training.step >= config.steps:
        metrics.say(f"all {config.steps} steps are done; more are asked for with --steps")
    speed = Speed(run)
    while training.step < config.steps:
        step = training.step
        failpoint("step", step)
        failpoint("loader", step)
        batch = loader.rows(training.position, run.place.rank, run.place.world_size).to(run.device)  # x, y: (rows, seq)
        outcome = train_step(
            wrapped, training.optimizer, batch, step, config,
            n_micro_batches=run.micro_batches, stop=lambda: stop_request.status,
        )  # fmt: skip
        check_update(outcome, training, metrics)
        training.step, training.position = step + 1, batch.next
        line = {"step": step, "loss": outcome.loss, "lr": outcome.lr, "grad_norm": outcome.grad_norm}
        line |= speed.step_done(step, batch.n_tokens)
        stop_request.step_took(line["step_s"])
        end.step(line["step_s"], outcome.loss)
        if validation is not None and training.step % config.eval_every == 0 and not outcome.stop:
            with stop_request.longer_than_a_step(), speed.paused():
                line["val_loss"] = evaluate(
                    wrapped, validation, config.eval_batches, run.place, run.device, run.micro_batches
                )
        metrics.step(line)
        if outcome.stop and training.step < config.steps:
            return outcome.stop
        report_failed_saves(training, metrics)
        if config.save_every and training.step % config.save_every == 0:
            with stop_request.longer_than_a_step(), speed.paused():
                save(training, metrics)
    return 0


def command() -> int:
    """`main` for a process of its own, with Ctrl-C before training begins or pressed thrice."""
    keep_freed_memory()
    try:
        status = main()
    except KeyboardInterrupt:
        status = 130
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    # Leave without shutting Python down. A gloo thread takes the GIL to let go of the last collective's tensor
    # (TensorImpl::decref_pyobject in ProcessGroupGloo::runLoop); one that asks for it while Python shuts down aborts
    # the process: "terminate called without an active exception", seen with torch 2.13 on a busy machine.
    os._exit(command())
