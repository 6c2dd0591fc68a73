"""The end of a training: a sample, the memory of all ranks, a recorded step, the simulator's prediction, the report."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_sim.measure import live_bytes
from fsdp_sim.measure.live_bytes import workspace_bytes
from labs.loop.evaluation import sample
from labs.loop.metrics import Metrics
from labs.loop.report import PredictedQuantity, TrainingReport, compare, hardware, summary_line, versions
from labs.loop.run_state import RunState
from labs.loop.step import train_step
from labs.measure.prediction import predict
from labs.measure.profiling import Recording, gathered, profiled, trouble_of_any
from labs.measure.simulated import simulated
from labs.measure.step_summary import StepSummary, summarize
from labs.measure.utilization import RankMemory, flops_per_token, median_step_s, memory_bytes, mfu, of_ranks, peak_flops
from labs.model import empty
from labs.wrapping.wrap_policy import find_units

REPORT = "report.json"
TIMELINE = "timeline.jsonl.gz"
RECORDED_STEPS = 4


class EndOfRun:
    """What has to be kept while training, for what is said at its end."""

    def __init__(self, training: RunState) -> None:
        self.training = training
        self.steps_s: list[float] = []
        self.losses: list[float] = []
        self.stopped = ""
        self._memory: list[RankMemory] = []
        self._state_bytes: list[int] = []
        self._recording: Recording | None = None  # of all ranks, on rank 0
        self._unread = ""  # what was wrong with it
        self._tensor_bytes: int | None = None

    def step(self, step_s: float, loss: float) -> None:
        self.steps_s.append(step_s)
        self.losses.append(loss)

    def measure(self, metrics: Metrics, stopped: str) -> None:
        """With all ranks: after the last checkpoint, so what is trained here to be recorded is not kept."""
        run, config = self.training.run, self.training.run.config
        self.stopped = stopped
        mine = memory_bytes(run.device)
        if run.device.type == "cuda":
            mine = mine._replace(workspace_bytes=workspace_bytes())
        self._memory = of_ranks(mine, _gather, run.device)
        state = torch.tensor([self.training.state_bytes], dtype=torch.int64, device=run.device)
        self._state_bytes = [int(n) for (n,) in _gather(state).tolist()]
        if stopped:
            return
        if config.sample:
            text = sample(self.training.wrapped, run.tokenizer, config.prompt, config.sample, config.seed, run.device)
            metrics.say(f"\n{text}\n")
            metrics.event("sampled", text=text)
        wanted = config.predict if config.predict is not None else run.device.type == "cuda"
        if self.losses and (wanted or config.profile):
            self._record(config.profile or RECORDED_STEPS, counted=wanted)

    def _record(self, steps: int, *, counted: bool) -> None:
        """A few steps more, recorded; and one on a CPU with its tensors counted."""
        training, run = self.training, self.training.run
        loader, position = run.loader("train"), training.position

        def step() -> None:
            nonlocal position
            batch = loader.rows(position, run.place.rank, run.place.world_size).to(run.device)
            train_step(
                training.wrapped, training.optimizer, batch, training.step, run.config,
                n_micro_batches=run.micro_batches,
            )  # fmt: skip
            position = batch.next

        self._recording = self._recorded(step, steps)
        if not counted:
            return
        if run.device.type == "cuda":
            held = max(memory.peak_bytes - memory.workspace_bytes for memory in self._memory)
        else:
            with live_bytes(training.wrapped.model, training.optimizer) as meter:
                step()
            held = meter.peak_bytes
        most = _gather(torch.tensor([held], dtype=torch.int64, device=run.device))
        self._tensor_bytes = int(most.max())

    def _recorded(self, step: Callable[[], None], steps: int) -> Recording | None:
        """Some steps, as all ranks recorded them; what went wrong with that on any rank all ranks are told."""
        run, timeline = self.training.run, None
        rank = run.place.rank
        units = find_units(empty(run.model), run.config.plan.wrap).names
        try:
            with profiled(rank=rank, api=run.config.api, device=run.device.type, units=units) as profile:
                for _ in range(steps):
                    step()
            timeline = profile.timeline
        except ValueError as error:  # the profiler failed, or what it wrote cannot be read: the steps were done
            self._unread = f"rank {rank}: {error}"
        self._unread = trouble_of_any(self._unread)
        try:
            return gathered(timeline)
        except ValueError as error:
            self._unread = str(error)
            return None

    def report(self) -> None:
        """On rank 0, when the ranks have parted: a prediction on CPUs times pieces, and wants the cores for itself."""
        training, run = self.training, self.training.run
        config, place, device = run.config, run.place, run.device
        if place.rank or not self.losses:
            return
        step_s = median_step_s(self.steps_s)
        tokens_per_s = config.global_batch * config.plan.seq_len / step_s
        flops = flops_per_token(run.model, config.plan.seq_len)
        compared: list[PredictedQuantity] = []
        sentences: list[str] = []
        try:
            summary = self._summary()
        except Exception as error:
            summary, self._unread = None, f"{type(error).__name__}: {error}"
        exposed_s = summary.exposed_s if summary else None
        if summary:
            sentences.append(f"Recorded: {summary.line()}.")
        if self._recording and (missing := place.world_size - len(self._recording.timeline.ranks)):
            sentences.append(f"The recordings of {missing} other ranks could not be read.")
        if self._unread:
            sentences.append(f"Exposed communication was not measured: {self._unread}")
        if self._tensor_bytes is not None:
            try:
                prediction = predict(config, run.model, place, device)
                sentences += prediction.sentences
                compared = compare(
                    prediction, step_s=step_s, exposed_comm_s=exposed_s,
                    peak_bytes=self._tensor_bytes, device=device,
                )  # fmt: skip
            except ValueError as error:
                sentences.append(f"No prediction: {str(error).splitlines()[0]}")  # what follows is a traceback
        n_params = training.wrapped.n_params
        report = TrainingReport(
            summary=summary_line(config, place, device, n_params, self.losses, tokens_per_s, self.stopped),
            label=f"{config.model}: {training.wrapped.label}",
            config=config.by_key(),
            versions=versions(),
            hardware=hardware(place, device),
            ranks=place.world_size,
            first_step=training.step - len(self.losses),
            last_step=training.step - 1,
            loss_first=self.losses[0],
            loss_last=self.losses[-1],
            step_s=step_s,
            tokens_per_s=tokens_per_s,
            mfu=mfu(tokens_per_s, flops, peak_flops(device, config.plan.param_dtype or "fp32"), place.world_size),
            exposed_comm_s=exposed_s,
            memory=self._memory,
            state_bytes=self._state_bytes,
            tensor_bytes=self._tensor_bytes,
            restarts=place.restarts,
            resumed_from=training.resumed_from,
            saved=training.saved,
            failed_saves=training.failed_saves,
            stopped=self.stopped,
            compared=compared,
            explanation=sentences,
        )
        if config.out:
            try:
                report.write(Path(config.out, REPORT))
                if config.profile and self._recording:
                    self._recording.write(Path(config.out, TIMELINE))
            except OSError as error:
                print(f"labs.train: {error}", file=sys.stderr)
        report.print()

    def _summary(self) -> StepSummary | None:
        """Of the recorded steps, beside the program that was predicted, if there is one."""
        if self._recording is None:
            return None
        run = self.training.run
        try:
            predicted = simulated(run.config, run.model, run.place, run.device).timeline
        except ValueError:  # the simulator does not know this GPU or cannot play this: the prediction says so
            predicted = None
        return summarize(self._recording.timeline, predicted)


def _gather(mine: torch.Tensor) -> torch.Tensor:
    """This rank's numbers (k,) to those of all ranks (ranks, k)."""
    if not dist.is_initialized():
        return mine[None]
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone)
