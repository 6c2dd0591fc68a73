"""`CachingAllocator` against torch's own: recordings of torch 2.13's compiled allocator, of every byte it counts."""

from pathlib import Path

import pytest

from fsdp_sim.engine.caching_allocator import CachingAllocator, OutOfMemoryError

RECORDED = sorted(Path(__file__).with_name("torch_allocator").glob("*.txt"))
MIB = 2**20


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_every_count_is_torch_s(path):
    """Sizes of all kinds on two streams, record_stream, too little memory: so retries, and memory that runs out."""
    (_, limit, _, expandable), *commands = map(str.split, path.read_text().splitlines())
    allocator = CachingAllocator(int(limit), expandable_segments=expandable == "True")
    blocks, used_elsewhere, launched, finished, failures = {}, set(), 0, 0, 0
    for number, (command, which, *rest) in enumerate(commands):
        match command:
            case "a":
                try:
                    blocks[which] = allocator.allocate(int(rest[0]), rest[1], finished)
                except OutOfMemoryError:
                    failures += 1
            case "r":
                used_elsewhere.add(which)
            case "f" if which in blocks:
                allocator.free(blocks.pop(which), launched if which in used_elsewhere else None)
            case "w":
                launched += 1
            case "d":
                finished = launched
        if "->" in rest:
            counted = (allocator.allocated_bytes, allocator.active_bytes, allocator.reserved_bytes, allocator.retries)
            assert [*map(str, counted), str(failures)] == rest[rest.index("->") + 1 :], (number, command, which, rest)


def test_there_are_recordings_of_all_that_can_happen():
    last = {path.stem: path.read_text().split()[-2:] for path in RECORDED}
    assert {path.split("-")[0] for path in last} == {"plain", "expandable"}
    assert any(int(retries) > 1 for retries, _ in last.values())
    assert any(int(failures) > 1 for _, failures in last.values())
