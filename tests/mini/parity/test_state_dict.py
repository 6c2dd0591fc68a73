"""State dicts: shards as DTensors under the usual names, so torch's checkpoint tools work without knowing about it."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from tests.mini.models import Toy, Transformer, assert_same_params, my_part, shard, twin
from tests.mini.parity.tools import sharded_toy, square_loss, train_side_by_side

SIZES = (5, 3, 1)


def one_step(model, optimizer, x):
    square_loss(model(x)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("moment", ["before", "after forward", "after backward", "while unsharded"])
def test_values_are_shards_at_any_moment(ranks, impl, moment):
    def run():
        model, plain = sharded_toy(impl, 2, SIZES)
        if moment != "before":
            out = model(torch.randn(2, 4))
            if moment == "after backward":
                out.sum().backward()
            if moment == "while unsharded":
                for unit in (model, *model.layers):
                    unit.unshard()
        state_dict = model.state_dict()
        assert list(state_dict) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            assert isinstance(state_dict[name], DTensor)
            assert torch.equal(state_dict[name].full_tensor(), value)

    ranks(3, run)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("moment", ["before the first forward", "after a step"])
def test_save_and_load(ranks, impl, assign, moment):
    def run():
        model, plain = sharded_toy(impl, 2, SIZES)
        if moment == "after a step":
            train_side_by_side(model, plain, steps=1)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        expected = twin(plain)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        model.load_state_dict(saved, assign=assign)
        assert_same_params(model, expected)
        train_side_by_side(model, plain)
        assert_same_params(model, plain)

    ranks(3, run)


@pytest.mark.parametrize("offload", [False, True])
def test_a_state_dict_taken_before_training_follows_it(ranks, impl, offload):
    """Uneven shards too: their memory is the same from `fully_shard` on, unless the parameters are replaced."""

    def run():
        policy = impl.CPUOffloadPolicy(pin_memory=False) if offload else impl.OffloadPolicy()
        model, plain = sharded_toy(impl, 2, SIZES, offload_policy=policy)
        early = model.state_dict()
        train_side_by_side(model, plain)
        for name, p in plain.named_parameters():
            torch.testing.assert_close(early[name].full_tensor(), p.detach())

    ranks(2, run)


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_get_model_state_dict_in_full(ranks, impl, cpu_offload):
    def run():
        model = Transformer(1, tied=True)
        plain = twin(model)
        shard(model, impl.fully_shard)
        options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
        full = get_model_state_dict(model, options=options)
        for name, value in full.items():
            assert type(value) is torch.Tensor
            assert torch.equal(value, plain.state_dict()[name]), name
        return len(full) == len(plain.state_dict())

    assert ranks(2, run) == [True, not cpu_offload]  # offloaded, it is on rank 0 alone


@pytest.mark.parametrize("rank_0_alone", [False, True])
def test_set_model_state_dict_in_full(ranks, impl, rank_0_alone):
    """Into a model that was made on the meta device."""

    def run():
        plain = Toy(2, SIZES)
        with torch.device("meta"):
            model = Toy(2, SIZES)
        shard(model, impl.fully_shard)
        model.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=rank_0_alone)
        has_it = dist.get_rank() == 0 or not rank_0_alone
        set_model_state_dict(model, plain.state_dict() if has_it else {}, options=options)
        assert_same_params(model, plain)
        train_side_by_side(model, plain)

    ranks(2, run)


def test_optimizer_state_goes_and_comes_back(ranks, impl):
    def run():
        model, plain = sharded_toy(impl, 2, SIZES)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
        whole = torch.randn(4, 4)
        for m, optimizer, x in zip((model, plain), optimizers, (my_part(whole), whole), strict=True):
            one_step(m, optimizer, x)
        saved = get_optimizer_state_dict(model, optimizers[0])
        assert isinstance(saved["state"]["embed.w"]["exp_avg"], DTensor)
        full = get_optimizer_state_dict(model, optimizers[0], options=StateDictOptions(full_state_dict=True))
        expected = get_optimizer_state_dict(plain, optimizers[1])
        for name, entries in expected["state"].items():
            torch.testing.assert_close(full["state"][name]["exp_avg"], entries["exp_avg"])
        fresh = torch.optim.AdamW(model.parameters(), lr=0.1)
        set_optimizer_state_dict(model, fresh, saved)
        for m, optimizer, x in zip((model, plain), (fresh, optimizers[1]), (my_part(whole), whole), strict=True):
            one_step(m, optimizer, x)
        assert_same_params(model, plain, rtol=1e-3, atol=1e-4)

    ranks(2, run)


def test_torch_save_and_load_with_weights_only(ranks, impl, tmp_path):
    def run(folder):
        model, _ = sharded_toy(impl, 2, SIZES)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        one_step(model, optimizer, torch.randn(2, 4))
        file = f"{folder}/rank{dist.get_rank()}.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        loaded = torch.load(file, weights_only=True)
        other, _ = sharded_toy(impl, 2, SIZES)
        other.load_state_dict(loaded["model"])
        torch.optim.AdamW(other.parameters()).load_state_dict(loaded["optimizer"])
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a.to_local(), b.to_local())

    ranks(2, run, str(tmp_path))


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3)])
def test_a_distributed_checkpoint_is_loaded_by_another_number_of_ranks(ranks, impl, tmp_path, before, after):
    def make(seed):
        torch.manual_seed(seed)
        model = shard(Toy(2, SIZES), impl.fully_shard)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def whole(model, optimizer):
        options = StateDictOptions(full_state_dict=True)
        return get_state_dict(model, optimizer, options=options)

    def save(folder):
        model, optimizer = make(1)
        one_step(model, optimizer, torch.ones(2, 4))
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        return whole(model, optimizer)

    def load(folder):
        model, optimizer = make(2)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        loaded = whole(model, optimizer)
        one_step(model, optimizer, torch.ones(2, 4))
        return loaded

    saved = ranks(before, save, str(tmp_path / "checkpoint"))[0]
    for model_state, optimizer_state in ranks(after, load, str(tmp_path / "checkpoint")):
        for name, value in saved[0].items():
            assert torch.equal(value, model_state[name])
        for name, entries in saved[1]["state"].items():
            assert torch.equal(entries["exp_avg"], optimizer_state["state"][name]["exp_avg"])


def test_a_checkpoint_of_one_process_is_loaded_into_shards(ranks, impl, tmp_path):
    torch.manual_seed(4)
    plain = Toy(2, SIZES)
    dcp.save({"model": plain.state_dict()}, checkpoint_id=tmp_path, no_dist=True)

    def run(folder):
        model, _ = sharded_toy(impl, 2, SIZES)
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        return {name: p.full_tensor().detach() for name, p in model.named_parameters()}

    for loaded in ranks(2, run, str(tmp_path)):
        for name, p in plain.named_parameters():
            assert torch.equal(loaded[name], p)


def test_buffers_and_modules_without_parameters_are_in_it_too(ranks, impl):
    def run():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
        for m in model:
            impl.fully_shard(m)
        impl.fully_shard(model)
        model(torch.randn(3, 4)).sum().backward()
        state_dict = model.state_dict()
        model.load_state_dict(state_dict)
        return {name: type(value).__name__ for name, value in state_dict.items()}

    params = dict.fromkeys(("0.weight", "0.bias", "1.weight", "1.bias"), "DTensor")
    buffers = dict.fromkeys(("1.running_mean", "1.running_var", "1.num_batches_tracked"), "Tensor")
    assert ranks(2, run) == [{**params, **buffers}] * 2
