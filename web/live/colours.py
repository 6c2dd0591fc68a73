"""The colours of pages as variables of CSS, light and dark: those of `fsdp_sim.viz.theme`."""

from __future__ import annotations

from fsdp_sim.viz import theme

LIGHT = {
    "ink": theme.INK, "paper": "#FFFFFF", "muted": theme.MUTED, "rule": theme.RULE, "limit": theme.LIMIT,
    "accent": theme.FORWARD.color,
}  # fmt: skip
DARK = {
    "ink": theme.DARK_INK, "paper": theme.DARK_PAPER, "muted": "#9DA7B3", "rule": "#57606A", "limit": "#FF7B72",
    "accent": theme.ALL_GATHER.color,
}  # fmt: skip


def colours() -> str:
    """A style sheet that sets ``--ink``, ``--paper``, ``--muted``, ``--rule``, ``--limit`` and ``--accent``."""
    return f"{_root(LIGHT)}\n@media (prefers-color-scheme: dark) {{ {_root(DARK)} }}"


def _root(values: dict[str, str]) -> str:
    return f":root {{ {' '.join(f'--{name}: {value};' for name, value in values.items())} }}"
