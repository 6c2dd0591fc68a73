"""A YAML or JSON text whose keys are changed where they stand: comments, order and quotes of all else stay."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fsdp_sim.packages import need


class YamlText:
    """The text. A key is named by its path, as it is written: ``("fsdp_config", "fsdp_version")``.

    Raises:
        ValueError: it has an alias, so that one place stands for several.
    """

    def __init__(self, text: str, where: str) -> None:
        need(where, "yaml")
        import yaml  # type: ignore[import-untyped]

        self.text, self.where, self._yaml = text, where, yaml
        self._end_of_line = "\r\n" if "\r\n" in text else "\n"
        try:
            has_alias = any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text))
        except yaml.YAMLError as error:  # JSON may hold what PyYAML does not take, such as a tab
            raise ValueError(f"{where} cannot be changed in place: {' '.join(str(error).split())}") from None
        if has_alias:
            raise ValueError(f"{where} has an alias (*name), by which a change in one place is one in several; write "
                             f"its values out, and ask again")  # fmt: skip

    def keys(self, path: tuple[str, ...]) -> list[str]:
        """The keys of a section, as they are written; none of what is not there or holds no keys."""
        node = self._at(path)
        return [one.value for one, _ in node.value] if isinstance(node, self._yaml.MappingNode) else []

    def rename(self, path: tuple[str, ...], name: str) -> None:
        """Give a key another name."""
        *above, key = path
        pair = _pair(self._at(tuple(above)), key)
        assert pair is not None
        self._name(pair[0], name)

    def _name(self, key: Any, name: str) -> None:
        self._put(key.start_mark.index, key.end_mark.index, json.dumps(name) if key.style == '"' else name)

    def set(self, path: tuple[str, ...], value: Any, *, name: str = "") -> None:
        """Give a key another value, and another name if one is said; a key that is not there goes to the end of its
        section, and a section to the end of the text."""
        *above, key = path
        mapping = self._at(tuple(above))
        pair = _pair(mapping, key)
        if pair is not None and isinstance(value, Mapping):
            self.remove(path)
            mapping, pair = self._at(tuple(above)), None
        if pair is None:
            self._append(mapping, name or key, value)
        else:
            old, at = pair
            new = json.dumps(value) if '"' in (old.style, getattr(at, "style", "")) else _plain(value)
            is_below = isinstance(at.value, list) and not at.flow_style
            if is_below:
                self._put(*self._lines(at.start_mark.index, _end(at)), "")
            if is_below or at.start_mark.index == at.end_mark.index:
                after = self.text.index(":", old.end_mark.index) + 1
                self._put(after, after, f" {new}")
            else:
                self._put(at.start_mark.index, _end(at), new)
            if name:
                self._name(old, name)

    def remove(self, path: tuple[str, ...]) -> None:
        """Take out a key with its value, and with the rest of its line where it has one of its own; if it is there."""
        *above, key = path
        mapping = self._at(tuple(above))
        pairs = mapping.value
        at = next((place for place, (one, _) in enumerate(pairs) if one.value == key), None)
        if at is None:
            return
        start, end = pairs[at][0].start_mark.index, _end(pairs[at][1])
        if not mapping.flow_style:
            start, end = self._lines(start, end)
        elif at + 1 < len(pairs):
            end = pairs[at + 1][0].start_mark.index
        elif at:
            start = _end(pairs[at - 1][1])
        self._put(start, end, "")

    def _at(self, path: tuple[str, ...]) -> Any:
        node = self._yaml.compose(self.text, self._yaml.SafeLoader)
        for key in path:
            pair = _pair(node, key) if isinstance(node, self._yaml.MappingNode) else None
            node = pair[1] if pair else None
        return node

    def _append(self, mapping: Any, key: str, value: Any) -> None:
        first, last = mapping.value[0][0].start_mark, _end(mapping.value[-1][1])
        if mapping.flow_style:
            apart = first.line != mapping.value[-1][0].start_mark.line
            quoted = mapping.value[0][0].style == '"'
            new = f"{json.dumps(key) if quoted else key}: {json.dumps(value)}"
            self._put(last, last, f",{self._end_of_line}{' ' * first.column}{new}" if apart else f", {new}")
            return
        new = f"{key}:" if isinstance(value, Mapping) else f"{key}: {_plain(value)}"
        lines = [new, *(f"  {k}: {_plain(v)}" for k, v in (value.items() if isinstance(value, Mapping) else ()))]
        place = self.text.find("\n", last)
        if place < 0:
            self.text += self._end_of_line
            place = len(self.text) - 1
        self._put(place + 1, place + 1, "".join(f"{' ' * first.column}{line}{self._end_of_line}" for line in lines))

    def _lines(self, start: int, end: int) -> tuple[int, int]:
        """From where the first line begins to where the last one ends."""
        return self.text.rfind("\n", 0, start) + 1, (self.text.find("\n", end) + 1) or len(self.text)

    def _put(self, start: int, end: int, new: str) -> None:
        self.text = self.text[:start] + new + self.text[end:]


def _pair(mapping: Any, key: str) -> tuple[Any, Any] | None:
    return next(((one, value) for one, value in mapping.value if one.value == key), None)


def _end(node: Any) -> int:
    """Where a value ends: of a block that is its last value, for what PyYAML says is where the next thing begins."""
    if isinstance(node.value, list) and node.value and not node.flow_style:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) and value not in ("no", "yes") else json.dumps(value)
