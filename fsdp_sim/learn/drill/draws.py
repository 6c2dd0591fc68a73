"""What questions draw from: models, GPUs and ranks that people know, each from the catalogue that names its source."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

from fsdp_sim.spec import Gpu, Model, gpu

NAMES = {
    "gpt2-1.5b": "GPT-2 1.5B",
    "llama2-7b": "Llama 2 7B",
    "llama3-8b": "Llama 3 8B",
    "llama2-13b": "Llama 2 13B",
    "llama3-70b": "Llama 3 70B",
    "gpt3-175b": "GPT-3 175B",
    "llama3-405b": "Llama 3 405B",
}
GPUS = ("A100-SXM-40GB", "A100-SXM-80GB", "H100-SXM-80GB", "H200-SXM-141GB")

Drawn = TypeVar("Drawn")


def a_model(draw: random.Random, *among: str) -> tuple[str, Model]:
    """A model by the name that people call it, and its dimensions; ``among`` names of the catalogue."""
    name = draw.choice(among or tuple(NAMES))
    return NAMES[name], Model.preset(name)


def a_gpu(draw: random.Random, *among: str) -> Gpu:
    """A GPU of the catalogue."""
    return gpu(draw.choice(among or GPUS))


def billions(parameters: int) -> str:
    """A number of parameters as people say it: ``8.03 billion``."""
    return f"{parameters / 1e9:.3g} billion"


def balanced(draw: random.Random, settings: Mapping[str, Sequence[Drawn]]) -> Drawn:
    """A setting out of those listed for each right answer, each right answer as likely as any other."""
    return draw.choice(settings[draw.choice([right for right in settings if settings[right]])])
