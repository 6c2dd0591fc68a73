"""A script and what `migrate` makes of it train the same: both run on two gloo ranks, and their losses are compared."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_sim.migrate import migration_of_script

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
SCRIPTS = sorted((HERE / "scripts").glob("*.py"))
TOLERANCE = {
    # clip_grad_norm_ adds up the squares of shards, not of whole gradients: another order of a sum
    "ddp_accumulation": 1e-6,
    # bf16, and FSDP1 casts a flat parameter where FSDP2 casts each: sums over a batch in another order
    "fsdp1_everything": 1e-2,
}
"""By how much of a loss; in the others each number is equal to the last bit."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """By script: what rank 0 printed before and after, each run once."""
    folder, jobs = tmp_path_factory.mktemp("migrated"), []
    for script in SCRIPTS:
        found, _ = migration_of_script(script.read_text(), str(script))
        new = folder / script.name
        new.write_text(found.new)
        for path, when in ((script, "before"), (new, "after")):
            (folder / script.stem / when).mkdir(parents=True)
            jobs.append([str(path), str(folder / script.stem / when)])
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, str(HERE / "run_on_ranks.py"), str(folder / "jobs.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    return {script.stem: results[2 * n : 2 * n + 2] for n, script in enumerate(SCRIPTS)}


def numbers(result):
    assert result["status"] == [0, 0], result["output"] + result["other"]
    found = [line.split() for line in result["output"].splitlines() if line.startswith(("loss", "norm"))]
    assert found, result["output"]
    return found


@pytest.mark.parametrize("name", [script.stem for script in SCRIPTS])
def test_losses_are_equal_before_and_after(ran, name):
    before, after = (numbers(result) for result in ran[name])

    assert [what for what, _ in before] == [what for what, _ in after]
    assert [float(x) for _, x in after] == pytest.approx(
        [float(x) for _, x in before], rel=TOLERANCE.get(name, 0), abs=0
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_migrated_script_has_nothing_to_migrate(script):
    found, _ = migration_of_script(script.read_text(), str(script))
    again, _ = migration_of_script(found.new, str(script))

    assert found.changed
    assert found.by_hand == []
    assert not again.changed
    assert "nothing to do" in again.notes[0]
