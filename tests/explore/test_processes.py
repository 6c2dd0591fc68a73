"""Processes that simulate beside each other: what they find comes in order, and what befalls them is told."""

import os

import pytest

from fsdp_sim.explore import Processes


@pytest.fixture(scope="module", params=[1, 3])
def processes(request):
    with Processes(request.param) as entered:
        yield entered


def test_each_takes_its_turn_and_the_results_are_in_order(processes):
    assert processes.map(abs, range(-100, 0)) == list(range(100, 0, -1))
    assert processes.map(abs, [-1]) == [1]
    assert processes.map(abs, []) == []


def test_one_is_read_while_the_others_fill_their_pipes(processes):
    given = [(200_000,)] * processes.count
    for stream in reversed(processes.streams(range, given)):
        assert list(stream) == list(range(200_000))


def test_what_was_left_unread_is_not_taken_for_what_comes_next(processes):
    first, *_ = processes.streams(range, [(50,)] * processes.count)
    assert next(first) == 0

    assert processes.map(str, [1, 2, 3]) == ["1", "2", "3"]


def test_an_exception_is_that_of_the_function_and_the_processes_go_on(processes):
    with pytest.raises(ValueError, match="invalid literal"):
        processes.map(int, ["1", "one"])

    assert processes.map(int, ["1"]) == [1]


def test_a_process_that_dies_is_told_of():
    with Processes(2) as processes, pytest.raises(ChildProcessError, match="has ended"):
        list(processes.streams(os._exit, [(1,), (1,)])[0])
