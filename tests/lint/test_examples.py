"""Each rule finds its trap in the example that has it, and no rule anything in the example that looks like it."""

import pytest

from fsdp_sim.lint import PLACES, Costs, Finding, examples, lint, proof_of, rules
from fsdp_sim.lint.config import DETECTORS as OF_CONFIGS
from fsdp_sim.lint.module import DETECTORS as OF_MODULES
from fsdp_sim.lint.module import Model
from fsdp_sim.lint.script import DETECTORS as OF_SCRIPTS

DETECTORS = {"script": OF_SCRIPTS, "config": OF_CONFIGS, "module": OF_MODULES}
ON_H100 = {"gpu": "H100"}
RUNS = {
    "does-not-fit": ON_H100 | {"model": "llama3-70b"},
    "offload-though-it-fits": ON_H100 | {"model": "llama3-8b"},
    "other-models-block": {"model": "llama3-8b"},
}
"""Of which run a configuration is, where the rule has to know."""
FSDP1 = {"frozen-in-flat-unit", "integer-parameters"}


@pytest.mark.parametrize("place", PLACES)
def test_each_rule_has_a_detector_examples_and_a_proof_and_nothing_else_has(place):
    ids = {id for id, rule in rules().items() if place in rule.where}

    assert set(DETECTORS[place]) == ids
    assert set(examples(place)) == ids
    assert all(proof_of(id) for id in ids)


@pytest.mark.parametrize("rule", examples("script"))
def test_a_script_with_the_trap_and_one_that_looks_like_it(rule, tmp_path):
    trap, clean = (found(tmp_path, text) for text in examples("script")[rule][:2])

    assert trap == {rule}
    assert clean == set()


ARGUMENTS = """
from transformers import TrainingArguments
args = TrainingArguments({first}fsdp_config={{"version": 1, "backward_prefetch": "BACKWARD_PRE"}})
"""


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        (ARGUMENTS.format(first=""), {"fsdp-config-without-fsdp"}),
        (ARGUMENTS.format(first="fsdp='full_shard', "), set()),
        (ARGUMENTS.format(first="fsdp=flags.fsdp, "), set()),
        (ARGUMENTS.format(first="").replace("})", "})  # fsdp-sim: ignore"), set()),
        (ARGUMENTS.format(first="").replace("transformers", "mine"), set()),
    ],
)
def test_what_a_script_gives_a_trainer_is_looked_at_where_it_says_its_values(text, rules, tmp_path):
    assert found(tmp_path, text) == rules


@pytest.mark.parametrize("rule", examples("config"))
def test_a_configuration_with_the_trap_and_one_that_looks_like_it(rule, tmp_path):
    example = examples("config")[rule]
    costs = Costs(RUNS.get(rule, {}))
    trap, clean = (found(tmp_path, text, example.suffix, costs) for text in example[:2])

    assert trap == {rule}
    assert clean == set()


@pytest.fixture(scope="module")
def facts_of():
    torch = pytest.importorskip("torch")
    from fsdp_sim.lint.made_on_meta import facts

    def look(text):
        names = {}
        exec(compile(text, "model.py", "exec"), names)
        with torch.device("meta"):
            return facts(names["Model"]())

    return look


@pytest.mark.parametrize("rule", examples("module"))
def test_a_model_with_the_trap_and_one_that_looks_like_it(rule, facts_of):
    api = "fsdp1" if rule in FSDP1 else "fsdp2"
    trap, clean = (
        {id for id, detect in OF_MODULES.items() if list(detect(Model(facts_of(text), 8, api)))}
        for text in examples("module")[rule][:2]
    )

    assert rule in trap
    assert rule not in clean


def found(folder, text, suffix=".py", costs=None):
    path = folder / f"file{suffix}"
    path.write_text(text)
    [report] = lint(str(path), costs=costs)
    assert all(isinstance(finding, Finding) for finding in report.findings)
    return {finding.rule for finding in report.findings}
