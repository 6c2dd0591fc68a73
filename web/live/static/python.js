// The page's side of the worker.
//
//   import { call, ready } from "./live/python.js";
//   const answer = await call("see", { line: "model=gpt2-124m gpus=8" });   // what the function of web/live/calls returns
//
// A call that is refused throws a `Refused`, whose message is a sentence for the reader.

export class Refused extends Error {}

let worker, waiting, started;
let last = 0;

/** Settles when the worker can answer. */
export let ready;

function start() {
  waiting = new Map();
  ready = new Promise((resolve, reject) => (started = { resolve, reject }));
  ready.catch(() => {});
  worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
  worker.onmessage = ({ data: { id, ready: now, progress, answer, refused, failed } }) => {
    if (now) return started.resolve();
    if (id === undefined) return started.reject(new Error(failed));
    const { resolve, reject, told } = waiting.get(id);
    if (progress) return told?.(...progress);
    waiting.delete(id);
    if (refused !== undefined) reject(new Refused(refused));
    else if (failed !== undefined) reject(new Error(failed));
    else resolve(answer);
  };
  worker.onerror = (event) => started.reject(new Error(event.message || "the worker could not be loaded"));
}
start();

/** Ask the worker. Calls are answered in order; `ready` rejecting says why none will be.
 *
 * Files are read in the worker where they lie; the argument names them as `files`. `told` hears of progress: what is
 * done, and all.
 */
export function call(name, argument, files = [], told = undefined) {
  return new Promise((resolve, reject) => {
    ready.catch(reject);
    const id = ++last;
    waiting.set(id, { resolve, reject, told });
    worker.postMessage({ id, name, argument, files });
  });
}

/** End what the worker is at; another one takes its place. Calls that wait are refused with a sentence. */
export function cancel(sentence) {
  const unanswered = [...waiting.values()];
  worker.terminate();
  start();
  for (const { reject } of unanswered) reject(new Refused(sentence));
}
