"""What a checkpoint says besides tensors, in JSON's types; any other is damage."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from msgspec import Meta


class Scale(TypedDict):
    """The state of a `torch.amp.GradScaler`."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    _growth_tracker: int


class Progress(TypedDict):
    """How far a training is, and what the numbers in it depend on."""

    step: Annotated[int, Meta(ge=0)]
    position: Annotated[int, Meta(ge=0, le=2**62)]
    identity: dict[str, Any]
    scaler: Scale | None
    config: dict[str, Any]
    world_size: Annotated[int, Meta(ge=1)]
    api: str
    device: str
    versions: dict[str, str]
