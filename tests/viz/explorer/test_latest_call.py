"""Calls that come while one is running are coalesced, and the last one always lands."""

import threading

import pytest

from fsdp_sim.viz.explorer.latest_call import LatestCall


def test_of_those_that_come_meanwhile_only_the_last_is_served() -> None:
    begun, go_on, served = threading.Event(), threading.Event(), []

    def serve(call: int) -> None:
        served.append(call)
        begun.set()
        assert go_on.wait(10)

    latest: LatestCall[int] = LatestCall(serve)
    thread = threading.Thread(target=latest, args=(0,))
    thread.start()
    assert begun.wait(10)
    for call in range(1, 6):
        latest(call)  # returns at once
    assert latest.waiting
    go_on.set()
    thread.join(10)
    assert served == [0, 5]


def test_from_many_threads_the_last_call_is_the_last_that_is_served() -> None:
    served: list[int] = []
    latest: LatestCall[int] = LatestCall(served.append)
    lock, calls = threading.Lock(), iter(range(400))

    def call() -> None:
        for _ in range(100):
            with lock:  # so that there is a last one
                latest(next(calls))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert served[-1] == 399
    assert served == sorted(set(served))


def test_a_call_that_fails_does_not_stop_the_next() -> None:
    served: list[int] = []

    def serve(call: int) -> None:
        if call == 0:
            raise RuntimeError("no")
        served.append(call)

    latest: LatestCall[int] = LatestCall(serve)
    with pytest.raises(RuntimeError, match="no"):
        latest(0)
    latest(1)
    assert served == [1]
