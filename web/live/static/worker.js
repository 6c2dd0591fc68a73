// Python in a worker: wakes it from its memory, unpacks our code, answers calls one after the other.
import { loadPyodide } from "./python/pyodide.mjs";

const here = new URL("./python/", import.meta.url).href;

async function fetched(name) {
  const got = await fetch(here + name);
  if (!got.ok) throw new Error(`${name}: ${got.status}`);
  return got;
}

async function begin() {
  // As it was when the site was built, after the standard library's imports (compile.mjs): half the start.
  const memory = fetched("memory.gz").then((got) =>
    new Response(got.body.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer(),
  );
  const [python, ours] = await Promise.all([
    loadPyodide({ indexURL: here, packageBaseUrl: here, _loadSnapshot: memory }),
    fetched("ours.zip").then((got) => got.arrayBuffer()),
  ]);
  const place = python.runPython("import site; site.getsitepackages()[0]");
  python.unpackArchive(ours, "zip", { extractDir: place });
  python.globals.set("page", self.name);
  const call = python.runPython("import importlib; importlib.invalidate_caches(); from web.live import calls; calls.prepare(page); calls.call");
  return { call, FS: python.FS };
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
    if (performance.now() - last < 100) return;
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
