// Python in a worker: loads it, unpacks our code, answers calls one after the other.
import { loadPyodide } from "./python/pyodide.mjs";

const here = new URL("./python/", import.meta.url).href;

async function begin() {
  const [python, ours] = await Promise.all([
    loadPyodide({ indexURL: here, packageBaseUrl: here }),
    fetch(`${here}ours.zip`).then((got) => {
      if (!got.ok) throw new Error(`ours.zip: ${got.status}`);
      return got.arrayBuffer();
    }),
  ]);
  const place = python.runPython("import site; site.getsitepackages()[0]");
  python.unpackArchive(ours, "zip", { extractDir: place });
  const call = python.runPython("import importlib; importlib.invalidate_caches(); from web.live.calls import call; call");
  return { call, FS: python.FS };
}

const ready = begin();
ready.then(
  () => postMessage({ ready: true }),
  (error) => postMessage({ failed: String(error?.message ?? error) }),
);

const FILES = "/files";

/** Call with files at hand: they are not copied, and read piece by piece. */
function withFiles({ call, FS }, name, argument, files) {
  if (!files.length) return call(name, JSON.stringify(argument));
  FS.mkdirTree(FILES);
  FS.mount(FS.filesystems.WORKERFS, { files }, FILES);
  try {
    return call(name, JSON.stringify({ ...argument, files: files.map((file) => `${FILES}/${file.name}`) }));
  } finally {
    FS.unmount(FILES);
  }
}

onmessage = async ({ data: { id, name, argument, files } }) => {
  try {
    postMessage({ id, ...JSON.parse(withFiles(await ready, name, argument, files)) });
  } catch (error) {
    postMessage({ id, failed: String(error?.message ?? error).trim().split("\n").at(-1) });
  }
};
