"""What `from fsdp_sim import ...` gives: at once, without torch, and whatever else has been imported before."""

import json
import subprocess
import sys

import pytest

import fsdp_sim
from fsdp_sim import Cluster, Plan, Timeline, simulate
from fsdp_sim.engine import straggler

HEAVY = {"torch", "pandas", "plotly", "scipy", "rich", "click", "tqdm"}


def answer_of(code: str) -> object:
    """What a fresh Python prints as JSON."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_the_package_imports_no_room():
    found = "[m for m in sys.modules if m.startswith('fsdp_sim.') or m == 'numpy']"
    code = f"import json, sys, fsdp_sim; print(json.dumps({found}))"

    assert answer_of(code) == []


def test_a_first_simulation_imports_nothing_heavy():
    code = f"""
import json, sys
from fsdp_sim import Cluster, Model, Plan, Timeline, simulate
from fsdp_sim.engine import straggler
sim = simulate("gpt2-124m", Cluster("A100", gpus=8), Plan(micro_batch=8, param_dtype="bf16"))
sim.step_time_s, sim.peak_memory_bytes, sim.explain().sentences, sim.timeline
print(json.dumps(sorted(set(sys.modules) & {HEAVY!r})))
"""
    assert answer_of(code) == []


def test_one_rank_needs_no_numpy():
    code = """
import json, sys
sys.modules["numpy"] = None  # an import of it fails
from fsdp_sim import Cluster, Plan, simulate
plans = [Plan(cpu_offload=True), Plan(shard_size=8, grad_accum=2), Plan(api="fsdp1"), Plan(api="zero2")]
sims = [simulate("gpt2-124m", Cluster("A100", gpus=16), plan) for plan in plans]
asked = [(s.step_time_s, s.exposed_comm_s, s.memory.peak, s.memory.reserved_bytes, s.explain().sentences) for s in sims]
print(json.dumps(min(len(sim.timeline.events) for sim in sims) > 100))
"""
    assert answer_of(code) is True


@pytest.mark.parametrize("name", fsdp_sim.__all__)
def test_every_name_is_there_and_listed(name):
    assert getattr(fsdp_sim, name).__name__ == name
    assert name in dir(fsdp_sim)


@pytest.mark.parametrize("first", ["import fsdp_sim.simulation", "import fsdp_sim.requests"])
def test_simulate_is_the_function_whatever_was_imported_before(first):
    code = f"{first}\nimport json, fsdp_sim\nfrom fsdp_sim import simulate\n"
    code += "print(json.dumps([callable(simulate), callable(fsdp_sim.simulate)]))"

    assert answer_of(code) == [True, True]


@pytest.mark.parametrize(
    ("model", "cluster", "plan", "words"),
    [
        (None, Cluster("H100", gpus=8), None, "model is None; it must be a name of the catalogue"),
        ("gpt2-124m", "H100", None, "cluster is 'H100'; it must be a Cluster"),
        ("gpt2-124m", Cluster("H100", gpus=8), {"micro_batch": 2}, "plan is {'micro_batch': 2}; it must be a Plan"),
    ],
)
def test_an_argument_of_another_kind_is_refused_in_one_sentence(model, cluster, plan, words):
    with pytest.raises(ValueError, match=words):
        simulate(model, cluster, plan)


def test_the_package_lacks_what_it_does_not_have():
    with pytest.raises(AttributeError, match="has no attribute 'simulator'"):
        _ = fsdp_sim.simulator


@pytest.fixture(scope="module")
def sim():
    plan = Plan(micro_batch=1, seq_len=8192, param_dtype="bf16", reduce_dtype="fp32")
    return simulate("llama3-8b", Cluster("H100-SXM-80GB", gpus=64), plan)


def test_a_simulation_has_a_timeline_that_agrees_with_them(sim):
    assert isinstance(sim.timeline, Timeline)
    assert sim.timeline.end_s == pytest.approx(sim.step_time_s - sim.between_steps_s)
    assert f"{sim.timeline.end_s * 1e3:,.0f} ms" in str(sim.explain())


@pytest.mark.parametrize(
    ("skew", "words"),
    [
        (None, "exposed"),
        (lambda seconds, ranks: straggler(seconds, ranks, rank=1, factor=1.5), "keeps 3 ranks waiting"),
    ],
)
def test_a_simulation_shows_itself_as_a_figure(skew, words, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data["text/plain"]))

    simulate("gpt2-124m", Cluster("A100", gpus=4), Plan(), skew=skew).show()

    assert words in shown[0]
