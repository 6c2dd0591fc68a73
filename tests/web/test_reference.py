"""The reference's sources, as Sphinx is given them: all of it comes from the code."""

from __future__ import annotations

import dataclasses
import pkgutil
import re
from pathlib import Path

import pytest

pytest.importorskip("sphinx", reason="needs Sphinx, MyST-NB and Furo: the extra html")

import fsdp_sim
from fsdp_sim.cli.main import COMMANDS
from fsdp_sim.spec import Gpu, Link, Model, Plan, gpu_names, link_names, stack_names
from web.pages import reference


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    reference.stage(folder)
    return folder


def test_every_field_of_a_plan_has_its_meaning_what_it_takes_and_its_default(sources: Path) -> None:
    text = (sources / "fields.rst").read_text()
    entries = dict(re.findall(r"^\.\. _Plan\.(\w+):\n\n(?:.+\n)+\n\n(.+\n\n.+\n)", text, flags=re.MULTILINE))

    assert set(entries) == {f.name for f in dataclasses.fields(Plan) if not f.name.startswith("_")}
    assert all(re.fullmatch(r"\S.+\n\n\*Takes\* .+; by default ``.+``\. \*Type\* ``.+\n", e) for e in entries.values())
    assert entries["limit_all_gathers"] == (
        "fsdp1, the rate limiter.\n\n"
        "*Takes* True or False; by default ``True``. *Type* ``bool``. *Only with* ``fsdp1``.\n"
    )


@pytest.mark.parametrize("cls", [Model, Gpu, Link], ids=lambda cls: cls.__name__)
def test_the_docstring_of_what_one_simulates_speaks_of_its_fields(cls: type) -> None:
    assert set(reference.meanings(cls)) <= {*vars(cls), *(f.name for f in dataclasses.fields(cls))}


def test_a_field_of_which_the_docstring_says_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "__doc__", Plan.__doc__.replace("        grad_accum:", "        gradients:"))
    with pytest.raises(ValueError, match="Plan says nothing of grad_accum"):
        reference.meanings(Plan)


def test_every_command_is_there_with_its_options(sources: Path) -> None:
    text = (sources / "commands.rst").read_text()
    assert all(f"\nfsdp-sim {name}\n" in text for name in COMMANDS)
    assert "   Usage: fsdp-sim simulate [OPTIONS]" in text
    assert "\nfsdp-sim drill mock\n" in text


def test_every_name_of_the_catalogue_is_there(sources: Path) -> None:
    first = set(re.findall(r"^   \* - (.+)$", (sources / "catalogue.rst").read_text(), flags=re.MULTILINE))
    known = {*Model.presets(), *gpu_names(), *link_names(), *stack_names()}
    assert {reference.literal(name) for name in known} <= first


def test_every_room_that_lists_what_is_its_own_has_a_page() -> None:
    rooms = {module.name for module in pkgutil.iter_modules(fsdp_sim.__path__) if module.ispkg}
    assert set(reference.ROOMS) == rooms - {"cli", "accuracy", "schemas"}


def test_a_paper_keeps_its_links_to_hosts_and_loses_those_to_files(tmp_path: Path) -> None:
    paper = tmp_path / "paper.md"
    paper.write_text("[a](code.py) [b](https://example.org) [c](#here) ![d](picture.svg)")
    assert reference.paper(paper) == "a [b](https://example.org) [c](#here) ![d](picture.svg)"


def test_a_diagram_is_drawn_as_chains_of_its_labels() -> None:
    drawn = reference.drawn("flowchart LR\n  subgraph one [first part]\n  a[model + plan] --> b & c\n  end\n")
    shown = re.sub(r"</?(?:div|span)[^>]*>", "", drawn)
    assert shown == "<p>first part</p><ol><li>model + plan</li><li>b, c</li></ol>"
    with pytest.raises(ValueError, match=r"'a -\.- b'"):
        reference.drawn("flowchart LR\n a -.- b\n")
