"""The Llama shape: its published parameter counts, its positions, and what it refuses."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from labs.model import model_config
from labs.model.llama import PRESETS, Attention, Llama, LlamaConfig, rope_table, rotate

SMALL = LlamaConfig(n_layer=2, n_head=4, n_kv_head=2, d_model=32, d_ff=48, vocab_size=11, context=16)


@pytest.fixture
def model():
    return Llama(SMALL, seed=0)


class TestSizes:
    @pytest.mark.parametrize(
        ("preset", "published"),
        [("llama-1b", 1_235_814_400), ("llama-8b", 8_030_261_248), ("teaching-llama", 1_017_216)],
    )
    def test_parameter_counts_are_the_published_ones(self, preset, published):
        with torch.device("meta"):
            assert Llama(PRESETS[preset]).num_params() == published

    def test_a_tied_weight_is_one_parameter(self, model):
        assert model.head.weight is not model.tok_emb.weight
        tied = Llama(dataclasses.replace(SMALL, tied=True))
        assert tied.head.weight is tied.tok_emb.weight


class TestForward:
    def test_gives_logits_or_the_cross_entropy_of_counted_targets(self, model):
        idx, targets = torch.randint(11, (3, 16)), torch.randint(11, (3, 16))
        targets[0] = -1
        expected = F.cross_entropy(model(idx)[1:].flatten(0, 1), targets[1:].flatten())
        torch.testing.assert_close(model(idx, targets), expected)
        torch.testing.assert_close(model(idx, targets, reduction="sum"), expected * 32)

    def test_more_tokens_than_positions_is_an_error(self, model):
        with pytest.raises(ValueError, match="rows of 17 tokens, but context=16"):
            model(torch.zeros(1, 17, dtype=torch.int64))


class TestPositions:
    def test_a_product_depends_on_the_distance_alone(self):
        table = rope_table(SMALL, torch.device("cpu"))
        q, k = (torch.randn(8).expand(1, 1, 16, 8) for _ in range(2))
        products = (rotate(q, table) @ rotate(k, table).transpose(-2, -1))[0, 0]  # (16, 16)
        for distance in range(16):
            along = products.diagonal(-distance)
            torch.testing.assert_close(along, along[:1].expand_as(along))
        assert products[0].std() > 1e-3

    def test_late_positions_are_exact(self):
        config = model_config("llama-8b")
        cos, sin = rope_table(config, torch.device("cpu"))
        assert (cos.shape, cos.dtype) == ((8192, 64), torch.float32)
        for position, pair in ((8191, 0), (8191, 1), (5000, 63)):
            angle = position * 500_000 ** (-2 * pair / 128)
            assert cos[position, pair].item() == pytest.approx(math.cos(angle), abs=1e-7)
            assert sin[position, pair].item() == pytest.approx(math.sin(angle), abs=1e-7)

    def test_are_turned_in_fp32_when_the_rest_is_bf16(self):
        table = rope_table(SMALL, torch.device("cpu"))
        x = torch.randn(1, 1, 16, 8).bfloat16()
        turned = rotate(x, table)
        assert turned.dtype == torch.bfloat16
        assert torch.equal(turned, rotate(x.float(), table).bfloat16())

    def test_the_table_is_shared_and_in_no_checkpoint(self, model):
        tables = {id(module.rope) for module in model.modules() if isinstance(module, Attention)}
        assert len(tables) == 1
        assert not [name for name in model.state_dict() if "rope" in name]

    def test_the_table_is_made_anew_after_the_meta_device_also_inside_wrappers(self, model):
        with torch.device("meta"):
            other = Llama(SMALL)
        other.to_empty(device="cpu")
        other.load_state_dict(model.state_dict())
        for attention in (module for module in other.modules() if isinstance(module, Attention)):
            attention.rope.fill_(torch.nan)  # what memory may hold
        other.layers[0].attn = checkpoint_wrapper(other.layers[0].attn)
        other.layers[1] = checkpoint_wrapper(other.layers[1])
        other.init_buffers()
        idx = torch.randint(11, (1, 16))
        assert torch.equal(other(idx), model(idx))


class TestErrors:
    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"n_kv_head": 3}, "n_kv_head=3 does not divide n_head=4; use n_kv_head=2"),
            ({"n_kv_head": 8}, "n_kv_head=8 does not divide n_head=4; use n_kv_head=4"),
            ({"d_model": 34}, "d_model=34 does not divide into n_head=4 heads; use d_model=32 or 36"),
            ({"d_model": 20}, "is 5 numbers each, and rotary positions turn them in pairs; use d_model=24"),
            ({"d_ff": 0}, "d_ff=0: it is a whole number, at least 1"),
            ({"n_kv_head": True}, "n_kv_head=True: it is a whole number"),
            ({"rope_theta": 0.0}, r"rope_theta=0\.0: it is a positive number"),
            ({"norm_eps": math.nan}, "norm_eps=nan: it is a positive number"),
        ],
    )
    def test_sizes_that_cannot_be(self, changes, says):
        with pytest.raises(ValueError, match=says):
            dataclasses.replace(SMALL, **changes)
