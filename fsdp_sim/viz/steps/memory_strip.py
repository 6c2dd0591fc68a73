"""The strip below the lanes: live bytes by category, the peak, and the limit of the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fsdp_sim.timeline import Memory
from fsdp_sim.viz import theme
from fsdp_sim.viz.steps.step_view import LiveMemory, StepView
from fsdp_sim.words import byte_unit, human_bytes

if TYPE_CHECKING:
    import numpy as np  # which only figures that stand still need

MAX_MOMENTS = 500  # of a curve: about one for each pixel of a small screen
SMALL = 0.015  # of the peak: categories that never reach it are drawn as one
ROOMY = 1.6  # a limit this many times the peak is told in words, for it would crush the curve
OTHER = theme.LegendKind("other", "#D9CFC3")

Curves = dict[theme.LegendKind, "np.ndarray"]


@dataclass(frozen=True)
class Strip:
    """The memory of one rank during one step, ready to be drawn. False where the rank recorded no memory."""

    view: StepView
    rank: int

    def __bool__(self) -> bool:
        return bool(self.alive)

    @cached_property
    def alive(self) -> LiveMemory:
        """See `StepView.live_memory`."""
        return self.view.live_memory(self.rank)

    @cached_property
    def live(self) -> tuple[np.ndarray, dict[Memory, np.ndarray]]:
        """See `StepView.live`."""
        return self.view.live(self.rank)

    @cached_property
    def peak_bytes(self) -> int:
        """The true peak, in issue order; that of the curves, in the order of the device, may be a little off."""
        return self.view.peak_bytes(self.rank)

    @cached_property
    def highest_bytes(self) -> int:
        return max(self.peak_bytes, max(self.alive.total))

    @cached_property
    def scale(self) -> tuple[float, str]:
        """The unit of the axis: its size in bytes and its name."""
        return byte_unit(self.highest_bytes)

    @property
    def limit_bytes(self) -> int:
        return self.view.timeline.header.memory_limit_bytes

    @property
    def limit_is_drawn(self) -> bool:
        """Whether the limit is near enough to the peak to be a line; further away it would crush the curves."""
        return 0 < self.limit_bytes <= ROOMY * self.peak_bytes

    @cached_property
    def _small(self) -> list[Memory]:
        """The categories too small to see, if they are several."""
        small = [c for c, n_bytes in self.live[1].items() if n_bytes.max() < SMALL * self.highest_bytes]
        return small if len(small) > 1 else []

    @property
    def small_names(self) -> str:
        return ", ".join(theme.MEMORY[c].name for c in self._small)

    @cached_property
    def curves(self) -> tuple[np.ndarray, Curves]:
        """Milliseconds, and bytes of each category from bottom to top.

        Categories too small to see are summed. Of more moments than can be told apart, that with the highest sum of
        each slice of the step is kept, so that no summit gets lost.
        """
        import numpy as np

        times_s, live = self.live
        rest = self._small
        found: Curves = {}
        if rest:  # at the bottom, where it disturbs no other
            found[OTHER] = np.sum([live[c] for c in rest], axis=0)
        found |= {theme.MEMORY[c]: n_bytes for c, n_bytes in live.items() if c not in rest}
        keep = moments(self.alive.times_s, self.alive.total, MAX_MOMENTS)
        return times_s[keep] * 1e3, {kind: n_bytes[keep] for kind, n_bytes in found.items()}

    def traces(self) -> list[dict[str, Any]]:
        """An area per category, stacked, and a line over them that says what is alive when it is pointed at."""
        if not self:
            return []
        import numpy as np

        times_ms, found = self.curves
        size, unit = self.scale
        x = times_ms.astype(np.float32)
        columns = {kind: (n_bytes / size).astype(np.float32) for kind, n_bytes in found.items()}
        areas = [_area(kind, x, y, f"{self.view.name}/memory") for kind, y in columns.items()]
        parts = "".join(
            f"<br>%{{customdata[{n}]:.2f}} {self.small_names if kind is OTHER else kind.name}"
            for n, kind in reversed(list(enumerate(columns)))
        )
        together = {
            "type": "scatter",
            "name": "alive together",
            "x": x,
            "y": np.sum(list(columns.values()), axis=0),
            "mode": "lines",
            "line": {"shape": "hv", "width": 1, "color": theme.SEPARATOR},
            "customdata": np.stack(list(columns.values()), axis=1),
            "hovertemplate": f"<b>%{{y:.2f}} {unit} alive</b> at %{{x:,.2f}} ms{parts}<extra></extra>",
            "showlegend": False,
        }
        return [*areas, together]

    def axis(self) -> dict[str, Any]:
        size, unit = self.scale
        top = max(self.highest_bytes, self.limit_bytes if self.limit_is_drawn else 0) / size
        tick = next(t * 10.0**p for p in range(-2, 9) for t in (1, 2, 5) if top / (t * 10.0**p) <= 4.5)
        values = [n * tick for n in range(int(top / tick) + 1)]
        return {
            "range": [0, top * 1.08],
            "fixedrange": True,
            "tickvals": values,
            "ticktext": [f"{value:,.4g} {unit}" if value else "0" for value in values],
        }

    def heading(self) -> str:
        """The line above the strip: the peak, and how far the limit is from it."""
        text = f"<b>live memory</b> of rank {self.rank}, peak {human_bytes(self.peak_bytes)}"
        if not self.limit_bytes:
            return text
        if (over := self.peak_bytes - self.limit_bytes) > 0:
            return f"{text}: <b>{human_bytes(over)} more than the {human_bytes(self.limit_bytes)} there are</b>"
        return f"{text}, {self.peak_bytes / self.limit_bytes:.0%} of the {human_bytes(self.limit_bytes)} there are"


def _area(kind: theme.LegendKind, x: np.ndarray, y: np.ndarray, group: str) -> dict[str, Any]:
    import numpy as np

    changes = np.flatnonzero(np.diff(y))
    keep = np.unique(np.concatenate([[0], changes, changes + 1, [len(y) - 1]]))
    return {
        "type": "scatter",
        "name": kind.name,
        "legendgroup": kind.name,
        "legend": "legend2",
        "x": x[keep],
        "y": y[keep],
        "stackgroup": group,
        "stackgaps": "interpolate",  # between equal values: what is left out is what does not change
        "mode": "lines",
        "line": {"shape": "hv", "width": 0},
        "fillcolor": kind.color,
        "fillpattern": theme.hatch(kind) | {"bgcolor": kind.color},
        "hoverinfo": "skip",
    }


def moments(times_s: Sequence[float], total: Sequence[int], most: int) -> list[int]:
    """The numbers of the samples to keep: of each moment the last, and the highest of each slice of the step."""
    end = len(times_s) - 1
    last = [k for k, (one, other) in enumerate(pairwise(times_s)) if one != other]
    last.append(end)
    highest = total.index(max(total))  # it may last no time at all
    if len(last) > most:
        tops: dict[int, int] = {}
        for k, (time_s, n_bytes) in enumerate(zip(times_s, total, strict=True)):
            of = int(time_s / times_s[-1] * (most - 2))
            if n_bytes > total[tops.setdefault(of, k)]:
                tops[of] = k
        last = [*tops.values(), end]
    return sorted({0, highest, *last})
