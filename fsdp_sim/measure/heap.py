"""`keep_freed_memory`: a step on CPU cores should not page in the same memory again and again."""

from __future__ import annotations

import ctypes


def keep_freed_memory() -> bool:
    """Have glibc's malloc keep what is freed for the next allocation; returns whether it will.

    By default it gives large tensors back to the kernel at once, and each step faults their pages in again (the
    teaching model on 2 cores: 3 to 6% of a step). With another malloc nothing is changed.

    Source: mallopt(3).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mmap_threshold, trim_threshold, most = -3, -1, 2**31 - 1
    return bool(mallopt(mmap_threshold, most)) and bool(mallopt(trim_threshold, most))
