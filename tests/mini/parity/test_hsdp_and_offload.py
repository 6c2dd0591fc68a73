"""Meshes of two dimensions, gathering over a smaller mesh in backward, and parameters that live in the CPU's memory."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_sim.mini import versions
from tests.mini.models import Collectives, Toy, assert_same_grads, my_part, shard, twin
from tests.mini.parity.tools import (
    Issued,
    called,
    events,
    group_of,
    groups_of,
    kind,
    reshard_all,
    sharded_toy,
    square_loss,
    train_side_by_side,
)

SIZES = (5, 3, 2)


NAMES = ("shard", "replicate")


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
    [*product([(2, 2), (1, 4), (4, 1)], [True, False, None]), ((2, 2), 2), ((1, 4), 2)],
    ids=str,
)
def test_training_on_a_mesh_of_two_dimensions(ranks, impl, shape, reshard_after_forward):
    def run():
        model, plain = sharded_toy(
            impl, 2, SIZES, mesh=hybrid_mesh(*shape), reshard_after_forward=reshard_after_forward
        )
        train_side_by_side(model, plain)

    ranks(4, run)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_clipping_and_optimizers_on_a_mesh_of_two_dimensions(ranks, impl, optimizer):
    def run():
        model, plain = sharded_toy(impl, 2, SIZES, mesh=hybrid_mesh())
        optimizers = [optimizer(m.parameters(), lr=0.1) for m in (model, plain)]
        whole = 3 * torch.randn(8, 4)
        for m, x in ((model, my_part(whole)), (plain, whole)):
            square_loss(m(x)).backward()
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, plain)]
        torch.testing.assert_close(norms[0].full_tensor(), norms[1])
        assert_same_grads(model, plain)
        for step in optimizers:
            step.step()

    ranks(4, run)


def test_collectives_of_a_hybrid_step_in_order(ranks, impl):
    """Gathers and reduce-scatters among the shards; each reduce-scatter is followed by an all-reduce of a shard."""

    def run():
        mesh = hybrid_mesh()
        model, _ = sharded_toy(impl, 2, mesh=mesh)
        with called() as log, Issued() as mode:
            model(torch.randn(2, 4)).sum().backward()
        shards, replicas = (tuple(dist.get_process_group_ranks(mesh.get_group(name))) for name in NAMES)
        assert [{c.ranks for c in mode.of(name)} for name in ("AG", "RS", "AR")] == [{shards}, {shards}, {replicas}]
        assert {op for name, op in log if name != "AG"} == {"AVG"}
        return mode.names, [c.numel for c in mode.of("AR")]

    forward, backward = ["AG"] * 3, ["AG", "AG", "RS", "AR", "RS", "AR", "RS", "AR"]
    assert ranks(4, run) == [(forward + backward, [8, 8, 16])] * 4


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


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.bfloat16])
def test_mixed_precision_on_a_mesh_of_two_dimensions(ranks, impl, reduce_dtype):
    def run():
        policy = impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        model, plain = sharded_toy(impl, 1, mesh=hybrid_mesh(), mp_policy=policy)
        whole = torch.randn(8, 4)
        with Issued() as mode:
            square_loss(model(my_part(whole))).backward()
        square_loss(plain(whole)).backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=0.1, atol=0.05)
        return {c.dtype for c in mode.log if c.name != "AG"}, {p.grad.dtype for p in model.parameters()}

    default = torch.float32 if versions.GRADS_KEEP_ORIGINAL_DTYPE else torch.bfloat16
    assert ranks(4, run) == [({reduce_dtype or default}, {torch.float32})] * 4


@pytest.mark.parametrize("factor", [None, 4.0, 6.0])
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
            for m, x in ((model, my_part(whole)), (plain, whole)):
                square_loss(m(x)).backward()
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


def test_an_all_reduce_hook_after_the_native_all_reduce(ranks, impl):
    def run():
        model, plain = sharded_toy(impl, 1, mesh=hybrid_mesh())
        model.layers[0].set_all_reduce_hook(lambda reduced: reduced.mul_(3))
        whole = torch.randn(8, 4)
        with Issued() as mode:
            for m, x in ((model, my_part(whole)), (plain, whole)):
                square_loss(m(x)).backward()
        plain.layers[0].w.grad.mul_(3)
        assert_same_grads(model, plain)
        return mode.names.count("AR")

    assert ranks(4, run) == [2] * 4


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
@pytest.mark.parametrize("prefetch", [False, True])
def test_a_slice_of_2_ranks_is_kept_between_forward_and_backward(ranks, impl, sizes, prefetch):
    def run():
        model, plain = sharded_toy(impl, 2, sizes, reshard_after_forward=2)
        if prefetch:
            model.layers[0].set_modules_to_forward_prefetch([model.layers[1]])
            model.layers[1].set_modules_to_backward_prefetch([model.layers[0]])
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


def test_backward_gathers_over_the_smaller_mesh_and_reduces_over_all(ranks, impl):
    def run():
        model, _ = sharded_toy(impl, 2, reshard_after_forward=2)
        sizes = []
        for _ in range(2):
            with Issued() as forward:
                out = model(torch.randn(2, 4))
            with Issued() as backward:
                out.sum().backward()
            collectives = (forward.of("AG"), backward.of("AG"), backward.of("RS"))
            groups = [[len(c.ranks) for c in some] for some in collectives]
            sizes.append(groups)
        return sizes

    # given a number, the root too keeps a slice only
    assert ranks(4, run) == [[[[4] * 3, [2] * 3, [4] * 3]] * 2] * 4


def test_reshard_by_hand_gives_up_the_slice(ranks, impl):
    def run():
        model, plain = sharded_toy(impl, 1, reshard_after_forward=2)
        whole = torch.randn(4, 4)
        out = model(my_part(whole))
        reshard_all(model)
        assert {p.placements for p in model.parameters()} == {(Shard(0),)}
        with Issued() as mode:
            square_loss(out).backward()
        square_loss(plain(whole)).backward()
        assert_same_grads(model, plain)
        return [len(c.ranks) for c in mode.of("AG")]

    assert ranks(4, run) == [[4, 4]] * 4


@pytest.mark.parametrize(("number", "same_as"), [(4, True), (1, False)])
def test_numbers_that_mean_true_and_false(ranks, impl, number, same_as):
    def run():
        counts = []
        for value in (number, same_as):
            model, _ = sharded_toy(impl, 2, reshard_after_forward=value)
            with Collectives() as mode:
                out = model(torch.randn(2, 4))
                kinds = [kind(p) for p in model.parameters()]
                out.sum().backward()
            counts.append((mode.counts, kinds))
        return counts[0] == counts[1]

    assert ranks(4, run) == [True] * 4


def test_a_number_on_a_hybrid_mesh(ranks, impl):
    """(1, 4): pairs inside the 4 shards."""

    def run():
        model, plain = sharded_toy(impl, 2, SIZES, mesh=hybrid_mesh(1, 4), reshard_after_forward=2)
        with Issued() as mode:
            train_side_by_side(model, plain, steps=1)
        return [len(c.ranks) for c in mode.of("AG")]

    assert ranks(4, run) == [[4] * 3 + [2] * 3] * 4


# CPU offload


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
def test_training_with_offload(ranks, impl, reshard_after_forward):
    """On a CPU mesh there is nowhere to go, but everything that offload does must hold."""

    def run():
        model, plain = sharded_toy(
            impl,
            2,
            SIZES,
            offload_policy=impl.CPUOffloadPolicy(pin_memory=False),
            reshard_after_forward=reshard_after_forward,
        )
        train_side_by_side(model, plain)
        fsdp_params = [p for g in groups_of(impl, model) for p in g.fsdp_params]
        return {p.offload_to_cpu for p in fsdp_params}, {p.to_local().device.type for p in model.parameters()}

    assert ranks(2, run) == [({True}, {"cpu"})] * 2


@pytest.mark.parametrize(
    ("sync", "policy"), list(product([True, False], [{}, {"param_dtype": torch.bfloat16}])), ids=str
)
def test_accumulation_with_offload(ranks, impl, sync, policy):
    def run():
        model, plain = sharded_toy(
            impl,
            2,
            offload_policy=impl.CPUOffloadPolicy(pin_memory=False),
            mp_policy=impl.MixedPrecisionPolicy(**policy),
        )
        wholes = [torch.randn(4, 4) for _ in range(3)]
        for i, whole in enumerate(wholes):
            model.set_requires_gradient_sync(sync or i == 2)
            square_loss(model(my_part(whole))).backward()
            square_loss(plain(whole)).backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            tolerance = {"rtol": 0.1, "atol": 0.05} if policy else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(a.grad.full_tensor(), b.grad, **tolerance)

    ranks(2, run)


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


def test_a_model_made_on_meta_with_offload(ranks, impl):
    def run():
        with torch.device("meta"):
            model = Toy(1, (5, 3))
        shard(model, impl.fully_shard, offload_policy=impl.CPUOffloadPolicy(pin_memory=False))
        model.to_empty(device="cpu")
        plain = Toy(1, (5, 3))
        for m in (model, plain):
            for p in m.parameters():
                torch.nn.init.constant_(p, 0.5)
        train_side_by_side(model, plain)

    ranks(2, run)


def test_order_of_events_with_offload_and_hybrid_is_the_usual_one(ranks, impl):
    def run():
        logs = []
        for options in (
            {},
            {"mesh": hybrid_mesh()},
            {"offload_policy": impl.CPUOffloadPolicy(pin_memory=False)},
            {"reshard_after_forward": 2},
        ):
            model, _ = sharded_toy(impl, 2, **options)
            with events(impl) as log:
                model(torch.randn(2, 4)).sum().backward()
            logs.append(log)
        assert logs[0] == logs[1] == logs[2]
        return [event for event in logs[3] if event not in logs[0]]

    # only the root, which gave its parameters up for a slice
    assert ranks(4, run) == [[("unshard", "", "PRE_BACKWARD")]] * 4
