"""What `pinned.toml` names, fetched once by npm and pip, each from the index that it is set up to ask."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
FETCHED = HERE.parent / "build" / "fetched"
PLATFORM = ["--platform", "pyemscripten_2026_0_wasm32", "--python-version", "3.14", "--abi", "cp314"]


def fetched(name: str, folder: Path = FETCHED) -> Path:
    """The file of a name in `pinned.toml`.

    Raises:
        RuntimeError: npm is missing, the file cannot be had, or it is another than the one pinned.
    """
    pin = tomllib.loads((HERE / "pinned.toml").read_text(encoding="utf-8"))[name]
    path = folder / pin["file"]
    if not path.exists():
        _fetch(pin, folder)
    if not path.exists():
        raise RuntimeError(f"{pin['from']} brought no {pin['file']}; web/pinned.toml names it")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != pin["sha256"]:
        raise RuntimeError(f"{path} has sha256 {found}, not {pin['sha256']} as web/pinned.toml says: remove it")
    return path


def tool(name: str) -> str:
    """Where npm or node is.

    Raises:
        RuntimeError: nowhere.
    """
    if found := shutil.which(name):
        return found
    raise RuntimeError(
        f"the live parts of the site need {name}, which is not installed: install Node.js 20 or newer, or build all "
        "but these parts: python -m web.build --no-live"
    )


def _fetch(pin: dict[str, str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if pin["from"] == "npm":
        command = [
            tool("npm"),
            "pack",
            f"{pin['name']}@{pin['version']}",
            "--silent",
            "--pack-destination",
            str(folder),
        ]
    else:
        command = [sys.executable, "-m", "pip", "download", f"{pin['name']}=={pin['version']}", "--no-deps", "-q"]
        command += ["--only-binary=:all:", "--implementation", "cp", *PLATFORM, "-d", str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if run.returncode:
        said = (run.stderr or run.stdout).strip().splitlines() or ["it said nothing"]
        raise RuntimeError(
            f"{pin['from']} could not fetch {pin['name']} {pin['version']} ({said[-1].strip()}); with a network it "
            "can, and without one all but the live parts are built by python -m web.build --no-live"
        )
