"""What the ladder refuses, before anything is started."""

import pytest

from labs.experiments.ladder import choose, climb
from labs.experiments.ladder.faults import FAULTS, check_fault
from labs.experiments.ladder.on_ranks import LadderConfig


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"ranks": 5}, "1 to 4"),
        ({"ranks": 0}, "1 to 4"),
        ({"steps": 0}, "at least 1 step"),
        ({"ranks": 4, "batch": 6}, "does not divide into 4 ranks"),
        ({"seq_len": 33}, "rows of 1 to 32"),
        ({"model": "tinny"}, "no preset 'tinny'"),
        ({"tolerance": 0.0}, "tolerance=0.0"),
    ],
)
def test_an_impossible_setting_is_refused(wrong: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LadderConfig(**wrong)  # type: ignore[arg-type]


def test_rungs_that_do_not_exist_or_do_not_go_are_refused() -> None:
    with pytest.raises(ValueError, match="no rung 'mini-fdsp'; did you mean 'mini-fsdp'"):
        choose(["mini-fdsp"], 2, 12)
    with pytest.raises(ValueError, match="2 or 4 ranks, not 3"):
        choose(["mini-hsdp"], 3, 12)
    with pytest.raises(ValueError, match="mini-bf16 cuts the batch into 12 equal parts, 3 on each rank: 8 rows do not"):
        choose(["mini-bf16"], 2, 8)
    assert "mini-hsdp" not in choose(None, 3, 12)
    assert {"mini-3", "mini-bf16"}.isdisjoint(choose(None, 2, 8))
    assert choose(["mini-fsdp", "mini-ddp"], 2, 12) == ["one-process", "mini-ddp", "mini-fsdp"]


def test_faults_that_do_not_exist_or_do_not_go_are_refused() -> None:
    with pytest.raises(ValueError, match=f"no fault 'typo'; there are {', '.join(FAULTS)}"):
        check_fault("typo", "mini-fsdp", 2)
    with pytest.raises(ValueError, match="stale-shard cannot be done to 'mini-ddp'; it can to torch-fsdp2"):
        check_fault("stale-shard", "mini-ddp", 2)
    with pytest.raises(ValueError, match="takes 2 ranks or more"):
        climb(LadderConfig(ranks=1), ["mini-fsdp"], broken={"mini-fsdp": "wrong-seed"})
    with pytest.raises(ValueError, match="mini-fsdp is to be broken, but is not climbed"):
        climb(LadderConfig(), ["mini-ddp"], broken={"mini-fsdp": "wrong-seed"})
