"""Where two runs part: found in the order in which numbers come into being, with its rows and whose they are."""

import copy
from dataclasses import replace

import pytest
import torch

from labs.experiments.ladder.divergence import (
    RankRun,
    distance,
    first_divergence,
    largest_error,
    noise_elements,
    ranges,
    unit_of,
)
from labs.model import build
from labs.model.gpt import GPTConfig

NAMES = ("tok_emb.weight", "layers.0.attn.qkv.bias", "layers.1.mlp.fc.weight", "norm.bias")
TOKENS = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))


def tensors(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(6, *(() if "bias" in name else (4,)), generator=random) for name in NAMES}


def healthy(ranks: int = 2, steps: int = 2) -> list[RankRun]:
    run = RankRun([5.0, 4.0][:steps], [2.0, 1.0][:steps], [tensors(s) for s in range(steps)], [])
    run.parameters.extend(tensors(10 + s) for s in range(steps + 1))
    return [replace(copy.deepcopy(run), losses=[loss + rank for loss in run.losses]) for rank in range(ranks)]


def test_equal_runs_do_not_part() -> None:
    assert first_divergence(healthy(), healthy()) is None
    assert first_divergence(healthy(), healthy(), tolerance=None) is None
    assert largest_error(healthy(), healthy(), {}) == 0.0


def test_one_bit_is_found_bit_by_bit_and_is_within_the_tolerance() -> None:
    other = healthy()
    weight = other[1].parameters[1]["layers.1.mlp.fc.weight"]
    weight[3, 2] = torch.nextafter(weight[3, 2], torch.tensor(9.0))

    found = first_divergence(healthy(), other, tolerance=None)

    assert found is not None
    assert str(found).startswith("at step 1, unit layers.1, parameter of mlp.fc.weight, rows 3 to 3, on rank 1 (by")
    assert first_divergence(healthy(), other) is None
    assert 0 < largest_error(healthy(), other, {}) < 1e-6


def test_what_comes_into_being_first_is_named_and_the_rest_is_counted() -> None:
    other = healthy()
    for run in other:
        run.losses[1] += 0.1  # the second step's
        run.parameters[1]["norm.bias"] += 1
        for name in NAMES:
            run.gradients[0][name] *= 2

    found = first_divergence(healthy(), other)

    assert found is not None
    assert (found.step, found.what, found.unit, found.tensor, found.others) == (1, "gradient", "root", "norm.bias", 3)
    assert "and 3 more, in 3 units, on all ranks (by 1e+00)" in str(found)


def test_the_start_comes_before_the_first_step() -> None:
    other = healthy()
    other[0].parameters[0]["tok_emb.weight"][3:] += 1

    found = first_divergence(healthy(), other, n_shards=2)

    assert str(found).startswith(
        "before the first step, unit root, parameter of tok_emb.weight, rows 3 to 5, the shard of rank 1, on rank 0"
    )


@pytest.mark.parametrize(
    ("rows", "n_shards", "ranks", "owners"),
    [
        (slice(0, 3), 2, 2, (0,)),
        (slice(2, 4), 2, 2, ()),  # of both ranks
        (slice(4, 6), 3, 3, (2,)),
        (slice(0, 3), 2, 4, (0, 2)),  # hybrid: two ranks hold each shard
        (slice(0, 3), None, 2, ()),
    ],
)
def test_rows_belong_to_the_ranks_whose_shard_they_are(rows, n_shards, ranks, owners) -> None:
    other = healthy(ranks)
    for run in other:
        run.parameters[1]["tok_emb.weight"][rows] += 1

    found = first_divergence(healthy(ranks), other, n_shards=n_shards)

    assert found is not None
    assert found.rows == (rows.start, rows.stop - 1)
    assert found.shard_of == owners


def test_the_losses_of_as_many_ranks_are_compared_one_by_one_else_their_mean() -> None:
    other = healthy()
    other[0].losses[0] += 0.5
    other[1].losses[0] -= 0.5

    found = first_divergence(healthy(), other)
    one = [replace(healthy(1)[0], losses=[5.5, 4.5])]  # the means of the two ranks' losses

    assert found is not None
    assert (found.what, found.ranks) == ("loss", (0, 1))
    assert first_divergence(one, other) is None


def test_a_missing_gradient_and_a_nan_differ_from_everything() -> None:
    without, spoiled = healthy(), healthy()
    del without[1].gradients[0]["norm.bias"]
    spoiled[1].gradients[0]["norm.bias"][2] = torch.nan

    for other in (without, spoiled):
        found = first_divergence(healthy(), other)
        assert found is not None
        assert (found.what, found.tensor, found.ranks, found.error) == ("gradient", "norm.bias", (1,), float("inf"))


def test_noise_is_compared_bit_by_bit_only() -> None:
    other = healthy()
    for run in other:
        run.parameters[1]["layers.0.attn.qkv.bias"][2:4] += 1
    mask = torch.tensor([0, 0, 1, 1, 0, 0], dtype=torch.bool)

    assert first_divergence(healthy(), other) is not None
    assert first_divergence(healthy(), other, noise={"layers.0.attn.qkv.bias": mask}) is None
    assert largest_error(healthy(), other, {"layers.0.attn.qkv.bias": mask}) == 0.0
    assert first_divergence(healthy(), other, None, {"layers.0.attn.qkv.bias": mask}) is not None


def test_the_distance_is_relative_to_the_whole_tensor() -> None:
    a = torch.tensor([3.0, 4.0, 0.0])

    assert distance(a, a + torch.tensor([0.0, 0.0, 0.05])) == pytest.approx(0.01)
    assert distance(torch.zeros(2), torch.zeros(2)) == 0.0
    assert distance(torch.zeros(2), torch.ones(2)) == float("inf")
    assert distance(a, a[:2]) == float("inf")


@pytest.mark.parametrize("bias", [True, False])
def test_the_noise_of_a_gpt_is_the_biases_of_its_keys(bias: bool) -> None:
    config = GPTConfig(n_layer=2, n_head=2, d_model=16, vocab_size=256, context=16, bias=bias)

    masks = noise_elements(lambda: build(config), TOKENS[:, :-1], TOKENS[:, 1:])

    keys = [f"layers.{i}.attn.qkv.bias[16:32]" for i in range(2)]
    assert [ranges(name, mask) for name, mask in masks.items()] == (keys if bias else [])


def test_ranges_are_slices() -> None:
    assert ranges("b", torch.tensor([1, 1, 0, 1], dtype=torch.bool)) == "b[0:2], b[3:4]"
    assert ranges("w", torch.ones(2, 3, dtype=torch.bool)) == "6 elements of w"


def test_units_are_blocks_and_the_root() -> None:
    assert unit_of("layers.11.mlp.fc.weight") == ("layers.11", "mlp.fc.weight")
    assert unit_of("tok_emb.weight") == ("root", "tok_emb.weight")
