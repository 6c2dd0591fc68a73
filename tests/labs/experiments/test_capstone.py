"""The capstone: choices in words, intervals beside the simulator's, a scoreboard that stays, a defence, a page."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fsdp_sim import Model, Plan
from fsdp_sim.learn import kept
from labs.config import read_config
from labs.experiments import capstone
from labs.experiments.capstone import scores
from labs.experiments.capstone.choice import Choice
from labs.experiments.result import LabResult, ResultRow, this_machine

START = Plan(seq_len=1024, micro_batch=2, param_dtype="bf16", reduce_dtype="fp32")
BUDGET = {"tokens": 1e9, "days": 1, "usd_per_gpu_hour": 2.0}


@pytest.fixture(autouse=True)
def own_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kept.VARIABLE, str(tmp_path / "progress.json"))


@pytest.fixture(scope="module")
def choice() -> Choice:
    return capstone.chosen("gpt2-124m", "16 H100, 400 Gb/s per GPU", BUDGET, START)


def result(step_ms: float) -> LabResult:
    rows = (ResultRow("your plan", "step time", 100.0, step_ms, "ms"),)
    return LabResult("capstone", "measured", rows, this_machine("cpu", 2))


def test_a_model_is_a_name_or_a_config_and_a_cluster_is_words(choice: Choice, tmp_path: Path) -> None:
    assert (choice.model.name, choice.cluster.gpus, choice.cluster.nodes) == ("gpt2-124m", 16, 2)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 3}))
    assert capstone.chosen(str(config), "8 x A100", {}, START).model.n_layer == 3


@pytest.mark.parametrize(
    ("model", "cluster", "budget", "said"),
    [
        ("gpt2-124m", "a few H100", {}, "say how many of which GPU, as in '8 H100'"),
        ("gpt2-124m", "8 H100", {"memory": 3}, "a budget has no memory"),
        ("gpt2-124m", "8 H100", {"days": "two"}, "the budget's days is 'two'; give a number"),
        ("gpt2-124m", "8 H100", {"days": math.nan}, "the budget's days is nan"),
        ("gpt3-124m", "8 H100", {}, "gpt3-124m"),
        ("gpt2-124m", "8 H1000", {}, "H1000"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(model: str, cluster: str, budget: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        capstone.chosen(model, cluster, budget, START)


def test_the_plan_is_written_as_a_script_without_traps_and_one_with_a_trap_is_told(choice: Choice) -> None:
    code = capstone.script(choice, START)
    assert "fully_shard(" in code
    assert capstone.traps(code).rows == (("-", "none", "no trap was found"),)
    trap = "from torch.distributed.fsdp import fully_shard\nopt = AdamW(model.parameters())\nfully_shard(model)\n"
    assert [rule for _, rule, _ in capstone.traps(trap).rows] != ["none"]


def test_the_small_run_is_a_command_that_the_trainer_reads_as_the_same() -> None:
    plan = Plan(seq_len=1024, micro_batch=2, grad_accum=2, activation_checkpointing="full", forward_prefetch=1)
    config, _ = capstone.scaled(Model.preset("llama3-8b"), plan)
    said = capstone.command(config)
    assert said.startswith("torchrun --standalone --nproc_per_node=2 -m labs.train --model=teaching-llama")
    assert read_config(said.split()[5:], "") == config


def test_a_bill_says_what_the_tokens_take_and_whether_it_is_allowed(choice: Choice) -> None:
    step = choice.simulate()
    rows = {row[0]: row for row in capstone.bill(choice, step).rows}
    days = 1e9 / (16 * step.tokens_per_s_per_gpu) / 86400
    assert float(rows["days"][1]) == pytest.approx(days, rel=0.01)
    assert float(rows["USD"][1]) == pytest.approx(days * 24 * 16 * 2, rel=0.01)
    assert rows["days"][-1] == "yes"
    assert rows["USD"][-1] == "", "no limit was given"


def test_an_interval_meets_the_simulators_or_is_too_low_or_too_high(choice: Choice) -> None:
    step = choice.simulate()
    low, high = step.step_time_interval_s
    mine = {"step_s": (high * 2, high * 3), "peak_gib": (0.001, 0.002), "mfu": (0.01, 1.0)}
    assert [row[3] for row in capstone.compared(mine, step).rows] == ["too high", "too low", "they meet"]
    with pytest.raises(ValueError, match="predict each of step_s, peak_gib, mfu"):
        capstone.compared({"step_s": (low, high)}, step)
    for bad in ((2.0, 1.0), (0.0, 1.0), "ab", 3.0, (math.nan, 1.0)):
        with pytest.raises(ValueError, match=r"step_s is .*give the lower and the upper end"):
            capstone.compared(mine | {"step_s": bad}, step)  # type: ignore[arg-type]


def test_the_plan_runs_here_in_the_same_micro_batches(choice: Choice) -> None:
    plan = Plan(micro_batch=2, grad_accum=2, reshard_after_forward=False, activation_checkpointing="full", compile=True)
    config, notes = capstone.scaled(choice.model, plan)
    assert (config.model, config.global_batch, config.micro_batch) == ("teaching", 8, 2)
    assert config.plan.reshard_after_forward is False
    assert config.plan.activation_checkpointing == "full"
    assert "Left out here: compile=True." in notes


def test_every_run_stays_on_the_scoreboard_and_is_drawn() -> None:
    with pytest.raises(ValueError, match="empty"):
        capstone.scoreboard()
    assert "capstone.json" in capstone.keep("first", (1.0, 0.9, 1.1), result(100.0))
    capstone.keep("second", (2.0, 1.8, 2.2), result(80.0))
    assert [score.what for score in scores.read()] == ["first", "second"]
    picture = capstone.scoreboard()
    assert list(picture.figure.data[0].y) == [1.0, 1.25]
    assert "2 s (1.8 to 2.2)" in picture.tables[0].rows[1]


def test_a_damaged_scoreboard_is_put_aside() -> None:
    scores.path().write_text("{")
    assert "damaged" in capstone.keep("first", (1.0, 0.9, 1.1), result(100.0))
    assert len(scores.read()) == 1


def test_the_simulator_judges_the_defence(choice: Choice) -> None:
    answers = {"slow_link": (1.0, 3.0), "twice_gpus": (0.9, 1.5), "twice_tokens": (5.0, 6.0)}
    assert [row[3] for row in capstone.defence(choice, START, answers).rows] == ["✓", "✓", "✗"]
    with pytest.raises(ValueError, match="answer each of slow_link, twice_gpus, twice_tokens"):
        capstone.defence(choice, START, {})


def test_a_plan_in_words_is_simulated_for_the_learners_own_model(choice: Choice) -> None:
    review = capstone.in_words(choice, "Fully sharded over 16 GPUs, bf16, micro-batch 2 of 1024 tokens.").review()
    assert "gpt2-124m on 16 GPUs, " in review[0]


def test_the_report_has_the_learners_words_as_text(choice: Choice) -> None:
    capstone.keep("<i>mine</i>", (1.0, 0.9, 1.1), result(100.0))
    page = capstone.report("<script>no</script>", [capstone.scoreboard()], [], title="A & B").read_text()
    assert "&lt;script&gt;no" in page
    assert "&lt;i&gt;mine" in page
    assert "A &amp; B" in page
