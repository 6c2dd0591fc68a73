"""Networks whose units are used in every way a unit can be: in order, twice, not at all, in part, again in backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from tests.mini.models import Matrix, Toy, Transformer, batches, token_loss


class Net(nn.Module):
    """Three layers between ``embed`` and ``head``, called in different ways by the classes below."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = Matrix(), Matrix()
        self.layers = nn.ModuleList(Matrix() for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.middle(self.embed(x)))

    def middle(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class LayerTwice(Net):
    def middle(self, x):
        a, b, c = self.layers
        return b(c(b(a(x))))


class LayerUnused(Net):
    def middle(self, x):
        a, _, c = self.layers
        return c(a(x))


class OutputUnused(Net):
    """The second layer runs, and its output takes no part in backward: its prefetched gather is not used."""

    def middle(self, x):
        a, b, c = self.layers
        x = a(x)
        b(x)
        return c(x)


class Detached(Net):
    """Backward never reaches the first layer and the embedding."""

    def middle(self, x):
        a, b, c = self.layers
        return c(b(a(x).detach()))


class NoGradPart(Net):
    def middle(self, x):
        a, b, c = self.layers
        with torch.no_grad():
            x = a(x)
        return c(b(x))


class Parallel(Net):
    def middle(self, x):
        return sum(layer(x) for layer in self.layers)


class Structures(Net):
    """Nested inputs and outputs."""

    class Layer(Matrix):
        def forward(self, batch, *, scale):
            x, y = batch["x"], batch["y"][0]
            return {"x": super().forward(x) * scale, "y": (super().forward(y), "a string", None)}

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def middle(self, x):
        batch = {"x": x, "y": (x + 1,)}
        for layer in self.layers:
            batch = layer(batch, scale=2.0)
        return batch["x"] + batch["y"][0]


@dataclass
class Batch:
    x: torch.Tensor
    scale: float


class Dataclasses(Net):
    """A dataclass in, two tensors out, of which backward may reach one alone."""

    class Layer(Matrix):
        def forward(self, batch):
            x = super().forward(batch.x)
            return Batch(x * batch.scale, batch.scale), x

    both = True

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def middle(self, x):
        batch, total = Batch(x, 2.0), 0
        for layer in self.layers:
            batch, x = layer(batch)
            total = total + x if self.both else 0
        return batch.x + total


class OneOfTwoOutputs(Dataclasses):
    both = False


class InPlace(Net):
    """The output of a unit is changed in place."""

    def middle(self, x):
        for layer in self.layers:
            x = layer(x)
            x += 1
        return x


class NoTensorInput(Net):
    def forward(self, n):
        return super().forward(torch.ones(n, 4))


class Checkpointed(Net):
    """The forward of each unit runs again inside backward, unit and all."""

    reentrant = False

    def middle(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class CheckpointedInside(Net):
    """What runs again lies within the unit."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.w = Matrix(), nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False) @ self.w

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))


class CheckpointedAcross(Net):
    """Two units in one checkpoint."""

    def middle(self, x):
        a, b, c = self.layers
        return c(checkpoint(lambda x: b(a(x)), x, use_reentrant=False))


class CheckpointWrapped(Net):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(checkpoint_wrapper(Matrix()) for _ in range(3))


class Nested(Net):
    """Units within units."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.w = Matrix(), nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            return self.inner(x @ self.w) @ self.w

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))


class NoOwnParameters(nn.Module):
    """The root has no parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Matrix() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def frozen(model: Any, *names: str) -> Any:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def frozen_in_another_dtype() -> Any:
    model = Toy(2)
    for layer in model.layers:
        layer.register_parameter("scale", nn.Parameter(torch.ones(4, dtype=torch.bfloat16), requires_grad=False))
    return model


@dataclass(frozen=True)
class Network:
    build: Callable[[], Any]
    units: Callable[[Any], list[Any]] = lambda model: list(model.layers)
    loss: Callable[[Any], torch.Tensor] = lambda model: model(torch.ones(2, 4)).sum()
    options: Callable[[Any], dict[str, Any]] = lambda model: {}


def ignored(model: Any) -> dict[str, Any]:
    return {"ignored_params": {model.layers[1].w, model.head.w}}


NETWORKS = {
    "toy": Network(lambda: Toy(3)),
    "uneven": Network(lambda: Toy(3, sizes=(5, 3, 7, 9))),
    "transformer": Network(lambda: Transformer(2), loss=lambda model: token_loss(model, batches(1)[0])),
    "tied weights": Network(lambda: Transformer(2, tied=True), loss=lambda model: token_loss(model, batches(1)[0])),
    "only the root": Network(lambda: Toy(2), units=lambda model: []),
    "a root without parameters": Network(NoOwnParameters),
    "a root without tensor inputs": Network(NoTensorInput, loss=lambda model: model(2).sum()),
    "an input with a gradient": Network(
        lambda: Toy(2), loss=lambda model: model(torch.ones(2, 4, requires_grad=True)).sum()
    ),
    "a layer twice": Network(LayerTwice),
    "an unused layer": Network(LayerUnused),
    "an unused output": Network(OutputUnused),
    "a detached part": Network(Detached),
    "a part without gradients": Network(NoGradPart),
    "parallel layers": Network(Parallel),
    "nested structures": Network(Structures),
    "a dataclass and two outputs": Network(Dataclasses),
    "one of two outputs": Network(OneOfTwoOutputs),
    "an output changed in place": Network(InPlace),
    "units in units": Network(Nested, units=lambda m: [u for layer in m.layers for u in (layer.inner, layer)]),
    "two layers in a list": Network(Net, units=lambda m: [[m.layers[0], m.layers[1]], m.layers[2]]),
    "embed and head in a list": Network(Net, units=lambda m: [*m.layers, [m.embed, m.head]]),
    "a list of which one is unused": Network(LayerUnused, units=lambda m: [[m.layers[0], m.layers[1]], m.layers[2]]),
    "a frozen layer": Network(lambda: frozen(Toy(3), "layers.1.w")),
    "the first layers frozen": Network(lambda: frozen(Toy(3), "embed.w", "layers.0.w")),
    "a frozen embedding": Network(lambda: frozen(Toy(3), "embed.w")),
    "a root that is frozen": Network(lambda: frozen(Toy(2), "embed.w", "head.w")),
    "frozen in another dtype": Network(frozen_in_another_dtype),
    "ignored parameters": Network(lambda: Toy(3), options=ignored),
    "checkpointed": Network(Checkpointed),
    "checkpointed, reentrant": Network(CheckpointedReentrant),
    "checkpointed inside": Network(CheckpointedInside),
    "checkpointed across": Network(CheckpointedAcross),
    "checkpoint wrapper": Network(CheckpointWrapped),
}
