"""Jobs that stop: out of memory, and what a checkpoint has left."""

from __future__ import annotations

import functools
import random

from fsdp_sim.learn.drill.draws import NAMES
from fsdp_sim.learn.drill.question import Choice
from fsdp_sim.learn.drill.template import template
from fsdp_sim.spec import Model, block_shapes, gpu

CURES = {  # a part of the peak, and the change that takes most of it away
    "shards and optimizer states": "train on twice as many GPUs",
    "gathered parameters": "give each block to fully_shard, not the model alone",
    "whole gradients": "reduce the gradients of every micro-batch",
    "activations": "compute the activations of each block again in backward",
    "logits and their gradients": "compute the loss in pieces of a few hundred tokens",
}


@functools.cache
def _too_large() -> tuple[tuple[str, str, int, tuple[float, ...], float, str], ...]:
    """Jobs that do not fit, of which one change alone makes one that does."""
    found = []
    for key in ("llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b", "gpt3-175b"):
        model = Model.preset(key)
        block = sum(rows * columns for _, rows, columns in block_shapes(model))
        root = model.param_count - model.n_layer * block
        for device in ("A100-SXM-40GB", "A100-SXM-80GB", "H100-SXM-80GB"):
            limit = round(0.92 * gpu(device).mem_bytes / 1e9, 1)
            for ranks in (8, 16, 24, 32, 48, 64, 128, 256):
                for tokens in (2048, 4096, 8192, 16384, 32768):
                    for off in range(5):  # what is set badly, if anything; 0 is nothing
                        hidden = 2 * tokens * model.d_model * model.n_layer
                        parts = (
                            16 * model.param_count / ranks,
                            4.0 * model.param_count if off == 1 else 2.0 * (4 * block + 2 * root),
                            4.0 * model.param_count if off == 2 else 0.0,
                            17.0 * hidden if off == 3 else 1.0 * hidden,
                            10.0 * tokens * model.vocab if off == 4 else 10.0 * 512 * model.vocab,
                        )
                        shown = tuple(round(part / 1e9, 1) for part in parts)
                        over = sum(shown) - limit
                        saves = (shown[0] / 2, *shown[1:])
                        enough = [n for n, saved in enumerate(saves) if saved > over]
                        if over > 1 and len(enough) == 1 and saves[enough[0]] > 1.3 * over:
                            cure = tuple(CURES.values())[enough[0]]
                            found.append((NAMES[key], device, ranks, shown, limit, cure))
    return tuple(found)


@template(
    level=2,
    seconds=60,
    section="12.7",
    rule="Out of memory: first ask what the peak is made of; the change must shrink the part that is too large.",
    source="activations: Korthikanti et al. (2022), 34 s b h per layer; memory of GPUs: fsdp_sim/spec/gpus.toml",
)
def change_that_fits(draw: random.Random) -> Choice:
    cases = _too_large()
    cure = draw.choice(sorted({case[-1] for case in cases}))
    name, device, ranks, parts, limit, _ = draw.choice([case for case in cases if case[-1] == cure])
    cures = tuple(CURES.values())
    account = ", ".join(f"{part} {size:g} GB" for part, size in zip(CURES, parts, strict=True))
    over = sum(parts) - limit
    causes = {
        change: f"that takes {size / (1 + (change == cures[0])):.1f} GB away at most, and {over:.1f} GB are too much"
        for change, size in zip(cures, parts, strict=True)
    }
    return Choice(
        text=f"{name} on {ranks} GPUs ({device}, of which a job can use {limit:g} GB) runs out of memory. Counted "
        f"per "
        f"GPU, the peak would be: {account}. Which one change makes it fit?",
        options=tuple(CURES.values()),
        wrong={change: cause for change, cause in causes.items() if change != cure},
        given={"parts": parts, "limit_gb": limit},
        why=f"In all {sum(parts):.1f} GB, {over:.1f} GB too much; only one of the parts can give so much: {cure}.",
    )


@template(
    level=2,
    seconds=60,
    section="09.3",
    rule="Rank r's file holds rows r x c to (r + 1) x c - 1 of each weight, c = ceil(rows / W): lose it, lose them.",
    source="torch.chunk; torch.distributed.checkpoint metadata (offsets and sizes of chunks)",
)
def rows_that_are_lost(draw: random.Random) -> Choice:
    ranks = draw.choice((4, 6, 8))
    rows = draw.choice([n for n in (10, 21, 50, 101, 250, 500, 1003) if n % ranks and -(-n // ranks) * (ranks - 1) < n])
    rank = draw.randrange(1, ranks - 1)
    each, least, extra = -(-rows // ranks), rows // ranks, rows % ranks

    def span(first: int, count: int) -> str:
        return f"rows {first:,} to {min(first + count, rows) - 1:,}"

    right = span(rank * each, each)
    start = rank * least + min(rank, extra)
    wrong = {
        span((rank - 1) * each, each): "ranks are counted from 0",
        span(rank * least, least): "pieces are rounded up, not down",
        span(start, least + (rank < extra)): "the remainder is not spread over the first ranks: pieces are of one size",
        span((rank + 1) * each, each): "that is the next rank's",
    }
    wrong.pop(right, None)
    return Choice(
        text=f"{ranks} ranks save an FSDP2 model with DCP, one file per rank. A weight has {rows:,} rows, counted "
        f"from 0. "
        f"The file of rank {rank} is lost (ranks are counted from 0). Which rows of the weight are gone?",
        options=(right, *wrong),
        wrong=wrong,
        given={"rows": rows, "ranks": ranks, "rank": rank},
        why=f"ceil({rows:,} / {ranks}) = {each} rows each; rank {rank} begins at {rank} x {each} = {rank * each:,}.",
    )


@template(
    level=1,
    seconds=45,
    section="09.6",
    rule="A checkpoint counts if it has all files, DCP's .metadata (written last) and its final name; 'latest' "
    "proves none.",
    source="torch/distributed/checkpoint/filesystem.py (FileSystemWriter.finish)",
)
def checkpoint_that_counts(draw: random.Random) -> Choice:
    ranks, every = draw.choice((8, 16, 64)), draw.choice((100, 250, 500))
    first = every * draw.randrange(4, 20)
    states = ["whole", *(draw.choice(("whole", "no index", "a file less", "not renamed")) for _ in range(2))]
    states.append(draw.choice(("no index", "a file less", "not renamed")))
    contents = {
        "whole": f"{ranks} files, .metadata",
        "no index": f"{ranks} files",
        "a file less": f"{ranks - 1} files, .metadata",
        "not renamed": f"{ranks} files",
    }
    causes = {
        "whole": "it can be loaded, and there is a newer one",
        "no index": "it has no .metadata, which DCP writes last: the save was not finished",
        "a file less": "a rank's file is missing, and with it its rows of every weight",
        "not renamed": "it has not its final name: not all ranks were done",
    }
    steps = [first + n * every for n in range(4)]
    listing = tuple(
        f"step-{step}{'.tmp' if state == 'not renamed' else ''} ({contents[state]})"
        for step, state in zip(steps, states, strict=True)
    )
    newest = max(step for step, state in zip(steps, states, strict=True) if state == "whole")
    return Choice(
        text=f"{ranks} ranks, one file each, with DCP. One script saves straight into step-N; another into step-N.tmp, "
        f"which it renames when all ranks are done; a clean-up has deleted files too. The folder holds: "
        f"{'; '.join(listing)}; and a file `latest` that says step-{steps[3]}. After which step does the job go on?",
        options=tuple(f"after step {step}" for step in steps),
        wrong={f"after step {s}": causes[state] for s, state in zip(steps, states, strict=True) if s != newest},
        given={"listing": listing, "ranks": ranks},
        why=f"step-{newest} is the newest with {ranks} files, .metadata and its final name.",
    )
