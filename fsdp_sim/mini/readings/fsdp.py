"""`fully_shard` in one file, for one evening. Stands alone on torch (2.11 or later); read it from top to bottom.

    torchrun --nproc_per_node=2 fsdp.py  # trains; compares with one process and, bit for bit, with torch's fully_shard

You train a model whose parameters, gradients and optimizer state do not fit on one GPU. So each of W ranks keeps 1/W of
every parameter, and the whole ones exist only while somebody computes with them. One call makes a *unit* of a module:

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)  # what is left: embedding, head
    optimizer = torch.optim.AdamW(model.parameters())  # sees shards, and so has 1/W of the state

and the training loop stays as it was, for PyTorch calls us at four moments of a unit's life:

    pre_forward     a forward pre-hook              unshard: all-gather, wait, copy out
    post_forward    a forward hook                  reshard: free. Put pre_backward on the outputs
    pre_backward    a tensor hook on the outputs    unshard again, and issue the all-gather of the unit that comes next
    post_backward   an autograd node on the inputs  reshard; reduce-scatter the gradients

and once at the end of backward, for whatever is left (`Context.final_callback`).

[Note: issue and wait]  A collective is issued with ``async_op=True`` and waited for later, by `Work.wait`. On a GPU,
NCCL runs it on a stream of its own, which begins when the stream that issued it has come that far; ``wait`` makes the
current stream wait and returns at once. On a CPU, gloo's threads run it; ``wait`` blocks this thread. In between lies
the compute that hides it. The same lines do both.

[Note: one more stream]  On a GPU the CPU runs ahead: it queues forward(i), then calls pre_forward(i+1), while the GPU
is still busy with forward(i-1). That is the prefetch of forward: nobody does anything for it. But before the all-gather
the shards must be copied into its buffer, and on the compute stream that copy would queue behind forward(i). So the
copy-in has a stream of its own. On a CPU there is no running ahead, and forward hides nothing. Backward does, on both:
pre_backward(i) issues the all-gather of unit i-1 before backward(i) begins.

[Note: whose memory]  PyTorch's allocator gives freed memory to whoever allocates next *on the same stream*. So a buffer
is let go of when its own stream has been told to wait for its last reader. Two places do that: the end of
`Unit.wait_for_unshard` (the gathered buffer belongs to the copy-in stream, and compute reads it) and
`Context.finish_reduction` (the buffers of the reduce-scatter belong to the compute stream, and NCCL reads them).

What torch's has beside this: hybrid sharding, offload, meta device, several modules in one unit, explicit prefetch,
float16 (which needs other divisions), a gathered buffer that lives one unit longer in forward. See ``fsdp_sim/mini``.
"""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.utils import _apply_to_tensors as apply_to_tensors  # in nested containers and dataclasses

# ---- What you call ---------------------------------------------------------------------------------------------------


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> nn.Module:
    """Make the parameters of a module, but those of units inside it, one unit. In place; so inner modules first.

    Args:
        mesh: 1-D; all ranks by default.
        reshard_after_forward: free the whole parameters between forward and backward, and gather them again. By
            default all units do but the root, which backward needs first.
        mp_policy: dtype of gathered parameters and compute, of the reduction, of what a forward returns. The shards
            keep theirs: each rank updates its own rows in full precision.

    Raises:
        ValueError: the parameters differ in dtype, one is a scalar, or one is in another unit already (tied weights).
    """
    if mesh is None:
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    unit = Unit(module, mesh, reshard_after_forward, mp_policy or MixedPrecisionPolicy())
    cls = type(module)
    module.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"unit": unit})
    return module


class FSDPModule:
    """What a module becomes, besides what it was."""

    unit: Unit

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether backward reduces gradients. Without, each rank adds up whole ones: no communication, W x the bytes.

        For gradient accumulation: ``model.set_requires_gradient_sync(is_last_micro_batch)``.
        """
        for unit in units_in(self):
            unit.requires_gradient_sync = requires_gradient_sync


def units_in(module: Any) -> list[Unit]:
    """Of a module and all below, outermost first."""
    return [m.unit for m in module.modules() if isinstance(m, FSDPModule)]


# ---- One parameter ---------------------------------------------------------------------------------------------------


class FSDPParam:
    """A parameter in its two forms. With W ranks and ``rows = ceil(d0 / W)``:

        sharded    (0 to rows, ...)  DTensor with placement Shard(0): this rank's rows, for optimizer and state dict
        unsharded  (d0, ...)         plain tensor: forward and backward compute with this one

    Collectives move pieces of equal size, so the memory behind both is padded to whole pieces: a rank sends ``rows``
    rows, W of them arrive, and the parameter is the first d0. Rows are contiguous: the padding falls off the end.

    Args:
        owners: the modules that hold it, and under which names. Tied weights have several.
    """

    def __init__(
        self, param: nn.Parameter, owners: list[tuple[nn.Module, str]], mesh: DeviceMesh, dtype: torch.dtype
    ) -> None:
        whole = param.detach().contiguous()  # (d0, ...)
        self.owners, self.mesh, self.size, self.stride = owners, mesh, whole.size(), whole.stride()
        rows = -(-whole.size(0) // mesh.size())
        own = whole[rows * mesh.get_local_rank() :][:rows]  # (0 to rows, ...): the last ranks may have less, or none
        self.own_size, padded_size = own.size(), (rows, *self.size[1:])
        padded = whole.new_zeros(padded_size, device=mesh.device_type)
        padded[: len(own)] = own
        self.piece = padded.view(-1)  # (rows * ...): what this rank sends; the optimizer writes through `sharded`
        self.sharded = nn.Parameter(self.as_dtensor(padded[: len(own)]), param.requires_grad)

        # Autograd saves the unsharded tensor in forward and reads it in backward, when it was freed and gathered again.
        # So it is one object for the whole run, and only its memory comes and goes. Through `.data` the parameter has a
        # version counter of its own: that `gathered` is written again is no change that autograd should complain about.
        self.gathered = padded.new_empty(mesh.size(), padded.numel(), dtype=dtype)  # (W, rows * ...)
        unsharded = self.gathered.data.view(-1, *self.size[1:])[: self.size[0]]  # (d0, ...)
        self.unsharded = nn.Parameter(unsharded, param.requires_grad)
        self.grad: Tensor | None = None  # (d0, ...): found by backward, not yet reduced
        self.to_sharded()

    def as_dtensor(self, own: Tensor) -> DTensor:
        """This rank's rows as what they are: a part of a whole."""
        return DTensor.from_local(own, self.mesh, [Shard(0)], run_check=False, shape=self.size, stride=self.stride)

    def alloc(self) -> None:
        self.gathered.untyped_storage().resize_(self.gathered.nbytes)

    def to_unsharded(self) -> None:
        self.unsharded.requires_grad_(self.sharded.requires_grad)  # may have been frozen meanwhile
        self._register(self.unsharded)

    def to_sharded(self) -> None:
        self._register(self.sharded)
        self.gathered.untyped_storage().resize_(0)

    def _register(self, param: nn.Parameter) -> None:
        for module, name in self.owners:
            module._parameters[name] = param

    def take_grad(self, reduce_dtype: torch.dtype | None) -> None:
        """Add what backward has just found, (d0, ...), to what earlier micro-batches left here."""
        if (found := self.unsharded.grad) is None:
            return
        self.unsharded.grad = None
        found = found.to(reduce_dtype or found.dtype)
        self.grad = found if self.grad is None else self.grad.add_(found)

    def add_to_sharded_grad(self, piece: Tensor) -> None:
        """``piece`` is (rows * ...); its end may be padding."""
        own = piece[: self.own_size.numel()].view(self.own_size)  # (0 to rows, ...)
        if isinstance(grad := self.sharded.grad, DTensor):
            grad.to_local().add_(own)
        else:
            self.sharded.grad = self.as_dtensor(own)


# ---- One unit: parameters that travel together -----------------------------------------------------------------------


class Unit:
    """The parameters of one `fully_shard` call, and the hooks (torch: `FSDPParamGroup` and `FSDPState`).

    Two parameters a and b of this unit, in the buffers of its collectives (one row per rank):

        all-gather      | a0 b0 |    a row is what a rank sends, its pieces side by side
                        | a1 b1 |    a column is a parameter, and is copied out into the memory of that parameter
        reduce-scatter  | a0 b0 |    the gradients laid out alike
                        | a1 b1 |    rank r receives the mean of row r over all ranks
    """

    context: Context  # from the first forward on

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, reshard_after_forward: bool | None, policy: MixedPrecisionPolicy
    ) -> None:
        self.module, self.mesh, self.policy = module, mesh, policy
        self.reshard_after_forward, self.requires_gradient_sync = reshard_after_forward, True
        owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}  # each parameter once, with everyone who holds it
        of_units_inside = {m for unit in units_in(module) for m in unit.module.modules()}
        for owner in (m for m in module.modules() if m not in of_units_inside):
            for name, param in owner.named_parameters(recurse=False):
                if param.ndim == 0:
                    raise ValueError(f"{name} is a scalar and has no rows to shard; give it the shape (1,)")
                if getattr(param, "unit", self) is not self:
                    raise ValueError(f"{name} is in another unit already; tied weights must be in the same one")
                param.unit = self  # type: ignore[attr-defined]
                owners.setdefault(param, []).append((owner, name))
        if len(dtypes := {p.dtype for p in owners}) > 1:
            raise ValueError(f"the parameters of one unit travel together, but have {dtypes}")
        self.params = [FSDPParam(p, owners[p], mesh, policy.param_dtype or p.dtype) for p in owners]
        self.numels = [p.piece.numel() for p in self.params]
        self.is_unsharded = False
        self.gathering: tuple[Tensor, dist.Work] | None = None  # issued, and not yet waited for
        self.places: list[int] = []  # in `Context.forward_order`: one for each forward that backward has yet to reach
        self.in_backward = False  # between pre_backward and post_backward
        module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.post_forward)
        module.register_state_dict_pre_hook(lambda *_: self.reshard())  # after a forward the root is whole
        module.register_load_state_dict_pre_hook(lambda *_: self.reshard())

    # Unshard, reshard, reduce

    @torch.no_grad()
    def unshard(self) -> None:
        """Issue the all-gather, unless it is under way (prefetched) or the parameters are whole."""
        if self.is_unsharded or self.gathering is not None or not self.params:
            return
        with self.context.device.stream(self.context.copy_in_stream):
            first = self.params[0].gathered
            rows = first.new_empty(self.mesh.size(), sum(self.numels))  # (W, n)
            own = rows[self.mesh.get_local_rank()]  # (n): gathered in place
            torch._foreach_copy_(own.split(self.numels), [p.piece for p in self.params])  # and cast to param_dtype
            work = dist.all_gather_into_tensor(rows.view(-1), own, group=self.mesh.get_group(), async_op=True)
        self.gathering = rows, work

    @torch.no_grad()
    def wait_for_unshard(self) -> None:
        """Wait for the all-gather, copy it out, and put the whole parameters on the modules."""
        if self.gathering is None:
            return
        (rows, work), self.gathering = self.gathering, None
        work.wait()
        for p in self.params:
            p.alloc()
        torch.split_with_sizes_copy(rows, self.numels, dim=1, out=[p.gathered for p in self.params])
        for p in self.params:
            p.to_unsharded()
        self.is_unsharded = True
        self.context.all_gathers_wait_for_compute()  # the copy-out: then `rows` may go, see [Note: whose memory]

    def reshard(self) -> None:
        for p in self.params:
            p.to_sharded()
        self.is_unsharded = False

    @torch.no_grad()
    def reduce_grads(self) -> None:
        """Issue the reduce-scatter of the gradients that there are. Frozen and unused parameters have none."""
        params = [p for p in self.params if p.grad is not None]
        if not params:
            return
        grads = [p.grad for p in params if p.grad is not None]  # each (d0, ...)
        for p in params:
            p.grad = None
        n = sum(p.piece.numel() for p in params)
        rows = grads[0].new_empty(self.mesh.size(), n)  # (W, n)
        torch._chunk_cat(grads, dim=0, num_chunks=self.mesh.size(), out=rows)  # with zeros for padding
        own = rows.new_empty(n)  # of which the sharded gradients will be views
        group = self.mesh.get_group()
        work = dist.reduce_scatter_tensor(own, rows.view(-1), op=dist.ReduceOp.AVG, group=group, async_op=True)
        self.context.reduction = params, rows, own, work

    # The four hooks

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not hasattr(self, "context"):
            Context(self)
        if self is self.context.units[0]:
            self.context.all_gathers_wait_for_compute()  # the optimizer: it has to have written the shards
        if self.policy.cast_forward_inputs:
            args, kwargs = cast((args, kwargs), self.policy.param_dtype)
        self.unshard()
        self.wait_for_unshard()
        return PostBackward.on_inputs(self, args, kwargs)

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.context.in_backward and self.params:  # else checkpointing runs it again, for backward
            if self.reshard_after_forward:
                self.reshard()
            self.places.append(len(self.context.forward_order))
            self.context.forward_order.append(self)
        for tensor in tensors_with_grad(output):
            tensor.register_hook(self.pre_backward)
        return cast(output, self.policy.output_dtype)

    def pre_backward(self, grad: Tensor) -> None:
        """Called with the gradient of each output; the first one counts."""
        if self.in_backward:
            return
        self.in_backward = True
        if not self.context.in_backward:
            self.context.in_backward = True
            Variable._execution_engine.queue_callback(self.context.final_callback)
        self.unshard()  # nothing to do if prefetched
        self.wait_for_unshard()
        if self.places and (place := self.places.pop()) > 0:  # backward goes through the units in reverse
            self.context.forward_order[place - 1].unshard()

    def post_backward(self) -> None:
        """Does nothing where backward did not come by."""
        self.in_backward = False
        for p in self.params:
            p.take_grad(self.policy.reduce_dtype)
        self.reshard()
        if self.requires_gradient_sync:
            self.context.finish_reduction()  # of the unit before: it has travelled beside this one's backward
            self.reduce_grads()


class PostBackward(torch.autograd.Function):
    """The identity on the inputs of a unit. Its backward runs when their gradients are known: the unit's is done."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.unit = unit
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.unit.post_backward()
        return None, *grads

    @staticmethod
    def on_inputs(unit: Unit, args: Any, kwargs: Any) -> Any:
        """If no input needs a gradient, as the tokens of the root, `Context.final_callback` does it."""
        inputs = tensors_with_grad((args, kwargs))
        if not inputs or not torch.is_grad_enabled():
            return args, kwargs
        outputs = list(PostBackward.apply(unit, *inputs))
        return apply_to_tensors(lambda t: outputs.pop(0) if t.requires_grad else t, (args, kwargs))


def tensors_with_grad(tree: Any) -> list[Tensor]:
    """Those that need a gradient, in a fixed order."""
    found: list[Tensor] = []

    def visit(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    apply_to_tensors(visit, tree)
    tensors = [t for t in found if t.requires_grad]
    found.clear()  # `apply_to_tensors` leaves `visit` in a cycle, and would keep them alive with it
    return tensors


def cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """The floating-point tensors in it in another dtype."""
    return tree if dtype is None else apply_to_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


# ---- What the units of one model share -------------------------------------------------------------------------------


class Context:
    """Made by the first forward: whose forward runs first is the root, and all units below share this.

    Attributes:
        units: the root first.
        forward_order: units in the order in which their forward ended; who is called twice stands here twice.
        reduction: the one reduce-scatter under way: of which parameters, input (which must live until it is over),
            output. Were there more, their inputs would pile up where the network is slower than compute.
    """

    def __init__(self, root: Unit) -> None:
        self.units = units_in(root.module)
        self.device = torch.get_device_module(root.mesh.device_type)
        self.copy_in_stream = self.device.Stream(priority=-1)  # of torch.cpu: does nothing
        self.forward_order: list[Unit] = []
        self.reduction: tuple[list[FSDPParam], Tensor, Tensor, dist.Work] | None = None
        self.in_backward = False
        if any(hasattr(unit, "context") for unit in self.units):
            raise RuntimeError("a module inside ran its forward before the root did; run the root's first")
        for unit in self.units:
            unit.context = self
            if unit.reshard_after_forward is None:
                unit.reshard_after_forward = unit is not root

    def all_gathers_wait_for_compute(self) -> None:
        """What is issued from now on begins after what compute has been told to do so far."""
        self.copy_in_stream.wait_stream(self.device.current_stream())

    @torch.no_grad()
    def finish_reduction(self) -> None:
        """Wait for the reduce-scatter under way, and hand out its output."""
        if self.reduction is None:
            return
        (params, _, own, work), self.reduction = self.reduction, None
        work.wait()
        pieces = own.to(params[0].sharded.dtype).split([p.piece.numel() for p in params])  # each (rows * ...)
        for p, piece in zip(params, pieces, strict=True):
            p.add_to_sharded_grad(piece)

    def final_callback(self) -> None:
        """The end of backward, before ``loss.backward()`` returns."""
        for unit in self.units:
            unit.wait_for_unshard()  # prefetched in vain: its output is not part of the loss
            unit.post_backward()  # no gradient flowed to its inputs
            unit.places.clear()
        self.finish_reduction()
        self.forward_order.clear()
        self.in_backward = False


# ---- Try it ----------------------------------------------------------------------------------------------------------


def train(model: nn.Module, tokens: Tensor) -> Tensor:
    """The losses on this rank's tokens, (B, T + 1). No line of it knows about shards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        logits = model(tokens[:, :-1])  # (B, T, 97)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def main() -> None:
    """Train a few steps with one process, with this file and with torch's `fully_shard`, and compare."""
    warnings.simplefilter("ignore")  # the collectives have newer names in torch 2.13; the head returns a view
    device = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))  # and the process group, and this rank's GPU

    torch.manual_seed(0)  # the same on every rank. 97 tokens and 35 hidden do not divide by 2
    blocks = [nn.TransformerEncoderLayer(32, 4, 35, dropout=0.0, batch_first=True, norm_first=True) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(97, 32), *blocks, nn.Linear(32, 97)).to(device)
    tokens = torch.randint(97, (4 * mesh.size(), 17)).to(device)  # (B, T + 1)
    losses = {"one process": train(copy.deepcopy(model), tokens)}
    ways: dict[str, Any] = {"this file": fully_shard, "torch's": torch.distributed.fsdp.fully_shard}
    for name, shard in ways.items():
        sharded = copy.deepcopy(model)
        for block in list(sharded)[1:-1]:
            shard(block, mesh=mesh)
        shard(sharded, mesh=mesh)
        losses[name] = train(sharded, tokens.chunk(mesh.size())[mesh.get_rank()])
        dist.all_reduce(losses[name], dist.ReduceOp.AVG)

    if mesh.get_rank() == 0:
        for name, of_steps in losses.items():
            print(f"{name:12}" + "".join(f"{loss:12.7f}" for loss in of_steps))
    # some of a GPU's kernels add up in any order
    for name, rtol in {"one process": 1e-5, "torch's": 1e-5 if device == "cuda" else 0.0}.items():
        torch.testing.assert_close(losses["this file"], losses[name], rtol=rtol, atol=0)
        if mesh.get_rank() == 0:
            print(f"{name}: equal {f'to {rtol}' if rtol else 'bit for bit'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
