"""The tensors of the models that questions name, from the catalogue's dimensions."""

import functools

from fsdp_sim.learn.drill.draws import NAMES
from fsdp_sim.spec import Model, param_shapes

KEYS = {called: key for key, called in NAMES.items()}


@functools.cache
def shapes_of(called: str) -> tuple[tuple[int, ...], ...]:
    """The shapes of all parameters of a model that is called so; positions for a sequence of 2,048."""
    return tuple(tuple(shape) for _, *shape in param_shapes(Model.preset(KEYS[called]), 2048))
