"""What lies in the folder that the ranks were lent: whether what was asked to be saved has been saved.

A right result can come from memory. What is on the disk cannot: it is looked for in the files, byte for byte, and
nothing is unpickled.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fsdp_sim.learn.apart import Trial, TrialRun
from fsdp_sim.learn.folders import folders_in
from fsdp_sim.learn.verdict import Finding, Grade

if TYPE_CHECKING:
    from fsdp_sim.learn.judges.ranks import Inputs

MOST_BYTES = 2**26  # of all files together, which is what the ranks may write


@dataclass(frozen=True)
class InFiles:
    """What each rank had to save is in a file of the shared folder.

    Attributes:
        saved: by rank, the tensors, from the inputs of all.
        what: they are: "the rows of the newest whole checkpoint".
    """

    saved: Callable[[Inputs], Sequence[Sequence[torch.Tensor]]]
    what: str

    def look(self, trial: Trial, ran: TrialRun) -> Finding:
        inputs = [cases[0] for cases in trial.each]
        found = list(contents(next(folders_in(inputs))))
        for rank, tensors in enumerate(self.saved(inputs)):
            for tensor in tensors:
                data = tensor.contiguous().numpy().tobytes()
                if not any(data in file for file in found):
                    return Finding(
                        Grade.NOT_YET,
                        f"the result is right, and none of the {len(found)} files in the folder has {self.what} of "
                        f"rank {rank}: it has to come from the disk, so save it there.",
                    )
        return Finding(Grade.OPTIMAL, "")


def contents(folder: str) -> Iterator[bytes]:
    """Of the files below a folder, as others have left it: no link is followed, and nothing is waited for."""
    left = MOST_BYTES
    for place, _, names in os.walk(folder):
        for name in sorted(names):
            try:
                descriptor = os.open(os.path.join(place, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                continue
            with open(descriptor, "rb") as file:
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    yield (data := file.read(left))
                    left -= len(data)
