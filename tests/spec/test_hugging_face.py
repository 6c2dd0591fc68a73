"""A config.json is read as transformers reads it: as many parameters as the class builds, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from fsdp_sim.requests import request_of_texts
from fsdp_sim.spec import Model
from fsdp_sim.spec.catalogue import tables
from fsdp_sim.spec.torchtitan import model_of_flavor
from tests.some import some

TYPES = tables("hugging_face.toml")
SMALL = {  # other dimensions than the defaults, by what the class calls them
    "vocab_size": 1000, "hidden_size": 96, "n_embd": 96, "dim": 96, "d_model": 96, "num_hidden_layers": 5, "n_layer": 5,
    "n_layers": 5, "num_layers": 4, "num_attention_heads": 6, "n_head": 6, "n_heads": 6, "num_heads": 6,
    "num_key_value_heads": 2, "intermediate_size": 160, "n_inner": 160, "ffn_dim": 160, "d_ff": 160, "hidden_dim": 160,
    "ffn_hidden_size": 160, "head_dim": 24, "d_kv": 24, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56, "n_shared_experts": 2,
    "first_k_dense_replace": 2, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 176, "kv_lora_rank": 16,
    "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "max_position_embeddings": 64,
    "n_positions": 64, "patch_size": 8, "image_size": 32, "num_channels": 1, "num_decoder_layers": 3, "n_group": 2,
    "topk_group": 1, "type_vocab_size": 3, "sliding_window": 16,
}  # fmt: skip
OPTIONAL = {"num_key_value_heads", "head_dim", "n_inner", "num_decoder_layers", "q_lora_rank", "ffn_hidden_size",
            "n_group", "topk_group", "n_routed_experts", "num_experts_per_tok", "n_shared_experts"}  # fmt: skip


FLAGS = [  # of classes that have them: what turns a branch of the reading
    {"attention_bias": True}, {"attention_bias": True, "mlp_bias": True}, {"mlp_bias": True}, {"use_bias": True},
    {"use_qkv_bias": True}, {"q_lora_rank": None}, {"mlp_only_layers": [0, 1]}, {"decoder_sparse_step": 2},
    {"parallel_attn": False}, {"new_decoder_architecture": True, "num_kv_heads": 3}, {"multi_query": False},
    {"use_parallel_residual": False}, {"use_parallel_residual": True}, {"feed_forward_proj": "gated-gelu"},
    {"use_qk_norm": True}, {"attention_out_bias": True}, {"bias": True}, {"alibi": True},
]  # fmt: skip


REFUSED = {("cohere", "use_qk_norm"), ("deepseek_v2", "mlp_bias"), ("eurobert", "mlp_bias"), ("seed_oss", "mlp_bias")}
TIED = {kind for kind, of in TYPES.items() if of["model"].get("head_transform")}  # always


def config_of(kind: str, **changes: Any) -> Any:
    """A small one of the type, as transformers makes it of the keys that its class has."""
    of = getattr(hf, TYPES[kind]["class"]).config_class
    fields = {name for name in of.__dataclass_fields__ if name in TYPES[kind]["config"] or name in OPTIONAL}
    small = {name: value for name, value in SMALL.items() if name in fields}
    return of(**small | changes, pad_token_id=0)


def count_of(kind: str, config: Any) -> int:
    with torch.device("meta"):
        module = getattr(hf, TYPES[kind]["class"])(config)
    has_head = TYPES[kind].get("body") and not getattr(config, "tie_word_embeddings", False)
    return sum(p.numel() for p in module.parameters()) + (config.vocab_size * config.hidden_size if has_head else 0)


@pytest.mark.parametrize("kind", some(list(TYPES), first=12))
def test_a_config_has_the_parameters_of_the_module_that_transformers_builds_of_it(kind: str) -> None:
    """Small, with grouped queries where the class has them; tied and untied; with each flag that the class has."""
    fields = getattr(hf, TYPES[kind]["class"]).config_class.__dataclass_fields__
    ties = [{"tie_word_embeddings": tied} for tied in (True, False) if kind not in TIED]
    for changes in [{}, *ties, *(flags for flags in FLAGS if set(flags) <= set(fields))]:
        config = config_of(kind, **changes)
        if any((kind, flag) in REFUSED and value for flag, value in changes.items()):
            with pytest.raises(ValueError, match="trace the module"):
                Model.from_config(config.to_dict())
            continue
        assert Model.from_config(config.to_dict()).param_count == count_of(kind, config), changes


def test_a_type_that_is_not_known_is_read_by_the_class_that_its_file_names() -> None:
    """Kimi K2's is ``kimi_k2``, and the module DeepSeek-V3's."""
    given = config_of("deepseek_v3").to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}
    assert Model.from_config(given | {"model_type": "kimi_k2"}).param_count == Model.from_config(given).param_count
    with pytest.raises(ValueError, match="model_type is 'kimi_k2'"):
        Model.from_config(given | {"model_type": "kimi_k2", "architectures": ["KimiForCausalLM"]})
    with pytest.raises(ValueError, match=r"model_type is \[\]"):
        Model.from_config({"model_type": [], "architectures": [{}]})


@pytest.mark.parametrize(
    ("kind", "key", "value", "words"),
    [
        ("llama", "num_hidden_layers", None, "it must be a whole number"),
        ("llama", "hidden_size", "4096", "it must be a whole number"),
        ("llama", "hidden_act", [], "it must be a text"),
        ("qwen3", "layer_types", 3, "it must be a list"),
        ("qwen3_moe", "mlp_only_layers", [[]], "it must be a list"),
        ("llama", "quantization_config", 8, "it must be a table"),
        ("gpt2", "n_positions", None, "it must be a whole number"),
        ("deepseek_v3", "qk_rope_head_dim", None, "it must be a whole number"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_its_key(kind: str, key: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"{key} is .*{words}"):
        Model.from_config({"model_type": kind, key: value})


def llama(**more: Any) -> dict[str, Any]:
    return {"model_type": "llama"} | more


def qwen(**more: Any) -> dict[str, Any]:
    return {"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 0} | more


S, F = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("config", "window", "every"),
    [
        ({"model_type": "mistral"}, 4096, None),
        ({"model_type": "mistral", "sliding_window": None}, None, None),
        ({"model_type": "gemma3_text"}, 4096, 6),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 4}, 4096, 4),
        ({"model_type": "gemma2", "num_hidden_layers": 3, "layer_types": [F, F, F]}, None, None),
        ({"model_type": "gpt_oss", "num_hidden_layers": 4, "layer_types": [S, F, S, F]}, 128, 2),
        ({"model_type": "llama4_text", "attention_chunk_size": None}, None, None),
        (qwen(), 4096, None),
        (qwen(max_window_layers=4), None, None),
        (qwen(use_sliding_window=False), None, None),
    ],
)
def test_which_layers_see_a_window_is_read(config: dict[str, Any], window: int | None, every: int | None) -> None:
    model = Model.from_config(config)
    assert (model.window, model.full_attention_every) == (window, every)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "mellum", "mlp_layer_types": ["sparse", "dense"] * 14},
            r"mlp_layer_types is .*; known are the first",
        ),
        (
            {"model_type": "mellum", "mlp_layer_types": ["moe"] * 28},
            "mlp_layer_types is .*; known are dense and sparse",
        ),
        (
            {"model_type": "zzz"},
            "model_type is 'zzz'; known are .* more .the tables of fsdp_sim/spec/hugging",
        ),
        ({"model_type": "lama"}, "the config: model_type is 'lama'; the nearest known is llama"),
        ({"model_type": "mamba2"}, r"model_type is 'mamba2'; .*; others fsdp-sim simulate alone can read"),
        ({}, "model_type is None; known are llama, "),
        (llama(hidden_act="xielu"), "hidden_act is 'xielu'; known are silu, "),
        (
            llama(num_memory_layers=2),
            "num_memory_layers is 2; it is not known what this changes in a llama. If nothing",
        ),
        (llama(num_attention_heads=5), "the config: Model.n_head is 5, which does not divide d_model 4096"),
        (
            llama(quantization_config={"quant_method": "gptq"}),
            "quantization_config is {'quant_method': 'gptq'}; say in",
        ),
        (qwen(max_window_layers=2), r"max_window_layers is 2; known are 0 and num_hidden_layers \(4\)"),
        (
            {"model_type": "gpt_oss", "layer_types": [S, F, F, S]},
            "layer_types is .* known is every k-th layer with full",
        ),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [3]}, r"mlp_only_layers is \[3\]; known are the first layers"),
        (llama(architectures=["LlamaForSequenceClassification"]), "Classification'.; known is LlamaForCausalLM, which"),
        (llama(architectures=["LlamaModel"]), "architectures is .'LlamaModel'.; known is LlamaForCausalLM, which"),
        ({"model_type": "dbrx", "attn_config": {"clip_qkv": 8}}, "model_type is 'dbrx'; known are llama"),
        ({"model_type": "opt", "do_layer_norm_before": False}, "do_layer_norm_before is False; known is True; trace"),
        ({"model_type": "gpt2", "n_embd": "768"}, "the config: "),
    ],
)
def test_what_is_not_understood_is_refused_with_key_value_and_remedy(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Model.from_config(config)


IMAGES = {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27, "patch_size": 14}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}, "text_config (llama4_text) is known"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "text_config (gemma3_text) is known"),
        (
            {"model_type": "mistral3", "tie_word_embeddings": False, "text_config": {"model_type": "mistral"}},
            "save that object, with the tie_word_embeddings (False) that stands beside it, as a file of its own",
        ),
        ({"model_type": "internvl_chat", "llm_config": {"model_type": "qwen2"}}, "llm_config (qwen2) is known"),
        ({"model_type": "x_vl", "language_config": {"model_type": "deepseek_v2"}}, "language_config (deepseek_v2) is"),
        ({"model_type": "omni", "thinker_config": {"text_config": llama()}}, "thinker_config.text_config (llama) is"),
        ({"model_type": "encoder-decoder", "encoder": {"model_type": "bert"}}, "encoder (bert) is known"),
        ({"model_type": "mllama", "text_config": {"model_type": "mllama_text_model"}}, "none for text is known: text_"),
        ({"model_type": "clip", "text_config": {}}, "none for text is known: text_config, vision_config (siglip_"),
        ({"model_type": "qwen2_5_vl", "hidden_size": 8, "num_hidden_layers": 2}, "language model, qwen2_5_vl_text, is"),
    ],
)  # fmt: skip
def test_of_several_models_in_one_config_the_one_for_text_is_named_with_what_to_do(config: Any, says: str) -> None:
    with pytest.raises(ValueError, match=r"^the config: model_type is '\w.*; (give|or trace|others)") as refused:
        Model.from_config(config | {"vision_config": IMAGES, "quantization_config": {"quant_method": "fp8"}})
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_long_value_is_cut_at_its_end_and_says_so() -> None:
    with pytest.raises(ValueError, match=r"layer_types is \['full.*\.\.\. \([\d,]+ more characters\); 'odd' is no att"):
        Model.from_config(llama(sliding_window=8, layer_types=["full_attention"] * 31 + ["odd"]))


def test_keys_that_change_no_shape_do_not_matter() -> None:
    more = {"rope_scaling": {"type": "yarn"}, "torch_dtype": "bfloat16", "unsloth_fixed": True, "use_flash": 1,
            "quantization_config": {"quant_method": "fp8"}, "num_nextn_predict_layers": 1}  # fmt: skip
    assert Model.from_config(llama(**more)) == Model.from_config(llama())


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("bloom", {"n_embed": 64, "offset_alibi": 100, "skip_bias_add": True}),
        ("cohere2", {"layer_switch": 4, "position_embedding_type": "rope_gptj", "use_gated_activation": True}),
        ("ernie4_5", {"use_rmsnorm": True}),
        ("exaone4", {"sliding_window_pattern": "LLLG"}),
        ("hunyuan_v1_dense", {"attention_head_dim": 128, "num_experts": 1, "norm_type": "rms", "use_qk_norm": True}),
        ("minimax_m2", {"mlp_intermediate_size": 8192, "num_mtp_modules": 3, "use_qk_norm": True}),
    ],
)
def test_keys_of_published_files_that_the_class_does_not_read_do_not_matter(kind: str, more: dict[str, Any]) -> None:
    assert Model.from_config({"model_type": kind} | more) == Model.from_config({"model_type": kind})


def test_of_two_spellings_the_class_reads_its_own() -> None:
    starcoder = {"model_type": "starcoder2", "activation_function": "relu", "hidden_act": "gelu", "mlp_type": "default"}
    assert Model.from_config(starcoder).ffn_type == "gelu"
    assert Model.from_config({"model_type": "gpt_oss", "experts_per_token": 4, "num_experts_per_tok": 2}) == (
        Model.from_config({"model_type": "gpt_oss", "num_experts_per_tok": 2})
    )


def test_a_file_its_folder_and_torchtitans_toml_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama(_name_or_path="org/Mine-7B")))
    toml = tmp_path / "train.toml"
    toml.write_text('[job]\ndump_folder = "."\n[model]\nname = "llama4"\nflavor = "17bx16e"\n[training]\nseq_len = 8\n')

    assert Model.from_config(tmp_path) == Model.from_config(tmp_path / "config.json") == Model.from_config(
        llama(_name_or_path="Mine-7B")
    )  # fmt: skip
    scout = Model.from_config(toml)
    assert (scout.param_count, scout.window) == (Model.preset("llama4-scout").param_count, None)
    assert request_of_texts({"model_file": str(toml)}).model.n_expert == 16
    assert request_of_texts({"model_file": str(tmp_path), "layers": "2"}).model.n_layer == 2
    toml.write_text('[model]\nname = "llama3"\nflavor = "8b"\n')
    with pytest.raises(ValueError, match=r"train.toml: model.flavor is '8b'; did you mean 8B\?"):
        Model.from_config(toml)


@pytest.mark.parametrize(("name", "flavors"), tables("torchtitan.toml").items())
def test_every_flavor_of_torchtitan_is_a_model(name: str, flavors: dict[str, Any]) -> None:
    for flavor in flavors:
        made = model_of_flavor({"model": {"name": name, "flavor": flavor}}, "")
        assert made.name == f"torchtitan {name} {flavor}"
