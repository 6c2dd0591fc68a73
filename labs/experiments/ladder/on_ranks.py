"""What a rank of the parity ladder runs: the same steps for every rung, and what it notes of them.

The numbers of a step are asked for where they come into being: the loss after forward, gradients and their norm after
backward, parameters after the optimizer's step. Whole tensors cost collectives of their own, so the times of the phases
are noted too: what was issued outside of them does not count.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from functools import cached_property

import torch
import torch.distributed as dist

from fsdp_sim.measure import live_bytes
from fsdp_sim.timeline import Phase
from labs.data import Corpus, check_batch, load_corpus, local_batch
from labs.experiments.ladder.divergence import TOLERANCE, RankRun
from labs.experiments.ladder.faults import OTHER_SEED, Fault
from labs.experiments.ladder.rungs import Rung
from labs.model import build
from labs.model.gpt import GPT, GPTConfig

MAX_RANKS = 4
MODELS = {"tiny": GPTConfig(n_layer=2, n_head=2, d_model=32, vocab_size=256, context=32)}
STEP = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


@dataclasses.dataclass(frozen=True)
class LadderConfig:
    """What all rungs train.

    Attributes:
        batch: rows per step over all ranks; 12 goes into 1, 2, 3 and 4 ranks.
        model: ``tiny`` (35 thousand parameters), or a preset of `labs.model.gpt`.
        seed: of the weights and of the order of the data.
        tolerance: relative, see `labs.experiments.ladder.divergence`.

    Raises:
        ValueError: more than 4 ranks or fewer than 1; ranks that do not divide the batch; no steps; rows longer than
            the context; no such model; a tolerance that is not a positive number.
    """

    ranks: int = 2
    steps: int = 3
    batch: int = 12
    seq_len: int = 32
    model: str = "tiny"
    data: str | None = None
    seed: int = 0
    tolerance: float = TOLERANCE

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"ranks={self.ranks}: the ladder runs on 1 to {MAX_RANKS} ranks")
        if self.steps < 1:
            raise ValueError(f"steps={self.steps}: it takes at least 1 step to compare")
        check_batch(self.batch, self.ranks)
        if not 1 <= self.seq_len <= self.gpt.context:
            raise ValueError(f"seq_len={self.seq_len}: {self.model} takes rows of 1 to {self.gpt.context} tokens")
        if not (math.isfinite(self.tolerance) and self.tolerance > 0):
            raise ValueError(f"tolerance={self.tolerance}: must be a number above 0, for example {TOLERANCE:g}")

    @property
    def gpt(self) -> GPTConfig:
        return MODELS[self.model] if self.model in MODELS else GPTConfig.preset(self.model)

    @cached_property
    def corpus(self) -> Corpus:
        return load_corpus(self.data)

    def build(self, seed_offset: int = 0) -> GPT:
        return build(self.gpt, self.seed + seed_offset)

    def rows(self, step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A rank's tokens and targets, both (batch / ranks, seq)."""
        x, y = self.corpus.batch(step, self.batch, self.seq_len, seed=self.seed)
        return local_batch(x, rank, ranks), local_batch(y, rank, ranks)


Spans = list[tuple[int, Phase, float, float]]
"""Step, phase, and when it began and ended."""


def train(
    setting: LadderConfig, rung_of: Rung, fault: Fault | None = None, micro_batches: int | None = None
) -> tuple[RankRun, Spans, int]:
    """What a rank runs.

    Args:
        micro_batches: of a step, by default the rung's. Their losses are divided by their number, and gradients add up.

    Returns:
        the numbers of every step; when its phases were, those of the micro-batches one after the other; the peak of
        live bytes in the step after them.
    """
    micro_batches = micro_batches or rung_of.micro_batches
    rank, ranks = dist.get_rank(), dist.get_world_size()
    astray = fault is not None and fault.wrong_seed and rank == ranks - 1
    rung = rung_of.build(setting.build(OTHER_SEED if astray else 0))
    if fault is not None and fault.spoil is not None:
        fault.spoil(rung)
    rows_of = 0 if fault is not None and fault.same_rows else rank
    mine, spans = RankRun(), Spans()
    gc.disable()  # a buffer freed by the collector in the middle of issuing a collective would have it recorded twice

    def step(number: int, look: bool) -> None:
        x, y = setting.rows(number, rows_of, ranks)
        losses = []
        begin_s = time.monotonic()
        rung.optimizer.zero_grad()
        for count, (rows, targets) in enumerate(zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True), 1):
            rung.begin_micro_batch(last=count == micro_batches)
            loss = rung.model(rows, targets) / micro_batches
            forward_s = time.monotonic()
            loss.backward()
            backward_s = time.monotonic()
            spans.append((number, Phase.FORWARD, begin_s, forward_s))
            spans.append((number, Phase.BACKWARD, forward_s, backward_s))
            losses.append(loss.item())
            begin_s = time.monotonic()
        if look:
            mine.losses.append(sum(losses))
            mine.gradients.append(rung.gradients())
            mine.norms.append(rung.grad_norm())
        begin_s = time.monotonic()
        rung.optimizer.step()
        spans.append((number, Phase.OPTIMIZER, begin_s, time.monotonic()))
        if look:
            mine.parameters.append(rung.parameters())

    mine.parameters.append(rung.parameters())
    for number in range(setting.steps):
        step(number, look=True)
    with live_bytes(*rung.held) as meter:
        step(setting.steps, look=False)
    return mine, [span for span in spans if span[0] < setting.steps], meter.peak_bytes
