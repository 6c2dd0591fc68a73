"""Errors: of the type that torch raises, naming the thing that is wrong, before any work is started."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.mini.models import Matrix, Toy, Transformer, shard
from tests.mini.parity.tools import group_of, kind, raised, sharded_toy


def check(ranks, run, error, *mentions, world_size=2):
    """``run`` returns what `raised` does, on every rank alike."""
    for result in ranks(world_size, run):
        assert result is not None, "nothing was raised"
        name, text = result
        assert name == error, text
        for mention in mentions:
            assert mention.lower() in text.lower()


# Construction


@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict])
def test_a_container_without_forward(ranks, impl, container):
    def run():
        members = [Matrix()] if container is nn.ModuleList else {"a": Matrix()}
        return raised(lambda: impl.fully_shard(container(members)))

    check(ranks, run, "ValueError", container.__name__, "forward")


def test_a_container_that_has_a_forward_is_fine(ranks, impl):
    def run():
        class Calls(nn.ModuleList):
            def forward(self, x):
                return self[0](x)

        return raised(lambda: impl.fully_shard(Calls([Matrix()]))(torch.ones(1, 4)))

    assert ranks(2, run) == [None, None]


def test_a_module_that_is_sharded_already(ranks, impl):
    def run():
        model = impl.fully_shard(Matrix())
        return raised(lambda: impl.fully_shard(model))

    check(ranks, run, "AssertionError", "Matrix", "already", "once")


def test_a_list_with_a_module_that_is_sharded_already(ranks, impl):
    def run():
        model = impl.fully_shard(Matrix())
        return raised(lambda: impl.fully_shard([Matrix(), model]))

    check(ranks, run, "AssertionError", "already")


def test_a_list_with_a_module_twice(ranks, impl):
    def run():
        model = Matrix()
        return raised(lambda: impl.fully_shard([model, model]))

    check(ranks, run, "AssertionError", "already", "once")


@pytest.mark.parametrize("empty", [[], ()])
def test_no_modules(ranks, impl, empty):
    check(ranks, lambda: raised(lambda: impl.fully_shard(empty)), "IndexError")


def test_a_lazy_module_that_has_no_shape_yet(ranks, impl):
    def run():
        model = nn.Sequential(Matrix(), nn.LazyLinear(3))
        error = raised(lambda: impl.fully_shard(model))
        return error if kind(model[0].w) == "unsharded" else ("half sharded", "")  # refused before anything is done

    check(ranks, run, "RuntimeError", "shape")


def test_parameters_that_are_sharded_already(ranks, impl):
    """By the other `fully_shard`, or by hand: a mesh without names is not one of tensor parallelism."""

    def run():
        model = Matrix()
        model.w = nn.Parameter(distribute_tensor(model.w.detach(), init_device_mesh("cpu", (2,)), [Shard(0)]))
        return raised(lambda: impl.fully_shard(model))

    check(ranks, run, "TypeError")


def test_a_scalar_parameter(ranks, impl):
    def run():
        model = Matrix()
        model.temperature = nn.Parameter(torch.tensor(1.0))
        return raised(lambda: impl.fully_shard(model))

    check(ranks, run, "ValueError", "scalar", "temperature", "1D tensor")


def test_a_parameter_that_is_not_contiguous(ranks, impl):
    def run():
        model = Matrix(4, 3)
        model.w = nn.Parameter(model.w.detach().t())
        return raised(lambda: impl.fully_shard(model))

    check(ranks, run, "NotImplementedError", "contiguous", "shape", "stride", "(1, 3)")


def test_a_mesh_of_three_dimensions(ranks, impl):
    def run():
        mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("a", "b", "c"))
        return raised(lambda: impl.fully_shard(Matrix(), mesh=mesh))

    check(ranks, run, "ValueError", "mesh", "1", "2")


def test_a_mesh_of_two_dimensions_without_names(ranks, impl):
    def run():
        mesh = init_device_mesh("cpu", (2, 1))
        return raised(lambda: impl.fully_shard(Matrix(), mesh=mesh))

    check(ranks, run, "AssertionError", "mesh_dim_names")


@pytest.mark.parametrize("value", ["yes", 1.5])
def test_reshard_after_forward_of_another_type(ranks, impl, value):
    def run():
        return raised(lambda: impl.fully_shard(Matrix(), reshard_after_forward=value))

    check(ranks, run, "ValueError", "reshard_after_forward", str(value))


@pytest.mark.parametrize("value", [3, 8])
def test_reshard_after_forward_that_does_not_divide_the_ranks(ranks, impl, value):
    def run():
        return raised(lambda: impl.fully_shard(Matrix(), reshard_after_forward=value))

    check(ranks, run, "ValueError", "reshard_after_forward", str(value), "2")


def test_sharding_another_dimension_that_does_not_divide(ranks, impl):
    def run():
        return raised(lambda: impl.fully_shard(Matrix(4, 5), shard_placement_fn=lambda p: Shard(1)))

    check(ranks, run, "NotImplementedError", "dim")


def test_something_that_is_no_placement(ranks, impl):
    def run():
        return raised(lambda: impl.fully_shard(Matrix(), shard_placement_fn=lambda p: "rows"))

    check(ranks, run, "ValueError", "shard_placement_fn", "rows")


def test_options_go_by_name(ranks, impl):
    def run():
        return raised(lambda: impl.fully_shard(Matrix(), init_device_mesh("cpu", (2,))))

    check(ranks, run, "TypeError")


def test_no_process_group(impl, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="RANK"):
        impl.fully_shard(Matrix())


def test_a_deep_copy(ranks, impl):
    def run():
        model = impl.fully_shard(Matrix())
        return raised(lambda: copy.deepcopy(model))

    check(ranks, run, "AssertionError", "state dict")


# The first forward


def test_a_list_of_modules_as_the_root(ranks, impl):
    def run():
        model = Toy(2)
        impl.fully_shard([model.layers[0], model.layers[1]])
        return raised(lambda: model(torch.ones(1, 4)))

    check(ranks, run, "RuntimeError", "root", "Matrix")


def test_a_submodule_that_runs_before_the_root(ranks, impl):
    def run():
        model, _ = sharded_toy(impl, 2)
        model.layers[0](torch.ones(1, 4))
        return raised(lambda: model(torch.ones(1, 4)))

    check(ranks, run, "RuntimeError", "layers.0", "root")


def test_parameters_on_the_meta_device(ranks, impl):
    def run():
        with torch.device("meta"):
            model = Toy(1)
        shard(model, impl.fully_shard)
        return raised(lambda: model(torch.ones(1, 4)))

    check(ranks, run, "RuntimeError", "meta", "embed.w", "to_empty")


def test_one_parameter_on_the_meta_device(ranks, impl):
    def run():
        with torch.device("meta"):
            model = Toy(1)
        shard(model, impl.fully_shard)
        for module in (model.embed, model.head):
            module.to_empty(device="cpu")
        result = raised(lambda: model(torch.ones(1, 4)))
        assert "embed.w" not in result[1]
        return result

    check(ranks, run, "RuntimeError", "meta", "layers.0.w")


def test_unshard_with_parameters_on_the_meta_device(ranks, impl):
    def run():
        with torch.device("meta"):
            model = Matrix()
        impl.fully_shard(model)
        return raised(model.unshard)

    check(ranks, run, "RuntimeError", "meta")


def test_offloaded_parameters_on_another_device_than_the_cpu(ranks, impl):
    def run():
        with torch.device("meta"):
            model = Matrix()
        impl.fully_shard(model, offload_policy=impl.CPUOffloadPolicy(pin_memory=False))
        return raised(lambda: model(torch.ones(1, 4)))

    check(ranks, run, "RuntimeError", "meta")


def test_tied_weights_in_two_groups(ranks, impl):
    def run():
        model = Transformer(1, tied=True)
        impl.fully_shard(model.tokens)
        impl.fully_shard(model.head)
        impl.fully_shard(model)
        return raised(lambda: model(torch.zeros(1, 3, dtype=torch.int64)))

    check(ranks, run, "ValueError", "weight", "already managed by", "fully_shard([module_a, module_b])")


def test_parameters_of_two_dtypes_in_one_group(ranks, impl):
    def run():
        model = nn.Sequential(Matrix(), Matrix())
        model[1].bfloat16()
        impl.fully_shard(model)
        return raised(lambda: model(torch.ones(1, 4)))

    check(ranks, run, "AssertionError", "torch.float32", "torch.bfloat16")


def test_a_frozen_parameter_may_have_another_dtype(ranks, impl):
    def run():
        class Both(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = Matrix(), Matrix()
                self.b.bfloat16().requires_grad_(False)

            def forward(self, x):
                return self.a(x) + self.b(x.bfloat16()).float()

        model = Both()
        expected = model(torch.ones(1, 4))
        impl.fully_shard(model)
        out = model(torch.ones(1, 4))
        torch.testing.assert_close(out, expected)
        out.sum().backward()
        return model.b.w.grad, model.a.w.grad is not None

    assert ranks(2, run) == [(None, True)] * 2


# Setters and functions


@pytest.mark.parametrize("value", [2, None, "yes"])
def test_set_reshard_after_forward_takes_bools(ranks, impl, value):
    def run():
        model = impl.fully_shard(Matrix())
        return raised(lambda: model.set_reshard_after_forward(value))

    check(ranks, run, "ValueError", "reshard_after_forward")


@pytest.mark.parametrize("setter", ["set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"])
def test_only_sharded_modules_can_be_prefetched(ranks, impl, setter):
    def run():
        model = impl.fully_shard(Matrix())
        return raised(lambda: getattr(model, setter)([nn.Linear(2, 2)]))

    check(ranks, run, "ValueError", "Linear")


@pytest.mark.usefixtures("since_torch_2_13")
@pytest.mark.parametrize(
    ("value", "error"), [(0, "ValueError"), (-1, "ValueError"), (True, "TypeError"), (1.5, "TypeError")]
)
def test_number_of_reduce_scatter_buffers(ranks, impl, value, error):
    def run():
        model = impl.fully_shard(Matrix())
        return raised(lambda: model.set_reduce_scatter_max_input_buffers(value))

    check(ranks, run, error, "max_input_buffers")


def test_a_stream_for_the_hook_of_a_hybrid_mesh(ranks, impl):
    def run():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        model = impl.fully_shard(Matrix(), mesh=mesh)
        return raised(lambda: model.set_all_reduce_hook(lambda x: None, stream=torch.cpu.current_stream()))

    check(ranks, run, "ValueError", "stream")


def test_a_forward_method_that_is_not_there(ranks, impl):
    def run():
        model = impl.fully_shard(Matrix())
        return raised(lambda: impl.register_fsdp_forward_method(model, "encode"))

    check(ranks, run, "ValueError", "encode", "Matrix")


def test_only_sharded_modules_share_a_communication_context(ranks, impl):
    def run():
        model = impl.fully_shard(Matrix())
        return raised(lambda: impl.share_comm_ctx([model, nn.Linear(2, 2)]))

    check(ranks, run, "ValueError", "Linear")


@pytest.mark.usefixtures("since_torch_2_13")
def test_resetting_another_module_than_the_root(ranks, impl):
    def run():
        model, _ = sharded_toy(impl, 1)
        model(torch.ones(1, 4))
        return raised(model.layers[0].reset_iter_state)

    check(ranks, run, "RuntimeError", "reset_iter_state", "root")


def test_resetting_before_any_forward(ranks, impl):
    """Nobody knows the root yet, and there is nothing to reset. torch stumbles over an attribute that is not there."""

    def run():
        model, _ = sharded_toy(impl, 1)
        return [raised(m.reset_iter_state) for m in (model, model.layers[0])]

    for errors in ranks(2, run):
        assert {name for name, _ in errors} <= {"RuntimeError", "AttributeError"}
        if impl.__name__ == "fsdp_sim.mini":
            assert all(name == "RuntimeError" and "never ran" in text for name, text in errors)


def test_the_old_name_of_the_divide_factor_warns(ranks, impl):
    def run():
        model = impl.fully_shard(Matrix())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.set_reduce_scatter_divide_factor(4.0)
        return [w.category.__name__ for w in caught], group_of(impl, model).gradient_divide_factor

    assert ranks(2, run) == [(["DeprecationWarning"], 4.0)] * 2


def test_a_method_other_than_forward_fails_loudly(ranks, impl):
    def run():
        class Encoder(Matrix):
            def encode(self, x):
                return x @ self.w

        model = impl.fully_shard(Encoder())
        return raised(lambda: model.encode(torch.ones(1, 4)))

    check(ranks, run, "RuntimeError", "DTensor")
