"""Who waits, and who never came: said from what ranks' recorders held."""

from __future__ import annotations

import pytest

from fsdp_sim.timeline import Op
from labs.cluster.flight_recorder import Dump, Entry, Group, diagnose, unit_of
from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.experiments.nodes.traffic import program_of

STEP = program_of(TrainConfig(api="fsdp2"), RankPlace(world_size=4, local_world_size=4))


def entry(seq: int, name: str = "gloo:all_gather", numel: int = 8, group: str = "0") -> Entry:
    return Entry((group, f"group {group}"), seq, name, ((numel,),))


def dumps_of(*counts: int, group: str = "0") -> dict[int, Dump]:
    """Ranks that have issued so many all-gathers."""
    return {rank: Dump(tuple(entry(i + 1, group=group) for i in range(n))) for rank, n in enumerate(counts)}


def test_ranks_that_have_issued_the_same_wait_for_nobody():
    assert diagnose(dumps_of(3, 3, 3)) == []


def test_who_has_issued_less_never_came():
    (finding,) = diagnose(dumps_of(3, 2, 3, 3))
    assert str(finding) == "rank 1 never came to all-gather #3; ranks 0, 2 and 3 wait in it"


def test_they_wait_in_the_first_collective_that_one_did_not_reach():
    (finding,) = diagnose(dumps_of(5, 3, 4))
    assert (finding.seq, finding.waiting, finding.missing) == (4, (0, 2), (1,))


def test_a_ring_buffer_has_forgotten_the_beginning():
    dumps = {0: Dump(tuple(entry(i) for i in range(7, 11))), 1: Dump(tuple(entry(i) for i in range(6, 10)))}
    (finding,) = diagnose(dumps)
    assert str(finding) == "rank 1 never came to all-gather #10; rank 0 waits in it"


def test_a_rank_that_never_issued_anything_is_known_from_the_group():
    dumps = {0: Dump((entry(1),), {"0": Group("[0, 1]")}), 1: Dump((), {"0": Group("[0, 1]")})}
    (finding,) = diagnose(dumps)
    assert finding.missing == (1,)


def test_an_operation_that_differs_is_a_mismatch():
    dumps = dumps_of(3, 3, 3)
    dumps[2] = Dump((*dumps[2].entries[:2], entry(3, "gloo:all_reduce", 1)))
    (finding,) = diagnose(dumps)
    assert str(finding) == "rank 2 issued all-reduce of 1 elements where ranks 0 and 1 issued all-gather #3"


def test_the_cause_comes_before_what_follows_from_it():
    """Rank 2 waits for rank 3 in one group, and so rank 0 waits for rank 2 in another."""
    in_a, in_b = entry(1, group="a"), entry(1, group="b")
    dumps = {0: Dump((in_a, entry(2, group="a"))), 2: Dump((in_a, in_b, entry(2, group="b"))), 3: Dump((in_b,))}
    assert [finding.missing for finding in diagnose(dumps)] == [(3,), (2,)]


def entries_of_steps(n: int) -> list[Entry]:
    """What a rank's recorder holds after so many collectives of a training, and a loss before each step."""
    entries: list[Entry] = []
    while len(entries) < n:
        entries.append(entry(len(entries) + 1, "gloo:all_reduce", 1))
        for i in STEP:
            name = "gloo:all_gather" if i.op is Op.ALL_GATHER else "gloo:all_reduce"
            entries.append(entry(len(entries) + 1, name, i.bytes // 4 // (4 if i.op is Op.ALL_GATHER else 1)))
    return entries[:n]


@pytest.mark.parametrize("done", range(2, 2 * len(STEP), 3))
def test_the_unit_is_known_from_its_place_in_the_step(done):
    place = (done - 1) % (len(STEP) + 1) - 1
    assert unit_of(entries_of_steps(done), STEP) == STEP[place].unit


def test_without_a_step_or_a_known_size_no_unit_is_named():
    assert unit_of(entries_of_steps(5), ()) == ""
    assert unit_of([entry(1, numel=3)], STEP) == ""
