"""What pyproject.toml cannot say: a wheel carries the course, notebooks and labs, as files within fsdp_sim.

`fsdp-sim course` writes them into a folder; nothing but fsdp_sim comes to lie at the top of site-packages. With
``FSDP_SIM_COMPILED=1`` the engine's inner loops are compiled, from the same files (``make compiled``).
"""

import os
import runpy
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
INNER_LOOPS = ("changes", "contended_rank", "contention", "exposure", "repetition", "seconds")
COURSE = runpy.run_path(str(ROOT / "fsdp_sim" / "cli" / "course_files.py"))


class BuildWithCourse(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib, "fsdp_sim", COURSE["IN_WHEEL"])
        shutil.rmtree(folder, ignore_errors=True)
        for name, source in COURSE["in_checkout"](ROOT).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / name)


def inner_loops() -> list:
    """As extensions, if they are asked for. mypyc reads the types; torch's and numpy's it does without, for speed."""
    if os.environ.get("FSDP_SIM_COMPILED", "0") in ("", "0"):
        return []
    from mypyc.build import mypycify

    files = [f"fsdp_sim/engine/{name}.py" for name in INNER_LOOPS]
    options = ["--config-file=", "--follow-imports=silent", "--ignore-missing-imports", "--no-site-packages"]
    return mypycify([*options, *files], opt_level="3")


setup(cmdclass={"build_py": BuildWithCourse}, ext_modules=inner_loops())
