"""Convert checkpoints: full and sharded, and weights to and from other programs.

    python -m labs.checkpoint.convert SOURCE TARGET --to=...

    runs/a/checkpoints/step-20 weights --to=full    whole tensors, as safetensors
    runs/a/checkpoints/step-20 mine --to=hf         for transformers: from_pretrained("mine")
    gpt2-medium/ weights --to=full                  from there; labs.train --init_from=weights
    theirs.pt weights --to=full                     a torch.save file, of DDP or anything else
    theirs.pt mine --to=hf --model=gpt2-medium

A run goes on from a converted checkpoint when it lies in its folder, as runs/b/checkpoints/step-20. Every api reads
what any other wrote: from DDP to FSDP or from FSDP1 to FSDP2 nothing has to be converted.
Exit status: 0 converted; 2 asked wrongly, or what is there cannot be converted; 1 it could not be written.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from labs.checkpoint.conversion import Target, convert
from labs.model import model_config


@dataclass(frozen=True)
class ConvertOptions:
    """What to convert, to what."""

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SOURCE")]
    """A checkpoint (step-N), a Hugging Face GPT-2's or Llama's folder, or a file of weights (.pt, .safetensors)."""
    target: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="TARGET")]
    """A folder that is not there yet."""
    to: Target
    """full: whole tensors in safetensors files. sharded: as a run writes by default. hf: for transformers."""
    model: str | None = None
    """The preset of weights that do not come from a run's checkpoint (hf)."""
    n_layer: int | None = None
    """Another number of layers than the preset's."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    asked = tyro.cli(
        ConvertOptions,
        prog="python -m labs.checkpoint.convert",
        description=__doc__,
        args=arguments,
        use_underscores=True,
    )
    try:
        model = None
        if asked.model:
            model = model_config(asked.model, **({"n_layer": asked.n_layer} if asked.n_layer else {}))
        convert(asked.source, asked.target, asked.to, model=model)
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        print(f"labs.checkpoint.convert: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"labs.checkpoint.convert: {asked.target} could not be written: {error}", file=sys.stderr)
        return 1
    print(f"{asked.target} is {asked.source} as {asked.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
