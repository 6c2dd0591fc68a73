"""What questions of several files of this topic share."""

from __future__ import annotations

GIB, DAY_S, HOUR_S = 2**30, 86400, 3600
