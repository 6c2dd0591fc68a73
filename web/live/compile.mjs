// node compile.mjs PYODIDE SOURCES.zip CODE.zip MEMORY.gz: what the page's Python begins with.
//
// CODE.zip has each .py as a .pyc of the Python that runs in the page, the rest as it is. MEMORY.gz is the memory of that
// Python after the imports from the standard library that our code makes: a page that begins with it saves the seconds
// that these take. (Our own modules cannot be in it: they need msgspec, a library that is linked when it is loaded.)
import fs from "node:fs";
import zlib from "node:zlib";
import { pathToFileURL } from "node:url";

const [folder, from, to, memory] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(`${folder}/pyodide.mjs`).href);
const python = await loadPyodide({ indexURL: folder });
python.FS.writeFile("/tmp/from.zip", fs.readFileSync(from));
const names = python.runPython(`
import importlib._bootstrap_external as external, importlib, sys, zipfile

with zipfile.ZipFile("/tmp/from.zip") as given, zipfile.ZipFile("/tmp/to.zip", "w", zipfile.ZIP_DEFLATED) as made:
    for name in sorted(given.namelist()):
        content = given.read(name)
        if name.endswith(".py"):
            code = compile(content, "/" + name, "exec", dont_inherit=True)
            name, content = name + "c", external._code_to_timestamp_pyc(code)
        made.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)

before = set(sys.modules)
import shutil, site
shutil.unpack_archive("/tmp/to.zip", site.getsitepackages()[0])
importlib.invalidate_caches()
from web.live import calls
for page in calls.PAGES:
    calls.prepare(page)
"\\n".join(name for name in sys.modules if name.partition(".")[0] in sys.stdlib_module_names and name != "__main__")
`);
fs.writeFileSync(to, python.FS.readFile("/tmp/to.zip"));

const asleep = await loadPyodide({ indexURL: folder, _makeSnapshot: true });
asleep.runPython(`
import gc, importlib
for name in ${JSON.stringify(names.split("\n"))}:
    importlib.import_module(name)
gc.collect()
`);
fs.writeFileSync(memory, zlib.gzipSync(asleep.makeMemorySnapshot(), { level: 9 }));
