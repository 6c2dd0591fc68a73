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
  return python.runPython("import importlib; importlib.invalidate_caches(); from web.live.calls import call; call");
}

const ready = begin();
ready.then(
  () => postMessage({ ready: true }),
  (error) => postMessage({ failed: String(error?.message ?? error) }),
);

onmessage = async ({ data: { id, name, argument } }) => {
  try {
    const call = await ready;
    postMessage({ id, ...JSON.parse(call(name, JSON.stringify(argument))) });
  } catch (error) {
    postMessage({ id, failed: String(error?.message ?? error).trim().split("\n").at(-1) });
  }
};
