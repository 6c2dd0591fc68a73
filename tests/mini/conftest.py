"""``ranks(world_size, fn, *args)``: run a function on real gloo ranks and get one result per rank."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.mini.launch import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    pools: dict[int, Ranks] = {}

    def run(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        if world_size in pools and pools[world_size].worn:
            pools.pop(world_size).stop()
        if world_size not in pools:
            pools[world_size] = Ranks(world_size, tmp_path_factory.mktemp(f"ranks{world_size}"))
        return pools[world_size].run(fn, *args)

    yield run
    for pool in pools.values():
        pool.stop()
