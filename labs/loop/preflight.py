"""What can be wrong with a run is looked at before any process group exists: one rank says it, and all leave."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from labs.checkpoint import newest_progress
from labs.checkpoint.full import check_weights
from labs.cluster.process_group import RankPlace, find_device
from labs.config import TrainConfig
from labs.data import Corpus, load_corpus
from labs.data.loader import Loader, check_batch
from labs.data.tokenizer import Tokenizer, tokenizer
from labs.loop.metrics import check_tensorboard, is_line, metrics_file
from labs.loop.progress import Progress
from labs.model import ModelConfig
from labs.model.gpt import did_you_mean
from labs.wrapping import check
from labs.wrapping.precision import has_bf16

CHECKPOINTS = "checkpoints"


@dataclasses.dataclass(frozen=True)
class CheckedRun:
    """A TrainConfig found to be possible here.

    Attributes:
        micro_batches: per rank and optimizer step.
        micro_rows: rows in each of them.
    """

    config: TrainConfig
    model: ModelConfig
    tokenizer: Tokenizer
    corpus: Corpus
    place: RankPlace
    device: torch.device
    micro_batches: int
    micro_rows: int

    @property
    def backend(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"

    @property
    def checkpoints(self) -> Path | None:
        return Path(self.config.out, CHECKPOINTS) if self.config.out else None

    def loader(self, split: str = "train") -> Loader:
        tokens = self.corpus.train if split == "train" else self.corpus.val
        return Loader(tokens, self.config.plan.seq_len, self.config.global_batch, self.config.seed)


def prepare(config: TrainConfig, place: RankPlace) -> CheckedRun:
    """Check what is asked for against the model, the data, the checkpoints and the machine.

    Raises:
        ValueError: what is wrong, with the value and what would be right.
        OSError: data or folder cannot be read or written.
    """
    model = config.model_config
    check_batch(config.global_batch, place.world_size)
    micro_batches, micro_rows = _micro_batches(config, place)
    if config.plan.seq_len > model.context:
        raise ValueError(
            f"seq_len={config.plan.seq_len}: {config.model} has a context of {model.context}; "
            f"use seq_len <= {model.context}"
        )
    device = find_device(config.device, place)
    _check_dtypes(config, device)
    if config.plan.compile and config.compile_backend not in (backends := torch._dynamo.list_backends(None)):
        raise ValueError(f"compile_backend={config.compile_backend!r}{did_you_mean(config.compile_backend, backends)}")
    check(config, place, device)
    if config.metrics:
        folder = Path(config.metrics).absolute().parent
        if not folder.is_dir() and not (config.out and folder == Path(config.out).absolute()):
            raise ValueError(f"metrics={config.metrics}: there is no folder {folder}; make it, or name another file")
    words = tokenizer(config.tokenizer)
    if words.vocab_size > model.vocab_size:
        raise ValueError(
            f"tokenizer={config.tokenizer} has {words.vocab_size} tokens and {config.model} only {model.vocab_size}; "
            "use tokenizer=bytes or a model with a larger vocabulary, such as gpt2"
        )
    if config.tensorboard:
        check_tensorboard()
    corpus = load_corpus(config.data, tokenizer=words)
    corpus.check(config.plan.seq_len)
    if config.eval_every:
        corpus.check(config.plan.seq_len, split="val")
    run = CheckedRun(config, model, words, corpus, place, device, micro_batches, micro_rows)
    if place.rank == 0:  # one rank reads files, and says what is wrong
        _check_checkpoints(run)
        _make_out(config)
        _check_metrics(config)
    return run


def _make_out(config: TrainConfig) -> None:
    if config.out:
        try:
            Path(config.out, CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"out={config.out}: the folder cannot be made ({error.strerror}: {error.filename}); name another one"
            ) from error


def _micro_batches(config: TrainConfig, place: RankPlace) -> tuple[int, int]:
    rows = config.global_batch // place.world_size
    micro_rows = config.micro_batch or rows
    if rows % micro_rows:
        fits = [n for n in range(1, rows + 1) if rows % n == 0]
        near = min(fits, key=lambda n: abs(n - micro_rows))
        raise ValueError(
            f"micro_batch={micro_rows} does not divide the {rows} rows that each of {place.world_size} ranks has of "
            f"global_batch={config.global_batch}; use micro_batch={near}"
        )
    return rows // micro_rows, micro_rows


def _check_dtypes(config: TrainConfig, device: torch.device) -> None:
    for key in ("param_dtype", "reduce_dtype"):
        dtype = getattr(config.plan, key)
        if dtype == "fp16" and device.type == "cpu":
            raise ValueError(f"{key}=fp16 is for GPUs (CPUs compute it slowly, if at all); use bf16 or fp32")
        if dtype == "bf16" and not has_bf16(device):
            name = torch.cuda.get_device_name(device)
            raise ValueError(f"{key}=bf16: {name} has no bf16 (compute capability 8.0 has); use fp16 or fp32")


def _check_checkpoints(run: CheckedRun) -> None:
    """The checkpoints in the folder belong to this model and these data, and are wanted."""
    config = run.config
    progress = newest_progress(run.checkpoints, Progress) if run.checkpoints else None
    if progress is None:
        if config.init_from:
            check_weights(Path(config.init_from), run.model)
        if config.resume == "must":
            raise ValueError(f"resume=must, and there is no checkpoint in out={config.out}; use resume=auto to begin")
        return
    if config.resume == "never":
        raise ValueError(
            f"resume=never, and out={config.out} has a checkpoint of step {progress['step']}; choose another folder, "
            "or resume=auto to go on from it"
        )
    # What the numbers in a checkpoint depend on. All else (ranks, api, dtypes, lr) may change from run to run.
    now = identity(run)
    for key in now | progress["identity"]:
        value = progress["identity"].get(key)
        if now.get(key) != value:
            raise ValueError(
                f"{key} is {now.get(key)!r}, and {value!r} in the checkpoint of step {progress['step']} in "
                f"out={config.out}; ask for the same {key}, or choose another folder"
            )


def _check_metrics(config: TrainConfig) -> None:
    """A file that is there holds metrics: it is written anew, or cut to where the run goes on."""
    file = metrics_file(config)
    if file is None:
        return
    if file.is_dir() or file.is_fifo():  # to open a pipe would wait for who reads it
        raise ValueError(f"{file} is a folder or a pipe; name another file with metrics=, or move it")
    if not config.metrics:
        return
    with file.open("ab+") as opened:
        opened.seek(0)
        line = opened.readline()
    if line and not is_line(line):
        raise ValueError(f"metrics={config.metrics} holds something else than metrics; name another file, or move it")


def identity(run: CheckedRun) -> dict[str, object]:
    """What a resumed run must share with the one it goes on with: the model's shape, the tokens and their order."""
    shape = {key: value for key, value in dataclasses.asdict(run.model).items() if key != "dropout"}
    return {
        **shape,
        "tokenizer": run.tokenizer.vocabulary,
        "data": run.corpus.sha256,
        "seq_len": run.config.plan.seq_len,
        "seed": run.config.seed,
    }
