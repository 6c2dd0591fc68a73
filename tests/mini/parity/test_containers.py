"""Containers that a unit is given or returns: FSDP looks for tensors in them, and leaves the containers alone."""

from dataclasses import dataclass, field

import torch
from torch import nn

from tests.mini.models import Matrix, assert_same_grads, twin


class Cache(dict):
    """Keys and values of the layers so far, as in a decoder: with state of its own."""

    def __init__(self):
        super().__init__()
        self.n_layers = 0


@dataclass
class Output:
    x: torch.Tensor
    note: str = field(init=False, default="")


class Two(tuple):
    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


class Layer(Matrix):
    def forward(self, given, seen: list, cache: Cache):
        out = Output(super().forward(given[0]))
        out.note = "kept"
        seen.append(given[1])
        cache.n_layers += 1
        cache[cache.n_layers] = out.x.detach()
        return out, Two(out.x, given[1] + 1)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = Matrix()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        given, seen, cache = Two(self.embed(x), 0), [], Cache()
        for layer in self.layers:
            out, given = layer(given, seen, cache=cache)
            assert out.note == "kept"
        assert (seen, cache.n_layers, list(cache)) == ([0, 1, 2], 3, [1, 2, 3])
        return given[0]


def test_containers_without_a_gradient_stay_the_objects_they_are_and_outputs_are_not_made_anew(ranks, impl):
    def run():
        model = Decoder()
        plain = twin(model)
        for unit in (*model.layers, model):
            impl.fully_shard(unit)
        for m in (model, plain):
            m(torch.ones(2, 4)).sum().backward()
        assert_same_grads(model, plain)

    ranks(2, run)
