"""A model's dimensions, its parameters, and the catalogue."""

import pytest

from fsdp_sim.spec import Model, param_shapes

PUBLISHED = {  # parameters, from each model's card or paper
    "gpt2-124m": 124_439_808,
    "gpt2-350m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_the_catalogue_has_the_published_number_of_parameters(name: str, count: int) -> None:
    assert Model.preset(name).param_count == count


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt3-175b", 175), ("bert-base", 0.11), ("bert-large", 0.34), ("t5-3b", 2.85), ("t5-11b", 11.3), ("mpt-30b", 30)],
)
def test_others_are_as_large_as_their_names_say(name: str, billions: float) -> None:
    assert Model.preset(name).param_count / 1e9 == pytest.approx(billions, rel=0.05)


def test_the_formula_of_llm_foundrys_parameter_counts_holds() -> None:
    model = Model.preset("mpt-7b")
    layers, d, vocab, seq = model.n_layer, model.d_model, model.vocab, 2048

    count = sum(rows * columns for _, rows, columns in param_shapes(model, seq))

    assert count == layers * (12 * d**2 + 13 * d) + vocab * d + seq * d + 2 * d


@pytest.mark.parametrize("name", Model.presets())
def test_every_name_of_a_parameter_is_used_once_in_its_block(name: str) -> None:
    from fsdp_sim.spec import block_shapes, blocks, root_shapes

    model = Model.preset(name)
    for shapes in (root_shapes(model, 128), *(block_shapes(model, block) for block in set(blocks(model).values()))):
        names = [shape[0] for shape in shapes]
        assert len(names) == len(set(names))


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no model is called 'lama3-8b'; the nearest names are llama3-8b"):
        Model.preset("lama3-8b")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_head": 5}, "Model.n_head is 5, which does not divide d_model 64"),
        ({"n_kv_head": 3}, "Model.n_kv_head is 3; it must divide n_head, which is 4"),
        ({"n_layer": 0}, "Model.n_layer is 0; it must be a whole number >= 1"),
        ({"ffn_type": "silu"}, "Model.ffn_type is 'silu'"),
    ],
)
def test_dimensions_that_cannot_be_are_named(fields: dict, message: str) -> None:
    good = {"name": "small", "n_layer": 2, "d_model": 64, "n_head": 4, "d_ffn": 256, "vocab": 100}
    with pytest.raises(ValueError, match=message):
        Model(**good | fields)


@pytest.mark.parametrize("name", ["Falcon-H1", "command-r", "nemotron-340b"])
def test_a_model_that_is_not_there_gets_no_other_models_name(name):
    with pytest.raises(
        ValueError, match=f"no model is called '{name}': it is not in the catalogue, so give its dim"
    ) as error:
        Model.preset(name)
    assert "nearest" not in str(error.value)
    assert all(known in str(error.value) for known in Model.presets())
