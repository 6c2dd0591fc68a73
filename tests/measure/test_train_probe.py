"""The probe that calibrate trains is really trained, alone and sharded."""

from fsdp_sim.measure.train_probe import ROUNDS, ProbeShape, time_plain, time_sharded
from fsdp_sim.ranks import run
from fsdp_sim.timeline import Op

SMALL, LARGE = ProbeShape(1, 64, 128, 256), ProbeShape(32, 64, 128, 256)


def test_a_forward_and_a_backward_are_really_run():
    small, large = time_plain((SMALL, LARGE), budget_s=0.05)

    assert (small.shape, large.shape) == (SMALL, LARGE)
    assert 0 < small.forward_s < large.forward_s
    assert 0 < small.backward_s < large.backward_s


def test_the_sharded_one_is_torchs_fsdp_on_all_ranks():
    shape = ProbeShape(1, 16, 32, 64, layers=2)
    results = run(time_sharded, 2, (shape,), 0.01, show_output=False, progress=False)
    for (time,) in results:
        assert time.shape == shape
        assert time.seconds > 0
    ops = [event.op for event in results.timeline.ops if event.rank == 0]
    steps = ops.count(Op.REDUCE_SCATTER) / 3  # the root and two blocks
    assert steps >= ROUNDS * 5
    assert ops.count(Op.ALL_GATHER) == 5 * steps
