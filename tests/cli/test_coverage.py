"""`fsdp-sim coverage` lists every row, and where it is taught."""

import json

from fsdp_sim.learn.coverage import lessons, masters, rows
from tests.cli.commands import call


def test_every_row_is_listed_with_its_places():
    found = json.loads(call("coverage", "--json").stdout)

    assert [row["name"] for row in found["list"]] == [row.name for row in rows()]
    assert sum(len(row["places"]) for row in found["list"]) == len(lessons(masters()))
    assert found["missing"] == sum(not row["places"] for row in found["list"])


def test_missing_rows_alone_and_the_exit_status_says_that_there_are_some():
    done = call("coverage", "--missing", "--json")
    found = json.loads(done.stdout)

    assert all(row["places"] == [] for row in found["list"])
    assert len(found["list"]) == found["missing"]
    assert done.exit_code == (1 if found["missing"] else 0)


def test_one_kind_of_rows():
    found = json.loads(call("coverage", "--kind", "pitfall", "--json").stdout)

    assert [row["name"] for row in found["list"]] == [f"pitfall {number}" for number in range(1, 55)]


def test_the_table_names_every_row():
    text = call("coverage", "--kind", "pitfall").output

    assert all(f"pitfall {number} " in text for number in range(1, 55))
    assert "of 54 rows have a place" in text
