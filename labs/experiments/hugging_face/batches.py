"""Rows to tensors: the same whole batch on every rank, of which each takes its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from labs.data import local_batch
from labs.experiments.hugging_face.models import tokenizer
from labs.experiments.hugging_face.wikihow import code_and_prose, documentation, read_csv

IGNORED = -100
"""The label of what is no target: transformers' and torch's convention for padding."""

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """What is learned, and from how much.

    Attributes:
        family: ``t5`` writes the headline of a text, ``bert`` tells code from prose.
        rows: of a batch, over all ranks.
        source_len, target_len: tokens of a text and of a headline; longer ones are cut, shorter ones padded.
        csv: a file in WikiHow's format, for ``t5``; None takes the documentation inside torch.distributed.
        pretrained, checkpointing, seed: as in `models.build`.
    """

    family: str = "t5"
    rows: int = 8
    source_len: int = 128
    target_len: int = 48
    csv: str | None = None
    pretrained: str | None = None
    checkpointing: bool = False
    seed: int = 0


def batches(task: Task, steps: int) -> list[Batch]:
    """The whole batches of the first steps: ``input_ids`` and ``attention_mask`` of shape (rows, source), ``labels``.

    T5's labels have shape (rows, target), and its ``decoder_input_ids`` are they, one place to the right; BERT's have
    shape (rows,). All rows have the same length, so that every step allocates the same.

    Raises:
        ValueError: fewer rows than a batch has; a CSV for BERT; as `wikihow.read_csv`.
    """
    words = tokenizer(task.family, pretrained=task.pretrained)
    sources, targets = _texts(task)
    if len(sources) < task.rows:
        raise ValueError(f"rows={task.rows}, but there are only {len(sources)} to read; give fewer rows or more text")
    order = torch.randperm(len(sources), generator=torch.Generator().manual_seed(task.seed)).tolist()
    picked = [[order[(step * task.rows + row) % len(order)] for row in range(task.rows)] for step in range(steps)]
    return [_batch(task, words, [sources[i] for i in rows], [targets[i] for i in rows]) for rows in picked]


def of_rank(batch: Batch, rank: int, ranks: int) -> Batch:
    """A rank's rows."""
    return {name: local_batch(tensor, rank, ranks) for name, tensor in batch.items()}


def n_targets(batch: Batch) -> int:
    """How many predictions count: label tokens that are not padding, or rows."""
    return int((batch["labels"] != IGNORED).sum())


def _texts(task: Task) -> tuple[list[str], list[Any]]:
    if task.family == "bert":
        if task.csv:
            raise ValueError(f"csv={task.csv}: WikiHow is to be summarised, by model=t5")
        pieces = code_and_prose()
        return [text for text, _ in pieces], [label for _, label in pieces]
    articles = read_csv(Path(task.csv)) if task.csv else documentation()
    return [f"summarize: {article.text}" for article in articles], [article.headline for article in articles]


def _batch(task: Task, words: Any, sources: Sequence[str], targets: Sequence[Any]) -> Batch:
    def tokens(texts: Sequence[str], length: int) -> Any:
        return words(list(texts), max_length=length, padding="max_length", truncation=True, return_tensors="pt")

    read = tokens(sources, task.source_len)
    batch = {"input_ids": read["input_ids"], "attention_mask": read["attention_mask"]}
    if task.family == "bert":
        return batch | {"labels": torch.tensor(targets)}
    written = tokens(targets, task.target_len)
    ids = written["input_ids"]
    start = torch.full((len(ids), 1), words.pad_token_id)  # T5 begins with its padding
    return batch | {
        "decoder_input_ids": torch.cat([start, ids[:, :-1]], dim=1),
        "labels": ids.masked_fill(written["attention_mask"] == 0, IGNORED),
    }
