"""Mixed precision: compute and gather in one dtype, reduce in another, keep shards and gradients in the original."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_sim.mini import versions
from tests.mini.models import Matrix, Toy, assert_same_grads, my_part, twin
from tests.mini.parity.tools import Issued, backward_of_both, called, group_of, groups_of, sharded_toy, square_loss

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def low_precision_gradients(plain, parts, dtype, reduce_dtype):
    """What mixed precision is defined to give: each rank's backward in ``dtype``, the mean in ``reduce_dtype``."""
    sums = [torch.zeros_like(p, dtype=reduce_dtype) for p in plain.parameters()]
    for part in parts:
        low = twin(plain).to(dtype)
        square_loss(low(part.to(dtype))).backward()
        for total, p in zip(sums, low.parameters(), strict=True):
            total += p.grad.to(reduce_dtype)
    return [(total / len(parts)).float() for total in sums]


@pytest.mark.parametrize(
    ("policy", "compute", "reduce"),
    [
        ({}, FP32, FP32),
        ({"param_dtype": BF16}, BF16, BF16),
        ({"param_dtype": BF16, "reduce_dtype": BF16}, BF16, BF16),
        ({"param_dtype": BF16, "reduce_dtype": FP32}, BF16, FP32),
        ({"param_dtype": FP32, "reduce_dtype": BF16}, FP32, BF16),
        ({"reduce_dtype": BF16}, FP32, BF16),
        ({"param_dtype": FP16}, FP16, FP16),
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_dtypes_of_gather_compute_reduction_and_gradient(ranks, impl, policy, compute, reduce, world_size):
    if versions.GRADS_KEEP_ORIGINAL_DTYPE and "reduce_dtype" not in policy:
        reduce = FP32

    def run():
        model, _ = sharded_toy(impl, 2, mp_policy=impl.MixedPrecisionPolicy(**policy))
        seen = set()
        for layer in (model.embed, *model.layers):
            layer.register_forward_pre_hook(lambda m, args: seen.add((m.w.dtype, args[0].dtype)))
        with Issued() as mode:
            out = model(torch.randn(2, 4))
            assert {p.dtype for g in groups_of(impl, model) for p in [g.fsdp_params[0].sharded_param]} == {FP32}
            square_loss(out).backward()
        assert seen == {(compute, compute)}
        assert {c.dtype for c in mode.of("AG")} <= {compute}
        assert {c.dtype for c in mode.of("RS")} <= {reduce}
        assert {p.dtype for p in model.parameters()} == {FP32}
        assert {p.grad.dtype for p in model.parameters()} == {FP32}
        return len(mode.log), out.dtype

    assert ranks(world_size, run) == [(8 if world_size > 1 else 0, compute)] * world_size


@pytest.mark.parametrize("reduce_dtype", [None, FP32])
def test_values_of_bf16_compute(ranks, impl, reduce_dtype):
    def run():
        policy = impl.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
        model, plain = sharded_toy(impl, 2, sizes=(5, 3, 1), mp_policy=policy)
        whole = torch.randn(4, 4)
        square_loss(model(my_part(whole))).backward()
        expected = low_precision_gradients(plain, whole.chunk(2), BF16, reduce_dtype or BF16)
        tolerance = {"rtol": 1e-6, "atol": 1e-6} if reduce_dtype is FP32 else {"rtol": 1e-2, "atol": 1e-3}
        for p, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), grad, **tolerance)

    ranks(2, run)


def test_gradients_that_bf16_would_lose_survive_a_reduction_in_fp32(ranks, impl):
    """256 + 1 is 256 in bf16."""

    def run():
        means = []
        for reduce_dtype in (BF16, FP32):
            model = Matrix(2, 1)
            impl.fully_shard(model, mp_policy=impl.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype))
            x = torch.full((1, 2), [256.0, 1.0][dist.get_rank()])
            model(x).sum().backward()
            means.append(model.w.grad.full_tensor().flatten().tolist())
        return means

    assert ranks(2, run) == [[[128.0, 128.0], [128.5, 128.5]]] * 2


def test_accumulation_without_sync_is_done_in_the_reduce_dtype(ranks, impl):
    def kept(fsdp_param):
        p = fsdp_param
        return p._unsharded_param.grad if versions.GRADS_KEEP_ORIGINAL_DTYPE else p.unsharded_accumulated_grad

    def run():
        model = Matrix(2, 1)
        impl.fully_shard(model, mp_policy=impl.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32))
        fsdp_param = group_of(impl, model).fsdp_params[0]
        for i, value in enumerate((256.0, 1.0, 1.0)):
            model.set_requires_gradient_sync(i == 2)
            model(torch.full((1, 2), value)).sum().backward()
            if i < 2:
                assert kept(fsdp_param).dtype == FP32
                assert versions.GRADS_KEEP_ORIGINAL_DTYPE or fsdp_param._unsharded_param.grad is None
        assert kept(fsdp_param) is None
        return model.w.grad.full_tensor().flatten().tolist()

    assert ranks(2, run) == [[258.0, 258.0]] * 2


def test_accumulation_with_sync_is_done_in_the_original_dtype(ranks, impl):
    def run():
        model = Matrix(2, 1)
        impl.fully_shard(model, mp_policy=impl.MixedPrecisionPolicy(param_dtype=BF16))
        for value in (256.0, 1.0):
            model(torch.full((1, 2), value)).sum().backward()
        return model.w.grad.full_tensor().flatten().tolist()

    assert ranks(2, run) == [[257.0, 257.0]] * 2


# Inputs and outputs


@dataclass
class Batch:
    x: torch.Tensor
    ids: torch.Tensor


class TakesMany(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.seen: dict = {}

    def forward(self, batch: Batch, pairs: list, *, mask: torch.Tensor, scale: float, y: torch.Tensor):
        self.seen = {
            "x": batch.x.dtype,
            "ids": batch.ids.dtype,
            "pair": pairs[0][0].dtype,
            "mask": mask.dtype,
            "scale": type(scale),
            "y": y.dtype,
        }
        out = (batch.x.to(self.w.dtype) @ self.w + y.to(self.w.dtype)) * scale
        return {"out": out, "ids": batch.ids, "list": [out.sum(), mask], "text": "as it was"}


@pytest.mark.parametrize("cast", [True, False])
def test_floating_point_inputs_are_cast_wherever_they_are(ranks, impl, cast):
    def run():
        model = TakesMany()
        impl.fully_shard(model, mp_policy=impl.MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=cast))
        x = torch.randn(2, 4)
        out = model(Batch(x, torch.arange(2)), [(x,)], mask=torch.ones(2, dtype=torch.bool), scale=0.5, y=x.double())
        return model.seen, out["out"].dtype

    floats = {"x": BF16, "pair": BF16, "y": BF16} if cast else {"x": FP32, "pair": FP32, "y": torch.float64}
    others = {"ids": torch.int64, "mask": torch.bool, "scale": float}
    assert ranks(2, run) == [({**floats, **others}, BF16)] * 2


def test_output_dtype(ranks, impl):
    def run():
        model = TakesMany()
        impl.fully_shard(model, mp_policy=impl.MixedPrecisionPolicy(param_dtype=BF16, output_dtype=torch.float64))
        x = torch.randn(2, 4)
        out = model(Batch(x, torch.arange(2)), [(x,)], mask=torch.ones(2, dtype=torch.bool), scale=0.5, y=x)
        square_loss(out["out"]).backward()
        dtypes = {name: out[name].dtype for name in ("out", "ids")}
        return dtypes, [t.dtype for t in out["list"]], out["text"], model.w.grad.dtype

    expected = ({"out": torch.float64, "ids": torch.int64}, [torch.float64, torch.bool], "as it was", FP32)
    assert ranks(2, run) == [expected] * 2


@pytest.mark.parametrize("low", [BF16, FP16])
def test_one_unit_in_low_precision_inside_a_model_in_fp32(ranks, impl, low):
    """Its output goes back to fp32, so nothing else notices."""

    def run():
        model = Toy(3)
        plain = twin(model)
        policy = impl.MixedPrecisionPolicy(param_dtype=low, reduce_dtype=FP32, output_dtype=FP32)
        impl.fully_shard(model.layers[1], mp_policy=policy)
        impl.fully_shard(model)
        plain.layers[1].to(low)
        plain.layers[1].forward = lambda x: Matrix.forward(plain.layers[1], x.to(low)).float()
        whole = torch.randn(4, 4)
        out = model(my_part(whole))
        with Issued() as mode:
            square_loss(out).backward()
        square_loss(plain(whole)).backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad.full_tensor(), b.grad.float(), rtol=2e-2, atol=2e-3)
        return [c.dtype for c in mode.of("AG")], out.dtype

    assert ranks(2, run) == [([low], FP32)] * 2


def test_a_policy_of_the_root_does_not_reach_units_below(ranks, impl):
    def run():
        model = Toy(1)
        impl.fully_shard(model.layers[0])
        impl.fully_shard(model, mp_policy=impl.MixedPrecisionPolicy(param_dtype=BF16))
        seen = {}
        model.layers[0].forward = lambda x: (
            seen.update(layer=model.layers[0].w.dtype, x=x.dtype),
            x @ model.layers[0].w.to(x.dtype),
        )[1]
        model(torch.randn(2, 4))
        return seen, model.embed.w.dtype

    assert ranks(2, run) == [({"layer": FP32, "x": BF16}, BF16)] * 2


def test_parameters_that_are_not_floating_point_are_gathered_as_they_are(ranks, impl):
    """A frozen table of integers inside a unit that computes in bf16."""

    def run():
        class Indexed(Matrix):
            def __init__(self):
                super().__init__()
                self.rows = nn.Parameter(torch.arange(10**6, 10**6 + 5), requires_grad=False)

            def forward(self, x):
                seen.append((self.rows.dtype, self.rows.tolist(), self.w.dtype))
                return x @ self.w

        seen = []
        model = Indexed()
        impl.fully_shard(model, mp_policy=impl.MixedPrecisionPolicy(param_dtype=BF16))
        square_loss(model(torch.randn(2, 4))).backward()
        return seen, model.w.grad.dtype, model.rows.grad

    expected = ([(torch.int64, list(range(10**6, 10**6 + 5)), BF16)], FP32, None)
    assert ranks(2, run) == [expected] * 2


def test_the_dtype_that_counts_is_that_of_the_first_forward(ranks, impl):
    def run():
        model, _ = sharded_toy(impl, 1, mp_policy=impl.MixedPrecisionPolicy(param_dtype=BF16))
        model.to(BF16)
        with Issued() as mode:
            square_loss(model(torch.randn(2, 4))).backward()
        return {c.dtype for c in mode.log}, {p.grad.dtype for p in model.parameters()}

    assert ranks(2, run) == [({BF16}, {BF16})] * 2


# Division


def test_fp16_is_summed_and_divided_before_and_after(ranks, impl):
    """Twice 49152 is too large for fp16; each half of it is not."""

    def run():
        model = Matrix(4, 1)
        impl.fully_shard(model, mp_policy=impl.MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP16))
        with called() as log:
            (model(torch.ones(1, 4)) * 49152.0).sum().backward()
        return [op for name, op in log if name == "RS"], model.w.grad.full_tensor().flatten().tolist()

    assert ranks(2, run) == [(["SUM"], [49152.0] * 4)] * 2


@pytest.mark.parametrize("factor", [1.0, 3.0, 4.0])
@pytest.mark.parametrize("policy", [{}, {"param_dtype": FP16}], ids=["fp32, sums forced", "fp16"])
def test_a_divide_factor_replaces_the_number_of_ranks(ranks, impl, factor, policy):
    def run():
        model, plain = sharded_toy(impl, 1, mp_policy=impl.MixedPrecisionPolicy(**policy))
        for unit in (model, *model.layers):
            unit.set_gradient_divide_factor(factor)
            unit.set_force_sum_reduction_for_comms(True)
        whole = torch.randn(4, 4)
        with called() as log:
            backward_of_both(model, plain, whole)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            tolerance = {"rtol": 1e-2, "atol": 5e-3} if policy else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(a.grad.full_tensor(), b.grad * 2 / factor, **tolerance)
        return {op for name, op in log if name == "RS"}

    assert ranks(2, run) == [{"SUM"}] * 2


def test_sums_can_be_forced(ranks, impl):
    def run():
        model, plain = sharded_toy(impl, 2)
        model.layers[0].set_force_sum_reduction_for_comms(True)
        whole = torch.randn(4, 4)
        with called() as log:
            backward_of_both(model, plain, whole)
        assert_same_grads(model, plain)
        return [op for name, op in log if name == "RS"]

    assert ranks(2, run) == [["AVG", "SUM", "AVG"]] * 2


def test_a_divide_factor_with_one_rank(ranks, impl):
    def run():
        model, plain = sharded_toy(impl, 1)
        for unit in (model, *model.layers):
            unit.set_gradient_divide_factor(4.0)
        x = torch.randn(4, 4)
        for m in (model, plain):
            square_loss(m(x)).backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad.full_tensor(), b.grad / 4)

    ranks(1, run)
