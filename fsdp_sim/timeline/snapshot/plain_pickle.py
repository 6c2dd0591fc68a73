"""A pickle of plain data, read by hand: Python's own reader runs whatever a pickle says.

A pickle is a program for a small machine with a stack. This machine knows the instructions that make numbers, texts,
lists, tuples and dictionaries; at any other, such as those that import or call, it stops and says so. Nothing is made
that the file is not long enough for: each instruction adds at most one thing.

Source: ``pickletools.opcodes``, protocols 2 to 5.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct, error
from typing import Any

from fsdp_sim.timeline.limits import Progress

_U2, _I4, _U4, _U8, _F8 = (Struct(code) for code in ("<H", "<i", "<I", "<Q", ">d"))
_MARK = object()
_TURN = 1 << 18  # instructions between two calls of ``progress``


def read_plain_pickle(data: bytes, progress: Progress | None = None) -> Any:
    """What a pickle holds, if it holds plain data.

    Args:
        progress: called with bytes read and bytes in all, now and then.

    Raises:
        ValueError: it imports, calls or makes anything else (the instruction is named, and what it would import), or is
            cut off or damaged.

    Example:
        >>> import pickle
        >>> read_plain_pickle(pickle.dumps({"segments": [(1, 2.5, None)]}))
        {'segments': [(1, 2.5, None)]}
    """
    try:
        return _Machine(data).run(progress)
    except (IndexError, error, TypeError, KeyError, UnicodeDecodeError):
        raise ValueError("is a pickle that is cut off or damaged; write it again") from None


class _Machine:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, progress: Progress | None = None) -> Any:
        data, stack, does = self.data, self.stack, _DOES
        while True:
            if progress:
                progress(self.at, len(data))
            for _ in range(_TURN):
                code = data[self.at]
                self.at += 1
                if code == _STOP:
                    return stack.pop()
                act = does.get(code)
                if act is None:
                    raise ValueError(self._refusal(code))
                act(self)

    def _refusal(self, code: int) -> str:
        import pickletools  # which only a refusal needs

        name = {ord(one.code): one.name for one in pickletools.opcodes}.get(code)
        if name is None:
            return f"is a pickle that is damaged: it has an instruction {code:#04x}; write it again"
        what = ""
        if name == "GLOBAL":
            what = " " + b".".join(self.data[self.at :][:200].split(b"\n")[:2]).decode(errors="replace")
        elif name == "STACK_GLOBAL" and len(self.stack) >= 2:
            what = f" {str(self.stack[-2])[:100]}.{str(self.stack[-1])[:100]}"
        return (
            f"is a pickle that does more than hold data ({name}{what}), so it is not read; a snapshot of "
            "torch.cuda.memory._dump_snapshot is numbers, texts, lists, tuples and dictionaries"
        )

    def take(self, length: int) -> bytes:
        piece = self.data[self.at : self.at + length]
        if len(piece) < length:
            raise IndexError
        self.at += length
        return piece

    def number(self, form: Struct) -> Any:
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def since_mark(self) -> list[Any]:
        stack = self.stack
        place = len(stack) - 1
        while stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise IndexError
        found = stack[place + 1 :]
        del stack[place:]
        return found

    def into(self, kind: type) -> Any:
        target = self.stack[-1]
        if type(target) is not kind:
            raise TypeError
        return target

    def extend(self, pairs: list[Any]) -> None:
        target = self.into(dict)
        if len(pairs) % 2:
            raise IndexError
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if type(key) not in (str, int):  # which alone are cheap to hash, however they are nested
                raise TypeError
            target[key] = value

    def tuple_of(self, length: int) -> None:
        if length > len(self.stack):
            raise IndexError
        items = tuple(self.stack[-length:])
        del self.stack[-length:]
        self.stack.append(items)


def _pushes(make: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    def act(m: _Machine) -> None:
        m.stack.append(make(m))

    return act


def _setitem(m: _Machine) -> None:
    pair = m.stack[-2:]
    del m.stack[-2:]
    m.extend(pair)


def _append(m: _Machine) -> None:
    value = m.stack.pop()
    m.into(list).append(value)


def _appends(m: _Machine) -> None:
    found = m.since_mark()
    m.into(list).extend(found)


def _long(length: Callable[[_Machine], int]) -> Callable[[_Machine], None]:
    def act(m: _Machine) -> None:
        n = length(m)
        if n > 16:  # bytes: an address has eight
            raise ValueError(f"is a pickle with a number of {n} bytes; it is no snapshot of memory")
        m.stack.append(int.from_bytes(m.take(n), "little", signed=True))

    return act


def _byte(m: _Machine) -> int:
    return m.take(1)[0]


def _text(form: Struct | None) -> Callable[[_Machine], None]:
    return _pushes(lambda m: str(m.take(_byte(m) if form is None else m.number(form)), "utf-8", "surrogatepass"))


def _memoize(m: _Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]


def _put(form: Struct | None) -> Callable[[_Machine], None]:
    def act(m: _Machine) -> None:
        m.memo[_byte(m) if form is None else m.number(form)] = m.stack[-1]

    return act


_STOP = ord(".")
_DOES: dict[int, Callable[[_Machine], object]] = {
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME
    ord("("): _pushes(lambda m: _MARK),
    ord("N"): _pushes(lambda m: None),
    0x88: _pushes(lambda m: True),
    0x89: _pushes(lambda m: False),
    ord("K"): _pushes(_byte),
    ord("M"): _pushes(lambda m: m.number(_U2)),
    ord("J"): _pushes(lambda m: m.number(_I4)),
    0x8A: _long(_byte),
    0x8B: _long(lambda m: m.number(_I4)),
    ord("G"): _pushes(lambda m: m.number(_F8)),
    0x8C: _text(None),
    ord("X"): _text(_U4),
    0x8D: _text(_U8),
    ord("]"): _pushes(lambda m: []),
    ord("}"): _pushes(lambda m: {}),
    ord(")"): _pushes(lambda m: ()),
    ord("a"): _append,
    ord("e"): _appends,
    ord("s"): _setitem,
    ord("u"): lambda m: m.extend(m.since_mark()),
    ord("t"): lambda m: m.stack.append(tuple(m.since_mark())),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    0x94: _memoize,
    ord("q"): _put(None),
    ord("r"): _put(_U4),
    ord("h"): _pushes(lambda m: m.memo[_byte(m)]),
    ord("j"): _pushes(lambda m: m.memo[m.number(_U4)]),
}
