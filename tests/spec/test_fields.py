"""Every spec is frozen, checks each value, and answers a misspelt field with the right one."""

import dataclasses
import re

import pytest

from fsdp_sim.spec import Allowed, Cluster, Model, Plan, field, number, one_of, spec, text, whole


@spec
class Oven:
    """A spec with a rule between fields."""

    name: str = field(text())
    heat: float = field(number(above=True), default=1.0)
    trays: int = field(whole(1), default=1)

    def __post_init__(self) -> None:
        if self.trays > 2 and self.heat < 2:
            raise ValueError(f"Oven.trays is {self.trays}; more than 2 need heat >= 2")


def test_a_spec_is_a_frozen_dataclass():
    oven = Oven("a", trays=2)
    assert (oven.name, oven.heat, oven.trays) == ("a", 1.0, 2)
    assert oven == Oven("a", trays=2)
    assert hash(oven) == hash(Oven("a", trays=2))
    assert oven != Oven("a", trays=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        oven.trays = 3


def test_a_misspelt_field_names_the_nearest():
    with pytest.raises(TypeError, match=r"Oven has no field tray \(given tray=2\); did you mean trays\?"):
        Oven("a", tray=2)
    with pytest.raises(TypeError, match="did you mean heat"):
        dataclasses.replace(Oven("a"), heats=2.0)


def test_a_name_near_none_lists_the_fields():
    with pytest.raises(TypeError, match=r"no field xyzzy \(given xyzzy='q'\); it has name, heat, trays"):
        Oven("a", xyzzy="q")


def test_values_are_checked_then_the_rule_between_fields():
    with pytest.raises(ValueError, match=r"Oven.heat is 0.0; it must be a number > 0"):
        Oven("a", heat=0.0)
    with pytest.raises(ValueError, match="more than 2 need heat"):
        Oven("a", trays=3)
    with pytest.raises(ValueError, match=r"Oven.trays is 0; it must be a whole number >= 1"):
        dataclasses.replace(Oven("a"), trays=0)


DIMS = {"name": "m", "n_layer": 2, "d_model": 64, "n_head": 4, "d_ffn": 128, "vocab": 100}
BASE = {Model: DIMS, Cluster: {"gpu": "H100", "gpus": 8}, Plan: {"activation_checkpointing": "full"}}


BEYOND = [
    (Model, "n_layer", 10**6, "Model.n_layer is 1,000,000; the simulator goes up to 10,000"),
    (Model, "d_model", 10**5000, "Model.d_model is a whole number of thousands of digits; the simulator goes up"),
    (Model, "vocab", -1, "Model.vocab is -1; it must be a whole number >= 1"),
    (Model, "name", "x" * 10**6, "Model.name is 'xxx"),
    (Cluster, "gpus", 10**9, "Cluster.gpus is 1,000,000,000; the simulator goes up to 1,048,576"),
    (Cluster, "gpu", "H100" * 10**5, "Cluster.gpu is 'H100H100"),
    (Cluster, "latency_us", float("nan"), "Cluster.latency_us is nan; it must be"),
    (Cluster, "bandwidth_gbps", 1e-320, "Cluster.bandwidth_gbps is 1e-320; the simulator goes from 1e-60 to"),
    (Plan, "grad_accum", 10**9, "Plan.grad_accum is 1,000,000,000; the simulator goes up to 10,000"),
    (Plan, "bucket_cap_mb", 1e308, "Plan.bucket_cap_mb is 1e+308; the simulator goes from 1e-60 to 1e+60"),
    (Plan, "param_dtype", "bf16" * 10**5, "Plan.param_dtype is 'bf16bf16"),
    (Plan, "freeze", ("x",) * 10**5, "Plan.freeze is ('x', 'x'"),
]  # fmt: skip


@pytest.mark.parametrize(("of", "name", "value", "says"), BEYOND, ids=[name for _, name, *_ in BEYOND])
def test_what_is_beyond_anything_is_refused_in_python_too_in_one_sentence(of, name, value, says):
    with pytest.raises(ValueError, match=f"^{re.escape(says)}") as refused:
        of(**BASE[of] | {name: value})
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("allowed", "good", "bad"),
    [
        (one_of(True, False, None), [True, False, None], [1, 0, "true", 1.0]),
        (one_of(None) | whole(1), [None, 1, 7], [True, 0, -1, 1.0, "1"]),
        (number(), [0, 0.5, 3], [-1, True, float("nan"), float("inf"), 10**400, "1", None]),
        (number(above=True), [0.5], [0, 0.0]),
        (text(), ["a"], ["", 1, None]),
    ],
)
def test_what_is_allowed_is_exact_about_types(allowed: Allowed, good, bad):
    assert [allowed.test(v) for v in good] == [True] * len(good)
    assert [allowed.test(v) for v in bad] == [False] * len(bad)
