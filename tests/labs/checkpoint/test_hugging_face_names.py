"""What transformers loads from us has our logits; what we load from it comes back bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from labs.checkpoint.full import load_weights, open_weights, write_full
from labs.checkpoint.hugging_face_names import write_model
from labs.checkpoint.state import read_state
from labs.checkpoint.tensors import TensorFiles, read_whole
from labs.model import ModelConfig, build
from labs.model.gpt import GPT, GPTConfig
from labs.model.llama import Llama, LlamaConfig

MODELS: dict[str, ModelConfig] = {
    "gpt2": GPTConfig(n_layer=2, n_head=2, d_model=8, vocab_size=17, context=12),
    "gpt2-untied": GPTConfig(n_layer=1, n_head=4, d_model=8, vocab_size=17, context=12, tied=False),
    "llama": LlamaConfig(2, 4, 2, 16, 24, vocab_size=17, context=12),
    "llama-ungrouped": LlamaConfig(1, 4, 4, 16, 24, vocab_size=17, context=12),
    "llama-tied": LlamaConfig(1, 4, 1, 16, 24, vocab_size=17, context=12, tied=True, rope_theta=300.0, norm_eps=1e-3),
}


def random_model(config: ModelConfig) -> GPT | Llama:
    """With biases and norms that are not 0 and 1, so that one in the wrong place is seen."""
    model = build(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.5, generator=generator)
    return model


def exported(model: GPT | Llama, at: Path) -> Path:
    """A folder for transformers."""
    (at / "full").mkdir()
    (at / "hf").mkdir()
    write_full(at / "full", read_state(model))
    write_model(at / "hf", TensorFiles(at / "full"), model.config)
    return at / "hf"


def same(one: GPT | Llama, other: GPT | Llama) -> bool:
    pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
    return all(a == b and torch.equal(p, q) for (a, p), (b, q) in pairs)


def from_pretrained(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    model = random_model(MODELS[name])
    theirs = from_pretrained(exported(model, tmp_path))
    tokens = torch.randint(17, (3, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-4, atol=1e-5)
    assert theirs.config.model_type == name.partition("-")[0]
    theirs.save_pretrained(tmp_path / "again", max_shard_size=2000)  # bytes: several files and an index
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 1
    for folder in (tmp_path / "hf", tmp_path / "again"):
        back = build(MODELS[name], seed=1)
        load_weights(folder, back)
        assert same(back, model), folder


def test_old_files_of_gpt2_have_names_without_root_masks_and_the_tied_head(tmp_path: Path) -> None:
    model = random_model(MODELS["gpt2"])
    tensors = load_file(exported(model, tmp_path) / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old |= {"h.0.attn.bias": torch.ones(1, 1, 12, 12).bool(), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    old |= {"lm_head.weight": old["wte.weight"].clone()}
    (tmp_path / "old").mkdir()
    save_file(old, tmp_path / "old" / "model.safetensors")
    back = build(MODELS["gpt2"], seed=1)
    load_weights(tmp_path / "old", back)
    assert same(back, model)


def test_nanogpt_has_their_names_and_linear_layers(tmp_path: Path) -> None:
    model = random_model(MODELS["gpt2"])
    tensors = load_file(exported(model, tmp_path) / "model.safetensors")
    linear = {n: t.T.contiguous() if ".c_" in n and n.endswith("weight") else t for n, t in tensors.items()}
    (tmp_path / "nano").mkdir()
    save_file(linear, tmp_path / "nano" / "model.safetensors")
    back = build(MODELS["gpt2"], seed=1)
    load_weights(tmp_path / "nano", back)
    assert same(back, model)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_any_slice_is_that_of_the_whole(name: str, tmp_path: Path) -> None:
    """Of transposed tensors, and across the borders of query, key and value."""
    source = open_weights(exported(random_model(MODELS[name]), tmp_path))
    for tensor_name, form in source.forms.items():
        whole = read_whole(source, tensor_name)
        rows = form.shape[0]
        for begin in range(rows):
            for end in range(begin + 1, rows + 1):
                index = (slice(begin, end), *(slice(0, n) for n in form.shape[1:]))
                assert torch.equal(source.read(tensor_name, index), whole[begin:end]), tensor_name


def test_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    folder = exported(random_model(MODELS["llama"]), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_norm.weight"
    save_file(tensors | {name: torch.ones(4)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name} has no place in GPT-2 or Llama as they are here"):
        open_weights(folder)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers.1.*is there without model.layers.1.self_attn.k_proj.weight"):
        open_weights(folder)


def test_a_gpt_without_biases_cannot_go_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bias=False: GPT-2 in transformers has biases"):
        exported(build(GPTConfig(1, 2, 8, vocab_size=17, context=12, bias=False)), tmp_path)
