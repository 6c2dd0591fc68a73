"""A torchrun that starts quickly, for the labs that start trainings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from labs.cluster import torchrun
from tests.warm import ADDRESS, CLIENT


@pytest.fixture(scope="module")
def warm_torchrun(warm_server: str) -> Iterator[None]:
    """In this module `labs.cluster.torchrun` starts torchrun's agent and its ranks by a fork, see `tests.warm`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ADDRESS, warm_server)
        patch.setattr(torchrun, "TIED", CLIENT)
        yield
