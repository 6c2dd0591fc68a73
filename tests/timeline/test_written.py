"""A file that cannot be written whole leaves the one before as it was."""

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_sim.spec import Cluster
from fsdp_sim.timeline import Event, Header, Lane, Op, Timeline, write_chrome, written
from fsdp_sim.viz import save_html, timeline

STEP = Timeline(
    Header(producer="test", clock="measured", world_size=1),
    [Event(seq=n, rank=0, op=Op.FWD, lane=Lane.COMPUTE, unit=f"u{n}", start_s=n, end_s=n + 0.5) for n in range(99)],
)


@pytest.mark.parametrize(
    "write",
    [
        STEP.to_jsonl,
        lambda path: write_chrome(STEP, path),
        lambda path: save_html(path, timeline(STEP), title="page"),
        lambda path: Cluster("H100-SXM-80GB", 8).to_file(path),
    ],
    ids=["jsonl", "chrome", "page", "cluster"],
)
def test_where_there_is_no_room_the_file_before_stays_whole(write: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match=r"file cannot be written \(File too large\); what was there is unchanged"):
            write(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_stays_a_link_and_a_file_keeps_who_may_read_it(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("before")
    path.chmod(0o640)
    link.symlink_to(path)
    with written(link) as new:
        new.write_text("after")
    assert (path.read_text(), link.is_symlink(), path.stat().st_mode & 0o777) == ("after", True, 0o640)


def test_what_is_no_file_is_written_as_it_is() -> None:
    with written("/dev/null") as new:
        new.write_text("gone")
    assert Path("/dev/null").is_char_device()
