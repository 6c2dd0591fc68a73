"""The tensors of a unit's inputs and outputs are found in whatever holds them."""

from dataclasses import dataclass, field

import torch

from fsdp_sim.measure.trace_segment import tensors_anywhere


@dataclass
class Output:
    x: torch.Tensor
    more: object = field(init=False, default=None)


class Pair(tuple):
    def __new__(cls, first: object, second: object) -> "Pair":
        return super().__new__(cls, (first, second))


def test_tensors_are_found_in_containers_that_cannot_be_made_anew() -> None:
    a, b, c, d = torch.ones(4, 1)
    output = Output(a)
    output.more = {"pair": Pair(b, [c, None]), "set": {d}, "no tensor": Output}
    assert [id(t) for t in tensors_anywhere((output, 3))] == [id(t) for t in (a, b, c, d)]
