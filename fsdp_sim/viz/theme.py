"""How things look: one colour per kind of operation, hatching for communication, plain names.

Colours are those of Okabe and Ito, made to be told apart by colour-blind readers ("Color Universal Design", 2008);
they are used as given, never blended into a scale. Hatching is a second cue: hatched means bytes on the wire, in
the bars and in the memory strip alike.

Surfaces (paper, text, grid, labels) are in two plotly templates, `LIGHT` and `DARK`, and nowhere else: a figure names
no colour of its own for them, mutes text by opacity and tints its bands by a colour that is mostly transparent, so
that it is made dark by changing its template.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from fsdp_sim.timeline import Lane, Memory, Op

if TYPE_CHECKING:
    import plotly.graph_objects as go

    LIGHT: go.layout.Template
    DARK: go.layout.Template

INK, MUTED, RULE = "#1A1A1A", "#57606A", "#D0D7DE"  # of pages; figures have theirs from a template
DARK_INK, DARK_PAPER = "#E6EDF3", "#111418"
BAND, SEPARATOR = "rgba(110,125,140,0.08)", "rgba(110,125,140,0.45)"  # both show on white and on near black
LIMIT = "#D1242F"  # a line that must not be crossed
MUTED_OPACITY = 0.72  # of an annotation that is less important than others
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif"


@dataclass(frozen=True)
class LegendKind:
    """What one legend entry stands for."""

    name: str
    color: str
    text_color: str = INK
    hatched: bool = False


FORWARD = LegendKind("forward", "#0072B2", text_color="#FFFFFF")
BACKWARD = LegendKind("backward", "#E69F00")
RECOMPUTE = LegendKind("recompute", "#7FB8D8")
OPTIMIZER = LegendKind("optimizer", "#009E73")
ALL_GATHER = LegendKind("all-gather", "#56B4E9", hatched=True)
REDUCE_SCATTER = LegendKind("reduce-scatter", "#D55E00", hatched=True)
ALL_REDUCE = LegendKind("all-reduce", "#CC79A7", hatched=True)
COPY = LegendKind("copy in or out", "#8C959F")
CAST = LegendKind("cast or scale", "#B9A88F")
HOST_COPY = LegendKind("copy to or from the CPU", "#55663F", text_color="#FFFFFF")
OTHER_COMM = LegendKind("other communication", "#F0E442", hatched=True)
OTHER = LegendKind("other work", "#6B5B85", text_color="#FFFFFF")
EXPOSED = LegendKind("exposed communication", "#FBE3E1", text_color="#A40E26")

KINDS: dict[Op, LegendKind] = {
    Op.FWD: FORWARD,
    Op.BWD: BACKWARD,
    Op.RECOMPUTE: RECOMPUTE,
    Op.OPTIM: OPTIMIZER,
    Op.ALL_GATHER: ALL_GATHER,
    Op.REDUCE_SCATTER: REDUCE_SCATTER,
    Op.ALL_REDUCE: ALL_REDUCE,
    Op.AG_COPY_IN: COPY,
    Op.AG_COPY_OUT: COPY,
    Op.RS_COPY_IN: COPY,
    Op.RS_COPY: COPY,
    Op.CLONE: COPY,
    Op.AG_CAST: CAST,
    Op.UPCAST: CAST,
    Op.GRAD_CAST: CAST,
    Op.DIV: CAST,
    Op.ACCUMULATE: CAST,
    Op.NORM: CAST,
    Op.CLIP: CAST,
    Op.H2D: HOST_COPY,
    Op.D2H: HOST_COPY,
    Op.ACT_D2H: HOST_COPY,
    Op.ACT_H2D: HOST_COPY,
    Op.ALL_TO_ALL: OTHER_COMM,
    Op.BROADCAST: OTHER_COMM,
    Op.BARRIER: OTHER_COMM,
    Op.SEND: OTHER_COMM,
    Op.RECV: OTHER_COMM,
    Op.OTHER: OTHER,
}
OP_NAMES: dict[Op, str] = {op: kind.name for op, kind in KINDS.items()} | {
    Op.AG_COPY_IN: "all-gather copy-in",
    Op.AG_COPY_OUT: "all-gather copy-out",
    Op.RS_COPY_IN: "reduce-scatter copy-in",
    Op.RS_COPY: "copy of gradients",
    Op.CLONE: "copy of the kept slice",
    Op.AG_CAST: "cast of shards",
    Op.UPCAST: "cast of whole gradients",
    Op.GRAD_CAST: "cast of reduced gradients",
    Op.DIV: "division of gradients",
    Op.ACCUMULATE: "accumulation of gradients",
    Op.H2D: "copy of shards from the CPU",
    Op.NORM: "norm",
    Op.CLIP: "clipping of gradients",
    Op.D2H: "copy of gradients to the CPU",
    Op.ACT_D2H: "copy of activations to the CPU",
    Op.ACT_H2D: "copy of activations from the CPU",
    Op.ALL_TO_ALL: "all-to-all",
    Op.BROADCAST: "broadcast",
    Op.BARRIER: "barrier",
    Op.SEND: "send",
    Op.RECV: "receive",
    Op.OTHER: "other",
}
OP_DOES: dict[Op, str] = {
    Op.FWD: "computes the output of the unit from its whole parameters",
    Op.BWD: "computes gradients of the unit's whole parameters and of its input",
    Op.RECOMPUTE: "runs the forward again for the activations that checkpointing did not keep",
    Op.OPTIM: "updates this rank's shards with the reduced gradients",
    Op.H2D: "copies this rank's shards from the CPU's memory to the device",
    Op.AG_CAST: "casts this rank's shards to the dtype they travel in",
    Op.AG_COPY_IN: "packs this rank's shards into one buffer to send",
    Op.ALL_GATHER: "brings together the shards of all ranks: now each has the whole parameters",
    Op.AG_COPY_OUT: "unpacks the gathered buffer into the unit's parameters",
    Op.CLONE: "keeps a larger shard, so that backward gathers among fewer ranks",
    Op.UPCAST: "casts whole gradients to the dtype they are reduced in",
    Op.RS_COPY_IN: "packs whole gradients into one buffer, a chunk for each rank",
    Op.RS_COPY: "moves gradients to where they belong; one rank has nothing to scatter",
    Op.DIV: "divides gradients by the number of ranks: a mean, not a sum",
    Op.REDUCE_SCATTER: "adds up the gradients of all ranks; each keeps only its own shard of the sum",
    Op.GRAD_CAST: "casts the reduced gradients to the dtype of the shards",
    Op.ACCUMULATE: "adds to the gradients of earlier micro-batches",
    Op.NORM: "computes norms of what lies on this rank: of gradients to clip them, of weights to scale them to fp8",
    Op.CLIP: "scales gradients down to the norm they may have",
    Op.D2H: "copies the reduced gradients to the CPU's memory",
    Op.ACT_D2H: "copies what backward will need to the CPU's memory",
    Op.ACT_H2D: "copies what backward needs back from the CPU's memory",
    Op.ALL_REDUCE: "adds up the gradients of all ranks of its group; each gets the whole sum",
    Op.ALL_TO_ALL: "sends each token to the rank that has its expert, or back",
    Op.BROADCAST: "sends the values of one rank to all others",
    Op.BARRIER: "waits until every rank is here",
    Op.SEND: "sends to one other rank",
    Op.RECV: "receives from one other rank",
    Op.OTHER: "something the record has no name for",
}
"""What each operation does, in a plain phrase."""
LANE_NAMES: dict[Lane, str] = {
    Lane.COMPUTE: "compute",
    Lane.AG_COPY_IN: "copy-in",
    Lane.ALL_GATHER: "all-gather",
    Lane.REDUCE_SCATTER: "reduce-scatter",
    Lane.ALL_REDUCE: "all-reduce",
    Lane.OTHER_COMM: "other comm",
    Lane.UNSHARD: "unshard",
    Lane.PRE_UNSHARD: "pre-unshard",
    Lane.POST_BACKWARD: "post-backward",
    Lane.OFFLOAD: "offload",
    Lane.CPU: "CPU",
}

# Each category is a tint of the operation that fills it; flat communication buffers are hatched like the collectives.
MEMORY: dict[Memory, LegendKind] = {
    Memory.SHARDED: LegendKind("parameter shards", "#8C959F"),
    Memory.OPTIMIZER: LegendKind("optimizer state", "#5CC2A4"),
    Memory.RS_OUTPUT: LegendKind("gradient shards", "#B5653A"),
    Memory.UNSHARDED: LegendKind("unsharded parameters", "#7CC4EE"),
    Memory.AG_OUTPUT: LegendKind("all-gather buffer", "#BFE2F7", hatched=True),
    Memory.UNSHARDED_GRAD: LegendKind("unsharded gradients", "#F0A27B"),
    Memory.RS_INPUT: LegendKind("reduce-scatter buffer", "#F9D5C0", hatched=True),
    Memory.ACTIVATION: LegendKind("activations", "#F4E87C"),
    Memory.CHECKPOINT: LegendKind("checkpoints", "#D8C93C"),
    Memory.LOGITS: LegendKind("logits and loss", "#C9A0DC"),
    Memory.TEMPORARY: LegendKind("temporaries", "#D9CFC3"),
    Memory.NONE: LegendKind("uncategorised", "#E1E4E8"),
}


def _template(ink: str, paper: str, grid: str, border: str) -> dict[str, Any]:
    font = {"family": FONT, "color": ink, "size": 12}
    axis: dict[str, Any] = {
        "showline": False,
        "zeroline": False,
        "gridcolor": grid,
        "ticks": "",
        "ticklabelstandoff": 6,
        "tickfont": {"size": 11, "color": ink},
        "title": {"font": {"size": 12, "color": ink}},
    }
    layout = dict(
        font=font,
        paper_bgcolor=paper,
        plot_bgcolor=paper,
        colorway=["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442"],
        xaxis=axis,
        yaxis=axis | {"title": axis["title"] | {"standoff": 8}},  # or it lies on the numbers
        annotationdefaults={"font": {"color": ink}, "arrowcolor": ink},
        hoverlabel={"bgcolor": paper, "bordercolor": border, "align": "left", "font": font},
        legend={"font": {"size": 12, "color": ink}, "bgcolor": "rgba(0,0,0,0)"},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": border, "activecolor": ink},
    )
    return {"layout": layout}


TEMPLATES = {
    "light": _template(ink=INK, paper="#FFFFFF", grid="#E6EAEE", border=RULE),
    "dark": _template(ink=DARK_INK, paper=DARK_PAPER, grid="#262C33", border="#57606A"),
}
"""As plain data; `LIGHT` and `DARK` are the same as plotly has them."""


def __getattr__(name: str) -> Any:
    if name not in ("LIGHT", "DARK"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import plotly.graph_objects as go  # which a page draws without

    found = globals()[name] = go.layout.Template(TEMPLATES[name.lower()])
    return found


CONFIG: dict[str, Any] = {
    "showSendToCloud": False,  # on by default in plotly.js 4: a button that uploads the figure
    "displaylogo": False,
    "responsive": True,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
}
"""The plotly configuration of every figure shown or saved."""


def hatch(kind: LegendKind) -> dict[str, Any]:
    """The pattern of a kind, for ``marker.pattern`` and ``fillpattern``; no shape when the kind is not hatched."""
    return {
        "shape": "/" if kind.hatched else "",
        "fillmode": "overlay",
        "fgcolor": "#FFFFFF",
        "fgopacity": 0.4,
        "size": 7,
        "solidity": 0.2,
    }


def short_unit(unit: str) -> str:
    """What fits inside a bar: the number of a block (``layers.3`` is ``3``), else the last part of the name."""
    number = re.search(r"\.(\d+)$", unit)
    return number[1] if number else unit.rsplit(".", 1)[-1]


def safe(text: object) -> str:
    """Text for plotly, which reads a few HTML tags in every string it draws."""
    return escape(str(text), quote=False)


def dark(figure: go.Figure) -> go.Figure:
    """The same figure for a dark page; the one given stays as it is."""
    import plotly.graph_objects as go

    other = go.Figure(figure)
    other.update_layout(template=__getattr__("DARK"))
    return other
