"""The parity ladder: rungs agree as far as they should, and a seeded fault is found where it is."""

import pytest

from fsdp_sim.timeline import Op, Phase
from labs.experiments.ladder import Ladder, RungResult, climb, table
from labs.experiments.ladder.faults import Fault
from labs.experiments.ladder.on_ranks import LadderConfig
from labs.experiments.ladder.rungs import RUNGS
from tests.labs.experiments.ladder.seeded import WHAT, seeded
from tests.some import some

pytestmark = pytest.mark.usefixtures("right_rungs_once")

TWO = LadderConfig(ranks=2, steps=2)
TWINS = {rung.name: rung.twin for rung in RUNGS.values() if rung.twin}
ON_TWO = [name for name, rung in RUNGS.items() if rung.ranks is None]


@pytest.fixture(scope="module")
def healthy() -> Ladder:
    return climb(TWO)


def counts(row: RungResult, phase: Phase) -> dict[Op, int]:
    return {op: n for op, (n, _) in row.collectives[phase].items()}


# A healthy ladder


def test_all_rungs_are_climbed_in_order_and_none_diverges(healthy: Ladder) -> None:
    assert [row.rung.name for row in healthy.rows] == list(RUNGS)
    assert healthy.divergences == []


def test_on_two_ranks_every_rung_equals_the_one_above_to_the_last_bit(healthy: Ladder) -> None:
    """A sum of two numbers has one order, and halving is exact: nothing is rounded in another way."""
    compared = [healthy[name].against_above for name in ON_TWO[2:]]

    assert [c.bitwise for c in compared if c] == [None] * (len(ON_TWO) - 2)


@pytest.mark.parametrize("mini", ["mini-3", "mini-bf16"])
def test_the_rungs_with_ranks_of_their_own_equal_their_twin_to_the_last_bit(healthy: Ladder, mini: str) -> None:
    above = healthy[mini].against_above

    assert above is not None
    assert (above.against, above.bitwise) == (TWINS[mini], None)
    assert healthy[mini].ranks == RUNGS[mini].ranks
    assert (healthy[mini].against_one is None) == RUNGS[mini].only_twin  # bfloat16 rounds otherwise than one process


def test_how_far_from_one_process_is_too_far_is_measured(healthy: Ladder) -> None:
    """One process that adds up the batch in parts gets as far from itself as right ranks do; a fault gets further."""
    largest = max(row.against_one.error for row in healthy.rows if row.against_one)

    assert TWO.tolerance <= healthy.to_one < 1e-4
    assert largest <= healthy.to_one
    assert f"{healthy.to_one:.0e} against one process" in table.legend(healthy)
    assert table.as_json(healthy)["tolerance_to_one_process"] == healthy.to_one


def test_against_one_process_bits_differ_and_no_more(healthy: Ladder) -> None:
    for row in healthy.rows[1:]:
        if not row.rung.only_twin:
            assert row.against_one is not None
            assert row.against_one.against == "one-process"
            assert row.against_one.bitwise is not None
            assert row.against_one.beyond is None
            assert 0 < row.against_one.error < healthy.to_one


@pytest.mark.parametrize(("mini", "torchs"), TWINS.items())
def test_the_mini_issues_torchs_collectives_and_holds_no_more(healthy: Ladder, mini: str, torchs: str) -> None:
    assert healthy[mini].twin == torchs
    assert healthy[mini].program is None
    assert healthy[mini].collectives == healthy[torchs].collectives
    assert healthy[mini].memory is None
    assert healthy[mini].peak_bytes <= 1.02 * healthy[torchs].peak_bytes


@pytest.mark.parametrize(
    ("name", "forward", "backward", "optimizer"),
    [
        ("one-process", {}, {}, {}),
        ("mini-ddp", {}, {Op.ALL_REDUCE: 1}, {}),
        ("zero-1", {}, {Op.ALL_REDUCE: 1}, {Op.ALL_GATHER: 1}),
        ("zero-2", {}, {Op.REDUCE_SCATTER: 1}, {Op.ALL_GATHER: 1}),
        ("function", {Op.ALL_GATHER: 3}, {Op.ALL_GATHER: 3, Op.REDUCE_SCATTER: 3}, {}),
        ("mini-fsdp", {Op.ALL_GATHER: 3}, {Op.ALL_GATHER: 2, Op.REDUCE_SCATTER: 3}, {}),
    ],
)
def test_collectives_are_counted_by_kind_and_phase(healthy: Ladder, name, forward, backward, optimizer) -> None:
    row = healthy[name]

    assert counts(row, Phase.FORWARD) == forward
    assert counts(row, Phase.BACKWARD) == backward
    assert counts(row, Phase.OPTIMIZER) == optimizer


def test_bytes_are_those_of_whole_messages(healthy: Ladder) -> None:
    whole = 4 * TWO.build().num_params()

    assert healthy["mini-ddp"].collectives[Phase.BACKWARD][Op.ALL_REDUCE] == (1, whole)
    assert healthy["mini-fsdp"].collectives[Phase.FORWARD][Op.ALL_GATHER] == (3, whole)  # every dim 0 is even


def test_each_stage_of_sharding_holds_less(healthy: Ladder) -> None:
    peaks = [healthy[name].peak_bytes for name in ("mini-ddp", "zero-1", "zero-2")]

    assert peaks == sorted(set(peaks), reverse=True)
    assert healthy["mini-fsdp"].peak_bytes < healthy["zero-1"].peak_bytes


def test_what_is_not_compared_by_value_is_named(healthy: Ladder) -> None:
    named = table.not_by_value(healthy)
    assert {int(mask.sum()) for mask in healthy.noise.values()} == {TWO.gpt.d_model}

    assert "Compared by loss and not by value: layers.0.attn.qkv.bias[32:64], layers.1.attn.qkv.bias[32:64]." in named
    assert named in healthy._repr_html_()
    assert table.as_json(healthy)["not_compared_by_value"] == [f"layers.{i}.attn.qkv.bias[32:64]" for i in range(2)]


def test_losses_norms_and_parameters_of_every_step_are_there(healthy: Ladder) -> None:
    for row in healthy.rows:
        assert len(row.losses) == len(row.grad_norms) == len(row.parameter_norms) == TWO.steps
        assert row.losses[1] < row.losses[0]
        assert row.peak_bytes > 16 * TWO.build().num_params() / row.ranks


# Other numbers of ranks


@pytest.mark.tail
def test_one_rank_is_one_process_and_communicates_nothing() -> None:
    ladder = climb(LadderConfig(ranks=1, steps=2), ["mini-ddp", "zero-2", "mini-fsdp"])

    for row in ladder.rows[1:]:
        assert row.against_one is not None
        assert row.against_one.bitwise is None
        assert not any(row.collectives.values())


@pytest.mark.tail
def test_three_ranks_agree_within_the_tolerance() -> None:
    ladder = climb(LadderConfig(ranks=3, steps=2), ["torch-fsdp2", "mini-fsdp"])

    assert ladder.divergences == []
    assert ladder["mini-fsdp"].against_above.bitwise is None  # type: ignore[union-attr]
    assert ladder["mini-fsdp"].program is None


@pytest.mark.tail
def test_on_four_ranks_the_mini_still_equals_torch_to_the_last_bit() -> None:
    """HSDP is on four ranks in every climb, as mini-bf16; of the flat parameter `tests/mini/siblings` has them."""
    ladder = climb(LadderConfig(ranks=4, steps=2), ["torch-fsdp2", "mini-fsdp"])
    above = ladder["mini-fsdp"].against_above

    assert ladder.divergences == []
    assert above is not None
    assert (above.against, above.bitwise) == ("torch-fsdp2", None)
    assert ladder["mini-fsdp"].program is None


# A broken rung


@pytest.fixture(scope="module")
def broken() -> Ladder:
    rungs = ["torch-ddp", "mini-ddp", "zero-1", "torch-fsdp2", "mini-fsdp"]
    faults = {"mini-ddp": "wrong-seed", "zero-1": "same-rows", "mini-fsdp": "stale-shard"}
    return climb(TWO, rungs, broken=faults)


@pytest.mark.tail
def test_a_rank_with_another_seed_is_healed_by_ddp_which_copies_rank_0(broken: Ladder) -> None:
    assert broken["mini-ddp"].fault == "wrong-seed"
    assert broken["mini-ddp"].divergences == {}


def test_the_same_rows_on_all_ranks_show_in_the_loss_of_the_others(broken: Ladder) -> None:
    found = broken["zero-1"].against_above.beyond  # type: ignore[union-attr]

    assert (found.step, found.what, found.ranks) == (1, "loss", (1,))  # type: ignore[union-attr]


def test_a_stale_shard_is_found_with_its_rows_and_its_rank(broken: Ladder) -> None:
    for comparison in (broken["mini-fsdp"].against_above, broken["mini-fsdp"].against_one):
        found = comparison.beyond  # type: ignore[union-attr]
        assert (found.step, found.what) == (1, "parameter")  # type: ignore[union-attr]
        assert (found.unit, found.tensor) == ("layers.1", "mlp.fc.weight")  # type: ignore[union-attr]
        assert (found.rows, found.shard_of, found.others) == ((64, 127), (1,), 0)  # type: ignore[union-attr]


def test_a_rung_is_compared_with_the_nearest_one_above_that_is_right(broken: Ladder) -> None:
    against = {row.rung.name: row.against_above.against for row in broken.rows if row.against_above}

    assert against["zero-1"] == "mini-ddp"
    assert against["torch-fsdp2"] == "mini-ddp"  # not zero-1
    assert broken["torch-fsdp2"].divergences == {}


@pytest.mark.parametrize("fault", some(["kept-whole", "not-averaged", "wrong-seed"], first=1))
def test_a_fault_of_the_mini_is_found_at_the_right_place(fault: str) -> None:
    ladder = climb(TWO, ["torch-fsdp2", "mini-fsdp"], broken={"mini-fsdp": fault})
    row = ladder["mini-fsdp"]
    above = row.against_above
    assert above is not None

    if fault == "kept-whole":  # every number is right: the collectives tell
        assert above.bitwise is None
        assert row.program is not None
        assert (row.program.step, row.program.unit) == (1, "layers.0")
        assert "in backward, torch FSDP2 issues ALL_GATHER(layers.0)" in row.program.detail
    else:
        found = above.beyond
        assert found is not None
        assert found.ranks == (0, 1)
        if fault == "not-averaged":
            assert (found.step, found.what, found.units, found.others) == (1, "gradient", ("layers.0",), 11)
            assert found.error == pytest.approx(1.0, rel=1e-5)  # twice the mean
        else:
            assert (found.step, found.what, found.tensor) == (0, "parameter", "tok_emb.weight")
            assert (found.rows, found.shard_of) == ((128, 255), (1,))
    assert ladder.divergences
    assert "[" + fault + "]" in ladder._repr_html_()


SEEDED = list(WHAT)


@pytest.mark.tail
@pytest.mark.parametrize("names", [SEEDED[i : i + 3] for i in range(0, len(SEEDED), 3)], ids=", ".join)
def test_a_fault_in_the_minis_own_code_shows_on_a_rung(names: list[str]) -> None:
    """A climb breaks three rungs, each with one fault."""
    faults = seeded()
    broken = {WHAT[name][0]: Fault(name, (), faults[name]) for name in names}
    ladder = climb(TWO, [n for rung in broken for n in (RUNGS[rung].twin, rung)], broken=broken)

    for name in names:
        rung, what = WHAT[name]
        assert ladder[rung].divergences, f"{name} was not seen"
        assert what in {found.what for found in ladder[rung].divergences.values()}, (name, ladder.divergences)
        assert ladder[RUNGS[rung].twin].divergences == {}
