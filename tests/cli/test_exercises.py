"""`fsdp-sim exercises` lists what is there, and counts it."""

import json

from fsdp_sim.learn.find import load_all, names
from tests.cli.commands import call


def test_the_counts_are_those_of_the_files():
    counts = json.loads(call("exercises", "--json").stdout)

    assert counts["exercises"] == len(names()) == len(counts["list"])
    assert counts["mutants"] == sum(len(e.wrong) + len(e.shortcuts) for e in load_all())
    for by in ("by_chapter", "by_kind"):
        for number in ("exercises", "mutants"):
            assert sum(row[number] for row in counts[by].values()) == counts[number]
    assert set(counts["by_chapter"]) == set(names().values())


def test_one_chapter_alone():
    found = json.loads(call("exercises", "--chapter", "bug_hunt", "--json").stdout)

    assert {row["chapter"] for row in found["list"]} == {"bug_hunt"}
    assert set(found["by_chapter"]) == {"bug_hunt"}


def test_the_tables_name_every_exercise_and_the_sums():
    text = call("exercises").output

    assert all(name[:10] in text for name in names())
    assert f"{len(names())}" in text
