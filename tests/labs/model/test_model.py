"""The catalogue, and weights that belong to the seed alone, however and wherever they are made."""

import math
import random

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_sim.ranks import run
from labs.model import PRESETS, build, empty, initial_, model_config
from labs.model.gpt import GPT, GPTConfig
from labs.model.initial_weights import without_random_start
from labs.model.llama import Llama, LlamaConfig

GPT_SMALL = GPTConfig(n_layer=2, n_head=2, d_model=16, vocab_size=40, context=8)
LLAMA_SMALL = LlamaConfig(n_layer=2, n_head=2, n_kv_head=1, d_model=16, d_ff=24, vocab_size=40, context=8)
both = pytest.mark.parametrize("config", [GPT_SMALL, LLAMA_SMALL], ids=["gpt", "llama"])


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


class TestCatalogue:
    def test_has_both_shapes_with_what_the_trainer_asks_of_a_config(self):
        kinds = {name: type(config) for name, config in PRESETS.items()}
        assert (kinds["gpt2-xl"], kinds["llama-8b"]) == (GPTConfig, LlamaConfig)
        for config in PRESETS.values():
            for field in ("n_layer", "n_head", "d_model", "vocab_size", "context"):
                assert getattr(config, field) >= 1

    def test_changes_fields(self):
        assert model_config("llama-8b", n_layer=2).n_layer == 2
        assert model_config("gpt2", dropout=0.1).dropout == 0.1

    @pytest.mark.parametrize(
        ("name", "changes", "says"),
        [
            ("lama-8b", {}, "there is no preset 'lama-8b'; did you mean 'llama-8b'"),
            ("llama-8b", {"dropout": 0.1}, "LlamaConfig has no field 'dropout'"),
            ("gpt2", {"n_layers": 1}, "GPTConfig has no field 'n_layers'; did you mean 'n_layer'"),
        ],
    )
    def test_unknown_names_suggest_the_nearest(self, name, changes, says):
        with pytest.raises(ValueError, match=says):
            model_config(name, **changes)

    @both
    def test_empty_is_on_the_meta_device(self, config):
        model = empty(config)
        assert isinstance(model, GPT if config is GPT_SMALL else Llama)
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


class TestStart:
    @both
    def test_is_the_same_for_a_seed_and_differs_for_another(self, config):
        first, again, other = (weights(build(config, seed)) for seed in (7, 7, 8))
        for name, value in first.items():
            assert value.dtype == torch.float32
            assert torch.equal(value, again[name]), name
            assert torch.equal(value, other[name]) == (name.endswith("bias") or "norm" in name), name

    @pytest.mark.parametrize("config", [model_config("teaching"), model_config("teaching-llama")])
    def test_is_gpt2s(self, config):
        for name, value in weights(build(config)).items():
            if name.endswith("bias"):
                assert not value.any(), name
            elif "norm" in name:
                assert (value == 1).all(), name
            else:
                std = 0.02 / math.sqrt(2 * config.n_layer) if name.endswith("proj.weight") else 0.02
                assert value.std().item() == pytest.approx(std, rel=0.05), name
                assert abs(value.mean().item()) < 5 * std / math.sqrt(value.numel()), name

    def test_no_two_parameters_have_the_same_numbers(self):
        values = [v.flatten()[:16] for n, v in weights(build(LLAMA_SMALL)).items() if "norm" not in n]
        assert len({tuple(value.tolist()) for value in values}) == len(values)

    @both
    def test_leaves_torchs_random_numbers_as_they_are(self, config):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        build(config, seed=7)
        assert torch.equal(torch.get_rng_state(), before)

    @both
    def test_is_drawn_once(self, config):
        class Drawn(TorchDispatchMode):
            numbers = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func in (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default):
                    self.numbers += args[0].numel()
                return func(*args, **(kwargs or {}))

        with Drawn() as drawn:
            model = build(config)
        matrices = [value for name, value in weights(model).items() if "norm" not in name and "bias" not in name]
        assert drawn.numbers == sum(value.numel() for value in matrices)

    def test_modules_made_without_random_start_draw_nothing(self):
        before = torch.get_rng_state()
        with without_random_start():
            torch.nn.Linear(3, 4), torch.nn.Embedding(3, 4)
        assert torch.equal(torch.get_rng_state(), before)
        torch.nn.Linear(3, 4)
        assert not torch.equal(torch.get_rng_state(), before)

    @pytest.mark.gpu
    def test_on_a_gpu_is_the_same_however_it_is_made(self):
        if not torch.cuda.is_available():
            pytest.skip("needs a GPU: weights drawn on it")
        model = build(LLAMA_SMALL, seed=7, device="cuda")
        assert model.layers[0].attn.rope.is_cuda
        for name, parameter in model.named_parameters():
            whole = torch.empty_like(parameter)
            initial_(model, name, whole, seed=7)
            assert torch.equal(whole, parameter), name


class TestFilling:
    @both
    def test_in_any_order_gives_the_weights_of_a_build(self, config):
        expected, model = weights(build(config, seed=7)), empty(config)
        names = list(expected)
        for shuffle in range(3):
            random.Random(shuffle).shuffle(names)
            for name in names:
                whole = torch.full(expected[name].shape, torch.nan)
                initial_(model, name, whole, seed=7)
                assert torch.equal(whole, expected[name]), name

    def test_a_tied_head_has_the_embeddings_numbers(self):
        head = torch.empty(40, 16)
        initial_(empty(GPT_SMALL), "head.weight", head, seed=7)
        assert torch.equal(head, build(GPT_SMALL, seed=7).tok_emb.weight)
        initial_(empty(LLAMA_SMALL), "head.weight", head, seed=7)
        assert torch.equal(head, build(LLAMA_SMALL, seed=7).head.weight)
        assert not torch.equal(head, build(LLAMA_SMALL, seed=7).tok_emb.weight)

    def test_refuses_a_shard(self):
        with pytest.raises(ValueError, match=r"tok_emb.weight is \(40, 16\) in all, and the tensor to fill \(20, 16\)"):
            initial_(empty(GPT_SMALL), "tok_emb.weight", torch.empty(20, 16), seed=0)

    def test_refuses_a_dtensor(self):
        def fill() -> None:
            mesh = init_device_mesh("cpu", (1,))
            sharded = distribute_tensor(torch.empty(40, 16), mesh, [Shard(0)])
            with pytest.raises(TypeError, match=r"tok_emb.weight is a DTensor; fill a whole tensor of \(40, 16\)"):
                initial_(empty(GPT_SMALL), "tok_emb.weight", sharded, seed=0)

        run(fill, 1, progress=False)

    def test_refuses_a_wrappers_name(self):
        name = "layers.0._checkpoint_wrapped_module.attn.qkv.weight"
        with pytest.raises(
            ValueError, match=r"no parameter 'layers.0._checkpoint_wrapped_module.attn.qkv.weight'; names"
        ):
            initial_(empty(GPT_SMALL), name, torch.empty(48, 16), seed=0)

    def test_refuses_another_dtype(self):
        with pytest.raises(TypeError, match=r"tok_emb.weight is torch.bfloat16: parameters are kept in torch.float32"):
            initial_(empty(GPT_SMALL), "tok_emb.weight", torch.empty(40, 16, dtype=torch.bfloat16), seed=0)
