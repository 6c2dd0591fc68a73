"""The colours of all pages as variables of CSS, light and dark, under Furo's names: those of `fsdp_sim.viz.theme`."""

from __future__ import annotations

from fsdp_sim.viz import theme

LIGHT = {
    "color-foreground-primary": theme.INK, "color-foreground-muted": theme.MUTED, "color-background-border": theme.RULE,
    "color-background-primary": "#FFFFFF", "color-background-secondary": "#F5F7F9", "color-limit": theme.LIMIT,
    "color-brand-primary": theme.FORWARD.color, "color-brand-content": theme.FORWARD.color,
}  # fmt: skip
DARK = {
    "color-foreground-primary": theme.DARK_INK, "color-foreground-muted": "#9DA7B3",
    "color-background-border": "#3A434D",
    "color-background-primary": theme.DARK_PAPER, "color-background-secondary": "#1A1F26", "color-limit": "#FF7B72",
    "color-brand-primary": theme.ALL_GATHER.color, "color-brand-content": theme.ALL_GATHER.color,
}  # fmt: skip


def colours() -> str:
    """A style sheet that sets them for a page that is not Furo's, by the reader's choice: ``data-theme``, as Furo's."""
    dark = _block(DARK, "dark")
    return (
        f"body {{ --font-stack: {theme.FONT}; {_block(LIGHT, 'light')} }}\n"
        f"@media (prefers-color-scheme: dark) {{ body:not([data-theme=light]) {{ {dark} }} }}\n"
        f"body[data-theme=dark] {{ {dark} }}"
    )


def _block(values: dict[str, str], scheme: str) -> str:
    return f"color-scheme: {scheme}; {' '.join(f'--{name}: {value};' for name, value in values.items())}"
