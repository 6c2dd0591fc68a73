"""The probe that calibrate trains: what it computes is counted as it is run."""

import pytest

from fsdp_sim.measure.train_probe import ATTENTION_BACKWARD, ProbeShape, amounts_of_probe, time_probe


def test_what_it_computes_follows_from_its_shape():
    rows, seq, width, vocab = shape = ProbeShape(2, 64, 96, 512)
    forward, backward = amounts_of_probe(shape)

    tokens = rows * seq
    assert forward.matmul_flops == 2 * tokens * width * (3 + 1 + 4 + 4) * width + 2 * tokens * width * vocab
    assert backward.matmul_flops == 2 * forward.matmul_flops  # of weights and of inputs
    assert forward.attention_flops == pytest.approx(2 * rows * seq**2 * width, rel=0.05)  # half of the square
    assert backward.attention_flops == pytest.approx(2.5 * ATTENTION_BACKWARD * forward.attention_flops, rel=0.01)
    assert forward.bytes < backward.bytes
    assert 10 < forward.kernels < backward.kernels


def test_twice_the_rows_are_twice_the_work_in_as_many_kernels():
    once, twice = (amounts_of_probe(ProbeShape(rows, 32, 64, 128))[0] for rows in (2, 4))

    assert twice.matmul_flops == 2 * once.matmul_flops
    assert twice.attention_flops == 2 * once.attention_flops
    assert twice.kernels == once.kernels


def test_a_forward_and_a_backward_are_really_run():
    small, large = (time_probe(ProbeShape(rows, 64, 128, 256), budget_s=0.05) for rows in (1, 32))

    assert 0 < small.forward_s < large.forward_s
    assert 0 < small.backward_s < large.backward_s
