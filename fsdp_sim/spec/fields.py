"""How a spec is written: a frozen dataclass whose fields say what they accept.

`spec` is the one decorator of this room. It makes the class a frozen dataclass, checks every value when one is
built, and answers a misspelt field with the nearest right name. What a field accepts is data (an `Allowed`), so a
new field is one line.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

from fsdp_sim.spec.elsewhere import BOOLS, instead_of, number_meant
from fsdp_sim.words import did_you_mean, in_brief, nearest

_T = TypeVar("_T")

# Beyond what anyone trains: a slip of the finger is an error, not a computation without end.
SIZE = 2**26  # of any whole number for which nothing smaller is said
MOST = 1e60  # of numbers that are not whole, and its inverse the least: with these no rate or time becomes infinite
LONGEST = 10_000  # characters of a name, names of modules


@dataclasses.dataclass(frozen=True)
class Allowed:
    """The values a field takes: a test, and the words an error message uses for it.

    Attributes:
        names: the strings among them, where there is a list of these.
        most: of whole numbers, beyond which a value is taken for a slip; None is any.
        instead: the end of the sentence about a value that another field takes; empty for any other.
        are_names: strings and tuples are names, and no longer than `LONGEST`.

    Example:
        >>> depth = one_of(None) | whole(minimum=1)
        >>> depth.words, depth.test(2), depth.test(True)
        ('None or a whole number >= 1', True, False)
    """

    words: str
    test: Callable[[Any], bool]
    names: tuple[str, ...] = ()
    most: int | None = None
    are_names: bool = False
    instead: Callable[[Any], str] = lambda value: ""

    def __or__(self, other: Allowed) -> Allowed:
        def test(value: Any) -> bool:
            return self.test(value) or other.test(value)

        return Allowed(
            f"{self.words} or {other.words}", test, self.names + other.names, self.most or other.most,
            self.are_names or other.are_names, lambda value: self.instead(value) or other.instead(value),
        )  # fmt: skip

    def explained(self, why: str) -> Allowed:
        """The same test with a remark in its words, for example what None means."""
        return dataclasses.replace(self, words=f"{self.words} ({why})")


def one_of(*values: object) -> Allowed:
    """Exactly these values; 1 is not True."""
    words = ", ".join(map(repr, values[:-1])) + (" or " if len(values) > 1 else "") + repr(values[-1])
    names = tuple(value for value in values if isinstance(value, str))
    return Allowed(words, lambda value: any(type(value) is type(v) and value == v for v in values), names)


def whole(minimum: int, most: int | None = None) -> Allowed:
    """A whole number, not a bool, of at least ``minimum``."""
    return Allowed(
        f"a whole number >= {minimum}", lambda value: type(value) is int and value >= minimum, most=most,
        instead=number_meant,
    )  # fmt: skip


def number(minimum: float = 0.0, *, above: bool = False) -> Allowed:
    """A finite number of at least ``minimum`` (strictly above it if ``above``), not a bool."""

    def test(value: Any) -> bool:
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            return False
        return bool(value > minimum if above else value >= minimum)

    def instead(value: Any) -> str:
        return number_meant(value) if isinstance(value, str) else ""

    return Allowed(f"a number {'>' if above else '>='} {minimum:g}", test, instead=instead)


def text() -> Allowed:
    """A string with at least one character."""
    return Allowed("a name (a non-empty string)", lambda value: isinstance(value, str) and value != "", are_names=True)


def field(allowed: Allowed, *, default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field that accepts what ``allowed`` says; required when it has no default."""
    return dataclasses.field(default=default, metadata={"allowed": allowed})


def check(owner: str, name: str, value: Any, allowed: Allowed) -> None:
    """Refuse a value that a field does not take, with the same sentence wherever the value comes from.

    Raises:
        ValueError: names the field, the value and what would be right.
    """
    if not allowed.test(value):
        near: list[Any] = nearest(value, allowed.names) if isinstance(value, str) else []
        near = [name for name in allowed.names if name == str(value)] or near  # 2.13 means '2.13'
        meant = BOOLS.get(str(value).lower()[:4])
        near = [meant] if meant is not None and allowed.test(meant) else near
        instead = instead_of(name, value) or allowed.instead(value) or (f"did you mean {near[0]!r}?" if near else "")
        hint = f"; {instead}" if instead else ""
        raise ValueError(f"{owner}.{name} is {in_brief(value, 200)}; it must be {allowed.words}{hint}")
    if type(value) is int and allowed.most is not None and value > allowed.most:
        shown = f"{value:,}" if value < MOST else in_brief(value)
        raise ValueError(f"{owner}.{name} is {shown}; the simulator goes up to {allowed.most:,}")
    if type(value) is float and value and not 1 / MOST <= abs(value) <= MOST:
        raise ValueError(f"{owner}.{name} is {value}; the simulator goes from {1 / MOST:g} to {MOST:g}")
    if allowed.are_names and isinstance(value, str | tuple) and max([len(value), *map(len, value)]) > LONGEST:
        most = f"{LONGEST:,} characters" if isinstance(value, str) else f"{LONGEST:,} names, each of as many characters"
        raise ValueError(f"{owner}.{name} is {in_brief(value)}; the simulator goes up to {most}")


def _check_names(cls: Any, names: list[str], kwargs: dict[str, Any]) -> None:
    for given, value in kwargs.items():
        if given not in names and given not in cls.__dataclass_fields__:  # which also has what only copies are given
            hint = did_you_mean(given, names, "it has")
            raise TypeError(f"{cls.__name__} has no field {given} (given {given}={in_brief(value, 200)}); {hint}")


@dataclass_transform(frozen_default=True, field_specifiers=(field, dataclasses.field))
def spec(cls: type[_T]) -> type[_T]:
    """Make ``cls`` a frozen dataclass that checks the names and values it is built from.

    The class's own ``__post_init__``, if any, runs after each value has been checked alone; it is the place for
    rules between fields. A static method ``__given__`` may add to the fields that an instance is built from.

    Raises (when an instance is built):
        TypeError: a field name that does not exist; names it, its value and the nearest right name.
        ValueError: a value that its field does not accept; names the field, the value and what would be right.
    """
    between_fields = cls.__dict__.get("__post_init__", lambda self: None)

    def __post_init__(self: Any, *of_a_copy: Any) -> None:  # noqa: N807
        values = self.__dict__
        for name, allowed, default in accepted:
            if (value := values[name]) is not default:  # of fifty fields a few are given
                check(cls.__name__, name, value, allowed)
        between_fields(self, *of_a_copy)

    cls.__post_init__ = __post_init__  # type: ignore[attr-defined]
    made: Any = dataclasses.dataclass(frozen=True)(cls)
    names = [f.name for f in dataclasses.fields(made) if f.init]
    accepted = [(f.name, f.metadata["allowed"], f.default) for f in dataclasses.fields(made) if "allowed" in f.metadata]
    equal, init, complete = made.__eq__, made.__init__, cls.__dict__.get("__given__", lambda given: given)

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        _check_names(made, names, kwargs)
        init(self, *args, **complete(kwargs))

    def __eq__(self: Any, other: object) -> Any:  # noqa: N807
        """Equal in every field; 1 is not True."""
        found = equal(self, other)
        if found is not True or self is other:
            return found
        return all((type(getattr(self, n)) is bool) == (type(getattr(other, n)) is bool) for n in names)

    made.__init__, made.__eq__ = __init__, __eq__
    specified: type[_T] = made
    return specified
