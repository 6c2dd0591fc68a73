"""A training drawn at random from a seed: modules, plan and sequence of calls. The same on every rank, whoever shards.

`train` does it with torch's `fully_shard` or the mini's and says everything that can be seen of it, bit by bit.
"""

from __future__ import annotations

import random
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.mini.parity.tools import Issued, kind

Seen = list[tuple[str, Any]]
"""What was looked at, and what was there: a tensor, or anything that can be compared."""


class Layer(nn.Module):
    """d -> d, in one of the shapes below. With ``inner`` another one inside, which may be a unit of its own."""

    KINDS = ("mlp", "one row", "cube", "tied", "pair")

    def __init__(self, shape: str, d: int, hidden: int, inner: Layer | None) -> None:
        super().__init__()
        self.shape, self.inner = shape, inner
        if shape in ("mlp", "pair"):
            self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d, bias=shape == "mlp")
        elif shape == "one row":  # all ranks but one hold nothing
            self.scale, self.shift = nn.Parameter(torch.randn(1, d)), nn.Parameter(torch.randn(1))
        elif shape == "cube":
            self.cube = nn.Parameter(torch.randn(hidden, d, d) / d)
        else:
            self.a, self.b = nn.Linear(d, d, bias=False), nn.Linear(d, d)
            self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> Any:
        if self.inner is not None:
            x = first(self.inner(x))
        if self.shape in ("mlp", "pair"):
            y = self.down(torch.tanh(self.up(x)))
        elif self.shape == "one row":
            y = x * self.scale + self.shift
        elif self.shape == "cube":
            y = torch.einsum("bd,hde->be", x, self.cube)
        else:
            y = self.b(torch.relu(self.a(x)))
        return {"y": y * scale, "aux": x * 2} if self.shape == "pair" else y * scale


class Hidden:
    """A plain object, into which FSDP does not look: no tensor in it is hooked."""

    def __init__(self, value: Any) -> None:
        self.value = value


def first(output: Any) -> torch.Tensor:
    if isinstance(output, dict):
        return output["y"]
    if isinstance(output, tuple):
        return output[0]
    return output.value if isinstance(output, Hidden) else output


class Net(nn.Module):
    """Embedding, layers, norm and head, with what was drawn for them."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        d = draw.choice([3, 4, 5, 6])
        make = partial(self._layer, draw, d)
        self.d = d
        self.embed = nn.Linear(4, d)
        self.layers = nn.ModuleList(make(make() if draw.random() < 0.25 else None) for _ in range(draw.randint(1, 3)))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 3, bias=draw.random() < 0.5)
        self.uses = [draw.choice(["once", "once", "once", "twice", "recomputed", "not at 1", "without grad"])
                     for _ in self.layers]  # fmt: skip
        self.output = draw.choice(["tensor", "tensor", "tuple", "dict", "hidden"])
        self.chunks = draw.choice([0, 0, 0, 2, 3])  # the head is called by the loss, once per chunk
        self.list_of_two = draw.random() < (0.8 if self.chunks else 0.3)  # norm and head are one unit

    def _layer(self, draw: random.Random, d: int, inner: Layer | None = None) -> Layer:
        return Layer(draw.choice(Layer.KINDS), d, draw.choice([1, 2, 5, 7]), inner)

    def forward(self, x: torch.Tensor, number: int) -> Any:
        x = self.embed(x)
        for layer, use in zip(self.layers, self.uses, strict=True):
            if use == "recomputed" and torch.is_grad_enabled():
                x = x + first(checkpoint(layer, x, use_reentrant=False))
            elif use == "without grad":
                with torch.no_grad():
                    x = x + first(layer(x))
            elif use != "not at 1" or number != 1:
                for _ in range(2 if use == "twice" else 1):
                    x = x + first(layer(x, scale=0.5))
        x = self.norm(x)
        if not self.chunks:
            x = self.head(x)
        outputs = {"tuple": lambda: (x, number), "dict": lambda: {"y": x, "n": None}, "hidden": lambda: Hidden(x)}
        return outputs.get(self.output, lambda: x)()


def train(impl: ModuleType, seed: int) -> Seen:
    """Draw a training for the ranks that are there, do it, and say what is to be seen."""
    draw = random.Random(f"{dist.get_world_size()} {seed}")
    torch.manual_seed(seed)
    model = Net(draw)
    for parameter in model.parameters():
        if draw.random() < 0.1:
            parameter.requires_grad_(False)
    seen: Seen = []
    units = shard(impl, model, draw, seen)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = draw.choice([partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.AdamW, lr=0.01)])(
        model.parameters() if trainable else [nn.Parameter(torch.zeros(1))], foreach=draw.random() < 0.5
    )
    micro_batches, accumulation = draw.randint(1, 3), draw.choice(ACCUMULATION)
    partly = draw.choice(units) if draw.random() < 0.3 else model
    input_needs_grad = model.output == "hidden" or draw.random() < 0.3
    set_to_none, between = draw.random() < 0.7, [draw.choice(BETWEEN) for _ in range(2)]
    seen.append(("drawn", (model.output, model.uses, model.chunks, accumulation, micro_batches, between)))
    with Issued() as issued:
        for step in range(2):
            for number in range(micro_batches):
                set_accumulation(accumulation, partly, model, number == micro_batches - 1)
                generator = torch.Generator().manual_seed(1000 * step + 10 * number + dist.get_rank())
                x = torch.randn(6, 4, generator=generator).requires_grad_(input_needs_grad)
                whole = accumulation != "is_last_backward" or number == micro_batches - 1  # until then nobody may look
                forward_backward(model, x, number, seen, whole)
                seen.append(("input's gradient", x.grad))
                seen += [(f"registered {n}", kind(p)) for n, p in model.named_parameters()]
                model_reshard(model)
                if whole:
                    seen += gradients(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            seen += [(f"step {step} {n}", local(p).clone()) for n, p in model.named_parameters()]
            look_between(between[step], model, units, seen)
        seen.append(("collectives", [(c.name, c.numel, c.dtype) for c in issued.log]))
    return seen


ACCUMULATION = ["", "", "requires_gradient_sync", "requires_all_reduce", "is_last_backward", "reshard_after_backward"]
BETWEEN = ["", "", "evaluate", "unshard", "unshard async", "state dict", "freeze"]


def shard(impl: ModuleType, model: Net, draw: random.Random, seen: Seen) -> list[Any]:
    """Cut the model into units, and set what can be set."""
    ranks = dist.get_world_size()
    hybrid = ranks == 4 and draw.random() < 0.4
    mesh = mesh_of((2, 2) if hybrid else (ranks,))
    shards = 2 if hybrid else ranks
    reshards = [None, None, True, False, *([2] if shards == 4 else [])]
    precision = draw.choice([{}, {}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
                             {"param_dtype": torch.bfloat16}, {"reduce_dtype": torch.bfloat16}])  # fmt: skip
    offload = impl.CPUOffloadPolicy(pin_memory=False) if draw.random() < 0.2 else impl.OffloadPolicy()

    def apply(module: Any, **policy: Any) -> None:
        impl.fully_shard(module, mesh=mesh, reshard_after_forward=draw.choice(reshards), offload_policy=offload,
                         mp_policy=impl.MixedPrecisionPolicy(**precision, **policy))  # fmt: skip

    units: list[Any] = []
    for layer in model.layers:
        if layer.inner is not None and draw.random() < 0.6:
            apply(layer.inner)
            units.append(layer.inner)
        if draw.random() < 0.85:
            apply(layer)
            units.append(layer)
    if model.list_of_two:
        apply([model.norm, model.head])
        units.append(model.head)
    elif model.chunks:
        apply(model.head)
        units.append(model.head)
    apply(model, **({"output_dtype": torch.float32} if precision and draw.random() < 0.5 else {}))
    units.append(model)
    settings: list[tuple[str, tuple[Any, ...]]] = [
        ("set_reduce_scatter_max_input_buffers", (draw.randint(1, 3),)),
        ("set_reduce_scatter_unused_params", (True,)),
        ("set_gradient_divide_factor", (draw.choice([1.0, 3.0, float(shards)]),)),
        ("set_force_sum_reduction_for_comms", (True,)),
        ("_set_unshard_async_op", (True,)),
        ("set_modules_to_forward_prefetch", (draw.sample(units, min(2, len(units))),)),
        ("set_modules_to_backward_prefetch", (draw.sample(units, min(2, len(units))),)),
        ("set_reshard_after_forward", (draw.random() < 0.5,)),
        ("set_all_reduce_hook", (lambda gradients: gradients.mul_(2),)),
    ]
    for name, values in settings:
        if draw.random() < 0.2:
            unit = draw.choice(units)
            getattr(unit, name)(*values)
            if name == "set_gradient_divide_factor":  # gloo has no operation that multiplies and sums
                unit.set_force_sum_reduction_for_comms(True)
            seen.append((name, units.index(unit)))
    return units


_meshes: dict[tuple[int, ...], Any] = {}


def mesh_of(shape: tuple[int, ...]) -> Any:
    """Made once by each rank: a mesh makes process groups, which cost."""
    if (dist.get_world_size(), *shape) not in _meshes:
        names = ("replicate", "shard")[-len(shape) :]
        _meshes[dist.get_world_size(), *shape] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[dist.get_world_size(), *shape]


def set_accumulation(what: str, unit: Any, model: Any, last: bool) -> None:
    if what == "is_last_backward":
        model.set_is_last_backward(last)
    elif what:
        getattr(unit, f"set_{what}")(last)


def forward_backward(model: Net, x: torch.Tensor, number: int, seen: Seen, whole: bool) -> None:
    out = first(model(x, number))
    seen.append(("output", out.detach()))
    if not model.chunks:
        if out.requires_grad:
            loss_of(out).backward()
        return
    detached = out.detach().requires_grad_()
    for chunk in detached.chunk(model.chunks):
        loss = loss_of(model.head(chunk))
        seen.append(("loss of a chunk", loss.detach()))
        loss.backward()
        if whole:
            seen += gradients(model)
    if out.requires_grad:
        out.backward(detached.grad)


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(out.float(), dim=-1).square().mean()


def gradients(model: nn.Module) -> Seen:
    """Of the sharded parameters, wherever they are at the moment."""
    return [(f"gradient {n}", None if p.grad is None else local(p.grad).clone())
            for n, p in model.named_parameters() if isinstance(p, DTensor)]  # fmt: skip


def local(tensor: Any) -> torch.Tensor:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def model_reshard(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def look_between(what: str, model: Any, units: list[Any], seen: Seen) -> None:
    """What a user may do between steps."""
    if what == "evaluate":
        with torch.no_grad():
            seen.append(("evaluated", first(model(torch.ones(2, 4), 0))))
        model_reshard(model)
    elif what.startswith("unshard"):
        handle = units[0].unshard(async_op=what == "unshard async")
        if handle is not None:
            handle.wait()
        seen += [(f"whole {n}", local(p).clone()) for n, p in units[0].named_parameters(recurse=False)]
        units[0].reshard()
    elif what == "state dict":
        seen += [(f"saved {n}", local(t).clone()) for n, t in model.state_dict().items()]
    elif what == "freeze":
        for parameter in units[0].parameters():
            parameter.requires_grad_(not parameter.requires_grad)


def difference(torchs: Seen, minis: Seen) -> str:
    """The first thing that is not the same to the last bit, in words; empty if all is."""
    for (name, a), (other, b) in zip(torchs, minis, strict=False):
        if name != other:
            return f"torch has {name!r} where the mini has {other!r}"
        both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        if both and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()):
            continue
        if both or a != b:
            return f"{name}: torch has {a}, the mini {b}"
    return "" if len(torchs) == len(minis) else f"torch has {len(torchs)} things to see, the mini {len(minis)}"
