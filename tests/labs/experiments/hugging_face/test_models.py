"""Models from a config: their ties, their blocks, and what is said when there is nothing to build them from."""

import sys

import pytest
import torch

from labs.experiments.hugging_face import models
from labs.experiments.hugging_face.packages import needs


def test_t5s_embedding_is_one_parameter_with_four_names():
    for model in (models.build("t5"), models.empty("t5")):
        places = {n for n, p in model.named_parameters(remove_duplicate=False) if p is model.shared.weight}
        assert places == {
            "shared.weight",
            "encoder.embed_tokens.weight",
            "decoder.embed_tokens.weight",
            "lm_head.weight",
        }


def test_the_empty_model_has_no_memory_and_the_same_shapes():
    whole, empty = models.build("bert"), models.empty("bert")
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    assert {n: p.shape for n, p in whole.named_parameters()} == {n: p.shape for n, p in empty.named_parameters()}


def test_the_weights_belong_to_the_seed():
    one, same, other = (models.build("bert", seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("t5", [f"{part}.block.{i}" for part in ("encoder", "decoder") for i in range(2)]),
        ("bert", [f"bert.encoder.layer.{i}" for i in range(3)]),
    ],
)
def test_blocks_are_found_by_their_class(family, names):
    assert list(models.blocks(models.empty(family), family)) == names


def test_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match="model=gpt5: this lab has t5 and bert"):
        models.build("gpt5")


def test_pretrained_weights_are_read_from_a_folder(tmp_path):
    saved = models.build("t5", seed=7)
    saved.save_pretrained(tmp_path)
    read = models.build("t5", pretrained=str(tmp_path)).state_dict()
    assert all(torch.equal(tensor, read[name]) for name, tensor in saved.state_dict().items())


def test_without_the_hub_one_sentence_says_so(monkeypatch, tmp_path):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(
        ConnectionError, match=r"pretrained=nobody/nothing: its files are not on this machine and .* cannot"
    ):
        models.build("t5", pretrained="nobody/nothing")


def test_without_transformers_one_sentence_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers, which is not installed: .*run make dev"):
        models.build("t5")


def test_a_package_that_fails_to_import_something_else_says_that(monkeypatch, tmp_path):
    (tmp_path / "broken_package.py").write_text("import package_that_is_nowhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'package_that_is_nowhere'"):
        needs("broken_package")
