// The schedule puzzle in a page: the notebook's front end (puzzle.js), whose messages the worker takes.
import puzzle from "./puzzle.js";
import { $, copy, fill, notebook } from "./page.js";
import { call } from "./python.js";
import { WORDS } from "./words.js";

const { first, in_torch } = JSON.parse($("begun").textContent);
const heard = [];
let state = first;

const order = () => state.lines.map((line) => line.text);
const python = () => `from fsdp_sim.learn import puzzle\n\npuzzle(${JSON.stringify(state.level)}).play([${order().map((line) => JSON.stringify(line)).join(", ")}])`;
const link = () => `#${new URLSearchParams({ level: state.level, ...(state.can_undo && { order: order().join(",") }) })}`;

function kept() {
  try {
    return JSON.parse(localStorage.getItem("puzzle") ?? "{}");
  } catch {
    return {}; // the browser keeps nothing
  }
}

function show(next) {
  state = next;
  try {
    localStorage.setItem("puzzle", JSON.stringify(Object.fromEntries(state.levels.map(({ name, stars }) => [name, stars]))));
  } catch { /* the same */ } // prettier-ignore
  history.replaceState(null, "", link());
  notebook($("notebook"), [
    ["markdown", `# ${state.title}\n\n${state.goal}`],
    ["code", python()],
    ["code", `puzzle(${JSON.stringify(state.level)})`],
  ]);
  heard.forEach((tell) => tell());
  document.body.dataset.drawn = Number(document.body.dataset.drawn ?? 0) + 1;
}

async function asked(name, argument) {
  try {
    show(await call(name, argument));
  } catch (error) {
    state = { ...state, refused: fill(WORDS.no_simulator, { why: error.message }) };
    heard.forEach((tell) => tell());
  }
}

function open() {
  const given = new URLSearchParams(location.hash.slice(1));
  return asked("open_puzzle", { won: kept(), in_torch, level: given.get("level"), order: given.get("order")?.split(",") });
}

puzzle.render({
  model: { get: () => state, on: (_, tell) => heard.push(tell), off: () => {}, send: (message) => asked("take", message) },
  el: $("puzzle"),
});
$("copy-link").onclick = () => copy($("copy-link"), location.href.split("#")[0] + link());
$("copy-python").onclick = () => copy($("copy-python"), python());
window.addEventListener("hashchange", open);
open();
