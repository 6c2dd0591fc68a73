"""What rounding and clipping do to a gradient is what the formulas say; the notebook asserts the rest on ranks."""

import math

import pytest
import torch

from labs.experiments import numerics
from labs.experiments.numerics import BF16_RMS, BF16_UNIT
from labs.experiments.numerics.__main__ import main
from labs.experiments.result import ResultRow


def of(rows, quantity):
    return {row.name: row for row in rows if quantity in row.quantity}


# ---- Adding in bf16 -------------------------------------------------------------------------------------------------


def test_one_rounding_to_bf16_is_off_by_what_the_formula_says():
    spread = torch.exp2(40 * torch.rand(200_000, generator=torch.Generator().manual_seed(0)) - 20)
    relative = (spread.bfloat16().float() - spread).abs() / spread
    assert relative.max() <= BF16_UNIT
    per_octave = torch.exp2(torch.rand(200_000, generator=torch.Generator().manual_seed(1)))  # of one size
    error = (per_octave.bfloat16().float() - per_octave).norm() / per_octave.norm()
    assert float(error) == pytest.approx(BF16_RMS, rel=0.01)


@pytest.mark.parametrize("common", [0.3, 1.0])
def test_the_error_of_a_sum_is_predicted_from_two_gradients(common):
    noise = torch.Generator().manual_seed(0)
    gradients = common * torch.randn(50_000, generator=noise) + torch.randn(64, 50_000, generator=noise)
    for ranks in (2, 16, 64):
        measured = numerics.add_in_bf16(gradients[:ranks])
        assert numerics.predict_reduction(gradients[:2], ranks) == pytest.approx(measured, rel=0.2)


def test_it_grows_like_the_root_of_the_number_of_ranks():
    noise = torch.Generator().manual_seed(0)
    two = torch.randn(10_000, generator=noise) + torch.randn(2, 10_000, generator=noise)
    error = [numerics.predict_reduction(two, ranks) for ranks in (256, 1024)]
    assert error[1] / error[0] == pytest.approx(2, rel=0.02)


# ---- fp16 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_tokens", [2**9, 2**19])
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_fp16_loses_the_gradients_that_the_formula_says(n_tokens, scale):
    predicted = numerics.predict_vanished(n_tokens, scale)
    assert predicted == (255 / 256 if (n_tokens, scale) == (2**19, 1.0) else 0)
    assert numerics.vanished(n_tokens, scale) == pytest.approx(predicted, abs=0.01)


# ---- Accumulation, clipping, tokens ---------------------------------------------------------------------------------


@pytest.mark.tail  # the lab's notebook runs it too
def test_ranks_that_clip_by_their_own_shards_keep_too_large_a_norm():
    rows = numerics.clipping(ranks=4, max_norm=0.1)
    clipped = of(rows, "clipped")
    for row in clipped.values():
        assert row.measured == pytest.approx(row.predicted, rel=1e-4)
    assert clipped["FSDP1, torch.nn.utils"].measured == pytest.approx(0.2, rel=1e-4)
    seen = [row for row in rows if "sees it" in row.quantity]
    true = of(rows, "all ranks see it")["FSDP2, DTensors"]
    assert true.measured == pytest.approx(true.predicted, rel=1e-4)
    assert math.hypot(*(row.measured for row in seen)) == pytest.approx(true.measured, rel=1e-4)
    assert all(row.measured < 0.9 * true.measured for row in seen)


# ---- The lab --------------------------------------------------------------------------------------------------------


def test_the_picture_has_each_number():
    rows = [
        ResultRow("reduce_dtype=bf16, 2 ranks", "error of the gradient", 0.002, 0.0025, "relative"),
        ResultRow("reduce_dtype=bf16, 2 gradients added here", "error of the gradient", 0.002, 0.0021, "relative"),
        ResultRow("reduce_dtype=bf16, 64 gradients added here", "error of the gradient", 0.007, 0.007, "relative"),
    ]
    picture = numerics.reduction_picture(rows)
    assert [list(trace.x) for trace in picture.figure.data] == [[2, 64], [2], [2, 64]]
    assert "20%" in picture.finding


@pytest.mark.parametrize(("ranks", "steps"), [(1, 5), (3, 5), (4, 0)])
def test_what_cannot_be_is_refused(ranks, steps, capsys):
    assert main(ranks, steps) == 2
    assert f"ranks={ranks}, steps={steps}" in capsys.readouterr().out
