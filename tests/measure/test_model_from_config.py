"""A Hugging Face model that has no table here is traced as transformers has it."""

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_sim import Model, Plan
from fsdp_sim.cost import workload
from fsdp_sim.measure import model_from_config
from tests.cli.commands import call

pytest.importorskip("transformers", reason="transformers is not installed")
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 128, "vocab_size": 256}  # fmt: skip
ON = ("--gpu", "H100", "--gpus", "8", "--seq-len", "64", "--micro-batch", "2")


def written(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps(SMALL | config))
    return str(folder)


def test_what_a_table_knows_is_traced_as_the_table_has_it(tmp_path):
    path, plan = written(tmp_path, model_type="llama", tie_word_embeddings=True), Plan(micro_batch=2, seq_len=64)

    traced, known = model_from_config(path, plan, progress=False), workload(Model.from_config(path), plan)

    assert (traced.param_count, traced.tokens, len(traced.units)) == (known.param_count, 128, 3)
    assert sum(work.forward_flops for work in traced.work.values()) == pytest.approx(
        sum(work.forward_flops for work in known.work.values()), rel=0.02
    )


def test_simulate_takes_a_model_that_has_no_table_and_says_how(tmp_path):
    asked = ("--model-file", written(tmp_path, model_type="apertus", _name_or_path="swiss/Apertus-mini"), *ON)

    result = json.loads(call("simulate", *asked, "--plan", "activation_checkpointing=full", "--json").stdout)

    assert result["model"] == "Apertus-mini"
    assert result["tokens_per_step"] == 2 * 64 * 8
    assert result["peak_memory_bytes"] < json.loads(call("simulate", *asked, "--json").stdout)["peak_memory_bytes"]
    said = " ".join(result["notes"])
    assert "its module was traced as transformers has it" in said
    assert "changes nothing" not in said
    assert "would_help" not in result


def test_a_gated_delta_rule_without_its_kernels_is_priced(tmp_path):
    layers = ["linear_attention", "full_attention"]
    path = written(tmp_path, model_type="qwen3_next", layer_types=layers, num_experts=4, num_experts_per_tok=2,
                   linear_num_value_heads=4, linear_num_key_heads=2, moe_intermediate_size=32,
                   shared_expert_intermediate_size=32)  # fmt: skip
    traced = model_from_config(path, Plan(seq_len=64, param_dtype="bf16"), progress=False)

    assert all(traced.work[f"model.layers.{layer}"].forward_flops > 0 for layer in (0, 1))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gtp5"}, "model_type is 'gtp5', which transformers .* does not know either"),
        ({"model_type": "apertus", "num_memory_experts": 8}, "ApertusConfig has no num_memory_experts; take it out"),
        ({"model_type": "apertus", "hidden_size": "many"}, "transformers .* cannot build it"),
        ({"model_type": "dinov2", "num_key_value_heads": None}, "no class of it that reads tokens"),
        ({"model_type": "qwen2_5_vl"}, "it holds several models"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}, "param_dtype=None: .* BF16"),
    ],
)
def test_what_cannot_be_traced_is_refused_with_what_is_wrong(config, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        model_from_config(written(tmp_path, **config), progress=False)


@pytest.mark.parametrize(
    ("config", "more"),
    [
        ({"model_type": "exaone4"}, {"head_dim": 32}),
        ({"model_type": "bert", "num_key_value_heads": None}, {"position_embedding_type": "absolute"}),
        ({"model_type": "apertus"}, {"quantization_config": {"quant_method": "fp8"}}),
    ],
)
def test_a_key_that_the_class_reads_unsaid_or_that_changes_nothing_is_taken(config, more, tmp_path):
    def count(**given):
        return model_from_config(written(tmp_path, **config, **given), Plan(seq_len=64), progress=False).param_count

    assert (count(**more) > count()) == ("head_dim" in more)


def test_a_model_with_another_head_than_its_table_has_is_traced_with_its_own(tmp_path):
    of_texts = {"model_type": "llama", "tie_word_embeddings": True, "pad_token_id": 0}
    (tmp_path / "head").mkdir()
    path = written(tmp_path / "head", **of_texts, architectures=["LlamaForSequenceClassification"], id2label={"0": "r"})
    result = json.loads(call("simulate", "--model-file", path, *ON, "--json").stdout)

    body = Model.from_config(written(tmp_path, **of_texts)).param_count
    assert model_from_config(path, progress=False).param_count == body + SMALL["hidden_size"]
    assert "its module was traced" in " ".join(result["notes"])


def test_a_command_that_varies_the_model_refuses_it_and_says_which_does_not(tmp_path):
    done = call("fit", "--model-file", written(tmp_path, model_type="apertus"), "--gpu", "H100", "--gpus", "8")

    assert done.exit_code == 2
    assert "others fsdp-sim simulate alone can read" in done.output


@pytest.mark.parametrize("beside", [("--layers", "4"), ("--model", "llama3-8b"), ("--dim", "dtype=bf16")])
def test_what_says_something_else_of_a_traced_model_is_refused(beside, tmp_path):
    done = call("simulate", "--model-file", written(tmp_path, model_type="apertus"), *beside, *ON)

    assert done.exit_code == 2
    assert "stands beside a model that is traced as its file has it" in done.output


def test_without_transformers_the_sentence_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr("fsdp_sim.packages.find_spec", lambda name: None)
    done = call("simulate", "--model-file", written(tmp_path, model_type="apertus"), *ON)

    assert done.exit_code == 2
    assert "model_type is 'apertus'" in done.output
    assert "which is not installed" in done.output
