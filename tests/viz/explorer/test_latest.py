"""Wishes that come while one is served are coalesced, and the last one always lands."""

import threading

import pytest

from fsdp_sim.viz.explorer.latest import Latest


def test_of_those_that_come_meanwhile_only_the_last_is_served() -> None:
    begun, go_on, served = threading.Event(), threading.Event(), []

    def serve(wish: int) -> None:
        served.append(wish)
        begun.set()
        assert go_on.wait(10)

    latest: Latest[int] = Latest(serve)
    thread = threading.Thread(target=latest, args=(0,))
    thread.start()
    assert begun.wait(10)
    for wish in range(1, 6):
        latest(wish)  # returns at once
    assert latest.waiting
    go_on.set()
    thread.join(10)
    assert served == [0, 5]


def test_from_many_threads_the_last_wish_is_the_last_that_is_served() -> None:
    served: list[int] = []
    latest: Latest[int] = Latest(served.append)
    lock, wishes = threading.Lock(), iter(range(400))

    def wish() -> None:
        for _ in range(100):
            with lock:  # so that there is a last one
                latest(next(wishes))

    threads = [threading.Thread(target=wish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert served[-1] == 399
    assert served == sorted(set(served))


def test_a_wish_that_fails_does_not_stop_the_next() -> None:
    served: list[int] = []

    def serve(wish: int) -> None:
        if wish == 0:
            raise RuntimeError("no")
        served.append(wish)

    latest: Latest[int] = Latest(serve)
    with pytest.raises(RuntimeError, match="no"):
        latest(0)
    latest(1)
    assert served == [1]
