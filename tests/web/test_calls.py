"""What the page's worker answers, asked natively: the words and numbers of the commands."""

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.diagnose import diagnose
from fsdp_sim.timeline import read_timeline
from web.live.calls import call

CONFIG = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
TEXTS = {"gpu": "H100-SXM-80GB", "gpus": "8", "micro_batch": "1", "seq_len": "4096"}
RECORDED = Path(__file__).parents[1] / "timeline/kineto/recorded"


def asked(name: str, argument: dict[str, Any]) -> Any:
    return json.loads(call(name, json.dumps(argument)))


def form(config: object = CONFIG, **texts: str) -> dict[str, Any]:
    return {"texts": TEXTS | texts, "config": config if isinstance(config, str) else json.dumps(config)}


def test_a_pasted_config_is_the_published_model() -> None:
    answer = asked("fit", form())["answer"]
    plan = Plan(micro_batch=1, seq_len=4096, param_dtype="bf16", reduce_dtype="fp32")
    sim = simulate("llama3-8b", Cluster("H100-SXM-80GB", gpus=8), plan)

    assert answer["fit"] == str(sim.fit)
    assert {part["category"]: part["bytes"] for part in answer["memory"]} == {
        str(category): n_bytes for category, n_bytes in sim.memory.peak_by_category.items()
    }
    assert answer == asked("fit", {"texts": TEXTS | {"model": "llama3-8b"}, "config": ""})["answer"] | {
        "answer": answer["answer"]
    }


def test_there_are_three_answers_and_each_says_why_and_what_would_help() -> None:
    found = {}
    for micro_batch in ("1", "2", "3"):
        of = form(micro_batch=micro_batch)
        answer = asked("fit", of)["answer"]
        if answer["fit"] not in found:
            found[answer["fit"]] = answer["why"], asked("changes", of)["answer"]
    assert set(found) == {"fits", "on the edge", "does not fit"}
    assert "does not fit 8 x H100" in found["does not fit"][0]
    assert "torch's allocator" in found["on the edge"][0]
    assert "that a process can use" in found["fits"][0]
    for fit in ("on the edge", "does not fit"):
        (told,) = [told for told in found[fit][1] if "make it fit" in told["sentence"]]
        assert "activation_checkpointing=selective" in " ".join(told["changes"])


@pytest.mark.parametrize(
    ("config", "texts", "sentence"),
    [
        (CONFIG | {"model_type": "lama"}, {}, "model_type is 'lama'; the nearest known is llama"),
        ("{", {}, "the config is not JSON: Input data was truncated"),
        ("[1]", {}, "a config.json is an object with a model_type"),
        ("", {}, "no model is named"),
        (CONFIG, {"gpu": "H10"}, "H100"),
        (CONFIG, {"gpus": "eight"}, "eight"),
        (CONFIG, {"model": "llama3-8b"}, "give one of them"),
        (CONFIG, {"api": "ddp", "reshard_after_forward": "true"}, "reshard_after_forward"),
    ],
)
def test_what_cannot_be_is_refused_in_the_simulators_own_sentence(
    config: object, texts: dict[str, str], sentence: str
) -> None:
    assert sentence in asked("fit", form(config, **texts))["refused"]


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.gz")), ids=lambda path: path.name)
def test_a_trace_has_the_sentences_of_the_command(path: Path) -> None:
    answer = asked("trace", {"files": [str(path)]})["answer"]
    found = diagnose(read_timeline(path))

    assert answer["headline"] == found.headline
    told = {blame.sentence: list(blame.advice) for blame in found.culprits}
    assert answer["culprits"]
    assert all(told[one["sentence"]] == one["advice"] for one in answer["culprits"])


def test_two_ranks_are_one_run_and_one_of_them_is_asked_for() -> None:
    files = [str(RECORDED / f"fsdp2.rank{rank}.json.gz") for rank in (0, 1)]
    assert asked("trace", {"files": files, "rank": 1})["answer"]["rank"] == 1
    assert "rank 7" in asked("trace", {"files": files, "rank": 7})["refused"]


def test_a_file_that_is_no_trace_is_named_without_its_folder(tmp_path: Path) -> None:
    wrong = tmp_path / "notes.json"
    wrong.write_text('{"traceEvents": [')
    refused = asked("trace", {"files": [str(wrong)]})["refused"]
    assert refused.startswith("notes.json ends in the middle of its JSON")
    assert str(tmp_path) not in refused
