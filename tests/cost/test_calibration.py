"""The fitted numbers are few, explained, and read from the file the fit writes."""

import tomllib
from dataclasses import fields, replace
from importlib.resources import files

from fsdp_sim.cost import Calibration, fitted
from fsdp_sim.validate.leave_out import FREE, OF_STACK


def test_every_number_says_what_it_means() -> None:
    assert all(len(meaning) > 20 or meaning.startswith("the same") for meaning in Calibration.meanings().values())
    assert set(Calibration.meanings()) == {f.name for f in fields(Calibration)}


def test_the_file_holds_exactly_the_numbers_that_are_fitted() -> None:
    table = tomllib.loads(files("fsdp_sim.cost").joinpath("calibration.toml").read_text())

    of_stacks = table.pop("stack")
    assert set(table) == set(FREE)
    assert all(getattr(fitted(), name) == value for name, value in table.items())
    for stack, own in of_stacks.items():
        assert set(own) == set(OF_STACK) | ({"kernel_gap_s"} if stack == "plain" else set())
        assert fitted(stack) == replace(fitted(), **own)


def test_fewer_than_a_dozen_numbers_are_fitted() -> None:
    assert len(FREE) < 12


def test_an_architecture_without_a_number_of_its_own_takes_the_common_one() -> None:
    numbers = Calibration(attention_fraction_ampere=0.5, attention_fraction_other=0.7)

    assert numbers.attention_fraction("Ampere") == 0.5
    assert numbers.attention_fraction("CDNA3") == 0.7


def test_fractions_are_fractions() -> None:
    now = fitted()
    for name in Calibration.meanings():
        if "fraction" in name:
            assert 0 < getattr(now, name) <= 1, name
