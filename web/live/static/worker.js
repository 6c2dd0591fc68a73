// Python in a worker: wakes it from its memory, answers calls one after the other.
import create from "./python/pyodide.asm.mjs";
import { loadPyodide } from "./python/pyodide.mjs";
import { waking } from "./wake.js";

const here = new URL("./python/", import.meta.url).href;

async function fetched(name) {
  const got = await fetch(here + name);
  if (!got.ok) throw new Error(`${name}: ${got.status}`);
  return got;
}

async function unpacked(name) {
  const { body } = await fetched(name);
  return new Uint8Array(await new Response(body.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer());
}

async function begin() {
  const memory = unpacked("memory.gz");
  const library = unpacked("library.wasm.gz").then((bytes) => WebAssembly.compile(bytes));
  const places = fetched("places.json").then((got) => got.json());
  const [python, rest] = await Promise.all([
    loadPyodide({ indexURL: here, packageBaseUrl: here, ...waking(create, { memory, library, places }) }),
    fetched("rest.zip").then((got) => got.arrayBuffer()),
  ]);
  python.unpackArchive(rest, "zip", { extractDir: python.runPython("site.getsitepackages()[0]") });
  return { call: python.runPython("importlib.invalidate_caches(); calls.call"), FS: python.FS };
}

const ready = begin();
ready.then(
  () => postMessage({ ready: true }),
  (error) => postMessage({ failed: String(error?.message ?? error) }),
);

const FILES = "/files";

/** Call with files at hand: they are not copied, and read piece by piece. */
function withFiles({ call, FS }, id, name, argument, files) {
  if (!files.length) return call(name, JSON.stringify(argument));
  FS.mkdirTree(FILES);
  FS.mount(FS.filesystems.WORKERFS, { files }, FILES);
  let last = 0;
  const progress = (done, all) => {
    if (done < all && performance.now() - last < 100) return;
    last = performance.now();
    postMessage({ id, progress: [done, all] });
  };
  try {
    return call(name, JSON.stringify({ ...argument, files: files.map((file) => `${FILES}/${file.name}`) }), progress);
  } finally {
    FS.unmount(FILES);
  }
}

onmessage = async ({ data: { id, name, argument, files } }) => {
  try {
    postMessage({ id, ...JSON.parse(withFiles(await ready, id, name, argument, files)) });
  } catch (error) {
    postMessage({ id, failed: String(error?.message ?? error).trim().split("\n").at(-1) });
  }
};
