"""Of every rule a proof: on two gloo ranks, with torch's FSDP or by simulation, the trap is one and the fix is none."""

import importlib

import pytest

from fsdp_sim.lint import proof_of, rules

NEEDS = {
    "accelerate": {"reshard-ignored", "other-models-block", "size-wraps-nothing"},
    "lightning_fabric": {"fabric-joint-setup"},
    "transformers": {"fsdp-config-without-fsdp"},
}


@pytest.mark.parametrize("rule", rules())
def test_the_trap_is_one(ranks, rule):
    for package, of in NEEDS.items():
        if rule in of:
            pytest.importorskip(package, reason=f"{package} is not installed")
    for holds, trap, fix in ranks(2, prove, f"fsdp_sim.lint.proofs.{proof_of(rule)[0]}", rule.replace("-", "_")):
        assert holds, f"with the trap: {trap}; without it: {fix}"


def prove(module, name):
    return tuple(getattr(importlib.import_module(module), name)())
