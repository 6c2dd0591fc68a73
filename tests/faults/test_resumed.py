"""A run that was stopped and gone on with is the run that was not: bit for bit; spread in another way, to rounding."""

import pytest

from tests.faults.runs import assert_same, losses

pytestmark = pytest.mark.tail  # see make test-all

SAME = {
    "single, with a schedule": (1, "--api=single", "--schedule=cosine", "--warmup_steps=2", "--clip=0.5"),
    "fsdp2 on 3 ranks, bf16, accumulating": (3, "--global_batch=6", "--micro_batch=1", "--param_dtype=bf16"),
    "fsdp1, flattened": (2, "--api=fsdp1", "--use_orig_params=false", "--weight_decay=0"),
    "mini, full checkpoints": (2, "--api=mini", "--checkpoint=full"),
}


@pytest.mark.parametrize("name", SAME)
def test_on_as_many_ranks_every_bit_is_the_same(start, name):
    ranks, *setting = SAME[name]
    whole = start(*setting, ranks=ranks, into="whole")
    assert whole.wait() == 0, whole.printed
    # killed twice: what is saved wrongly often shows at the second time only
    for step in (3, 5):
        killed = start(*setting, ranks=ranks, faults=f"kill:step@{step}@{ranks - 1}")
        assert killed.wait() == 1, killed.printed
    again = start(*setting, ranks=ranks)
    assert again.wait() == 0, again.printed
    assert "goes on from step " in again.printed  # 4, or 2 where step 4 was still being saved
    assert_same(again, whole)


LONG = ("--steps=15", "--save_every=3", "--global_batch=12", "--dropout=0", "--lr=1e-3")


@pytest.fixture(scope="module")
def long_run(server, tmp_path_factory):
    """15 steps of FSDP2 on 4 ranks."""
    from tests.faults.runs import SHORT

    job = server.start(tmp_path_factory.mktemp("long"), *SHORT, *LONG, ranks=4)
    assert job.wait() == 0, job.printed
    return job


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_spread_in_other_ways_the_steps_have_the_same_losses(start, long_run, kind):
    others = {3: (4, "hsdp"), 6: (2, "ddp"), 9: (1, "single"), 12: (2, "fsdp1"), 15: (3, "mini")}
    for step, (ranks, api) in others.items():
        fault = f"kill:step@{step}@0" if step < 15 else ""
        job = start(*LONG, f"--api={api}", f"--checkpoint={kind}", ranks=ranks, faults=fault)
        assert job.wait() == bool(fault), job.printed
        assert step == 3 or f"goes on from step {step - 3} " in job.printed
    assert losses(job) == pytest.approx(losses(long_run), rel=1e-5)
