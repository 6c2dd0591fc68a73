"""The panes of the debugger: a `Moment` in, HTML out, all text escaped."""

from __future__ import annotations

from collections import defaultdict
from html import escape

from fsdp_sim.timeline import COLLECTIVES, Event, Memory, Timeline
from fsdp_sim.viz import theme
from fsdp_sim.viz.debugger.moments import LiveBytes, Moment, OtherRank, change_bytes
from fsdp_sim.viz.debugger.sentences import name, sentence
from fsdp_sim.viz.debugger.sources import CodeLine, learners_line, listing, minis_line, places
from fsdp_sim.viz.debugger.strip import strip
from fsdp_sim.viz.table import cell, row, table_html
from fsdp_sim.words import human_bytes, human_ms, signed_bytes

AROUND = 10  # events listed before and after the current one
NUMBER = ' class="fsd-n"'
MOST_UNITS = 4  # named in a line of the memory pane
NO_SOURCE = {
    "simulated": "A predicted operation has no line: no code ran. Step a run of fsdp_sim.ranks to see the lines.",
    "measured": "This event was recorded without the line that issued it.",
}


def panes(at: Moment, timeline: Timeline, drawn_as: str = "") -> str:
    """All panes of a moment; ``drawn_as`` as for `strip`."""
    return (
        f'<div class="fsd">{headline(at)}{strip(at, timeline, drawn_as)}<div class="fsd-grid">'
        f'<section class="fsd-wide" aria-label="Events">{events(at)}</section>'
        f'<section class="fsd-wide" aria-label="Source">{source(at, timeline)}</section>'
        f'<section aria-label="Memory">{memory(at, timeline)}</section>'
        f'<section aria-label="Waits">{waits(at)}</section>'
        f'<section aria-label="Other ranks">{others(at)}</section></div></div>'
    )


def headline(at: Moment) -> str:
    """Which event this is, and the sentence."""
    e = at.event
    where = [f"rank {e.rank}", f"step {e.step}"]
    where += [f"micro-batch {e.micro_batch}"] if any(other.micro_batch for other in at.events) else []
    where += [str(e.phase)] if e.phase else []
    where.append(f"event {e.seq} of {at.events[-1].seq}")
    return (
        f'<div class="fsd-head" role="status"><div class="fsd-where">{escape(" · ".join(where))}</div>'
        f"<h3>{swatch(e)}{escape(_capital(name(e)))}</h3><p>{escape(sentence(at))}</p></div>"
    )


def events(at: Moment) -> str:
    """The events around this one in issue order."""
    first = max(0, min(at.position - AROUND, len(at.events) - 2 * AROUND - 1))
    rows = []
    for event in at.events[first : first + 2 * AROUND + 1]:
        here = ' class="fsd-here" aria-current="true"' if event.seq == at.event.seq else ""
        dim = ' class="fsd-memory"' if event.is_memory and not here else ""
        change = change_bytes(event)
        size = signed_bytes(change) if change else human_ms(event.duration_s)
        lane = "" if event.is_memory else theme.LANE_NAMES[event.lane]
        what = cell(f"{swatch(event)}{escape(name(event))}", ' class="fsd-clip"')
        cells = (cell(str(event.seq), NUMBER), what, cell(lane, ' class="fsd-lane"'), cell(size, NUMBER))
        rows.append(row(cells, here or dim))
    return f"<h4>Events, in issue order</h4>{table_html(rows)}"


def source(at: Moment, timeline: Timeline) -> str:
    """The learner's line, the mini's line, and the calls between them."""
    found = places(at.event)
    if not found:
        text = at.event.source and f"Recorded source: {at.event.source}"
        return f"<h4>Source</h4><p>{escape(text or NO_SOURCE[_clock(timeline)])}</p>"
    theirs, minis = learners_line(found), minis_line(found)
    if theirs is None:
        ours = "<h4>Your line</h4><p>Not known: autograd ran this hook on a thread of its own.</p>"
    else:
        ours = _listed("Your line", theirs)
    if minis is not None:
        ours += _listed("The line of the mini-FSDP that issues it", minis)
    elif at.event.is_memory:
        ours += "<p>No line of the mini-FSDP: PyTorch itself did this inside the call.</p>"
    return ours + _stack(found)


def memory(at: Moment, timeline: Timeline) -> str:
    """What is alive once the event has been issued, by category and unit, and what it changes."""
    if not at.top_bytes:
        return "<h4>Alive now</h4><p>This record has no memory events.</p>"
    by_category: dict[Memory, LiveBytes] = defaultdict(dict)
    for key, n_bytes in at.live.items():
        by_category[key[0]][key] = n_bytes
    rows = []
    for category in Memory:
        held = by_category.get(category, {})
        changed = at.change != 0 and category is at.event.category
        if not held and not changed:
            continue
        kind = theme.MEMORY[category]
        delta = f' <b class="fsd-delta">{signed_bytes(at.change)}</b>' if changed else ""
        cells = (
            cell(f"{_square(kind)}{kind.name}{_units(held)}"),
            cell(f"{human_bytes(sum(held.values()))}{delta}", NUMBER),
        )
        rows.append(row(cells, " class=fsd-here" if changed else ""))
    total = human_bytes(at.live_bytes)
    peak, limit = human_bytes(at.top_bytes), timeline.header.memory_limit_bytes
    device = f"<p>The device can hold {human_bytes(limit)}.</p>" if limit else ""
    return f"<h4>Alive now: {total} of {peak} at the peak</h4>{_stacked(at)}{table_html(rows)}{device}"


def waits(at: Moment) -> str:
    """What the event waits for and what waits for it."""
    if at.event.is_memory:
        return "<h4>Waits</h4><p>An alloc or a free takes no time and waits for nothing: it is done when issued.</p>"
    lane = theme.LANE_NAMES[at.event.lane]
    before = [(name(e), "") for e in at.waits_on] + ([(name(at.behind), f"before it on {lane}")] if at.behind else [])
    after = [(name(e), "") for e in at.waited_by] + ([(name(at.ahead), f"next on {lane}")] if at.ahead else [])
    late = "".join(f"<p>{escape(text)}</p>" for text in (_lag(at), _arrivals(at)) if text)
    return f"<h4>Waits for</h4>{_items(before, 'nothing')}{late}<h4>What waits for it</h4>{_items(after, 'nothing')}"


def others(at: Moment) -> str:
    """Where the other ranks are when this one issues the event."""
    if at.n_ranks == 1:
        return "<h4>Other ranks</h4><p>This record has one rank.</p>"
    head = row([cell("rank", "", "th"), cell("what it does", "", "th"), cell("this same event", NUMBER, "th")])
    rows = (row((cell(str(o.rank), NUMBER), cell(escape(_doing(o))), cell(_apart(at, o), NUMBER))) for o in at.others)
    more = at.n_ranks - 1 - len(at.others)
    rest = f"<p>And {more:,} more.</p>" if more else ""
    return f"<h4>The other ranks at this moment</h4>{table_html(rows, head)}{rest}"


def swatch(event: Event) -> str:
    """A small square in the colour of what the event is."""
    return _square(theme.MEMORY[event.category] if event.is_memory else theme.KINDS[event.op], event.is_memory)


def _square(kind: theme.LegendKind, hollow: bool = False) -> str:
    look = f"border:2px solid {kind.color}" if hollow else f"background-color:{kind.color}"
    return f'<i class="fsd-sq{" fsd-hatched" if kind.hatched and not hollow else ""}" style="{look}"></i>'


def _listed(title: str, at: CodeLine) -> str:
    code = listing(at) or "<p>The file is not here: it was recorded on another machine or in another session.</p>"
    return f'<h4>{title} <span class="fsd-where">{escape(at.label)}</span></h4>{code}'


def _stack(found: tuple[CodeLine, ...]) -> str:
    """The calls, outermost first, each with its line, folded."""
    rows = "".join(
        f'<li><span class="fsd-where">{escape(p.label)}</span><br><code>{escape(p.text)}</code></li>' for p in found
    )
    through = " → ".join(escape(p.function.rpartition(".")[2] or p.title) for p in found)
    return f"<details><summary>Through {through}</summary><ol>{rows}</ol></details>"


def _units(held: LiveBytes) -> str:
    """The units that hold most, and of those that hold the same the ones that came first."""
    named = sorted(((n_bytes, unit) for (_, unit), n_bytes in held.items() if unit), key=lambda of: -of[0])
    text = ", ".join(f"{unit} {human_bytes(n)}" for n, unit in named[:MOST_UNITS])
    more = f" and {len(named) - MOST_UNITS} more" if len(named) > MOST_UNITS else ""
    return f'<div class="fsd-where">{escape(text)}{more}</div>' if text else ""


def _stacked(at: Moment) -> str:
    """A bar as long as the peak, filled with what is alive."""
    parts = []
    for category in Memory:
        n_bytes = sum(n for (c, _), n in at.live.items() if c is category)
        if n_bytes > 0:
            kind = theme.MEMORY[category]
            hatched = " class=fsd-hatched" if kind.hatched else ""
            width = 100 * n_bytes / at.top_bytes
            parts.append(f'<i{hatched} style="width:{width:.2f}%;background-color:{kind.color}"></i>')
    label = f"{100 * at.live_bytes / at.top_bytes:.0f}% of the peak"
    return f'<div class="fsd-bar" role="img" aria-label="{label}">{"".join(parts)}</div>'


def _items(items: list[tuple[str, str]], none: str) -> str:
    if not items:
        return f"<p>{none}</p>"
    rows = (
        f"<li>{escape(text)}{f' <span class=fsd-where>({escape(note)})</span>' if note else ''}</li>"
        for text, note in items
    )
    return f"<ul>{''.join(rows)}</ul>"


def _lag(at: Moment) -> str:
    """How far the CPU was ahead of the device, and what the event waited for last."""
    if at.held_up_by is None:
        return ""
    return f"It ran {human_ms(at.lag_s)} after it was issued; the {name(at.held_up_by)} was over last."


def _arrivals(at: Moment) -> str:
    """Of a collective: which rank came last. It cannot begin before."""
    if at.event.op not in COLLECTIVES:
        return ""
    came = {o.rank: o.match.issue_s for o in at.others if o.match is not None}
    if not came:
        return ""
    came[at.event.rank] = at.event.issue_s
    last, first = max(came, key=lambda r: came[r]), min(came, key=lambda r: came[r])
    if came[last] == came[first]:
        return ""
    return f"Rank {last} came to it last, {human_ms(came[last] - came[first])} after rank {first}."


def _doing(other: OtherRank) -> str:
    if other.running:
        return ", ".join(name(e) for e in other.running)
    return f"between operations, after: {name(other.issued)}" if other.issued else "has not begun"


def _apart(at: Moment, other: OtherRank) -> str:
    """How much sooner or later than here the same event is issued there."""
    if other.match is None:
        return "never"
    apart_s = other.match.issue_s - at.event.issue_s
    if not apart_s:
        return "now"
    return f"{human_ms(abs(apart_s))} {'later' if apart_s > 0 else 'ago'}"


def _clock(timeline: Timeline) -> str:
    return "measured" if timeline.header.clock == "measured" else "simulated"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
