"""`explain_run`: published numbers beside a configuration that says one setting wrongly, and its own answers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fsdp_sim import Cluster, Model, Plan, simulate
from fsdp_sim.explore import Measured, explain_run
from tests.bench.bench_explain import answer, cases
from tests.cli.commands import call

RUN = Model.preset("gpt2-350m"), Cluster("A100-SXM-80GB", gpus=8), Plan(seq_len=1024, micro_batch=8, param_dtype="bf16")
ASKED = ("--model", "gpt2-350m", "--gpu", "A100-SXM-80GB", "--gpus", "8", "--seq-len", "1024", "--micro-batch", "8")
HIDDEN = {("c212", "activation_checkpointing"), ("c212", "wrap"), ("n175", "param_dtype")}
PUBLISHED = [case for case in cases() if (case[0].id, case[1]) in HIDDEN]


@pytest.mark.parametrize(("row", "name", "value"), PUBLISHED, ids=lambda case: getattr(case, "id", str(case)))
def test_the_setting_that_a_published_run_has_otherwise_is_found(row, name, value):
    assert answer(row, name, value)[0] == "found"


@pytest.mark.parametrize("change", [
    {"activation_checkpointing": "full"}, {"attention_impl": "math"}, {"cpu_offload": True},
    {"param_dtype": "fp32"},
])  # fmt: skip
def test_of_a_run_that_differs_in_one_setting_that_one_is_named(change):
    did = simulate(RUN[0], RUN[1], replace(RUN[2], **change))
    found = explain_run(*RUN, Measured(did.step_time_s, did.peak_memory_bytes))
    assert [suspect.name for suspect in found.accounts[0].by] == list(change)
    assert found.is_explained
    assert sum(account.likelihood for account in found.accounts) == pytest.approx(1)


def test_a_run_that_does_as_it_says_is_told_so():
    did = simulate(*RUN)
    first = explain_run(*RUN, Measured(did.step_time_s, did.peak_memory_bytes)).accounts[0]
    assert (first.what, first.worst) == ("what the configuration says", 0)


def test_two_at_once_are_tried_where_none_alone_explains_the_numbers():
    did = simulate(RUN[0], RUN[1], replace(RUN[2], param_dtype="fp32", activation_checkpointing="full"))
    found = explain_run(*RUN, Measured(did.step_time_s, did.peak_memory_bytes))
    assert {suspect.name for suspect in found.accounts[0].by} == {"param_dtype", "activation_checkpointing"}


def test_what_is_known_is_not_doubted():
    did = simulate(RUN[0], RUN[1], replace(RUN[2], activation_checkpointing="full"))
    found = explain_run(*RUN, Measured(did.step_time_s), known=["activation_checkpointing"])
    assert not any(s.name == "activation_checkpointing" for account in found.accounts for s in account.by)
    with pytest.raises(ValueError, match=r"known is 'wrp', which is nothing that is doubted .* did you mean wrap"):
        explain_run(*RUN, Measured(1.0), known=["wrp"])


@pytest.mark.parametrize(("measured", "says"), [
    (Measured(1e-3), r"a step of 1\.00 ms is .* times as fast as .* computes at its peak, .* --tokens-per-s"),
    (Measured(peak_bytes=500 * 2**30), r"a peak of 500 GiB is more than the \d+\.?\d* GiB of"),
])  # fmt: skip
def test_what_no_such_gpu_can_have_done_is_refused(measured, says):
    with pytest.raises(ValueError, match=says):
        explain_run(*RUN, measured)


def test_less_reserved_than_allocated_is_no_run():
    with pytest.raises(ValueError, match=r"70\.0 GiB reserved are less than 75\.0 GiB allocated, a part of them"):
        Measured(peak_bytes=75 * 2**30, reserved_bytes=70 * 2**30)


def test_the_measurement_that_decides_is_the_one_in_which_the_first_two_differ():
    """Time alone does not tell a slow rank from blocks that are computed again; memory does, with both predictions."""
    did = simulate(RUN[0], RUN[1], replace(RUN[2], activation_checkpointing="full"))
    told = json.loads(call("explain", *ASKED, "--step-time-s", str(did.step_time_s), "--json").stdout)
    first, second = told["accounts"][:2]
    assert told["decides"]["apart"] >= 2
    assert first["likelihood"] >= second["likelihood"]
    assert told["decides"]["first"] != told["decides"]["second"]


def test_where_no_number_tells_the_first_two_apart_a_look_does():
    did = simulate(*RUN)
    asked = (*ASKED, "--step-time-s", str(did.step_time_s), "--known", "wrap", "--known", "reshard_after_forward")
    told = json.loads(call("explain", *asked, "--json").stdout)
    assert told["decides"] == {
        "what": "print(next(model.parameters()).dtype)", "first": "what the configuration says",
        "second": "weights, gradients and the optimizer's states are kept in bf16", "apart": None,
    }  # fmt: skip
    assert "What decides between 1 and 2: print(next(model.parameters()).dtype)." in call("explain", *asked).stdout


def test_numbers_that_nothing_explains_are_told_so_and_the_answer_is_no():
    done = call("explain", *ASKED, "--step-time-s", "500", "--peak-gib", "1")
    assert (done.exit_code, "None of them, alone or in pairs, accounts for the numbers" in done.stdout) == (1, True)


@pytest.mark.parametrize(("given", "said"), [
    ((), "nothing was measured; give a step time, tokens a second or a peak of memory"),
    (("--step-time-s", "1", "--tokens-per-s", "9"), "--step-time-s and --tokens-per-s say the same in other words"),
])  # fmt: skip
def test_what_is_asked_wrongly_is_refused(given, said):
    done = call("explain", *ASKED, *given)
    assert (done.exit_code, said in done.stderr) == (2, True), done.stderr
