"""What a bar says when it is pointed at: how fast its bytes went, why it began when it did, who waited for it."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_sim.diagnose import Key, Links
from fsdp_sim.timeline import Event
from fsdp_sim.viz.theme import OP_NAMES, safe, short_unit
from fsdp_sim.words import human_bytes, human_ms

NAMED = 2  # of several operations; the others are counted


def details(event: Event, links: Links) -> str:
    """All but name, duration and times of an operation, as lines of a plotly hover text (each with its break)."""
    lines = []
    if (earlier_s := event.start_s - event.issue_s) > 0.5e-6:
        lines.append(f", issued {human_ms(earlier_s)} before")
    else:
        lines.append("")
    if event.bytes:
        lines.append(payload(event))
    lines += [safe(line) for line in reasons(event, links)]
    if event.source:
        lines.append(safe(event.source.rpartition("/")[2] if event.source.startswith("/") else event.source))
    return "<br>".join(lines)


def payload(event: Event) -> str:
    """Bytes, ranks, and what that makes a second: ``352 MiB bf16 among 64 ranks, 86.0 GB/s``."""
    dtype = f" {safe(event.dtype)}" if event.dtype else ""
    group = f" among {event.group_size} ranks" if event.group_size > 1 else ""
    speed = f", {gb_per_s(event)}" if event.duration_s > 0 else ""
    return f"{human_bytes(event.bytes)}{dtype}{group}{speed}"


def gb_per_s(event: Event) -> str:
    """The whole message over the time it took, in decimal units as networks are sold."""
    rate = event.bytes / event.duration_s / 1e9
    return f"{rate:,.{0 if rate >= 100 else 1 if rate >= 1 else 3}f} GB/s"


def reasons(event: Event, links: Links) -> list[str]:
    """Why an operation began when it did, what else it waited for, and what waited for it; plain text."""
    key = (event.rank, event.seq)
    cause, waited = links.cause(key), links.waited_for(key)
    where = f" on rank {cause.rank}, the last to come" if cause.rank != event.rank else ""
    sentences = []
    also = ""
    if cause.key is not None and cause.why == "lane":
        sentences.append(f"queued behind {_name(links, cause.key, event.unit)}{where}")
    elif cause.key is not None:
        sentences.append(f"waited for {_name(links, cause.key, event.unit)}{where}")
        waited, also = [other for other in waited if other != cause.key], "also "
    elif cause.why == "CPU" and (where or event.start_s > links.begin_s):
        sentences.append(f"began as soon as it was issued{where}")
    if waited:
        sentences.append(f"{also}after {_names(links, waited, event.unit)}")
    if after := links.awaited_by.get(key):
        sentences.append(f"awaited by {_names(links, after, event.unit)}")
    return sentences


def _name(links: Links, key: Key, unit: str) -> str:
    """An operation as seen from one of ``unit``: ``its all-gather``, ``forward of 3``."""
    e = links.ops[key]
    if not e.unit:
        return OP_NAMES[e.op]
    return f"its {OP_NAMES[e.op]}" if e.unit == unit else f"{OP_NAMES[e.op]} of {short_unit(e.unit)}"


def _names(links: Links, keys: Sequence[Key], unit: str) -> str:
    some = list(dict.fromkeys(_name(links, key, unit) for key in keys))
    more = f" and {len(some) - NAMED} more" if len(some) > NAMED else ""
    return ", ".join(some[:NAMED]) + more
