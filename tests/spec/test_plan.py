"""A plan has torch's names and defaults, and refuses what it does not mean."""

import pytest

from fsdp_sim.spec import Plan


def test_defaults_are_those_of_fully_shard():
    plan = Plan()
    assert plan.api == "fsdp2"
    assert plan.reshard_after_forward is None
    assert plan.forward_prefetch is None
    assert plan.backward_prefetch is None
    assert plan.grad_accum == 1
    assert plan.requires_gradient_sync is True


def test_a_misspelt_field_is_a_type_error_with_the_right_name():
    with pytest.raises(TypeError, match=r"forward_prefech=1\); did you mean forward_prefetch\?"):
        Plan(forward_prefech=1)


@pytest.mark.parametrize(
    ("field", "value", "right"),
    [
        ("api", "fsdp3", "'fsdp2'"),
        ("reshard_after_forward", 1, "True, False or None"),
        ("forward_prefetch", 0, r"None \(implicit prefetch\) or a whole number >= 1 \(depth"),
        ("forward_prefetch", True, "whole number >= 1"),
        ("backward_prefetch", "BACKWARD_PRE", "whole number >= 1"),
        ("grad_accum", 0, "whole number >= 1"),
        ("requires_gradient_sync", False, "True or 'last'"),
        ("micro_batch", -1, "whole number >= 1"),
        ("seq_len", 1.5, "whole number >= 1"),
    ],
)
def test_a_wrong_value_names_field_value_and_what_is_right(field, value, right):
    with pytest.raises(ValueError, match=rf"Plan\.{field} is {value!r}; it must be .*{right}"):
        Plan(**{field: value})
