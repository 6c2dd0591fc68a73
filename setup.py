"""What pyproject.toml cannot say: a wheel carries the course, notebooks and labs, as files within fsdp_sim.

`fsdp-sim course` writes them into a folder; nothing but fsdp_sim comes to lie at the top of site-packages.
"""

import runpy
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
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


setup(cmdclass={"build_py": BuildWithCourse})
