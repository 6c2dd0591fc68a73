"""``ranks(world_size, fn, *args)``: run a function on real gloo ranks and get one result per rank."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.mini.launch import Ranks

POOLS = pytest.StashKey[dict[int, Ranks]]()


@pytest.fixture
def ranks(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    pools = pytestconfig.stash.setdefault(POOLS, {})

    def run(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        if world_size in pools and pools[world_size].worn:
            pools.pop(world_size).stop()
        if world_size not in pools:
            pools[world_size] = Ranks(world_size, tmp_path_factory.mktemp(f"ranks{world_size}"))
        return pools[world_size].run(fn, *args)

    return run


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ranks stay between the tests of a file: those that wait for work take time from the others."""
    if nextitem is None or nextitem.path != item.path:
        for pool in item.config.stash.get(POOLS, {}).values():
            pool.stop()
        item.config.stash[POOLS] = {}
