"""What runs in the pages: Python in a worker, and our own code in it, compiled. `gathered` makes it, `write` copies it.

A page asks the worker with ``call(name, argument)`` (`static/python.js`); `calls` answers, in the worker or natively.
"""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

from web.fetch import FETCHED, fetched, tool
from web.words import module

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = ("pyodide.mjs", "pyodide.asm.wasm", "python_stdlib.zip")
"""Of npm's package what a page needs as it is."""
MADE = ("pyodide.asm.mjs", "memory.gz", "library.wasm.gz", "places.json", "rest.zip")
"""What `compile.mjs` makes of it and of our code."""
ROOMS = (
    "words.py", "states.py", "packages.py", "__init__.py", "timeline", "spec", "schedule", "cost", "engine", "diagnose",
    "simulation", "configurations", "requests", "forms", "explore", "viz/__init__.py", "viz/theme.py", "viz/explorer",
    "viz/steps", "learn/puzzle",
)  # fmt: skip
"""Of fsdp_sim what is taken along; what imports torch, or draws with plotly's Python, stays behind."""
PAGES = {"puzzle": "puzzle_page", "fit": "fit", "trace": "trace"}
"""Pages that live, beside the start page, and the word that is their title; `web.live.forms` writes them."""
LEFT_OUT = (".gz", ".csv", ".sbatch", ".css", ".pyc", ".html")


def gathered(folder: Path = FETCHED) -> dict[str, Path | bytes]:
    """The files of the folder ``live`` of the site, by name.

    Raises:
        RuntimeError: npm or node is missing, or something cannot be had; says what to do.
    """
    tool("node")
    unpacked = folder / "pyodide"
    archive = fetched("pyodide", folder)
    if not all((unpacked / name).exists() for name in PYTHON):
        shutil.rmtree(unpacked, ignore_errors=True)
        with tarfile.open(archive) as tar:
            tar.extractall(folder / "new", filter="data")
        (folder / "new" / "package").rename(unpacked)
    files: dict[str, Path | bytes] = {f"python/{name}": unpacked / name for name in PYTHON}
    made = compiled(unpacked, fetched("msgspec", folder), folder)
    # Read now: a build of other sources may remove them meanwhile.
    return files | {f"python/{name}": (made / name).read_bytes() for name in MADE}


def sources() -> dict[str, bytes]:
    """What is imported in the worker, by its path in `site-packages`."""
    package = ROOT / "fsdp_sim"
    paths = [p for room in ROOMS for p in ([package / room] if room.endswith(".py") else (package / room).rglob("*"))]
    paths += [HERE.parent / "__init__.py", *(HERE / "calls").rglob("*")]
    kept = [path for path in sorted(paths) if path.is_file() and path.suffix not in LEFT_OUT]
    found = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in kept}
    # Of these a page needs nothing, and the second imports what has to do with torch.
    return found | {"web/live/__init__.py": b"", "fsdp_sim/learn/__init__.py": b""}


def compiled(pyodide: Path, wheel: Path, folder: Path) -> Path:
    """A folder with what the page's Python begins with, made by that Python of our code and msgspec (`compile.mjs`).

    Made anew where a source has changed.
    """
    code = sources()
    with zipfile.ZipFile(wheel) as msgspec:
        code |= {name: msgspec.read(name) for name in msgspec.namelist() if not name.endswith((".pyi", "/"))}
    by = [HERE / "compile.mjs", HERE / "static" / "wake.js", pyodide / "package.json"]
    key = hashlib.sha256(repr(sorted(code.items())).encode() + b"".join(path.read_bytes() for path in by))
    made = folder / f"made-{key.hexdigest()[:16]}"
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # another build may be at it too
            raw, new = Path(scratch, "sources.zip"), Path(scratch, "new")
            new.mkdir()
            with zipfile.ZipFile(raw, "w") as file:
                for name, content in code.items():
                    file.writestr(name, content)
            command = [tool("node"), str(HERE / "compile.mjs"), *map(str, (pyodide, raw, new))]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                # Node shows the line that threw, which may be a script of a megabyte.
                said = [line for line in (run.stderr or run.stdout).splitlines() if line.strip() and len(line) < 500]
                raise RuntimeError("our code could not be compiled for the browser:\n" + "\n".join(said[-15:]))
            for old in folder.glob("made-*"):
                shutil.rmtree(old, ignore_errors=True)
            with suppress(OSError):  # the other build was faster
                new.rename(made)
    return made


def write(out: Path, files: dict[str, Path | bytes]) -> None:
    """Put files into the folder ``live`` of a site, and the scripts of pages beside them."""
    shutil.copytree(HERE / "static", out / "live")
    (out / "live" / "words.js").write_text(module(), encoding="utf-8")
    for name, content in files.items():
        target = out / "live" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    drawing = (ROOT / "fsdp_sim" / "viz" / "plotly-cartesian.min.js.gz").read_bytes()
    (out / "live" / "plotly.js").write_bytes(gzip.decompress(drawing))
