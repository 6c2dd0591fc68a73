"""`fsdp-sim exercises` lists what is there, and counts it."""

import json

from fsdp_sim.cli.main import COMMANDS
from fsdp_sim.learn.find import load_all, names
from tests.cli.commands import call, examples


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


def test_an_unknown_chapter_is_an_error():
    done = call("exercises", "--chapter", "cooking")

    assert done.exit_code == 2
    assert "cooking" in done.output


def test_the_examples_of_its_help_run():
    assert len(examples("exercises")) == 3
    assert all(call(*arguments).exit_code == 0 for arguments in examples("exercises"))


def test_it_is_on_the_list_of_commands():
    assert COMMANDS["exercises"].target == "fsdp_sim.cli.exercises:exercises"
