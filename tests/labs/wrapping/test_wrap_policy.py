"""One policy, one list of units, whatever the api; the model may be on the meta device."""

from __future__ import annotations

import dataclasses

import pytest
from torch import nn

from labs.model import empty
from labs.model.gpt import GPTConfig
from labs.model.llama import LlamaConfig
from labs.wrapping.wrap_policy import Units, find_units, ties

GPT = GPTConfig(n_layer=2, n_head=2, d_model=8, vocab_size=40, context=16)
LLAMA = LlamaConfig(n_layer=2, n_head=4, n_kv_head=2, d_model=8, d_ff=12, vocab_size=40, context=16)


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=lambda config: type(config).__name__)
def test_block_root_and_classes(config: GPTConfig | LlamaConfig) -> None:
    plain = empty(config)
    assert find_units(plain, "block") == Units(("layers.0", "layers.1"))
    assert find_units(plain, "root") == Units(())
    assert find_units(plain, "Attention, MLP") == Units(
        ("layers.0.attn", "layers.0.mlp", "layers.1.attn", "layers.1.mlp")
    )


def test_a_number_makes_units_of_modules_with_so_many_parameters_outside_units_within() -> None:
    """torch's size_based_auto_wrap_policy, the seed's fsdp_min_num_params."""
    plain = empty(GPT)
    # A block has 16 + 288 + 16 + 552 = 872 parameters: attention 288, MLP 552 of which fc 288 and proj 264.
    assert find_units(plain, "872").names == ("layers.0", "layers.1")
    assert find_units(plain, "553").names == ("layers.0", "layers.1")
    assert find_units(plain, "552").names == ("layers.0.mlp", "layers.1.mlp")
    # Attention and fc are units; what is left of the block, 296, is one as well.
    assert find_units(plain, "288").names == (
        "layers.0", "layers.0.attn", "layers.0.mlp.fc", "layers.1", "layers.1.attn", "layers.1.mlp.fc",
    )  # fmt: skip
    assert find_units(plain, "321").names == ("layers.0.mlp", "layers.1.mlp")
    assert find_units(plain, "1000000").names == ()


def test_both_places_of_a_tied_weight_stay_in_one_unit() -> None:
    tied = find_units(empty(GPT), "Embedding,Linear")
    assert tied.names[0] == "pos_emb"
    assert "head" not in tied.names
    assert tied.tied == ("tok_emb", "head")
    assert "tok_emb and head not units of their own: a weight is tied" in str(tied)

    free = find_units(empty(dataclasses.replace(GPT, tied=False)), "Embedding,Linear")
    assert {"tok_emb", "head"} <= set(free.names)
    assert free.tied == ()


def test_a_tie_within_one_unit_needs_nothing_and_one_across_units_moves_to_the_unit_around_both() -> None:
    def model() -> nn.Module:
        inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        inner[1][0].weight = inner[0].weight
        return nn.ModuleDict({"a": inner, "b": nn.Bilinear(4, 4, 4)})

    assert ties(model()) == [["a.0.weight", "a.1.0.weight"]]
    assert find_units(model(), "Sequential").names == ("a",)
    assert find_units(model(), "Sequential").tied == ("a.1",)
    assert find_units(model(), "Linear,Bilinear") == Units(("b",), ("a.0", "a.1.0"))


@pytest.mark.parametrize("wrap", ["Atention", "Attention,ModuleList", "GPT"])
def test_an_unknown_class_is_named_with_the_nearest(wrap: str) -> None:
    with pytest.raises(ValueError, match=r"is not block, root, a number of parameters, or a module class of GPT"):
        find_units(empty(GPT), wrap)
    with pytest.raises(ValueError, match="did you mean 'Attention'"):
        find_units(empty(GPT), "Atention")


@pytest.mark.parametrize("wrap", ["0", "-5", ""])
def test_what_no_plan_takes_is_refused_with_the_plans_sentence(wrap: str) -> None:
    with pytest.raises(ValueError, match=r"Plan\.wrap is .*; it must be 'block', 'root' or 'embed_block_head'"):
        find_units(empty(GPT), wrap)
