"""Meshes of two dimensions, gathering over a smaller mesh in backward, and parameters that live in the CPU's memory."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.mini.models import Toy, assert_same_grads, my_part, shard, twin
from tests.mini.parity.tools import (
    Issued,
    backward_of_both,
    called,
    group_of,
    groups_of,
    sharded_toy,
    square_loss,
    train_side_by_side,
)

SIZES = (5, 3, 2)


def hybrid_mesh(replicas=2, shards=2):
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


# Hybrid sharding


def test_parameters_are_replicated_over_dim_0_and_sharded_over_dim_1(ranks, impl):
    def run():
        mesh = hybrid_mesh()
        model, plain = sharded_toy(impl, 1, SIZES[:2], mesh=mesh)
        square_loss(model(torch.randn(2, 4))).backward()
        for p, full in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.placements == p.grad.placements == (Replicate(), Shard(0))
            assert p.device_mesh == mesh
            assert torch.equal(p.full_tensor(), full)
        return tuple(model.layers[0].w.to_local().shape)

    assert ranks(4, run) == [(3, 3), (2, 3)] * 2


@pytest.mark.parametrize(
    ("shape", "reshard_after_forward"),
    [((2, 2), None), ((1, 4), True), ((4, 1), False), ((1, 4), 2)],
    ids=str,
)
def test_training_on_a_mesh_of_two_dimensions(ranks, impl, shape, reshard_after_forward):
    def run():
        model, plain = sharded_toy(
            impl, 2, SIZES, mesh=hybrid_mesh(*shape), reshard_after_forward=reshard_after_forward
        )
        train_side_by_side(model, plain)

    ranks(4, run)


@pytest.mark.parametrize("accumulate", ["reduce-scatter each time", "no communication"])
def test_accumulation_with_one_all_reduce_at_the_end(ranks, impl, accumulate):
    def run():
        model, plain = sharded_toy(impl, 2, SIZES, mesh=hybrid_mesh())
        setter = (
            model.set_requires_all_reduce
            if accumulate == "reduce-scatter each time"
            else model.set_requires_gradient_sync
        )
        steps = []
        for _ in range(2):
            wholes = [torch.randn(8, 4) for _ in range(3)]
            with Issued() as mode:
                for i, whole in enumerate(wholes):
                    setter(i == 2)
                    square_loss(model(my_part(whole))).backward()
                    if i < 2:
                        assert all(p.grad is None for p in model.parameters())
            for whole in wholes:
                square_loss(plain(whole)).backward()
            assert_same_grads(model, plain)
            for m in (model, plain):
                m.zero_grad()
            steps.append((mode.names.count("RS"), mode.names.count("AR")))
        return steps

    reduces = 9 if accumulate == "reduce-scatter each time" else 3
    assert ranks(4, run) == [[(reduces, 3)] * 2] * 4


def test_sync_switched_on_includes_the_all_reduce(ranks, impl):
    def run():
        model, _ = sharded_toy(impl, 1, mesh=hybrid_mesh())
        counts = []
        for setter in (model.set_requires_all_reduce, model.set_requires_gradient_sync):
            for value in (False, True):
                model.set_requires_all_reduce(False)
                setter(value)
                with Issued() as mode:
                    model(torch.randn(2, 4)).sum().backward()
                counts.append((mode.names.count("RS"), mode.names.count("AR")))
        return counts

    assert ranks(4, run) == [[(2, 0), (2, 2), (0, 0), (2, 2)]] * 4


def test_a_partial_reduction_waits_in_the_group(ranks, impl):
    def run():
        model, _ = sharded_toy(impl, 1, mesh=hybrid_mesh())
        model.set_requires_all_reduce(False)
        model(torch.randn(2, 4)).sum().backward()
        partial = [g._partial_reduce_output is None for g in groups_of(impl, model)]
        model.set_requires_all_reduce(True, recurse=False)
        model(torch.randn(2, 4)).sum().backward()
        return partial, [g._partial_reduce_output is None for g in groups_of(impl, model)]

    assert ranks(4, run) == [([False, False], [True, False])] * 4


@pytest.mark.parametrize("factor", [None, 6.0])
def test_forced_sums_on_a_mesh_of_two_dimensions(ranks, impl, factor):
    """Sums in both collectives, divided by all ranks or by the factor afterwards."""

    def run():
        model, plain = sharded_toy(impl, 1, mesh=hybrid_mesh())
        for unit in (model, *model.layers):
            unit.set_force_sum_reduction_for_comms(True)
            if factor is not None:
                unit.set_gradient_divide_factor(factor)
        whole = torch.randn(8, 4)
        with called() as log:
            backward_of_both(model, plain, whole)
        for p in plain.parameters():
            p.grad.mul_(4 / (factor or 4))
        assert_same_grads(model, plain)
        return {op for name, op in log if name == "RS"}, {op for name, op in log if name == "AR"}

    assert ranks(4, run) == [({"SUM"}, {"SUM"})] * 4


# A hook in place of, or after, the all-reduce


def test_an_all_reduce_hook_makes_hybrid_sharding_out_of_a_mesh_of_one_dimension(ranks, impl):
    def run():
        mesh = hybrid_mesh()
        model, plain = sharded_toy(impl, 2, SIZES, mesh=mesh["shard"])
        seen = []

        def hook(reduced):
            seen.append((reduced.ndim, reduced.numel()))
            dist.all_reduce(reduced, group=mesh.get_group("replicate"), op=dist.ReduceOp.AVG)

        for unit in (*model.layers, model):
            unit.set_all_reduce_hook(hook)
        train_side_by_side(model, plain, steps=2)
        return seen

    # the padded shards of the units in backward order; the root last
    sizes = [(1, 2 * 2), (1, 3 * 3), (1, 2 * 5 + 1 * 4)]
    assert ranks(4, run) == [sizes * 2] * 4


def test_an_all_reduce_hook_sees_the_reduce_dtype(ranks, impl):
    def run():
        seen = []
        model = shard(
            Toy(1),
            impl.fully_shard,
            mp_policy=impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        )
        model.layers[0].set_all_reduce_hook(lambda reduced: seen.append(reduced.dtype))
        for sync in (False, True):
            model.set_requires_gradient_sync(sync)
            model(torch.randn(2, 4)).sum().backward()
        return seen

    assert ranks(2, run) == [[torch.float32]] * 2


# reshard_after_forward as a number


@pytest.mark.parametrize("sizes", [(), (5, 3, 1)], ids=["even", "uneven"])
def test_a_slice_of_2_ranks_is_kept_between_forward_and_backward(ranks, impl, sizes):
    def run():
        model, plain = sharded_toy(impl, 2, sizes, reshard_after_forward=2)
        train_side_by_side(model, plain)

    ranks(4, run)


def test_what_is_registered_with_a_smaller_mesh(ranks, impl):
    def run():
        model, plain = sharded_toy(impl, 1, reshard_after_forward=2)
        layer, group = model.layers[0], group_of(impl, model.layers[0])
        out = model(torch.randn(2, 4))
        between = layer.w
        assert isinstance(between, DTensor)
        assert between.placements == (Replicate(), Shard(0))
        assert tuple(between.device_mesh.shape) == (2, 2)
        half = dist.get_rank() % 2
        assert torch.equal(between.to_local(), plain.layers[0].w.chunk(2)[half])
        states = [group._sharded_state.name, group.is_sharded_post_forward]
        storage = group.fsdp_params[0]._unsharded_param.untyped_storage().size()
        out.sum().backward()
        return states, storage, group._sharded_state.name, layer.w.placements

    expected = (["SHARDED_POST_FORWARD", True], 0, "SHARDED", (Shard(0),))
    assert ranks(4, run) == [expected] * 4


# CPU offload


def test_training_with_offload(ranks, impl):
    """On a CPU mesh there is nowhere to go, but everything that offload does must hold."""

    def run():
        model, plain = sharded_toy(impl, 2, SIZES, offload_policy=impl.CPUOffloadPolicy(pin_memory=False))
        train_side_by_side(model, plain)
        fsdp_params = [p for g in groups_of(impl, model) for p in g.fsdp_params]
        return {p.offload_to_cpu for p in fsdp_params}, {p.to_local().device.type for p in model.parameters()}

    assert ranks(2, run) == [({True}, {"cpu"})] * 2


def test_offload_of_one_unit_alone(ranks, impl):
    def run():
        model = Toy(2)
        plain = twin(model)
        impl.fully_shard(model.layers[0], offload_policy=impl.CPUOffloadPolicy(pin_memory=False))
        impl.fully_shard(model.layers[1], offload_policy=impl.OffloadPolicy())
        impl.fully_shard(model)
        train_side_by_side(model, plain)
        state_dict = model.state_dict()
        return [g.fsdp_params[0].offload_to_cpu for g in groups_of(impl, model)], len(state_dict)

    assert ranks(2, run) == [([False, True, False], 4)] * 2
