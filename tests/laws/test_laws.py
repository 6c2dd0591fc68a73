"""Physics: what holds for every prediction, whatever the model, the plan and the cluster."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import Phase, given, settings

from tests.laws import facts, hardware, ranks, sharding, work
from tests.laws.draws import requests
from tests.laws.law import Law

TABLES: dict[str, list[Law]] = {
    "hardware": hardware.LAWS, "ranks": ranks.LAWS, "work": work.LAWS, "sharding": sharding.LAWS, "facts": facts.LAWS
}  # fmt: skip
STATEMENTS = [statement for table in TABLES.values() for law in table for statement in law.statements]


def test_each_law_is_said_once():
    assert len(STATEMENTS) >= 300
    assert [said for said, times in Counter(STATEMENTS).items() if times > 1] == []


@pytest.mark.parametrize("theme", TABLES)
def test_every_law_holds(theme):
    """The same requests each time; to shrink one would take minutes."""
    tried: Counter[str] = Counter()

    @settings(max_examples=25, phases=[Phase.reuse, Phase.generate], derandomize=True)
    @given(requests())
    def holds(request):
        broken = []
        for law in TABLES[theme]:
            try:
                broken += law.broken_by(request)
            except ValueError:  # there is no such request: a GPU without the dtype, a plan that is refused
                continue
            tried.update(law.statements[:1])
        assert broken == [], f"by {request}"

    holds()
    assert [law.statements[0] for law in TABLES[theme] if not tried[law.statements[0]]] == []
