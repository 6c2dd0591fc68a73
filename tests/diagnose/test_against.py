"""One run held against another: parts add up, signs are right, operations are matched."""

import json
import re
from dataclasses import replace

import pytest

from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.diagnose import Against, against, diagnosis_of, look
from fsdp_sim.timeline import Timeline
from tests.cli.commands import call

NODE = Cluster("A100", gpus=8)
PLAN = Plan(param_dtype="bf16", reduce_dtype="fp32", micro_batch=2)


def predicted(**changes: object) -> Timeline:
    return simulate("gpt2-124m", NODE, replace(PLAN, **changes)).timeline


def held(here: Timeline, there: Timeline) -> Against:
    seen = look(here), look(there)
    return against((seen[0], diagnosis_of(seen[0])), (seen[1], diagnosis_of(seen[1])))


CHANGES = [
    {"activation_checkpointing": "full"}, {"micro_batch": 4}, {"reshard_after_forward": False}, {"param_dtype": None},
    {"api": "ddp", "param_dtype": None, "reduce_dtype": None},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_parts_add_up_to_the_difference_of_the_steps(change: dict[str, object]) -> None:
    found = held(predicted(**change), predicted())
    assert sum(part.more_s for part in found.parts) == pytest.approx(found.more_s, abs=1e-9)
    assert sum(part.here_s for part in found.parts) == pytest.approx(found.step_here_s)
    assert sum(part.there_s for part in found.parts) == pytest.approx(found.step_there_s)


def test_the_other_way_round_every_sign_is_the_other() -> None:
    a, b = predicted(activation_checkpointing="full"), predicted()
    one, other = held(a, b), held(b, a)
    assert {p.name: p.more_s for p in one.parts} == {p.name: pytest.approx(-p.more_s) for p in other.parts}
    assert (one.only_here, one.only_there) == (other.only_there, other.only_here)
    assert "longer than" in one.sentences[0]
    assert "shorter than" in other.sentences[0]


def test_what_changed_is_what_is_named() -> None:
    found = held(predicted(activation_checkpointing="full", micro_batch=16), predicted(micro_batch=16))
    assert found.parts[0].name == "forward again in backward"
    assert "computing forward again in backward" in found.sentences[1]
    assert sum(times for label, times in found.only_here.items() if "RECOMPUTE" in label) == 12


def test_a_run_against_itself_is_alike() -> None:
    found = held(predicted(), predicted())
    assert found.more_s == 0
    assert len(found.sentences) == 1
    assert found.sentences[0].startswith("The steps are alike")


def test_the_command_takes_a_timeline_or_a_request(tmp_path) -> None:
    here, request = tmp_path / "here.jsonl", tmp_path / "there.json"
    predicted(activation_checkpointing="full").to_jsonl(here)
    plan = {"micro_batch": 2, "param_dtype": "bf16", "reduce_dtype": "fp32"}
    request.write_text(json.dumps({"model": "gpt2-124m", "gpu": "A100", "gpus": 8, "plan": plan}))
    shown = call("diagnose", str(here), "--against", str(request)).output
    parts = re.findall(r"^(?:computing|waiting:|all else).*?([+−])([\d.]+) ms *$", shown, re.MULTILINE)
    step = re.search(r"^step .*?([+−])([\d.]+) ms *$", shown, re.MULTILINE)
    assert step is not None

    def signed(sign: str, number: str) -> float:
        return float(number) * (1 if sign == "+" else -1)

    assert sum(signed(*part) for part in parts) == pytest.approx(signed(*step.groups()), rel=0.02)
