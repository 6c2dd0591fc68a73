"""Construction: `fully_shard` changes a module in place and replaces its parameters by shards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.mini.models import Matrix, Toy, assert_same_grads, assert_same_params, shard, twin
from tests.mini.parity.tools import group_of, groups_of, sharded_toy, square_loss, train_side_by_side


class Rows(nn.Module):
    """Parameters of the given numbers of rows; the output uses all of them."""

    def __init__(self, *rows: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(n, 4)) for n in rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x @ w.T for w in self.weights], dim=1)


def test_the_module_stays_the_same_object_with_the_same_names(ranks, impl):
    def run():
        model = Toy(2)
        names, modules = list(dict(model.named_parameters())), list(dict(model.named_modules()))
        returned = shard(model, impl.fully_shard)
        assert returned is model
        assert list(dict(model.named_parameters())) == names
        assert list(dict(model.named_modules())) == modules
        assert isinstance(model, impl.FSDPModule)
        assert isinstance(model, Toy)
        assert not isinstance(model.embed, impl.FSDPModule)
        return type(model).__name__, type(model.layers[0]).__name__, type(model.embed).__name__

    assert ranks(2, run) == [("FSDPToy", "FSDPMatrix", "Matrix")] * 2


def test_a_list_of_modules_is_returned_as_given_and_shares_one_state(ranks, impl):
    def run():
        given = [Matrix(), Matrix()]
        assert impl.fully_shard(given) is given
        states = [impl.fully_shard.state(m) for m in given]
        assert states[0] is states[1]
        assert states[0]._modules == tuple(given)
        assert all(isinstance(m, impl.FSDPModule) for m in given)
        alone = impl.fully_shard(Matrix())
        after_exceptions = [len(m._forward_hooks_always_called) for m in (*given, alone)]  # one of several may raise
        return len(states[0]._fsdp_param_group.fsdp_params), after_exceptions

    assert ranks(2, run) == [(2, [1, 1, 0])] * 2


def test_what_torch_compile_reads_is_on_every_module_that_is_managed(ranks, impl):
    def run():
        models = Toy(1), Toy(1)
        for model, ignored in zip(models, (None, {models[1].embed.w}), strict=True):
            shard(model, impl.fully_shard, ignored_params=ignored)
        return [
            [n for n, m in model.named_modules() if not getattr(m, "_is_fsdp_managed_module", False)]
            for model in models
        ], {m._fsdp_use_orig_params for m in models[0].modules()}

    assert ranks(2, run) == [([[], ["embed"]], {True})] * 2


def test_in_a_list_modules_inside_other_modules_of_the_list_count_once(ranks, impl):
    def run():
        parent = nn.Sequential(Matrix(), Matrix())
        impl.fully_shard([parent, parent[0]])
        assert impl.fully_shard.state(parent)._modules == (parent,)
        return type(parent[0]).__name__, len(group_of(impl, parent).fsdp_params)

    assert ranks(2, run) == [("Matrix", 2)] * 2


@pytest.mark.parametrize("world_size", [3, 4])
def test_a_shard_is_a_chunk_of_dim_0_and_may_be_empty(ranks, impl, world_size):
    shapes = [(8, 3), (7,), (1, 2), (17, 4), (3, 2, 2), (2,)]

    def run():
        model = nn.Module()
        for i, shape in enumerate(shapes):
            model.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape)))
        whole = [p.detach().clone() for p in model.parameters()]
        impl.fully_shard(model)
        rank = dist.get_rank()
        for param, full, fsdp_param in zip(model.parameters(), whole, group_of(impl, model).fsdp_params, strict=True):
            chunks = full.chunk(dist.get_world_size())
            mine = chunks[rank] if rank < len(chunks) else full[:0]
            assert isinstance(param, nn.Parameter)
            assert isinstance(param, DTensor)
            assert param.placements == (Shard(0),)
            assert param.shape == full.shape
            assert torch.equal(param.to_local(), mine)
            assert torch.equal(param.full_tensor(), full)
            assert fsdp_param.sharded_param is param
            assert fsdp_param.padded_sharded_param_size == chunks[0].shape
            padded = fsdp_param._sharded_param_data
            assert padded.shape == (chunks[0].numel(),)
            assert torch.equal(padded[: mine.numel()], mine.flatten())
            assert not padded[mine.numel() :].any()

    ranks(world_size, run)


def test_requires_grad_and_buffers_stay(ranks, impl):
    def run():
        model = nn.BatchNorm1d(4)
        model.bias.requires_grad_(False)
        impl.fully_shard(model)
        kinds = [type(b) for b in model.buffers()]
        return model.weight.requires_grad, model.bias.requires_grad, kinds == [torch.Tensor] * 3

    assert ranks(2, run) == [(True, False, True)] * 2


def test_a_module_that_appears_twice_is_sharded_once(ranks, impl):
    def run():
        layer = nn.Linear(4, 4)
        model = nn.Sequential(layer, layer, nn.Linear(4, 4))
        plain = twin(model)
        impl.fully_shard(model)
        assert len(group_of(impl, model).fsdp_params) == 4
        train_side_by_side(model, plain)

    ranks(2, run)


def test_a_group_has_what_the_units_below_left(ranks, impl):
    def run():
        model = shard(Toy(3), impl.fully_shard)
        return [len(g.fsdp_params) for g in groups_of(impl, model)], group_of(impl, model).modules == (model,)

    assert ranks(2, run) == [([2, 1, 1, 1], True)] * 2


def test_a_module_without_parameters_has_a_state_and_no_group(ranks, impl):
    def run():
        model = nn.Sequential(Matrix(), nn.ReLU(), Matrix())
        plain = twin(model)
        for module in model:
            impl.fully_shard(module)
        impl.fully_shard(model)
        relu, state = model[1], impl.fully_shard.state(model[1])
        assert state._fsdp_param_group is None
        assert state._fsdp_param_groups == []
        assert relu.unshard() is None
        relu.unshard(async_op=True).wait()
        relu.reshard()
        relu.set_requires_gradient_sync(True)
        relu.set_modules_to_forward_prefetch([model[2]])
        model[0].set_modules_to_forward_prefetch([relu])
        train_side_by_side(model, plain)
        return type(relu).__name__

    assert ranks(2, run) == ["FSDPReLU"] * 2


def test_the_state_of_a_module(ranks, impl):
    def run():
        model = shard(Toy(1), impl.fully_shard)
        state = impl.fully_shard.state(model.layers[0])
        assert isinstance(state, impl.FSDPState)
        assert state is model.layers[0]._get_fsdp_state()
        assert state._modules == (model.layers[0],)
        assert isinstance(state._fsdp_param_group, impl.FSDPParamGroup)
        assert state._fsdp_param_groups == [state._fsdp_param_group]
        assert all(isinstance(p, impl.FSDPParam) for p in state._fsdp_param_group.fsdp_params)
        assert impl.fully_shard.state(model.embed) is None
        assert impl.fully_shard.state(nn.Linear(2, 2)) is None

    ranks(2, run)


def test_the_first_forward_finds_the_root_and_names_everything(ranks, impl):
    def run():
        model = Toy(2)
        impl.fully_shard([model.layers[0], model.layers[1]])
        impl.fully_shard(model)
        root, layers = impl.fully_shard.state(model), impl.fully_shard.state(model.layers[0])
        assert (root._is_root, layers._is_root) == (None, None)
        model(torch.randn(2, 4))
        assert (root._is_root, layers._is_root) == (True, False)
        assert layers._state_ctx is root._state_ctx
        assert layers._comm_ctx is root._comm_ctx is layers._fsdp_param_group.comm_ctx
        assert root._state_ctx.all_states == [root, layers]
        return [
            (group._module_fqn, [p._param_fqn for p in group.fsdp_params])
            for group in (root._fsdp_param_group, layers._fsdp_param_group)
        ]

    assert ranks(2, run) == [[("", ["embed.w", "head.w"]), ("layers.0, layers.1", ["layers.0.w", "layers.1.w"])]] * 2


def test_indexing_and_slicing_a_sharded_sequential_gives_plain_classes(ranks, impl):
    def run():
        model = nn.Sequential(Matrix(), Matrix(), Matrix())
        for module in model:
            impl.fully_shard(module)
        impl.fully_shard(model)
        part, fresh = model[:2], type(model[0])(3, 3)
        assert part[0] is model[0]
        return type(model).__name__, type(part).__name__, type(model[0]).__name__, type(fresh).__name__

    assert ranks(2, run) == [("FSDPSequential", "Sequential", "FSDPMatrix", "Matrix")] * 2


def test_a_placement_of_dim_0_may_be_written_in_any_way(ranks, impl):
    def run():
        model = Toy(1)
        plain = twin(model)
        placements = iter([None, Shard(0), Shard(-2)])
        by_id = {id(p): next(placements) for p in model.parameters()}
        impl.fully_shard(model, shard_placement_fn=lambda p: by_id[id(p)])
        assert {p.placements for p in model.parameters()} == {(Shard(0),)}
        train_side_by_side(model, plain)

    ranks(2, run)


@pytest.mark.parametrize("assign", [True, False], ids=["assign", "to_empty then copy"])
def test_a_model_made_on_meta_trains_after_it_got_values(ranks, impl, assign):
    """With 8, 3 and 1 rows on 4 ranks, some hold nothing of some parameters."""

    def run():
        plain = Rows(8, 3, 1)
        with torch.device("meta"):
            model = Rows(8, 3, 1)
        impl.fully_shard(model)
        assert {p.device.type for p in model.parameters()} == {"meta"}
        if not assign:
            model.to_empty(device="cpu")
        full = plain.state_dict()
        shards = {
            name: distribute_tensor(full[name], p.device_mesh, p.placements) for name, p in model.named_parameters()
        }
        model.load_state_dict(shards, assign=assign)
        assert_same_params(model, plain)
        train_side_by_side(model, plain)
        assert_same_params(model, plain)
        return [p.to_local().shape[0] for p in model.parameters()]

    assert ranks(4, run) == [[2, 1, 1], [2, 1, 0], [2, 1, 0], [2, 0, 0]]


@pytest.mark.parametrize("convert", [lambda m: m.double(), lambda m: m.to(torch.float64)], ids=["double", "to"])
def test_a_model_converted_before_its_first_forward_trains_in_that_dtype(ranks, impl, convert):
    def run():
        model, plain = sharded_toy(impl, 2, sizes=(5, 3, 1))
        convert(model)
        plain.double()
        x = torch.randn(4, 4, dtype=torch.float64)
        for m, part in ((model, x.chunk(2)[dist.get_rank()]), (plain, x)):
            square_loss(m(part)).backward()
        assert_same_grads(model, plain)
        return {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()}

    assert ranks(2, run) == [{torch.float64}] * 2


def test_parameters_replaced_by_other_sharded_parameters_before_the_first_forward(ranks, impl):
    """As methods do that derive parameters from loaded ones."""

    def run():
        model, plain = sharded_toy(impl, 1, sizes=(3, 5))
        for m in (model, plain):
            m.embed.w = nn.Parameter(m.embed.w.detach() * 2)
        train_side_by_side(model, plain)

    ranks(2, run)
