"""What is said of a whole timeline: who made it, of which way of training, on what."""

from __future__ import annotations

import msgspec

VERSION = 1


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who made a timeline, on what, with which clock (``simulated`` or ``measured``).

    Attributes:
        api: which way of training it is a step of, as `Plan.api` has it (``fsdp2``, ``fsdp1``, ``ddp``, ``zero1``,
            ``zero2``); empty where nobody said.
        device: ``cpu`` where the thread that issues also computes, so that nothing is ever queued behind compute;
            ``gpu`` where a device works off what is issued; empty where nobody said.
        memory_limit_bytes: what a rank can allocate on its device; 0 when not known.
    """

    producer: str
    clock: str
    world_size: int
    title: str = ""
    hardware: str = ""
    api: str = ""
    device: str = ""
    versions: dict[str, str] = {}
    memory_limit_bytes: int = 0
    version: int = VERSION
