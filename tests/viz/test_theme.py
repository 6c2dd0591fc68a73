"""Every kind of operation looks different from every other."""

import plotly.graph_objects as go
import pytest

from fsdp_sim.timeline import COMM_LANES, Lane, Memory, Op, lane_of
from fsdp_sim.viz import theme


def test_every_operation_and_every_memory_category_has_a_look() -> None:
    assert set(theme.KINDS) == set(theme.OP_NAMES) == {op for op in Op if op not in (Op.ALLOC, Op.FREE)}
    assert set(theme.MEMORY) == set(Memory)
    assert set(theme.LANE_NAMES) == set(Lane)


def test_no_two_kinds_share_a_colour_or_a_name() -> None:
    for kinds in ({*theme.KINDS.values(), theme.EXPOSED}, set(theme.MEMORY.values())):
        assert len({kind.color for kind in kinds}) == len({kind.name for kind in kinds}) == len(kinds)


def test_what_runs_on_a_communication_lane_is_hatched_and_nothing_else_is() -> None:
    for op, kind in theme.KINDS.items():
        assert kind.hatched == (lane_of(op) in COMM_LANES and op is not Op.OTHER), op


def luminance(color: str) -> float:
    """Relative luminance as in WCAG 2.2."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(
    "kind", sorted({*theme.KINDS.values(), theme.EXPOSED}, key=lambda kind: kind.name), ids=lambda kind: kind.name
)
def test_text_inside_a_bar_can_be_read(kind: theme.LegendKind) -> None:
    dark, light = sorted((luminance(kind.color), luminance(kind.text_color)))
    assert (light + 0.05) / (dark + 0.05) >= 4.5


@pytest.mark.parametrize(
    ("unit", "short"),
    [("layers.3", "3"), ("transformer.h.11", "11"), ("embed", "embed"), ("transformer.wte", "wte"), ("", "")],
)
def test_a_block_is_known_by_its_number(unit: str, short: str) -> None:
    assert theme.short_unit(unit) == short


@pytest.mark.parametrize("template", [theme.LIGHT, theme.DARK], ids=["light", "dark"])
def test_text_can_be_read_on_paper_and_in_hover_labels(template: go.layout.Template) -> None:
    layout = template.layout
    for ink, paper in (
        (layout.font.color, layout.paper_bgcolor),
        (layout.hoverlabel.font.color, layout.hoverlabel.bgcolor),
    ):
        low, high = sorted((luminance(ink), luminance(paper)))
        assert (high + 0.05) / (low + 0.05) >= 7


def test_a_figure_is_made_dark_by_its_template_alone() -> None:
    figure = go.Figure(go.Scatter(x=[1], y=[2]), go.Layout(template=theme.LIGHT, title="t"))
    other = theme.dark(figure)
    assert other.layout.template.layout.paper_bgcolor == theme.DARK.layout.paper_bgcolor
    assert figure.layout.template.layout.paper_bgcolor == theme.LIGHT.layout.paper_bgcolor
    assert other.data == figure.data
