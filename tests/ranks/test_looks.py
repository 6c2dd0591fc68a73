"""What the kernel says that code took: its tensors, not the room that Python takes for its own objects."""

import pytest

from fsdp_sim.ranks import run
from fsdp_sim.ranks.looks import look, looked_at

ARENA_BYTES = 2**20  # what CPython asks the kernel for at once


def takes(objects_bytes: int, tensor_bytes: int) -> None:
    """Fills what Python has to the brim, whatever that was, and then is looked at while it takes more."""
    import torch

    was, full = look("self"), [[bytes(440)]]
    assert was is not None
    while (now := look("self")) and now.size_bytes < was.size_bytes + ARENA_BYTES:
        full.append([bytes(440) for _ in range(8)])
    full.append([bytes(440) for _ in range(62 * 32)])
    with looked_at():
        held = [bytes(440) for _ in range(objects_bytes // 456)], torch.empty(tensor_bytes, dtype=torch.uint8)
    del full, held


@pytest.mark.parametrize("tensor_bytes", [0, 2**21])
def test_a_process_grows_by_its_tensors_not_by_what_python_holds(tensor_bytes: int) -> None:
    ((before, after),) = run(takes, 1, ARENA_BYTES, tensor_bytes, progress=False).looks
    assert before
    assert after
    assert tensor_bytes <= after.most_bytes - before.size_bytes < tensor_bytes + ARENA_BYTES // 4
