"""The catalogue's models have as many parameters as transformers' own modules of these dimensions."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from fsdp_sim.spec import Model
from tests.some import some

LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256}
CASES: dict[str, tuple[str, dict]] = {  # class of a module, and what its config has beside the class's defaults
    "llama3.1-8b": ("LlamaForCausalLM", LLAMA | {"intermediate_size": 14336}),
    "llama3.2-1b": ("LlamaForCausalLM", LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True}),
    "llama4-scout": ("Llama4ForCausalLM", {}),
    "llama4-maverick": ("Llama4ForCausalLM", {"num_local_experts": 128, "interleave_moe_layer_step": 2}),
    "qwen2.5-7b": ("Qwen2ForCausalLM", {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064}),
    "qwen3-8b": ("Qwen3ForCausalLM", {
        "intermediate_size": 12288, "num_hidden_layers": 36, "num_key_value_heads": 8}),
    "qwen3-30b-a3b": ("Qwen3MoeForCausalLM", {"num_hidden_layers": 48, "head_dim": 128}),
    "mistral-7b": ("MistralForCausalLM", {}),
    "mixtral-8x7b": ("MixtralForCausalLM", {}),
    "gemma-7b": ("GemmaForCausalLM", {}),
    "gemma2-2b": ("Gemma2ForCausalLM", {}),
    "gemma3-1b": ("Gemma3ForCausalLM", {
        "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1,
        "vocab_size": 262144}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", {}),
    "deepseek-v2-lite": ("DeepseekV2ForCausalLM", {
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "q_lora_rank": None, "first_k_dense_replace": 1, "num_experts_per_tok": 6}),
    "gpt-oss-120b": ("GptOssForCausalLM", {}),
    "olmo2-7b": ("Olmo2ForCausalLM", {"vocab_size": 100352}),
    "phi-4": ("Phi3ForCausalLM", {
        "hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40, "num_attention_heads": 40,
        "num_key_value_heads": 10, "vocab_size": 100352}),
    "pythia-1.4b": ("GPTNeoXForCausalLM", {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16,
        "vocab_size": 50304}),
    "gpt2-124m": ("GPT2LMHeadModel", {}),
    "bert-base": ("BertForMaskedLM", {}),
    "vit-base": ("ViTForImageClassification", {"num_labels": 1000}),
    "t5-small": ("T5ForConditionalGeneration", {}),
    "t5-11b": ("T5ForConditionalGeneration", {
        "d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_layers": 24, "num_heads": 128}),
}  # fmt: skip


@pytest.mark.parametrize("name", some(list(CASES), first=8))
def test_a_published_model_has_the_parameters_of_its_module(name: str) -> None:
    class_name, changes = CASES[name]
    of = getattr(hf, class_name)
    with torch.device("meta"):
        module = of(of.config_class(**changes))
    assert sum(p.numel() for p in module.parameters()) == Model.preset(name).param_count
