"""How long steps take, and what that is in tokens per second, MFU and memory: what their lines in the metrics say."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from labs.loop.preflight import CheckedRun
from labs.measure.utilization import flops_per_token, memory_bytes, mfu, peak_flops, reset_peak_memory


class Speed:
    """Made when the first step begins."""

    def __init__(self, run: CheckedRun) -> None:
        self._run = run
        self._flops = flops_per_token(run.model, run.config.plan.seq_len)
        self._peak_flops = peak_flops(run.device, run.config.plan.param_dtype or "fp32")
        self._memory_bytes = memory_bytes(run.device).peak_bytes
        self._is_first = True
        self._since_s = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what belongs to no step, a save or an evaluation."""
        yield
        self._since_s = time.perf_counter()

    def step_done(self, step: int, n_tokens: int) -> dict[str, Any]:
        """What there is to say of the step that ends here: ``step_s``, ``tokens_per_s``, ``mfu``, ``memory_bytes``.

        Args:
            n_tokens: of all ranks.
        """
        run, now_s = self._run, time.perf_counter()
        step_s, self._since_s = now_s - self._since_s, now_s  # with what followed the step before: its line
        if self._is_first:
            reset_peak_memory(run.device)  # building, loading and compiling are over
            self._is_first = False
        elif run.place.rank == 0 and step % run.config.log_every == 0:
            self._memory_bytes = memory_bytes(run.device).peak_bytes
        rate = n_tokens / step_s
        return {
            "step_s": step_s,
            "tokens_per_s": rate,
            "mfu": mfu(rate, self._flops, self._peak_flops, run.place.world_size),
            "memory_bytes": self._memory_bytes,
        }
