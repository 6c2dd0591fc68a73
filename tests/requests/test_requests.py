"""Requests: from words and from JSON alike, and wrong ones answered with what would be right."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

import fsdp_sim.requests
from fsdp_sim.requests import Failure, read_requests, request_of_texts, resolve
from fsdp_sim.simulation import simulate
from fsdp_sim.spec import Cluster, Plan

BASE = {"model": "gpt2-124m", "gpu": "A100", "gpus": "8"}


def test_words_and_json_mean_the_same():
    texts = BASE | {"layers": "6", "micro_batch": "4", "activation_checkpointing": "none", "wrap": "layers.0,layers.1"}
    data = b"""[{"model": {"preset": "gpt2-124m", "n_layer": 6}, "gpu": "A100", "gpus": 8,
                 "plan": {"micro_batch": 4, "activation_checkpointing": null}, "wrap": ["layers.0", "layers.1"]}]"""

    (of_json,) = read_requests(data)
    of_words, of_json = resolve(request_of_texts(texts)), resolve(of_json)

    assert of_words == of_json
    assert of_words.plan.wrap == ("layers.0", "layers.1")


@given(st.dictionaries(st.sampled_from(["modle", "gpuss", "micro_bach", "n_layr", "x"]), st.integers(), min_size=1))
def test_a_name_that_does_not_exist_is_never_ignored(wrong):
    with pytest.raises(ValueError, match="there is no"):
        request_of_texts(BASE | {key: str(value) for key, value in wrong.items()})
    (failure,) = read_requests(fsdp_sim.requests.structs.msgspec.json.encode([BASE | {"gpus": 8} | wrong]))
    assert isinstance(failure, Failure)
    assert "has no field" in failure.error


def test_none_is_said_and_not_given_is_not_said():
    given = request_of_texts(BASE | {"param_dtype": "none"})
    left_out = request_of_texts(BASE | {"micro_batch": "2"})

    assert given.plan.param_dtype is None
    assert left_out.plan.param_dtype is UNSET
    assert resolve(given).plan == Plan()
    assert resolve(left_out).plan == Plan(micro_batch=2, param_dtype="bf16", reduce_dtype="fp32")


def test_a_plan_is_built_once_whether_words_or_json_ask_for_it(monkeypatch):
    built, check = [], Plan.__post_init__
    monkeypatch.setattr(Plan, "__post_init__", lambda plan, *of_copy: (built.append(plan), check(plan, *of_copy)))
    (of_json,) = read_requests(b'[{"model": "gpt2-124m", "gpu": "A100", "gpus": 8, "micro_batch": 1237}]')

    plans = [resolve(request).plan for request in (request_of_texts(BASE | {"micro_batch": "1237"}), of_json)]

    assert built == plans[:1] == plans[1:]


@pytest.mark.parametrize("api", ["ddp", "zero1", "zero2"])
def test_dtypes_are_chosen_for_fsdp_alone(api):
    job = resolve(request_of_texts(BASE | {"api": api}))

    assert job.plan == Plan(api=api)
    assert any(f"{api} has no policy of its own. param_dtype=bf16" in note for note in job.notes)


@pytest.mark.parametrize(
    ("beside", "is_said"),
    [({}, True), ({"reduce_dtype": "fp32"}, False), ({"gpus": "1"}, False), ({"api": "zero1"}, False)],
    ids=["named alone", "both named", "one GPU", "ZeRO"],
)
def test_that_ddp_reduces_in_the_dtype_of_compute_and_autocast_does_not_is_said(beside, is_said):
    job = resolve(request_of_texts(BASE | {"api": "ddp", "param_dtype": "bf16"} | beside))

    assert any("Gradients are reduced in bf16" in note for note in job.notes) is is_said


def test_two_names_of_a_model_are_an_error(tmp_path):
    path = tmp_path / "model.json"
    path.write_text('{"preset": "gpt2-350m"}')

    with pytest.raises(ValueError, match="name one of them"):
        request_of_texts(BASE | {"model_file": str(path)})


def test_an_adapters_configuration_names_the_model_it_is_for(tmp_path):
    path = tmp_path / "adapter_config.json"
    path.write_text('{"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.1-8B", "r": 16}')

    with pytest.raises(ValueError, match=r"of an adapter, not a model: its base is 'meta-llama/Llama-3.1-8B'"):
        request_of_texts({"model_file": str(path), "gpu": "A100", "gpus": "8"})


def test_a_file_given_as_the_models_name_is_told_where_files_go():
    with pytest.raises(ValueError, match=r"config\.json a file: give it as model_file"):
        request_of_texts({"model": "config.json", "gpu": "H100", "gpus": "8"})


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("m.toml", "n_layer = ", "is not TOML"),
        ("m.toml", "n_layer = " + "[" * 10_000, "is not TOML: it nests too deep"),
        ("m.json", '{"model_type": "llama", "x": ' + "[" * 100_000, "nested too deep"),
        ("m.json", '{"n_layer": 3,}', "is not JSON: line 1, column"),
        ("m.json", '{"n_layers": 3}', "did you mean n_layer?"),
        ("m.toml", 'n_layer = "3"', "m.toml: Model.n_layer is '3'; it must be a whole number >= 1"),
        ("m.json", "[]", "is a list"),
        ("m.json", '{"hidden_size": 64, "num_hidden_layers": 2}', "model_type is None; known are llama"),
    ],
)
def test_a_model_file_that_is_wrong_is_named(tmp_path, name, text, words):
    path = tmp_path / name
    path.write_text(text)

    with pytest.raises(ValueError, match=r"m\.(toml|json)") as error:
        request_of_texts({"model_file": str(path), "gpu": "A100", "gpus": "8"})
    assert words in str(error.value)


def test_a_step_of_more_blocks_than_anyone_waits_for_is_refused():
    with pytest.raises(ValueError, match=r"12,000 blocks in a step.*take a grad_accum of 833 or less"):
        resolve(asked := request_of_texts(BASE | {"grad_accum": "1000"}))
    with pytest.raises(ValueError, match=r"12,000 blocks in a step.*take a grad_accum of 833 or less"):
        simulate(asked.model, Cluster("A100", gpus=8), Plan(grad_accum=1000))


@pytest.mark.parametrize("name", ["head_dim", "gpus_per_node", "loss_metrics"])
def test_a_number_beyond_anything_is_refused_before_it_overflows(name):
    with pytest.raises(ValueError, match=f"{name} is 9,223,372,036,854,775,808; the simulator goes up to"):
        resolve(request_of_texts(BASE | {name: str(2**63)}))


@pytest.mark.parametrize("gpus", range(8, 88, 8))
def test_sizes_are_what_was_asked_for_and_not_what_is_kept_beside_it(gpus):
    """A request's cluster may be one that was simulated before, and a cluster keeps its hash, a large number."""
    request = request_of_texts(BASE | {"gpus": str(gpus)})
    assert hash(resolve(request).cluster) == hash(resolve(request).cluster)


def test_json_that_is_nested_too_deep_is_one_sentence():
    with pytest.raises(ValueError, match="nested too deep"):
        read_requests(b"[" * 200_000)


@pytest.mark.parametrize(
    ("fields", "said"), [({}, True), ({"shard_size": "8"}, False), ({"experts_impl": "loop"}, False)]
)
def test_experts_that_are_padded_are_said_to_be(fields: dict[str, str], said: bool) -> None:
    texts = BASE | {"model": "mixtral-8x7b", "gpus": "64"} | fields
    notes = [note for note in resolve(request_of_texts(texts)).notes if "8 experts are cut into 64 shards" in note]
    assert [("8 times as large" in note) for note in notes] == [True] * said


def test_an_image_has_as_many_tokens_as_it_has() -> None:
    job = resolve(request_of_texts(BASE | {"model": "vit-base"}))
    assert (job.plan.seq_len, job.notes[-1]) == (197, "An image is 197 tokens to vit-base (seq_len=197).")
