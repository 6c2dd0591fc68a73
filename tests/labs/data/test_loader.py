"""The order of the data: once per epoch, the same for any number of ranks, and read on from any position."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labs.data.loader import Loader, local_batch

loaders = st.builds(
    lambda n, seq_len, rest, batch, seed: Loader(numbers(n * seq_len + 1 + rest % seq_len), seq_len, batch, seed),
    n=st.integers(1, 40),
    seq_len=st.integers(1, 5),
    rest=st.integers(0, 4),
    batch=st.integers(1, 50),
    seed=st.integers(0, 2**32),
)
examples = settings(max_examples=150)


def numbers(n):
    """Tokens that tell where they come from: 0, 1, 2, ..."""
    return np.arange(n, dtype=np.uint16)


def samples_of(loader, batch):
    """Which sequences the rows are; None for a row that only fills up."""
    starts = [None if (y == -1).all() else x[0].item() for x, y in zip(batch.x, batch.y, strict=True)]
    return [None if start is None else start // loader.seq_len for start in starts]


class TestEpoch:
    @given(loader=loaders, epoch=st.integers(0, 3))
    @examples
    def test_has_each_sequence_once(self, loader, epoch):
        position, seen = epoch * len(loader), []
        while loader.epoch(position) == epoch:
            batch = loader.batch(position)
            assert batch.x.shape == (loader.global_batch, loader.seq_len)
            seen += samples_of(loader, batch)
            position = batch.next
        assert position == (epoch + 1) * len(loader)
        assert sorted(sample for sample in seen if sample is not None) == list(range(len(loader)))
        filling = seen.count(None)
        assert filling == -len(loader) % loader.global_batch
        assert None not in seen[: len(loader)]  # they come last

    @given(loader=loaders)
    @examples
    def test_every_token_is_a_target_once_but_the_first_and_what_is_left_over(self, loader):
        position, targets = 0, []
        while loader.epoch(position) == 0:
            batch = loader.batch(position)
            real = batch.y != -1
            assert (batch.y[real] == batch.x[real] + 1).all()
            assert batch.n_tokens == real.sum()
            targets += batch.y[real].tolist()
            position = batch.next
        assert sorted(targets) == list(range(1, len(loader) * loader.seq_len + 1))

    def test_is_the_same_on_every_machine(self):
        loader = Loader(numbers(17), 2, 8, seed=1)
        assert samples_of(loader, loader.batch(0)) == [2, 4, 7, 5, 0, 6, 3, 1]
        assert samples_of(loader, loader.batch(8)) == [5, 6, 3, 0, 7, 2, 1, 4]


class TestPosition:
    @given(loader=loaders, start=st.integers(0, 200), steps=st.integers(1, 6), other_batch=st.integers(1, 50))
    @examples
    def test_reads_on_from_anywhere_also_with_another_batch(self, loader, start, steps, other_batch):
        def rows(loader, position, end):
            found = []
            while position < end:
                batch = loader.batch(position)
                found += [sample for sample in samples_of(loader, batch) if sample is not None]
                position = batch.next
            return found

        position = start
        for _ in range(steps):
            position = loader.next(position)
        resumed = Loader(loader.tokens, loader.seq_len, other_batch, loader.seed)
        read = rows(loader, start, position) + rows(resumed, position, position + 30)
        assert read[:30] == rows(resumed, start, position + 30)[:30]

    @given(loader=loaders, step=st.integers(0, 30))
    @examples
    def test_of_a_step_is_where_a_run_from_0_has_come_to(self, loader, step):
        position = 0
        for _ in range(step):
            position = loader.batch(position).next
        assert loader.position(step) == position


class TestRows:
    @given(loader=loaders, ranks=st.integers(1, 8), position=st.integers(0, 200))
    @examples
    def test_of_the_ranks_are_the_batch(self, loader, ranks, position):
        loader = Loader(loader.tokens, loader.seq_len, loader.global_batch * ranks, loader.seed)
        whole = loader.batch(position)
        parts = [loader.rows(position, rank, ranks) for rank in range(ranks)]
        assert torch.equal(torch.cat([part.x for part in parts]), whole.x)
        assert torch.equal(torch.cat([part.y for part in parts]), whole.y)
        assert {(part.n_tokens, part.next) for part in parts} == {(whole.n_tokens, whole.next)}
        assert torch.equal(parts[-1].x, local_batch(whole.x, ranks - 1, ranks))

    def test_ten_sequences_on_four_ranks_make_equally_many_steps(self):
        loader = Loader(numbers(21), 2, 8, seed=0)
        real = [[(loader.rows(at, rank, 4).y != -1).all(1).tolist() for at in (0, 8)] for rank in range(4)]
        assert loader.next(8) == 10
        assert real == [
            [[True, True], [True, True]],
            [[True, True], [False, False]],
            [[True, True], [False, False]],
            [[True, True], [False, False]],
        ]
        assert loader.rows(8, 3, 4).n_tokens == 4  # of all ranks, so that none divides by 0

    def test_read_only_what_is_the_ranks(self):
        class Counted(np.ndarray):
            read = 0

            def __getitem__(self, key):
                Counted.read += 1
                return super().__getitem__(key)

        loader = Loader(numbers(100).view(Counted), 2, 8, seed=0)
        loader.rows(0, 1, 4)
        assert Counted.read == 2

    def test_of_a_memory_map_read_a_few_pages_of_it(self, tmp_path):
        path = tmp_path / "sparse"
        with path.open("wb") as file:
            file.truncate(2 * 10**10)  # 10^10 tokens, and no disk is used: a file that is one hole
        loader = Loader(np.memmap(path, dtype=np.uint16, mode="r"), 10**5, 4, seed=0)
        assert len(loader) == 99_999
        batch = loader.rows(5 * 99_999 + 17, 1, 4)
        assert batch.x.shape == (1, 10**5)
        assert path.stat().st_blocks == 0


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ((numbers(4), 4, 1, 0), "4 tokens are too few for seq_len=4: a sequence with its targets takes 5"),
            ((numbers(4), 0, 1, 0), "seq_len=0: it is a whole number, at least 1"),
            ((numbers(4), 1, 0, 0), "global_batch=0: it is a whole number, at least 1"),
            ((numbers(4), 1, 1, -1), "seed=-1: it is a whole number, at least 0"),
        ],
    )
    def test_a_loader_that_cannot_be(self, arguments, says):
        with pytest.raises(ValueError, match=says):
            Loader(*arguments)

    def test_positions_and_steps_count_from_0(self):
        loader = Loader(numbers(9), 2, 2, 0)
        for call, name in ((loader.batch, "position"), (loader.epoch, "position"), (loader.position, "step")):
            with pytest.raises(ValueError, match=f"{name}=-1: it counts from 0"):
                call(-1)

    @pytest.mark.parametrize(
        ("batch", "world_size", "says"),
        [
            (8, 3, "a batch of 8 rows does not divide into 3 ranks; use a batch of 6 or 9, or 2 or 4 ranks"),
            (2, 4, "a batch of 2 rows does not divide into 4 ranks; use a batch of 4, or 1 or 2 ranks"),
            (0, 2, "a batch of 0 rows does not divide into 2 ranks; use a batch of 2"),
            (8, 0, "world_size=0"),
        ],
    )
    def test_batch_that_does_not_divide(self, batch, world_size, says):
        with pytest.raises(ValueError, match=says):
            local_batch(torch.zeros(batch, 1), 0, world_size)

    def test_no_such_rank(self):
        with pytest.raises(ValueError, match="rank=2: with world_size=2 ranks are 0 to 1"):
            local_batch(torch.zeros(4, 1), 2, 2)
