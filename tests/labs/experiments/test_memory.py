"""What each knob saves: the simulator's bytes are those of real ranks, and each knob acts on its own part."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from labs.config import TrainConfig
from labs.experiments import memory
from labs.experiments.memory import (
    BASE,
    MIB,
    OPTIMIZERS,
    PEAK,
    PEAK_WITH_HOST,
    MemoryCase,
    count,
    main,
    run,
    settings,
)

pytestmark = pytest.mark.usefixtures("warm_torchrun")

SMALL = TrainConfig(n_layer=2, seq_len=32, device="cpu")


@pytest.fixture(scope="module")
def asked():
    return settings(SMALL, ranks=1, rows=2)


@pytest.fixture(scope="module")
def result(asked):
    """The lab's own way, on the smallest model and few settings."""
    few = {name: asked[name] for name in (BASE, "cpu_offload=True", "optimizer=sgd")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "settings", lambda *_: few)
        return run(ranks=1, rows=2, seq_len=32)


def test_one_knob_is_turned_at_a_time(asked):
    base = asked[BASE]
    for name, setting in list(asked.items())[1:]:
        changes = [setting.ranks != base.ranks, setting.optimizer != base.optimizer]
        changes += [setting.config.by_key()[key] != value for key, value in base.config.by_key().items()]
        expected = 2 if setting.ranks != base.ranks else 1  # more ranks have more rows in all, each as many as before
        assert sum(changes) == expected, name
        assert setting.config.global_batch // setting.ranks == (4 if "rows per rank" in name else 2)


@pytest.mark.tail  # the lab's notebook runs it too
def test_what_is_not_measured_on_a_cpu_is_not_said_to_be(result):
    rows = {(row.name, row.quantity): row for row in result.rows}
    assert rows["cpu_offload=True", PEAK].measured is None
    assert rows["cpu_offload=True", PEAK_WITH_HOST].measured == pytest.approx(rows[BASE, PEAK].measured, rel=1e-3)
    assert result.kind == "measured"


@pytest.mark.tail  # the lab's notebook runs it too
def test_what_is_counted_depends_on_the_setting_alone(asked, result):
    """A meter that told back what was predicted would not see that another prediction is wrong."""
    rows = {row.name: row.measured for row in result.rows}
    assert rows["optimizer=sgd"] * MIB < 0.8 * asked[BASE].peak_bytes


def test_every_optimizer_that_is_counted_is_one_of_the_simulator():
    from fsdp_sim.spec import OPTIMIZER_STATES

    assert set(OPTIMIZERS) <= set(OPTIMIZER_STATES)


@pytest.mark.parametrize("asked", [{"rows": 3}, {"rows": 0}, {"ranks": -1}, {"model": "gpt3"}, {"seq_len": 0}])
def test_what_cannot_be_is_refused_before_anything_runs(asked, capsys):
    assert main(**asked) == 2
    assert "labs.experiments.memory: " in capsys.readouterr().out


def test_on_gpus_it_is_what_tensors_hold_on_the_rank_where_they_hold_most(monkeypatch):
    """cuBLAS's workspaces are in the trainer's report, and not in a prediction. Not run on a GPU."""
    of_ranks = [[900 * MIB, 2**30, 32 * MIB], [880 * MIB, 2**30, 8 * MIB]]
    monkeypatch.setattr(memory, "train", lambda *_, **how: SimpleNamespace(report={"memory": of_ranks[: how["ranks"]]}))
    config = TrainConfig(device="cuda")
    assert count({"one": MemoryCase(config, ranks=1), "two": MemoryCase(config, ranks=2)}) == {
        "one": 868 * MIB, "two": 872 * MIB,
    }  # fmt: skip


@pytest.mark.gpu
def test_the_cuda_allocator_is_asked_where_there_is_one():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    base = settings(TrainConfig(device="cuda", seq_len=128), ranks=1, rows=8)
    counted = count({name: base[name] for name in (BASE, "activation_checkpointing=full")})
    assert counted["activation_checkpointing=full"] < counted[BASE]
