"""In which order the text is read: every sequence once per epoch, the same order for any number of ranks.

The only state is a position: how many sequences were taken since the beginning. A run that is resumed at a position
reads on as if it had not stopped, also with other ranks, another micro-batch or another global batch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from labs.model.gpt import IGNORED


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows to train on.

    Attributes:
        x, y: int64 of shape (rows, seq_len); y is x one token later. Rows that fill up the last batch of an epoch have
            y = -1 everywhere, which the models' loss leaves out.
        n_tokens: targets in the whole global batch, those of filling rows not counted: what the sum of all ranks'
            losses is divided by.
        next: the position after this batch.
    """

    x: torch.Tensor
    y: torch.Tensor
    n_tokens: int
    next: int

    def to(self, device: torch.device) -> Batch:
        """The same rows on a device; on their way to a GPU the CPU does not wait for them."""
        if device.type == "cpu":
            return self
        x, y = (rows.pin_memory().to(device, non_blocking=True) for rows in (self.x, self.y))
        return Batch(x, y, self.n_tokens, self.next)


@dataclass(frozen=True, eq=False)
class Loader:
    """Tokens cut into sequences that do not overlap, permuted anew in each epoch.

    Sequence i is the tokens i * seq_len to (i + 1) * seq_len, the last of them a target only; what is left over at
    the end is not used. An epoch is a permutation of all sequences that belongs to (seed, epoch). Its last batch is
    filled up to global_batch rows, so that all ranks do equally many steps; the position does not count such rows.

    Memory: the tokens stay in their file, and only the rows of a batch are copied. A permutation takes 4 bytes per
    sequence (8 from 2^32 sequences on), about 24 while it is made, and the last two are kept in each process: 10^10
    tokens in sequences of 1,024 are 10^7 sequences, so 40 MB each.

    Attributes:
        tokens: any unsigned type, shape (tokens,), best a memory map.
        global_batch: rows per optimizer step, over all ranks and micro-batches.

    Raises:
        ValueError: a number that is too small, or fewer than seq_len + 1 tokens.
    """

    tokens: np.ndarray
    seq_len: int
    global_batch: int
    seed: int = 0

    def __post_init__(self) -> None:
        for field, least in (("seq_len", 1), ("global_batch", 1), ("seed", 0)):
            if getattr(self, field) < least:
                raise ValueError(f"{field}={getattr(self, field)}: it is a whole number, at least {least}")
        if len(self) < 1:
            raise ValueError(
                f"{len(self.tokens)} tokens are too few for seq_len={self.seq_len}: a sequence with its targets takes "
                f"{self.seq_len + 1}"
            )

    def __len__(self) -> int:
        """Sequences in an epoch."""
        return (len(self.tokens) - 1) // self.seq_len

    def epoch(self, position: int) -> int:
        """The epoch, from 0, in which the batch at a position lies."""
        return _whole("position", position) // len(self)

    def position(self, step: int) -> int:
        """Where the batch of a step begins, in a run that began at 0 and kept its global batch."""
        epoch, in_epoch = divmod(_whole("step", step), -(-len(self) // self.global_batch))
        return epoch * len(self) + in_epoch * self.global_batch

    def next(self, position: int) -> int:
        """The position after the batch at ``position``: a batch ends with its epoch at the latest."""
        return min(position + self.global_batch, (self.epoch(position) + 1) * len(self))

    def batch(self, position: int) -> Batch:
        """The whole batch that begins at a position: x and y of shape (global_batch, seq_len)."""
        return self.rows(position, rank=0, ranks=1)

    def rows(self, position: int, rank: int, ranks: int) -> Batch:
        """One rank's rows of the batch at a position: x and y of shape (global_batch / ranks, seq_len).

        The same rows as `local_batch` takes from the whole batch, without reading the others.

        Raises:
            ValueError: global_batch does not divide into the ranks, no such rank, or a position below 0.
        """
        mine = rows_of(rank, ranks, self.global_batch)
        epoch, first = divmod(_whole("position", position), len(self))
        order = _permutation(len(self), self.seed, epoch)
        after = self.next(position)
        samples = order[first : first + after - position][mine].astype(np.int64)  # (real rows of this rank,)
        n_rows = mine.stop - mine.start
        both = np.zeros((n_rows, self.seq_len + 1), dtype=np.int64)
        for row, sample in zip(both, samples, strict=False):
            row[:] = self.tokens[sample * self.seq_len : (sample + 1) * self.seq_len + 1]
        x, y = torch.from_numpy(both[:, :-1].copy()), torch.from_numpy(both[:, 1:].copy())
        y[len(samples) :] = IGNORED
        return Batch(x, y, n_tokens=(after - position) * self.seq_len, next=after)


@functools.lru_cache(maxsize=2)  # of the training text and of the validation text
def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """The numbers 0 to n - 1 in the order of an epoch."""
    # The raw output of a bit generator is the part of numpy.random that is promised to stay the same.
    keys = np.random.PCG64((seed, epoch)).random_raw(n)
    order = np.argsort(keys, kind="stable").astype(np.min_scalar_type(n))
    order.setflags(write=False)
    return order


def _whole(name: str, value: int) -> int:
    if value < 0:
        raise ValueError(f"{name}={value}: it counts from 0")
    return value


def check_batch(batch_size: int, world_size: int) -> None:
    """Raise ValueError, naming the nearest right values, unless every rank gets equally many rows, at least 1."""
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: there is at least 1 rank")
    if batch_size < 1 or batch_size % world_size:
        below, above = batch_size // world_size * world_size, (batch_size // world_size + 1) * world_size
        batches = " or ".join(str(n) for n in (below, above) if n >= world_size)
        ranks = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
        near = sorted(sorted(ranks, key=lambda n: abs(n - world_size))[:2])
        also = f", or {' or '.join(map(str, near))} ranks" if near else ""
        raise ValueError(
            f"a batch of {batch_size} rows does not divide into {world_size} ranks; use a batch of {batches}{also}"
        )


def local_batch(x: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """The rows of one rank: (batch, ...) to (batch / world_size, ...); the ranks' rows in rank order are the batch.

    Raises:
        ValueError: the batch does not divide, or there is no such rank.
    """
    return x[rows_of(rank, world_size, len(x))]


def rows_of(rank: int, world_size: int, batch_size: int) -> slice:
    """Which rows of a batch are a rank's: equally many each, in the order of ranks.

    Raises:
        ValueError: the batch does not divide, or there is no such rank.
    """
    check_batch(batch_size, world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank}: with world_size={world_size} ranks are 0 to {world_size - 1}")
    rows = batch_size // world_size
    return slice(rank * rows, (rank + 1) * rows)
