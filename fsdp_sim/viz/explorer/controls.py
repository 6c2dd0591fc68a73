"""The controls as widgets: what a state means for them, and what they mean as a state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import ipywidgets as W

from fsdp_sim.forms import FormState
from fsdp_sim.viz.explorer.settings import CONTROLLED, SETTINGS, Control, Option, api_of, chosen, words_of

_STYLE = {"description_width": "90px"}


class Controls:
    """One widget for each setting.

    Attributes:
        widgets: by the setting's key; the value is the text it writes, empty for the default.
        box: all of them.
    """

    def __init__(self, moved: Callable[[FormState], None]) -> None:
        self._moved = moved
        self._quiet = False
        self._rest: dict[str, str] = {}  # words of the state that have no control
        self.widgets = {setting.key: _widget(setting) for setting in SETTINGS}
        for widget in self.widgets.values():
            widget.observe(self._on_move, "value")
        self.box = W.VBox(list(self.widgets.values()))

    @property
    def state(self) -> FormState:
        """What the controls and the words without a control say."""
        texts: dict[str, str | None] = dict(self._rest)
        api = self.widgets["api"].value or "fsdp2"
        for setting in SETTINGS:
            if setting.suits(api):
                texts |= words_of(setting, self._text(setting))
        return FormState({name: text for name, text in texts.items() if text is not None})

    def show(self, state: FormState) -> None:
        """Move the controls to where a state has them, without calling back."""
        api = api_of(state.texts)
        with self.quietly():
            self._rest = {name: text for name, text in state.texts.items() if name not in CONTROLLED}
            for setting in SETTINGS:
                widget = self.widgets[setting.key]
                self._suit(setting, api)
                if not setting.suits(api):
                    # a word that does not suit stays a word, so that what is impossible about it is said
                    continue
                self._set(widget, setting, chosen(setting, state.texts))
            suiting = {s.word for s in SETTINGS if s.suits(api)} | {"param_dtype", "reduce_dtype"}
            self._rest |= {
                name: text for name, text in state.texts.items() if name in CONTROLLED and name not in suiting
            }

    @contextmanager
    def quietly(self) -> Any:
        """While the controls are moved by the program and not by the reader."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def _text(self, setting: Control) -> str | None:
        value = self.widgets[setting.key].value
        return setting.options[int(value)][1] if setting.form == "check" else value or None

    def _set(self, widget: Any, setting: Control, text: str | None) -> None:
        if setting.form == "check":
            widget.value = text == setting.options[1][1]
            return
        options = _offered(setting, setting.offering(text))
        if widget.options != options:
            widget.options = options
        widget.value = text or ""

    def _suit(self, setting: Control, api: str) -> None:
        self.widgets[setting.key].layout.display = None if setting.suits(api) else "none"

    def _on_move(self, change: dict[str, Any]) -> None:
        if self._quiet:
            return
        if change["owner"] is self.widgets["api"]:
            self._rest = {name: text for name, text in self._rest.items() if name not in CONTROLLED}
            for setting in SETTINGS:
                self._suit(setting, change["new"] or "fsdp2")
        self._moved(self.state)


def _widget(setting: Control) -> Any:
    common = {
        "description": setting.label, "tooltip": setting.help, "style": _STYLE,
        "layout": W.Layout(width="auto", min_width="0"),
    }  # fmt: skip
    if setting.form == "check":
        return W.Checkbox(value=False, indent=True, **common)
    made = W.SelectionSlider if setting.form == "slider" else W.Dropdown
    options = _offered(setting, setting.options)
    return made(options=options, value=options[0][1], **common)


def _offered(setting: Control, options: tuple[Option, ...]) -> tuple[tuple[str, str], ...]:
    """As the widgets want them, which take no None: an empty text is the default."""
    return tuple((setting.shown(option), option[1] or "") for option in options)
