"""A restored generator draws on as if nothing had happened; a reseeded one what belongs to seed, step and rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from labs.checkpoint.rng import read_rng, reseed, write_rng


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    with torch.random.fork_rng():
        yield


def test_after_write_the_same_numbers_come() -> None:
    torch.manual_seed(3)
    torch.rand(7)
    state = read_rng()
    expected = torch.rand(5), torch.randn(5)
    torch.rand(100)
    write_rng(state)
    assert torch.equal(torch.rand(5), expected[0])
    assert torch.equal(torch.randn(5), expected[1])


def test_a_state_is_tensors_that_a_file_can_hold() -> None:
    assert {name: (t.dtype, t.ndim, t.device.type) for name, t in read_rng().items()} == {
        "cpu": (torch.uint8, 1, "cpu")
    }


def test_a_gpu_does_not_take_a_state_that_has_none_for_it() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"saved on cpu and not for cuda:1; use reseed\(seed, step, rank\)"):
        write_rng({"cpu": torch.zeros_like(before)}, "cuda:1")
    assert torch.equal(torch.get_rng_state(), before)


def test_reseeding_twice_draws_the_same_and_another_seed_step_or_rank_draws_another() -> None:
    def drawn(*key: int) -> float:
        reseed(*key)
        return torch.rand(()).item()

    keys = [(seed, step, rank) for seed in range(3) for step in (0, 1, 1000) for rank in range(4)]
    assert len({drawn(*key) for key in keys}) == len(keys)
    assert [drawn(*key) for key in keys] == [drawn(*key) for key in keys]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_goes_on_too() -> None:
    state = read_rng("cuda")
    expected = torch.rand(5, device="cuda")
    write_rng(state, "cuda")
    assert torch.equal(torch.rand(5, device="cuda"), expected)
