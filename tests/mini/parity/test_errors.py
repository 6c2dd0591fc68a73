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


def forward(model):
    return model(torch.ones(1, 4))


def given(**parameters):
    """A matrix with other parameters."""
    model = Matrix(4, 3)
    for name, value in parameters.items():
        setattr(model, name, nn.Parameter(value))
    return model


def on_meta(make):
    with torch.device("meta"):
        return make()


def twice(impl):
    model = impl.fully_shard(Matrix())
    impl.fully_shard([Matrix(), model])


def one_parameter_on_meta(impl):
    model = shard(on_meta(lambda: Toy(1)), impl.fully_shard)
    for module in (model.embed, model.head):
        module.to_empty(device="cpu")
    forward(model)


def a_layer_before_the_root(impl):
    model, _ = sharded_toy(impl, 2)
    forward(model.layers[0])
    forward(model)


def a_list_as_the_root(impl):
    model = Toy(2)
    impl.fully_shard([model.layers[0], model.layers[1]])
    forward(model)


def tied_in_two_groups(impl):
    model = Transformer(1, tied=True)
    for module in (model.tokens, model.head, model):
        impl.fully_shard(module)
    model(torch.zeros(1, 3, dtype=torch.int64))


def two_dtypes(impl):
    forward(impl.fully_shard(nn.Sequential(Matrix(), Matrix().bfloat16())))


def reset_of_a_layer(impl):
    model, _ = sharded_toy(impl, 1)
    forward(model)
    model.layers[0].reset_iter_state()


def hook_stream_on_a_hybrid_mesh(impl):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = impl.fully_shard(Matrix(), mesh=mesh)
    model.set_all_reduce_hook(lambda x: None, stream=torch.cpu.current_stream())


class Encoder(Matrix):
    def encode(self, x):
        return x @ self.w


def setter(name, *values):
    return lambda impl: getattr(impl.fully_shard(Matrix()), name)(*values)


# what to do with `impl`, the type of the error, and what its text mentions
ERRORS = {
    # construction
    "a list without forward": (
        lambda impl: impl.fully_shard(nn.ModuleList([Matrix()])), "ValueError", ["ModuleList", "forward"],
    ),
    "a dict without forward": (
        lambda impl: impl.fully_shard(nn.ModuleDict({"a": Matrix()})), "ValueError", ["ModuleDict", "forward"],
    ),
    "a module sharded already": (
        lambda impl: impl.fully_shard(impl.fully_shard(Matrix())), "AssertionError", ["Matrix", "already", "once"],
    ),
    "a list with a module sharded already": (twice, "AssertionError", ["already"]),
    "a list with a module twice": (
        lambda impl: impl.fully_shard([Matrix()] * 2), "AssertionError", ["already", "once"],
    ),
    "an empty list": (lambda impl: impl.fully_shard([]), "IndexError", []),
    "an empty tuple": (lambda impl: impl.fully_shard(()), "IndexError", []),
    # by the other `fully_shard`, or by hand: a mesh without names is not one of tensor parallelism
    "parameters sharded already": (
        lambda impl: impl.fully_shard(
            given(w=distribute_tensor(torch.ones(4, 3), init_device_mesh("cpu", (2,)), [Shard(0)]))
        ),
        "TypeError", [],
    ),
    "a scalar parameter": (
        lambda impl: impl.fully_shard(given(temperature=torch.tensor(1.0))),
        "ValueError", ["scalar", "temperature", "1D tensor"],
    ),
    "a parameter that is not contiguous": (
        lambda impl: impl.fully_shard(given(w=torch.ones(4, 3).t())),
        "NotImplementedError", ["contiguous", "shape", "stride", "(1, 3)"],
    ),
    "a mesh of three dimensions": (
        lambda impl: impl.fully_shard(
            Matrix(), mesh=init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("a", "b", "c"))
        ),
        "ValueError", ["mesh", "1", "2"],
    ),
    "a mesh of two dimensions without names": (
        lambda impl: impl.fully_shard(Matrix(), mesh=init_device_mesh("cpu", (2, 1))),
        "AssertionError", ["mesh_dim_names"],
    ),
    **{
        f"reshard_after_forward={value}": (
            lambda impl, value=value: impl.fully_shard(Matrix(), reshard_after_forward=value),
            "ValueError", ["reshard_after_forward", str(value), *of_number],
        )
        for value, of_number in [("yes", []), (1.5, []), (3, ["2"]), (8, ["2"])]
    },
    "another dimension that does not divide": (
        lambda impl: impl.fully_shard(Matrix(4, 5), shard_placement_fn=lambda p: Shard(1)),
        "NotImplementedError", ["dim"],
    ),
    "no placement": (
        lambda impl: impl.fully_shard(Matrix(), shard_placement_fn=lambda p: "rows"),
        "ValueError", ["shard_placement_fn", "rows"],
    ),
    "an option without its name": (
        lambda impl: impl.fully_shard(Matrix(), init_device_mesh("cpu", (2,))), "TypeError", [],
    ),
    "a deep copy": (lambda impl: copy.deepcopy(impl.fully_shard(Matrix())), "AssertionError", ["state dict"]),
    # the first forward
    "a list as the root": (a_list_as_the_root, "RuntimeError", ["root", "Matrix"]),
    "a layer that runs before the root": (a_layer_before_the_root, "RuntimeError", ["layers.0", "root"]),
    "everything on meta": (
        lambda impl: forward(shard(on_meta(lambda: Toy(1)), impl.fully_shard)),
        "RuntimeError", ["meta", "embed.w", "to_empty"],
    ),
    "one parameter on meta": (one_parameter_on_meta, "RuntimeError", ["['layers.0.w']"]),
    "unshard of what is on meta": (
        lambda impl: impl.fully_shard(on_meta(Matrix)).unshard(), "RuntimeError", ["meta"],
    ),
    "offloaded, but on meta": (
        lambda impl: forward(
            impl.fully_shard(on_meta(Matrix), offload_policy=impl.CPUOffloadPolicy(pin_memory=False))
        ),
        "RuntimeError", ["meta"],
    ),
    "tied weights in two groups": (
        tied_in_two_groups, "ValueError", ["weight", "already managed by", "fully_shard([module_a, module_b])"],
    ),
    "two dtypes in one group": (two_dtypes, "AssertionError", ["torch.float32", "torch.bfloat16"]),
    # methods and functions
    **{
        f"set_reshard_after_forward({value})": (
            setter("set_reshard_after_forward", value), "ValueError", ["reshard_after_forward"]
        )
        for value in (2, None, "yes")
    },
    **{
        name: (lambda impl, name=name: setter(name, [nn.Linear(2, 2)])(impl), "ValueError", ["Linear"])
        for name in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch")
    },
    "a stream for the hook of a hybrid mesh": (hook_stream_on_a_hybrid_mesh, "ValueError", ["stream"]),
    "a forward method that is not there": (
        lambda impl: impl.register_fsdp_forward_method(impl.fully_shard(Matrix()), "encode"),
        "ValueError", ["encode", "Matrix"],
    ),
    "a plain module in a shared context": (
        lambda impl: impl.share_comm_ctx([impl.fully_shard(Matrix()), nn.Linear(2, 2)]), "ValueError", ["Linear"],
    ),
    "a method other than forward": (
        lambda impl: impl.fully_shard(Encoder()).encode(torch.ones(1, 4)), "RuntimeError", ["DTensor"],
    ),
}  # fmt: skip

SINCE_TORCH_2_13 = {
    **{
        f"{value} input buffers": (
            setter("set_reduce_scatter_max_input_buffers", value), error, ["max_input_buffers"]
        )
        for value, error in [(0, "ValueError"), (-1, "ValueError"), (True, "TypeError"), (1.5, "TypeError")]
    },
    "a reset of another module than the root": (reset_of_a_layer, "RuntimeError", ["reset_iter_state", "root"]),
}  # fmt: skip


def check(ranks, impl, do, error, mentions):
    for result in ranks(2, lambda: raised(lambda: do(impl))):
        assert result is not None, "nothing was raised"
        name, text = result
        assert name == error, text
        for mention in mentions:
            assert mention.lower() in text.lower()


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_has_torchs_type_and_says_what_is_wrong(ranks, impl, name):
    check(ranks, impl, *ERRORS[name])


@pytest.mark.usefixtures("since_torch_2_13")
@pytest.mark.parametrize("name", SINCE_TORCH_2_13)
def test_an_error_of_a_newer_torch_is_here_with_an_older_one(ranks, impl, name):
    check(ranks, impl, *SINCE_TORCH_2_13[name])


def test_a_lazy_module_is_refused_before_anything_is_sharded(ranks, impl):
    def run():
        model = nn.Sequential(Matrix(), nn.LazyLinear(3))
        return raised(lambda: impl.fully_shard(model)), kind(model[0].w)

    for (name, text), registered in ranks(2, run):
        assert (name, registered) == ("RuntimeError", "unsharded")
        assert "shape" in text


def test_no_process_group(impl, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="RANK"):
        impl.fully_shard(Matrix())


def test_resetting_before_any_forward(ranks, impl):
    """Nobody knows the root yet, and there is nothing to reset. torch stumbles over an attribute that is not there."""

    def run():
        model, _ = sharded_toy(impl, 1)
        return [raised(m.reset_iter_state) for m in (model, model.layers[0])]

    for errors in ranks(2, run):
        assert {name for name, _ in errors} <= {"RuntimeError", "AttributeError"}
        if impl.__name__ == "fsdp_sim.mini":
            assert all(name == "RuntimeError" and "never ran" in text for name, text in errors)


# What is fine


def test_a_container_that_has_a_forward(ranks, impl):
    def run():
        class Calls(nn.ModuleList):
            def forward(self, x):
                return self[0](x)

        return raised(lambda: forward(impl.fully_shard(Calls([Matrix()]))))

    assert ranks(2, run) == [None, None]


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
        expected = forward(model)
        impl.fully_shard(model)
        out = forward(model)
        torch.testing.assert_close(out, expected)
        out.sum().backward()
        return model.b.w.grad, model.a.w.grad is not None

    assert ranks(2, run) == [(None, True)] * 2


def test_the_old_name_of_the_divide_factor_warns(ranks, impl):
    def run():
        model = impl.fully_shard(Matrix())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.set_reduce_scatter_divide_factor(4.0)
        return [w.category.__name__ for w in caught], group_of(impl, model).gradient_divide_factor

    assert ranks(2, run) == [(["DeprecationWarning"], 4.0)] * 2
