// node compile.mjs PYODIDE SOURCES.zip OUT: what the page's Python begins with, in the folder OUT.
//
// memory.gz is the memory of that Python after the imports that our pages make and a first answer: a page that begins
// with it has nothing to import (static/wake.js). library.wasm.gz is msgspec's, which that memory needs, places.json where
// it lay; pyodide.asm.mjs can put it there again. rest.zip has what the memory has not: each .py as a .pyc, and data.
import fs from "node:fs";
import zlib from "node:zlib";
import { pathToFileURL } from "node:url";
import { placing, waking } from "./static/wake.js";

const ROOM = 16;
const [folder, from, out] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(`${folder}/pyodide.mjs`).href);
const written = (name, content) => fs.writeFileSync(`${out}/${name}`, content);
const packed = (name, content) => written(`${name}.gz`, zlib.gzipSync(content, { level: 9 }));
written("pyodide.asm.mjs", placing(fs.readFileSync(`${folder}/pyodide.asm.mjs`, "utf8")));

const compiler = await loadPyodide({ indexURL: folder });
compiler.FS.writeFile("/tmp/from.zip", fs.readFileSync(from));
compiler.runPython(`
import ast, importlib._bootstrap_external as external, zipfile

def undocumented(source):
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node, clean=False) is not None:
                node.body[:1] = [] if node.body[1:] else [ast.copy_location(ast.Pass(), node.body[0])]
    return tree

with zipfile.ZipFile("/tmp/from.zip") as given, zipfile.ZipFile("/tmp/to.zip", "w", zipfile.ZIP_DEFLATED) as made:
    for name in sorted(given.namelist()):
        content = given.read(name)
        if name.endswith(".py"):
            code = compile(undocumented(content), "/" + name, "exec", dont_inherit=True)
            name, content = name + "c", external._code_to_timestamp_pyc(code)
        made.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
`);

const asleep = await loadPyodide({ indexURL: folder, _makeSnapshot: true });
const { _module: module, FS } = asleep;
module.wasmTable.grow(ROOM); // a browser may have some functions more than node (static/wake.js)
const start = module.wasmTable.length;
FS.writeFile("/tmp/all.zip", compiler.FS.readFile("/tmp/to.zip"));
const first = asleep.runPython(`
import gc, importlib, shutil, site, sys, zipfile

shutil.unpack_archive("/tmp/all.zip", site.getsitepackages()[0])
importlib.invalidate_caches()
from web.live import calls

for page in calls.PAGES:
    calls.prepare(page)
answer = calls.call("begin", "{}")
here = {name.replace(".", "/") for name in sys.modules}
with zipfile.ZipFile("/tmp/all.zip") as given, zipfile.ZipFile("/tmp/rest.zip", "w", zipfile.ZIP_DEFLATED) as made:
    for name in given.namelist():
        if name.removesuffix(".pyc").removesuffix("/__init__") not in here and not name.endswith(".so"):
            made.writestr(zipfile.ZipInfo(name), given.read(name), zipfile.ZIP_DEFLATED)
del page, here, given, made, name
answer
`);
written("rest.zip", FS.readFile("/tmp/rest.zip"));
asleep.runPython("del answer; gc.collect(); gc.freeze()");

const libraries = Object.entries(module.LDSO.loadedLibsByHandle).filter(([handle]) => Number(handle));
if (libraries.length !== 1) throw new Error(`${libraries.length} libraries are loaded; static/wake.js links one`);
const [[handle, { name }]] = libraries;
packed("library.wasm", FS.readFile(name));
const base = module.HEAPU32[(Number(handle) + 12) >> 2];
const { info } = JSON.parse(fs.readFileSync(`${folder}/pyodide-lock.json`, "utf8"));
const places = { name, base, table: { start, end: module.wasmTable.length }, info };
written("places.json", JSON.stringify(places));
empty();
const memory = asleep.makeMemorySnapshot();
packed("memory", memory);

// It is seen to wake, and to say the same.
const { default: create } = await import(pathToFileURL(`${out}/pyodide.asm.mjs`).href);
const library = new WebAssembly.Module(FS.readFile(name));
const woken = await loadPyodide({ indexURL: folder, ...waking(create, { memory, library, places }) });
if (woken.runPython("calls.call('begin', '{}')") !== first) throw new Error("what wakes from the memory says something else");

/** Fill what is free of the memory with zeros, which weigh nothing. */
function empty() {
  const end = () => module.HEAPU32[module._emscripten_get_sbrk_ptr() >> 2];
  const taken = [];
  for (let size = 1 << 20; size >= 64; size >>= 1)
    for (const now = end(); end() === now; taken.push(module._malloc(size)), module.HEAPU8.fill(0, taken.at(-1), taken.at(-1) + size));
  taken.forEach((at) => module._free(at));
}
