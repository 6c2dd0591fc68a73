"""`init_weights`: the shards together are what one process would have drawn."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_sim.measure import live_bytes
from fsdp_sim.mini import fully_shard, init_weights
from tests.mini.models import Toy, Transformer, shard


def on_meta(make):
    with torch.device("meta"):
        return make()


def init_fn(module):
    """As GPTs do: by type, in place."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.LayerNorm):
        module.reset_parameters()


def one_process(make, fn, seed):
    model = make()
    torch.manual_seed(seed)
    model.apply(fn)
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shards_together_are_the_one_process_initialization(ranks, world_size, tied):
    def run():
        expected = one_process(lambda: Transformer(tied=tied), init_fn, seed=7)
        model = shard(on_meta(lambda: Transformer(tied=tied)))
        state = torch.get_rng_state()
        init_weights(model, init_fn, seed=7)
        assert torch.equal(torch.get_rng_state(), state), "the caller's random stream is not touched"
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.full_tensor().detach(), expected[name], rtol=0, atol=0)
        model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()  # and it trains
        if tied:
            assert model.head.weight is model.tokens.weight

    ranks(world_size, run)


def test_reset_parameters_is_the_default(ranks):
    class WithBuffer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(6), nn.Linear(6, 5)

        def forward(self, x):
            return self.linear(self.norm(x))

    def run():
        def reset(module):
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

        expected = one_process(WithBuffer, reset, seed=0)
        model = fully_shard(on_meta(WithBuffer))
        init_weights(model)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.full_tensor().detach(), expected[name], rtol=0, atol=0)
        assert model.norm.running_var.eq(1).all()

    ranks(2, run)


def test_the_recipe_it_replaces_gives_every_rank_the_same_shard(ranks):
    def run():
        model = shard(on_meta(Toy)).to_empty(device="cpu")
        torch.manual_seed(0)
        nn.init.normal_(model.layers[0].w)
        whole = model.layers[0].w.full_tensor()
        return torch.equal(whole[:2], whole[2:])

    assert ranks(2, run) == [True, True]


def test_the_peak_is_the_shards_and_one_unit(ranks):
    def run():
        model = shard(on_meta(lambda: Transformer(n_layers=6)))
        layer_bytes = sum(p.numel() * 4 for p in model.layers[0].parameters())
        shards_bytes = sum(p.to_local().numel() * 4 for p in model.parameters())
        with live_bytes(model) as meter:
            init_weights(model, init_fn)
        return meter.peak_bytes, shards_bytes, layer_bytes

    for peak, shards, layer in ranks(2, run):
        assert shards < peak <= shards + 2 * layer


def forgets_biases(module):
    if hasattr(module, "weight"):
        nn.init.ones_(module.weight)


def reaches_into_layers(module):
    init_fn(module)
    if isinstance(module, Transformer):
        nn.init.zeros_(module.layers[0].down.weight)


@pytest.mark.parametrize(
    ("fn", "message"),
    [(forgets_biases, "LayerNorm.bias"), (reaches_into_layers, "changed Linear.weight when it was given a FSDPTransf")],
)
def test_errors_name_the_parameter(ranks, fn, message):
    def run():
        with pytest.raises(RuntimeError) as caught:
            init_weights(shard(on_meta(Transformer)), fn)
        dist.barrier()
        return str(caught.value)

    for text in ranks(2, run):
        assert message in text
