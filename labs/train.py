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

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from fsdp_sim.measure.heap import keep_freed_memory
from labs.checkpoint import Checkpointer, CheckpointError, RunLock
from labs.cluster.process_group import Place, RefusedError, deterministic, process_group, use_threads
from labs.config import read_config
from labs.loop.end_of_run import EndOfRun
from labs.loop.error_file import WholeErrorFile
from labs.loop.evaluation import evaluate
from labs.loop.failpoints import failpoint
from labs.loop.metrics import Metrics
from labs.loop.optimizer import make_optimizer
from labs.loop.preflight import Run, prepare
from labs.loop.progress import Progress
from labs.loop.refusal import refused
from labs.loop.run_state import NoGoodCheckpointError, Training
from labs.loop.step import NotFiniteError, Outcome, train_step
from labs.loop.stopping import PREEMPTED, StopRequest, stopping
from labs.measure.utilization import flops_per_token, memory_bytes, mfu, peak_flops, reset_peak_memory
from labs.wrapping import wrap

USAGE = __doc__ or ""
MANY_EPOCHS = 4
"""So often a text may be read before its repetition is worth much less than new text (Muennighoff et al. 2023, "Scaling
Data-Constrained Language Models"): more is warned of."""
MOST_SKIPPED = 20
"""Steps in a row without an update. fp16's scaler needs 16 to come down from where it starts (2**16) to 1."""
PREEMPTED_MARK = "PREEMPTED"
"""A file in the run's folder: it was told to leave, and has saved. torchrun's own exit status does not say so."""


def train(run: Run) -> int:
    """Train on all ranks; returns the exit status."""
    config, place, device = run.config, run.place, run.device
    use_threads(place)
    launcher = os.getppid() if place.torchrun else None  # now: it may be killed while the model is built
    with ExitStack() as stack:
        stack.enter_context(deterministic(config.deterministic, device))
        group = stack.enter_context(process_group(place, device, config.timeout_s))
        wrapped = wrap(config, run.model, place, device)
        checkpointer = None
        if run.checkpoints:
            checkpointer = Checkpointer(
                run.checkpoints, keep=config.keep, format=config.checkpoint, group=group, schema=Progress
            )
        training = Training(run, wrapped, make_optimizer(wrapped, config), checkpointer)
        stop_request = stack.enter_context(stopping(launcher))
        said = training.resume()
        metrics = stack.enter_context(_metrics(run, training.step))
        for line in [*_header(training), *said]:
            metrics.say(line)
        if training.resumed_from is not None:
            metrics.event("resumed", step=training.step, ranks=place.world_size, api=config.api)
        _mark(run, preempted=False)
        end = EndOfRun(training)
        stop = _steps(training, stop_request, metrics, end)
        with stop_request.longer_than_a_step():
            saved = _save(training, metrics, last=True)
            if stop == PREEMPTED and saved:
                _mark(run, preempted=True)
            end.measure(metrics, stopped=stop_request.reason(stop))
            status = stop or (0 if saved else 1)
            if status:  # torchrun ends all ranks when the first leaves with it, so rank 0 reports before
                end.report()
                dist.barrier(group)
    if not status:
        end.report()
    return status


def _steps(training: Training, stop_request: StopRequest, metrics: Metrics, end: EndOfRun) -> int:
    """Step until the last step, or until a rank is asked to stop; returns the exit status that this asks for."""
    run, config = training.run, training.run.config
    loader = run.loader("train")
    validation = run.loader("val") if config.eval_every else None
    flops = flops_per_token(run.model, config.plan.seq_len)
    peak, held_bytes = peak_flops(run.device, config.plan.param_dtype or "fp32"), memory_bytes(run.device).peak_bytes
    if training.step >= config.steps:
        metrics.say(f"all {config.steps} steps are done; more are asked for with --steps")
    first, since_s = training.step, time.perf_counter()
    skipped = 0  # in a row
    while training.step < config.steps:
        step = training.step
        failpoint("step", step)
        failpoint("loader", step)
        batch = loader.rows(training.position, run.place.rank, run.place.world_size).to(run.device)
        outcome = train_step(
            training.wrapped, training.optimizer, batch, step, config,
            n_micro_batches=run.micro_batches, stop=lambda: stop_request.status,
        )  # fmt: skip
        skipped = 0 if outcome.updated else skipped + 1
        if not outcome.finite or skipped == MOST_SKIPPED:
            _not_finite(outcome, step, training, metrics, give_up=skipped == MOST_SKIPPED)
        elif not outcome.updated:
            metrics.event("overflowed", step=step)  # the scaler has lowered its scale
        training.step, training.position = step + 1, batch.next
        now_s = time.perf_counter()
        step_s, since_s = now_s - since_s, now_s  # with what followed the step before: its line in the metrics
        stop_request.step_took(step_s)
        end.step(step_s, outcome.loss)
        rate = batch.n_tokens / step_s
        if step == first:
            reset_peak_memory(run.device)  # building, loading and compiling are over
        elif run.place.rank == 0 and step % config.log_every == 0:
            held_bytes = memory_bytes(run.device).peak_bytes
        line = {
            "step": step, "loss": outcome.loss, "lr": outcome.lr, "grad_norm": outcome.grad_norm, "step_s": step_s,
            "tokens_per_s": rate, "mfu": mfu(rate, flops, peak, run.place.world_size), "memory_bytes": held_bytes,
        }  # fmt: skip
        if validation is not None and training.step % config.eval_every == 0 and not outcome.stop:
            with stop_request.longer_than_a_step():
                line["val_loss"] = evaluate(
                    training.wrapped, validation, config.eval_batches, run.place, run.device, run.micro_batches
                )
            since_s = time.perf_counter()
        metrics.step(line)
        if outcome.stop and training.step < config.steps:
            return outcome.stop
        if not training.look_after_saves():
            _loudly(training, metrics)
        if config.save_every and training.step % config.save_every == 0:
            with stop_request.longer_than_a_step():
                _save(training, metrics)
            since_s = time.perf_counter()
    return 0


def _header(training: Training) -> list[str]:
    """What is about to be trained: the first thing to look at when something seems wrong."""
    run, config = training.run, training.run.config
    rows = f"{config.global_batch} rows of {config.plan.seq_len} tokens per step"
    if run.micro_batches > 1:
        rows += f", in {run.micro_batches} micro-batches of {run.micro_rows} rows on each rank"
    steps = -(-len(run.loader()) // config.global_batch)
    lines = [
        f"{config.model}: {training.wrapped.n_params:,} parameters; {training.wrapped.label}; {run.backend}",
        f"{run.corpus.name}: {len(run.corpus.train):,} tokens to train on, {steps:,} steps an epoch; {rows}",
    ]
    if (epochs := config.steps / steps) > MANY_EPOCHS:
        lines.append(
            f"WARNING: {config.steps:,} steps read this text {epochs:,.0f} times, which teaches a model to repeat it; "
            "give more text with data=PATH, or ask for fewer steps"
        )
    return lines


def _not_finite(outcome: Outcome, step: int, training: Training, metrics: Metrics, *, give_up: bool) -> None:
    what = f"step {step}: the loss is {outcome.loss:g} and the gradients' norm {outcome.grad_norm:g}"
    stops = give_up or training.run.config.nonfinite == "stop"
    if stops and not training.look_after_saves(wait=True):  # the next run begins with the one that is being written
        _loudly(training, metrics)
    if give_up:
        raise NotFiniteError(
            f"{what}; {MOST_SKIPPED} steps in a row had no update, so it is the parameters, and leaving out more "
            "changes nothing; start it again to go on from the newest checkpoint, with a lower lr or with clip"
        )
    if stops:
        raise NotFiniteError(f"{what}; stopped before the update (nonfinite=skip would leave it out and go on)")
    metrics.say(f"{what}: no update")
    metrics.event("skipped", step=step)


def _save(training: Training, metrics: Metrics, *, last: bool = False) -> bool:
    """Write a checkpoint of this step; when that fails, say it loudly and go on."""
    if not training.look_after_saves(wait=True):  # the one before, if it is still being written
        _loudly(training, metrics)
    asynchronous, before = training.run.config.async_save and not last, training.saved
    saved = training.save(asynchronous=asynchronous)
    if not saved:
        _loudly(training, metrics)
    elif training.saved > before:
        metrics.event("saving" if asynchronous else "saved", step=training.step)
    for line in training.checkpointer.said() if training.checkpointer else ():
        metrics.say(line)
    return saved


def _loudly(training: Training, metrics: Metrics) -> None:
    why = training.failed_saves[-1]
    metrics.say(f"WARNING: {why}; training goes on, and what was saved before is as it was")
    metrics.event("not saved", why=why)


def _metrics(run: Run, first_step: int) -> Metrics:
    config, out = run.config, Path(run.config.out) if run.config.out else None
    jsonl = Path(config.metrics) if config.metrics else out / "metrics.jsonl" if out else None
    tensorboard = out / "tensorboard" if out and config.tensorboard else None
    return Metrics(
        jsonl, tensorboard, steps=config.steps, first_step=first_step, log_every=config.log_every, rank=run.place.rank
    )


def _mark(run: Run, *, preempted: bool) -> None:
    """Put the mark of a preempted run there, or take it away."""
    if run.config.out and run.place.rank == 0:
        mark = Path(run.config.out, PREEMPTED_MARK)
        with contextlib.suppress(OSError):  # only a mark: the checkpoint is what counts
            mark.touch() if preempted else mark.unlink(missing_ok=True)


# ---- The command ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status, see the top of this file."""
    place, parent = Place(), os.getppid()
    with ExitStack() as stack:
        try:
            place = Place.read(os.environ)
            config = read_config(sys.argv[1:] if arguments is None else arguments, USAGE, quiet=place.rank > 0)
            run = prepare(config, place)
            if config.out and place.rank == 0:
                stack.enter_context(RunLock(Path(config.out)))
        except (ValueError, OSError, SystemExit) as error:
            return refused(error, place, parent)
        try:
            return record(train, WholeErrorFile())(run) or 0  # record is typed to return None after an error; it raises
        except (RefusedError, NoGoodCheckpointError) as error:
            return refused(error, place, parent)
        except Exception as error:
            _failed(error, place)
            return 1


def _failed(error: Exception, place: Place) -> None:
    """Say what went wrong: once where all ranks know the same, with the rank where they do not."""
    on_all_ranks = isinstance(error, (NotFiniteError, CheckpointError))
    if on_all_ranks or (isinstance(error, ValueError) and place.rank == 0):
        if place.rank == 0:
            print(f"labs.train: {error}", file=sys.stderr, flush=True)
    elif _lost(error):
        print(f"labs.train: rank {place.rank}: another rank is gone or stuck ({str(error).splitlines()[0][:200]})",
              file=sys.stderr, flush=True)  # fmt: skip
    else:
        said = "".join(traceback.format_exception(error))
        print(f"labs.train: rank {place.rank}: {type(error).__name__}: {error}\n{said}", file=sys.stderr, flush=True)


def _lost(error: Exception) -> bool:
    """Whether a collective failed because another rank did not take part."""
    texts = ("gloo", "Connection closed", "Connection reset", "Timed out", "pair closure", "NCCL")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    )


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
