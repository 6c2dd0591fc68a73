"""Python in a browser has no numpy and none of the packages that draw: a trace is read and diagnosed without them."""

import hashlib
import subprocess
import sys
from pathlib import Path

import msgspec

from fsdp_sim.diagnose import diagnose
from fsdp_sim.timeline import read_timeline

RECORDED = sorted(Path("tests/timeline/kineto/recorded").glob("*.json.gz"))
BLOCKED = ("numpy", "torch", "plotly", "pandas", "rich", "click", "scipy")
WITHOUT = f"""
import sys
sys.modules.update(dict.fromkeys({BLOCKED!r}))  # an import of any fails
from tests.diagnose.test_in_a_browser import of_each
print("\\n".join(of_each()))
"""


def of_each() -> list[str]:
    """Of each recorded trace what becomes of its events and of its diagnosis, as one line."""
    found = []
    for path in RECORDED:
        timeline = read_timeline(path)
        events = hashlib.sha256(msgspec.json.encode(timeline.events)).hexdigest()
        found.append(f"{path.name} {events} {msgspec.json.encode(diagnose(timeline)).decode()}")
    return found


def test_recorded_traces_are_read_and_diagnosed_to_the_same_without_numpy():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == of_each()
    assert len(RECORDED) >= 5
