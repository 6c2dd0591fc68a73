"""`fully_shard` in plain torch (2.11 or later): the parts are yours as the course goes on, what is between is given.

    from my_fsdp import fully_shard

A line such as `# 04 put_hooks: yours, accepted` stands before each part and says whose it is. Change what you like.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.utils import _apply_to_tensors as apply_to_tensors  # in nested containers and dataclasses

# ---- The parts -------------------------------------------------------------------------------------------------------


# 02 reduce_scatter_mean
def reduce_scatter_mean(rows, group):
    own = torch.empty_like(rows[0])
    work = dist.reduce_scatter_tensor(own, rows.view(-1), op=dist.ReduceOp.AVG, group=group, async_op=True)
    return own, work


# 03 rows_of_each_rank
def rows_of_each_rank(rows, ranks):
    most = -(-rows // ranks)  # rounded up
    return [max(0, min(most, rows - rank * most)) for rank in range(ranks)]


# 04 put_hooks
def put_hooks(unit):
    def pre_forward(module, args, kwargs):
        unit.unshard()
        unit.wait()
        return unit.on_inputs(post_backward, args, kwargs)

    def post_forward(module, args, output):
        unit.after_forward()
        return unit.on_outputs(pre_backward, output)

    def pre_backward():
        unit.unshard()
        unit.wait()
        unit.prefetch()

    def post_backward():
        unit.reshard()
        unit.reduce()

    unit.module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
    unit.module.register_forward_hook(post_forward)


# 05 prefetch
def prefetch(unit):
    if unit.places:
        place = unit.places.pop()
        if place > 0:  # backward goes through the units in reverse
            unit.order[place - 1].unshard()


# 06 parameters_of_unit
def parameters_of_unit(module):
    inside = {m for inner in module.modules() if hasattr(inner, "unit") for m in inner.modules()}
    owners = {}
    for owner in module.modules():
        if owner not in inside:
            for name, param in owner.named_parameters(recurse=False):
                owners.setdefault(param, []).append((owner, name))  # tied weights have several owners
    return owners


# 07 after_forward
def after_forward(unit):
    if unit.in_backward_of_model:  # checkpointing runs it again, for a backward that begins at once
        return
    reshard = unit.reshard_after_forward
    if reshard is None:
        reshard = not unit.is_root  # which backward needs first
    if reshard:
        unit.reshard()
    unit.places.append(len(unit.order))
    unit.order.append(unit)


# 08 add_gradient
def add_gradient(earlier, found, dtype):
    found = found.to(dtype or found.dtype)
    return found if earlier is None else earlier.add_(found)


# 08 clip_grad_norm
def clip_grad_norm(parameters, max_norm):
    with torch.no_grad():
        grads = [p.grad.to_local() for p in parameters if p.grad is not None]
        squares = torch.stack(torch._foreach_norm(grads)) ** 2  # one for each parameter
        dist.all_reduce(squares)
        total = torch.linalg.vector_norm(squares.sqrt())
        torch._foreach_mul_(grads, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


# 09 whole_tensors
def whole_tensors(tensors):
    found = {}
    for name, tensor in tensors.items():
        rows = -(-tensor.size(0) // dist.get_world_size())
        own = tensor.to_local()
        padded = own.new_zeros(rows, *own.shape[1:])
        padded[: len(own)] = own
        whole = own.new_empty(rows * dist.get_world_size(), *own.shape[1:])
        dist.all_gather_into_tensor(whole, padded)
        if dist.get_rank() == 0:
            found[name] = whole[: tensor.size(0)].cpu()
    return found


# ---- What is given ---------------------------------------------------------------------------------------------------


def fully_shard(module, *, mesh=None, reshard_after_forward=None, mp_policy=None):
    """Make one unit of a module's parameters but those of units inside it; so inner modules first. In place."""
    if mesh is None:
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    unit = Unit(module, mesh, reshard_after_forward, mp_policy or MixedPrecisionPolicy())
    cls = type(module)
    module.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"unit": unit})
    return module


class FSDPModule:
    """What a module becomes, besides what it was."""

    def set_requires_gradient_sync(self, requires_gradient_sync):
        """Whether backward reduces gradients; else each rank adds up whole ones, for the last micro-batch to reduce."""
        for unit in units_in(self):
            unit.requires_gradient_sync = requires_gradient_sync


def units_in(module):
    """Of a module and all below, outermost first."""
    return [m.unit for m in module.modules() if isinstance(m, FSDPModule)]


class Param:
    """A parameter in its two forms: `sharded`, a DTensor of this rank's rows, and `unsharded`, which computes."""

    def __init__(self, param, owners, mesh, dtype):
        whole = param.detach().contiguous()  # (d0, ...)
        self.owners, self.mesh, self.size, self.stride = owners, mesh, whole.size(), whole.stride()
        own = whole.split(rows_of_each_rank(len(whole), mesh.size()))[mesh.get_local_rank()]  # (0 to rows, ...)
        padded = whole.new_zeros(-(-len(whole) // mesh.size()), *self.size[1:], device=mesh.device_type)
        padded[: len(own)] = own
        self.piece, self.own_size = padded.view(-1), own.size()  # (rows * ...): what is sent; `sharded` is a view of it
        self.sharded = nn.Parameter(self.as_dtensor(padded[: len(own)]), param.requires_grad)
        # Autograd keeps the unsharded tensor from forward to backward: it stays, and only its memory comes and goes.
        self.gathered = padded.new_empty(mesh.size(), padded.numel(), dtype=dtype)  # (W, rows * ...)
        self.unsharded = nn.Parameter(self.gathered.data.view(-1, *self.size[1:])[: len(whole)], param.requires_grad)
        self.grad = None  # (d0, ...): found by backward, not yet reduced
        self.to_sharded()

    def as_dtensor(self, own):
        return DTensor.from_local(own, self.mesh, [Shard(0)], run_check=False, shape=self.size, stride=self.stride)

    def to_unsharded(self):
        self.put(self.unsharded.requires_grad_(self.sharded.requires_grad))  # may have been frozen meanwhile

    def to_sharded(self):
        self.put(self.sharded)
        self.gathered.untyped_storage().resize_(0)

    def put(self, param):
        for module, name in self.owners:
            module._parameters[name] = param

    def add_to_sharded_grad(self, piece):  # (rows * ...), whose end may be padding
        own = piece[: self.own_size.numel()].view(self.own_size)
        if self.sharded.grad is None:
            self.sharded.grad = self.as_dtensor(own)
        else:
            self.sharded.grad.to_local().add_(own)


class Unit:
    """The parameters of one `fully_shard` call: they are gathered together, and reduced together.

    Attributes:
        order: the model's units, as their forwards ended; places: this one's in it, whose backward is still to come.
    """

    def __init__(self, module, mesh, reshard_after_forward, policy):
        self.module, self.mesh, self.policy = module, mesh, policy
        self.reshard_after_forward, self.requires_gradient_sync = reshard_after_forward, True
        owners = parameters_of_unit(module)
        for param, ((_, name), *_) in owners.items():
            if param.ndim == 0:
                raise ValueError(f"{name} is a scalar and has no rows to shard; give it the shape (1,)")
            if hasattr(param, "in_a_unit") or isinstance(param, DTensor):
                raise ValueError(f"{name} is in another unit already; tied weights must be in the same one")
            param.in_a_unit = True
        if len(dtypes := {p.dtype for p in owners}) > 1:
            raise ValueError(f"the parameters of one unit travel together, but have {dtypes}")
        self.params = [Param(p, owners[p], mesh, policy.param_dtype or p.dtype) for p in owners]
        self.numels = [p.piece.numel() for p in self.params]
        self.is_unsharded = self.in_backward = False
        self.step = self.gathering = self.post_backward = None  # `gathering`: issued, and not yet waited for
        self.places = []
        put_hooks(self)
        module.register_state_dict_pre_hook(lambda *_: self.reshard())  # after a forward the root is whole
        module.register_load_state_dict_pre_hook(lambda *_: self.reshard())

    is_root = property(lambda self: self is self.step.units[0])
    order = property(lambda self: self.step.order)
    in_backward_of_model = property(lambda self: self.step.in_backward)

    @torch.no_grad()
    def unshard(self):
        """Issue the all-gather, unless it is under way (prefetched) or the parameters are whole."""
        self.step = self.step or Step(self)
        if self.is_root and not self.step.in_backward:
            self.step.all_gathers_wait_for_compute()  # the optimizer: it has to have written the shards
        if self.is_unsharded or self.gathering or not self.params:
            return
        with self.step.device.stream(self.step.copy_in_stream):
            rows = self.params[0].gathered.new_empty(self.mesh.size(), sum(self.numels))  # (W, n)
            own = rows[self.mesh.get_local_rank()]  # (n): gathered in place
            torch._foreach_copy_(own.split(self.numels), [p.piece for p in self.params])  # and cast to param_dtype
            work = dist.all_gather_into_tensor(rows.view(-1), own, group=self.mesh.get_group(), async_op=True)
        self.gathering = rows, work

    @torch.no_grad()
    def wait(self):
        """Wait for the all-gather, copy it out, and put the whole parameters on the modules."""
        if not self.gathering:
            return
        (rows, work), self.gathering = self.gathering, None
        work.wait()
        for p in self.params:
            p.gathered.untyped_storage().resize_(p.gathered.nbytes)
        torch.split_with_sizes_copy(rows, self.numels, dim=1, out=[p.gathered for p in self.params])
        for p in self.params:
            p.to_unsharded()
        self.is_unsharded = True
        self.step.all_gathers_wait_for_compute()  # the copy-out: then the memory of `rows` may be used again

    def reshard(self):
        """Put this rank's rows on the modules, and free the whole parameters."""
        for p in self.params:
            p.to_sharded()
        self.is_unsharded = False

    @torch.no_grad()
    def reduce(self):
        """Take the gradients that backward found, and issue their reduce-scatter, unless a later micro-batch will."""
        for p in self.params:
            if p.unsharded.grad is not None:
                p.grad = add_gradient(p.grad, p.unsharded.grad, self.policy.reduce_dtype)
                p.unsharded.grad = None
        if not self.requires_gradient_sync:
            return
        self.step.finish_reduction()  # of the unit before: it has travelled beside this one's backward
        params = [p for p in self.params if p.grad is not None]  # frozen and unused ones have none
        if params:
            rows = params[0].grad.new_empty(self.mesh.size(), sum(p.piece.numel() for p in params))  # (W, n)
            torch._chunk_cat([p.grad for p in params], dim=0, num_chunks=self.mesh.size(), out=rows)  # pads with zeros
            for p in params:
                p.grad = None
            self.step.reduction = params, rows, *reduce_scatter_mean(rows, self.mesh.get_group())

    def prefetch(self):
        prefetch(self)

    def after_forward(self):
        if self.params:
            after_forward(self)

    def on_inputs(self, call, args, kwargs):
        """The inputs, cast; ``call()`` when backward has found their gradients, or at its end if they need none."""
        self.post_backward = call
        if self.policy.cast_forward_inputs:
            args, kwargs = cast((args, kwargs), self.policy.param_dtype)
        inputs = tensors_with_grad((args, kwargs))
        if not inputs or not torch.is_grad_enabled():
            return args, kwargs
        outputs = list(AfterBackward.apply(self, *inputs))
        return apply_to_tensors(lambda t: outputs.pop(0) if t.requires_grad else t, (args, kwargs))

    def on_outputs(self, call, output):
        """The output, cast; ``call()`` when the first of its gradients is there."""

        def first(grad):
            if not self.in_backward:
                self.in_backward = True
                self.step.begin_backward()
                call()

        for tensor in tensors_with_grad(output):
            tensor.register_hook(first)
        return cast(output, self.policy.output_dtype)

    def end_backward(self):
        self.in_backward = False
        if self.post_backward:
            self.post_backward()


class AfterBackward(torch.autograd.Function):
    """The identity on the inputs of a unit. Its backward runs when their gradients are known: the unit's is done."""

    @staticmethod
    def forward(ctx, unit, *inputs):
        ctx.unit = unit
        return inputs

    @staticmethod
    def backward(ctx, *grads):
        ctx.unit.end_backward()
        return None, *grads


def tensors_with_grad(tree):
    """Those that need a gradient, in a fixed order."""
    found = []
    apply_to_tensors(lambda tensor: found.append(tensor) or tensor, tree)
    tensors = [t for t in found if t.requires_grad]
    found.clear()  # `apply_to_tensors` leaves the function in a cycle, and would keep them alive with it
    return tensors


def cast(tree, dtype):
    """The floating-point tensors in it in another dtype."""
    return tree if dtype is None else apply_to_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


class Step:
    """What the units of one model share from the first forward on: whose forward runs first is the root."""

    def __init__(self, root):
        self.units, self.order, self.reduction, self.in_backward = units_in(root.module), [], None, False
        self.device = torch.get_device_module(root.mesh.device_type)
        self.copy_in_stream = self.device.Stream(priority=-1)  # on compute's the copy-in would queue behind a forward
        if any(unit.step for unit in self.units):
            raise RuntimeError("a module inside ran its forward before the root did; run the root's first")
        for name, module in root.module.named_modules():
            if isinstance(module, FSDPModule):
                module.unit.step, module.unit._module_fqn = self, name  # whoever records collectives asks for the name

    def all_gathers_wait_for_compute(self):
        """What is issued from now on begins after what compute has been told to do so far."""
        self.copy_in_stream.wait_stream(self.device.current_stream())

    def begin_backward(self):
        if not self.in_backward:
            self.in_backward = True
            Variable._execution_engine.queue_callback(self.end_backward)

    @torch.no_grad()
    def finish_reduction(self):
        """Wait for the reduce-scatter under way, of which there is at most one, and hand out its output."""
        if self.reduction:
            (params, _, own, work), self.reduction = self.reduction, None
            work.wait()
            pieces = own.to(params[0].sharded.dtype).split([p.piece.numel() for p in params])  # each (rows * ...)
            for p, piece in zip(params, pieces, strict=True):
                p.add_to_sharded_grad(piece)

    def end_backward(self):
        for unit in self.units:
            unit.wait()  # prefetched in vain: its output is not part of the loss
            unit.end_backward()  # no gradient flowed to its inputs
            unit.places.clear()
        self.finish_reduction()
        self.order.clear()
        self.in_backward = False
