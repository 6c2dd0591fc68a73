"""The explorer's drawing needs neither numpy nor plotly: a page has neither."""

import subprocess
import sys

WITHOUT = """
import sys
for name in ("numpy", "plotly", "torch", "ipywidgets"):
    sys.modules[name] = None
import importlib.util as util
find = util.find_spec
util.find_spec = lambda name, *more: None if name == "plotly" else find(name, *more)
from fsdp_sim.forms import FormState
from fsdp_sim.viz.explorer import drawing, layout_of
from fsdp_sim.viz.explorer.scene import scene
from fsdp_sim.viz.explorer.starts import PRESETS
for line in PRESETS.values():
    seen = scene(FormState.read(line).simulate())
    window = (0.0, seen.span_ms)
    drawn = drawing.lane_changes(seen, window) + drawing.memory_changes(seen, window)
    print(sum(len(change["x"]) for change in drawn if change["visible"]) > 500, layout_of.needed_gib(seen) > 1)
from fsdp_sim import viz
try:
    viz.timeline
except ModuleNotFoundError as error:
    print(error)
"""


def test_every_start_is_drawn_without_numpy_and_plotly_and_what_needs_plotly_says_so() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    *drawn, sentence = run.stdout.splitlines()
    assert set(drawn) == {"True True"}, run.stderr
    assert sentence.startswith("fsdp_sim.viz needs plotly, which is not installed")
