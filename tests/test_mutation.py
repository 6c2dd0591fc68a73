"""The faults of `make mutation` can still be seeded: each edits one place of the code as it is."""

from pathlib import Path

import pytest

from tests.mutation import FAULTS, ROOT, Fault, applied


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_seeded_and_its_tests_are_there(fault: Fault, tmp_path: Path) -> None:
    copy = tmp_path / fault.file
    copy.parent.mkdir(parents=True)
    copy.write_text((ROOT / fault.file).read_text())

    applied(fault, tmp_path)

    assert copy.read_text() != (ROOT / fault.file).read_text()
    assert all((ROOT / word).exists() for word in fault.tests.split() if word.startswith("tests/"))


def test_a_text_that_is_not_there_exactly_once_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    with pytest.raises(ValueError, match=r"'x = 1' is in a\.py 2 times, not once"):
        applied(Fault("twice", "a.py", "x = 1", "x = 2", ""), tmp_path)
