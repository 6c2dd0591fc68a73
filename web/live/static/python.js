// The page's side of the worker.
//
//   import { call, ready } from "./live/python.js";
//   const answer = await call("see", { line: "model=gpt2-124m gpus=8" });   // what the function of web/live/calls returns
//
// A call that is refused throws a `Refused`, whose message is a sentence for the reader.

export class Refused extends Error {}

const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
const waiting = new Map();
let last = 0;
let started;

/** Settles when the worker can answer. */
export const ready = new Promise((resolve, reject) => (started = { resolve, reject }));
ready.catch(() => {});

worker.onmessage = ({ data: { id, ready: now, answer, refused, failed } }) => {
  if (now) started.resolve();
  else if (id === undefined) started.reject(new Error(failed));
  else {
    const { resolve, reject } = waiting.get(id);
    waiting.delete(id);
    if (refused !== undefined) reject(new Refused(refused));
    else if (failed !== undefined) reject(new Error(failed));
    else resolve(answer);
  }
};
worker.onerror = (event) => started.reject(new Error(event.message || "the worker could not be loaded"));

/** Ask the worker. Calls are answered in order; `ready` rejecting says why none will be.
 *
 * Files are read in the worker where they lie; the argument names them as `files`.
 */
export function call(name, argument, files = []) {
  return new Promise((resolve, reject) => {
    ready.catch(reject);
    const id = ++last;
    waiting.set(id, { resolve, reject });
    worker.postMessage({ id, name, argument, files });
  });
}
