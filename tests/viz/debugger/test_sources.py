"""``file:line`` becomes a place with its function and a listing, whatever became of the file."""

import linecache
from pathlib import Path

import pytest

from fsdp_sim.timeline.call_sites import remember
from fsdp_sim.viz.debugger.sources import listing, place, places
from tests.timeline.strategies import op


def recorded(file: Path) -> None:
    """As if a run of this process had been there."""
    remember([op(0, 1, source=f"{file}:1")])


def test_a_line_has_its_file_function_and_text(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("class Net:\n    def forward(self, x):\n        return x + 1\n")
    recorded(file)
    found = place(f"{file}:3")
    assert found is not None
    assert (found.label, found.text, found.in_mini) == ("train.py:3, in Net.forward", "return x + 1", False)


def test_a_line_that_ends_in_a_bracket_is_told_with_the_next(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("with (\n    span() as s,\n    other(),\n):\n    pass\n")
    recorded(file)
    found = place(f"{file}:1")
    assert found is not None
    assert found.text == "with (span() as s,"


def test_a_line_of_the_mini_is_found_wherever_the_package_is() -> None:
    found = place("fsdp_sim/mini/group.py:1")
    assert found is not None
    assert found.in_mini
    assert found.text.startswith('"""What happens to the parameters')


def test_as_torchs_profiler_writes_it() -> None:
    found = place("/home/someone/train.py(12): step")
    assert found is not None
    assert (found.title, found.line, found.lines) == ("train.py", 12, ())


@pytest.mark.parametrize(
    "source", ["", "nowhere", ":3", "file.py:", "file.py:0", "file.py:-1", "file.py:x", "a" * 9999]
)
def test_what_names_no_line_is_no_place(source: str) -> None:
    assert place(source) is None


@pytest.mark.parametrize("name", ["settings.py", "ipykernel_1/settings.py", "ipykernel_1/456/../settings.py"])
def test_a_strangers_timeline_makes_no_file_of_this_machine_be_quoted(tmp_path: Path, name: str) -> None:
    secret = tmp_path / name
    (secret.parent if ".." not in name else tmp_path / "ipykernel_1" / "456").mkdir(parents=True, exist_ok=True)
    secret.write_text("PASSWORD = 'swordfish'\n")
    for event in (
        op(0, 1, source=f"{secret}:1"),
        op(0, 1, source="fsdp_sim/mini/../spec/model.py:1", stack=(f"{secret}(1): f",)),
    ):
        for found in places(event):
            assert (found.lines, found.text, listing(found)) == ((), "", "")
            assert found.title


def test_only_python_is_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the password\n")
    recorded(secret)
    found = place(f"{secret}:1")
    assert found is not None
    assert (found.lines, listing(found)) == ((), "")


def test_the_listing_marks_the_line_and_escapes_all(tmp_path: Path) -> None:
    file = tmp_path / "evil.py"
    file.write_text("\n".join(f"x{i} = '<script>alert({i})</script>'" for i in range(1, 40)))
    recorded(file)
    found = place(f"{file}:20")
    assert found is not None
    html = listing(found)
    assert "<script>" not in html
    (marked,) = [line for line in html.split("<span") if 'aria-current="true"' in line]
    assert "▶  20" in marked
    assert "alert(14)" not in html
    assert all(f"alert({i})" in html for i in range(15, 25))


def test_a_line_beyond_the_end_of_a_file_that_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "short.py"
    file.write_text("x = 1\n")
    recorded(file)
    found = place(f"{file}:500")
    assert found is not None
    assert (found.text, listing(found)) == ("", "")


def test_what_is_no_python_is_listed_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / "cell.py"
    file.write_text("%%time\ntrain(\n\x00 <b>\n")
    recorded(file)
    found = place(f"{file}:2")
    assert found is not None
    assert found.function == ""
    assert "train" in listing(found)


def test_a_cell_is_called_a_cell_and_its_text_comes_from_linecache() -> None:
    name = "/tmp/ipykernel_123/456.py"
    linecache.cache[name] = (12, None, ["def train():\n", "    loss.backward()\n"], name)
    try:
        found = place(f"{name}:2")
    finally:
        del linecache.cache[name]
    assert found is not None
    assert (found.label, found.text) == ("a notebook cell:2, in train", "loss.backward()")
