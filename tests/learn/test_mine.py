"""my_fsdp.py: the reference does what torch's `fully_shard` does; answers go into the file; what is edited stays."""

import ast
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_sim.learn import check, mine
from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.find import load, names
from fsdp_sim.learn.judges.mine import SAVED, WAYS, InTheFile, by_torch
from fsdp_sim.learn.mine import Whose
from fsdp_sim.ranks import run

PARTS = [name for name in mine.chapters() if name in names()]


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "my_fsdp.py"
    monkeypatch.setenv(mine.VARIABLE, str(path))
    return path


def whose(file: Path | str) -> dict[str, Whose]:
    """Of a file, or its text."""
    text = file if isinstance(file, str) else file.read_text()
    return {part.name: part.whose for part in mine.parts(text).values()}


def first_difference(text: str) -> str:
    """What runs on a rank: the file's numbers beside torch's, case by case."""
    warnings.simplefilter("ignore")
    theirs: list[dict[str, Any]] = by_torch(7, (*WAYS, SAVED))
    for case, expected in zip((*WAYS, SAVED), theirs, strict=True):
        found = InTheFile("put_hooks", text)(case, 7)
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            if not torch.equal(tensor, found[name]):
                return f"{case}: {name}"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_reference_trains_as_torch_bit_for_bit(ranks: int) -> None:
    found = run(first_difference, ranks, mine.begun(), progress=False, show_output=False)

    assert list(found) == [""] * ranks


@pytest.mark.slow
def test_what_is_compared_sees_a_gradient_that_is_summed() -> None:
    text = mine.begun().replace("ReduceOp.AVG", "ReduceOp.SUM")

    found = run(first_difference, 2, text, progress=False, show_output=False)

    assert found[0] == "plain: the gradient of blocks.2.down.bias in step 1"


def test_the_file_is_short_and_needs_torch_alone() -> None:
    text = mine.begun()
    packages = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(text))
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import) else
            [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        )
    }  # fmt: skip

    assert text.count("\n") < mine.MAX_LINES
    assert packages - {"torch"} <= sys.stdlib_module_names
    assert set(whose(text).values()) == {Whose.NOT_YET}


@pytest.mark.slow
def test_an_accepted_answer_goes_into_the_file_and_parts_before_it_are_skipped(file: Path) -> None:
    verdict = check("put_hooks", load("put_hooks").reference)

    assert verdict.passed, verdict
    assert f"It now stands in {file.name}, where {len(mine.chapters()) - 1} of" in verdict.message
    found = whose(file)
    assert found.pop("put_hooks") is Whose.YOURS
    skipped = [name for name, is_of in found.items() if is_of is Whose.SKIPPED]
    assert skipped == ["reduce_scatter_mean", "rows_of_each_rank"]
    assert "# 03 rows_of_each_rank: the reference; you skipped this step [" in file.read_text()


@pytest.mark.slow
def test_the_whole_model_may_be_gathered_to_rank_0_alone(file: Path) -> None:
    gathered = Edit(
        {
            "whole = own.new_empty(rows * dist.get_world_size(), *own.shape[1:])": (
                "parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]"
            ),
            "dist.all_gather_into_tensor(whole, padded)": (
                "dist.gather(padded, parts if dist.get_rank() == 0 else None)"
            ),
            "whole[: tensor.size(0)]": "torch.cat(parts)[: tensor.size(0)]",
        },
        of=load("whole_tensors").reference,
    )

    assert check("whole_tensors", gathered).passed
    assert "dist.gather(" in file.read_text()


def test_an_answer_that_is_not_accepted_does_not_go_into_the_file(file: Path) -> None:
    assert not check("put_hooks", load("put_hooks").shortcuts[0].function).passed
    assert not file.exists()


def test_a_learner_s_pass_through_all_parts_makes_the_whole_file_theirs(file: Path) -> None:
    for name in mine.chapters():
        mine.put(name, mine.source_of(load(name).reference, name))

    assert set(whose(file).values()) == {Whose.YOURS}
    assert file.read_text().count("\n") < mine.MAX_LINES
    assert [*whose(file)] == [*mine.chapters()]


def test_a_part_that_was_edited_by_hand_is_never_overwritten(file: Path) -> None:
    mine.put("put_hooks", "def put_hooks(unit):\n    pass")
    file.write_text(
        file.read_text().replace("    pass", "    unit.mine = True").replace("class Unit:", "class Unit:  # !")
    )
    edited = file.read_text()

    said = mine.put("put_hooks", "def put_hooks(unit):\n    return None")

    assert whose(file)["put_hooks"] is Whose.BY_HAND
    assert "keeps the put_hooks that you edited there" in said
    assert file.read_text() == edited

    mine.put("prefetch", "def prefetch(unit):\n    pass")
    assert "unit.mine = True" in file.read_text()
    assert "class Unit:  # !" in file.read_text()
    assert whose(file)["put_hooks"] is Whose.BY_HAND


def test_without_its_digest_an_edited_part_may_be_replaced(file: Path) -> None:
    mine.put("put_hooks", "def put_hooks(unit):\n    pass")
    marker = next(line for line in file.read_text().splitlines() if line.startswith("# 04 put_hooks"))
    file.write_text(file.read_text().replace("    pass", "    unit.x = 1").replace(marker, marker.partition(" [")[0]))

    mine.put("put_hooks", "def put_hooks(unit):\n    return None")

    assert whose(file)["put_hooks"] is Whose.YOURS
    assert "unit.x" not in file.read_text()


def test_a_part_that_needs_something_of_the_notebook_is_not_put_into_the_file(file: Path) -> None:
    said = mine.put("prefetch", "def prefetch(unit):\n    helper(unit)")

    assert "it uses `helper`, which is not there" in said
    assert not file.exists()
    assert "It now stands" in mine.put("prefetch", "def prefetch(unit):\n    return [n for n in unit.order if dist]")


@pytest.mark.slow
def test_an_accepted_answer_without_a_text_is_accepted_and_not_put_into_the_file(file: Path) -> None:
    verdict = check("rows_of_each_rank", lambda rows, ranks: load("rows_of_each_rank").reference(rows, ranks))

    assert verdict.passed
    assert "It is not in my_fsdp.py: the text of your function cannot be found" in verdict.message
    assert not file.exists()


def test_a_file_that_cannot_be_read_is_left_as_it_is(file: Path) -> None:
    file.write_text("def (:\n")

    assert "line 1 is no Python" in mine.put("put_hooks", "def put_hooks(unit):\n    pass")
    assert file.read_text() == "def (:\n"


def test_a_part_whose_line_is_gone_is_not_guessed(file: Path) -> None:
    file.write_text(mine.begun().replace("# 04 put_hooks", "# mine"))
    before = file.read_text()

    assert "has no line `# 04 put_hooks`" in mine.put("put_hooks", "def put_hooks(unit):\n    pass")
    assert file.read_text() == before


def test_an_answer_is_taken_under_the_name_of_its_part() -> None:
    def my_hooks(unit):
        return unit

    assert mine.source_of(my_hooks, "put_hooks").startswith("def put_hooks(unit):")
    with pytest.raises(ValueError, match="beginning with def"):
        mine.source_of(len, "put_hooks")


@pytest.mark.parametrize("what", ["pipe", "device", "huge", "deep", "no text"])
def test_a_file_that_nobody_wrote_is_refused_and_left_as_it_is(file: Path, what: str) -> None:
    made = {
        "pipe": lambda: os.mkfifo(file),
        "device": lambda: file.symlink_to("/dev/zero"),
        "huge": lambda: file.write_text("#" * 1_000_001),
        "deep": lambda: file.write_text("a = " + "-" * 100_000 + "1"),
        "no text": lambda: file.write_bytes(b"# \xff"),
    }
    made[what]()
    with pytest.raises((OSError, ValueError)):
        mine.parts(mine.read(file))
    if file.is_file():
        assert "could not be put into" in mine.put("put_hooks", "def put_hooks(): ...")
