"""What the demo says. Each sentence follows from the numbers it is given, whichever way they fall."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fsdp_sim.words import human_ms

SAME = 0.01  # of a step: what differs by less is said to be the same
NEAR = 0.1  # of what was promised
QUIET = 0.03  # of a step: steps that differ by less from each other have next to no noise

INTRO = """\
Fully Sharded Data Parallel trains one model on {ranks} processes. Every parameter is cut into {ranks} shards, and each
rank keeps one. For each layer a rank all-gathers the whole parameters, computes, frees them again, and reduce-scatters
the gradients. All of that ran on this machine just now, over a modelled network that makes transfers slow beside the
compute, as a cluster's are.

The first picture has no noise worth the name: there compute is a sleep of known length. In the others a GPT computes on
the cores of this machine, and what else runs on them shows. How much, it says beside them."""

KNOWN = """\
{blocks} blocks on {ranks} ranks. A forward sleeps {forward}, a backward {backward}, a collective takes {collective}. \
On a CPU the thread that would issue the next all-gather is the one that computes. So with prefetch off, nothing runs \
ahead in forward: each block waits for its own parameters. These waits are the pale red boxes. With prefetch on, \
each block issues the next one's all-gather before it computes. In backward FSDP always does that."""

COUNTED = "Live memory is what FSDP and the optimizer hold; activations are not counted."


@dataclass(frozen=True)
class PrefetchGain:
    """A step without and with prefetch, and what prefetch gains by arithmetic; seconds."""

    off_s: float
    on_s: float
    promised_s: float

    @property
    def gained_s(self) -> float:
        return self.off_s - self.on_s

    @property
    def same(self) -> bool:
        return abs(self.gained_s) <= SAME * self.off_s

    def heading(self) -> str:
        """In a few words."""
        if self.same:
            return "Prefetch off and on: on this machine, just now, the same"
        than = "shorter" if self.gained_s > 0 else "longer"
        return f"Prefetch makes the step {human_ms(abs(self.gained_s))} {than}"

    def sentence(self) -> str:
        """What prefetch did to the step, beside what arithmetic says."""
        steps = f"({human_ms(self.off_s)} without, {human_ms(self.on_s)} with)"
        promise = f"by arithmetic {human_ms(self.promised_s)} shorter"
        why = "each block's all-gather but the first hides behind the forward before it"
        if self.same:
            return f"Prefetch leaves the step as long as it was {steps}; it should be {promise}. {BUSY}"
        if self.gained_s < 0:
            return (
                f"With prefetch the step is {human_ms(-self.gained_s)} longer {steps}; it should be {promise}. {BUSY}"
            )
        sentence = f"Prefetch makes the step {human_ms(self.gained_s)} shorter {steps}; {promise}: {why}."
        return sentence if abs(self.gained_s - self.promised_s) <= NEAR * self.promised_s else f"{sentence} {DIFFERS}"


BUSY = (
    "Something else keeps the cores so busy that ranks which only sleep are woken late. "
    "Try again when this machine has less to do."
)
DIFFERS = "The difference is what ranks were woken late: other work on these cores."


@dataclass(frozen=True)
class PredictionGap:
    """A predicted step beside the measured ones; seconds."""

    predicted_s: float
    measured_s: Sequence[float]

    @cached_property
    def median_s(self) -> float:
        return statistics.median_high(self.measured_s)

    @property
    def low_s(self) -> float:
        return min(self.measured_s)

    @property
    def high_s(self) -> float:
        return max(self.measured_s)

    @property
    def noise(self) -> float:
        """The spread of steps of one program, as a fraction of the median step."""
        return (self.high_s - self.low_s) / self.median_s

    @property
    def error(self) -> float:
        """The prediction's relative error: above 0 where it is longer than the median step."""
        return self.predicted_s / self.median_s - 1

    def noise_sentence(self) -> str:
        """How large the noise is, measured from the steps themselves."""
        count = len(self.measured_s)
        if count < 2:
            return "One step was measured, so how large the noise is cannot be said: train more steps."
        apart = (
            f"The {count} measured steps, all of one program, took {human_ms(self.low_s)} to {human_ms(self.high_s)}"
        )
        if self.noise <= QUIET:
            return f"{apart}: next to no noise."
        return f"{apart}. They are {self.noise:.0%} apart: that is noise, of ranks that share cores with other work."

    def heading(self) -> str:
        """In a few words."""
        sentence = f"A GPT's step: predicted {human_ms(self.predicted_s)}, measured {human_ms(self.median_s)}"
        return sentence if self.noise <= QUIET else f"{sentence}, give or take the noise"

    def sentence(self) -> str:
        """How good the prediction is, as far as the noise lets one say."""
        longer = "longer" if self.error > 0 else "shorter"
        off_by = f"The prediction is {abs(self.error):.0%} {longer} than the median step"
        if abs(self.error) <= SAME:
            return "The prediction is as long as the median step, to within a percent."
        if self.low_s <= self.predicted_s <= self.high_s:
            return f"{off_by}, which is within the noise: it lies among the measured steps."
        if self.predicted_s < self.low_s:
            return f"{off_by}; every step took longer. {MEASURED_BUSY}"
        return f"{off_by}; every step was shorter. {TIMED_BUSY}"


MEASURED_BUSY = "Something else may have used the cores while it was measured: try again."
TIMED_BUSY = "Something else may have used the cores while its pieces were timed: try again."


def order_sentence(same: bool) -> str:
    """Whether the ranks did what was predicted, in the order that was predicted."""
    if same:
        return "Every rank issued the predicted operations, in the predicted order."
    return "The ranks did NOT issue what was predicted, in its order: a fault of the simulator, please report it."
