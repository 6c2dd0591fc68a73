// The explorer of the start page. What it shows at first was drawn when the site was built; then Python answers.
import { element, paragraph } from "./page.js";
import { Refused, call, ready } from "./python.js";

const $ = (id) => document.getElementById(id);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const begun = await (await fetch(new URL("./first.json", import.meta.url))).json();
let shown = begun.first; // the last plan that works
let asked = null; // what is to be asked next: only the latest counts
let busy = false;

function draw() {
  const narrow = $("figure").clientWidth < 600;
  const layout = structuredClone(shown.layout);
  layout.template = begun.templates[dark.matches ? "dark" : "light"];
  if (narrow) {
    layout.margin.l = 84;
    layout.yaxis.tickfont = layout.yaxis2.tickfont = { size: 10 };
  }
  return window.Plotly.react($("figure"), shown.data, layout, begun.config);
}

function control(setting) {
  const read = setting.options.map(([text]) => text);
  const move = (at) => ask({ key: setting.key, option: setting.options[at][1] });
  let field, beside;
  if (setting.form === "menu") {
    field = element("select", {}, ...read.map((text) => element("option", {}, text)));
    field.selectedIndex = setting.at;
    field.onchange = () => move(field.selectedIndex);
  } else if (setting.form === "check") {
    field = element("input", { type: "checkbox" });
    // Of a box, on is what is ticked: it may be the first option.
    const on = read.indexOf("on");
    field.checked = setting.at === on;
    field.onchange = () => move(field.checked ? on : 1 - on);
  } else {
    field = element("input", { type: "range", min: 0, max: read.length - 1, step: 1, value: setting.at });
    const now = element("output", {});
    const tell = () => {
      now.textContent = read[field.value];
      field.setAttribute("aria-valuetext", read[field.value]);
    };
    tell();
    field.oninput = () => {
      tell();
      move(Number(field.value));
    };
    beside = element("span", { class: "slider" }, field, now);
  }
  field.dataset.key = setting.key;
  return element("label", { class: "control", title: setting.help }, element("span", {}, setting.label), beside ?? field);
}

/** The controls anew, where what they offer or say has changed; what has the focus keeps it. */
let built = {};
function showControls() {
  const key = document.activeElement?.dataset?.key;
  for (const [place, wanted] of [["at-hand", true], ["more", false]]) {
    const settings = shown.controls.filter((setting) => setting.at_hand === wanted);
    const same = JSON.stringify(settings);
    if (built[place] === same) continue;
    built[place] = same;
    $(place).replaceChildren(...settings.map(control));
  }
  if (key && document.activeElement?.dataset?.key !== key) document.querySelector(`[data-key="${key}"]`)?.focus();
}

function say() {
  $("numbers").replaceChildren(...shown.numbers.map(([name, text]) =>
    element("div", {}, element("dt", {}, name), element("dd", name === "peak memory" && !shown.fits ? { class: "bad" } : {}, text)))); // prettier-ignore
  const [headline, memory, why, ...remarks] = shown.sentences;
  $("words").replaceChildren(
    paragraph(element("b", {}, headline)),
    element("p", shown.fits ? {} : { class: "refused" }, memory),
    paragraph(why),
    ...remarks.map((text) => element("p", { class: "remark" }, text)),
  );
  $("legend").innerHTML = shown.legend;
  $("seen").classList.remove("stale");
  history.replaceState(null, "", `#${encodeURIComponent(shown.line)}`);
  const start = Object.values(begun.starts).indexOf(shown.line);
  $("start").selectedIndex = start + 1;
  const cells = [
    ["markdown", "# A step to explore\n\n`make lab` in a checkout of fsdp_sim opens this notebook."],
    ["code", `from fsdp_sim.viz import explorer\n\nexplorer(state=${JSON.stringify(shown.line)})`],
    ["code", shown.python],
  ].map(([cell_type, source], n) => ({ cell_type, id: `cell-${n}`, source, metadata: {}, ...(cell_type === "code" ? { execution_count: null, outputs: [] } : {}) })); // prettier-ignore
  const notebook = { cells, metadata: { kernelspec: { name: "python3", display_name: "Python 3", language: "python" } }, nbformat: 4, nbformat_minor: 5 };
  URL.revokeObjectURL($("notebook").href);
  $("notebook").href = URL.createObjectURL(new Blob([JSON.stringify(notebook, null, 1)], { type: "application/x-ipynb+json" }));
}

function refuse(error) {
  const text = error instanceof Refused ? `Impossible: ${error.message}.` : `The simulator stopped: ${error.message}`;
  $("words").replaceChildren(
    element("p", { class: "refused" }, text),
    paragraph(`The figure still shows the last plan that works: ${shown.line}`),
  );
  $("seen").classList.add("stale");
}

/** Ask for a plan. While one is answered a newer question replaces the one that waits. */
async function ask(change) {
  asked = { line: shown.line, ends: shown.ends, ...change };
  if (busy) return;
  busy = true;
  while (asked) {
    const now = asked;
    asked = null;
    try {
      shown = await call("see", now);
      await draw();
      say();
      showControls();
      document.body.dataset.drawn = Number(document.body.dataset.drawn ?? 0) + 1;
    } catch (error) {
      refuse(error);
    }
  }
  busy = false;
}

async function copy(button, text) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    window.prompt("The browser does not let a page copy. Here it is:", text);
  }
  setTimeout(() => (button.textContent = before), 1500);
}

$("start").append(...["this plan", ...Object.keys(begun.starts)].map((name) => element("option", {}, name)));
$("start").onchange = () => {
  const line = Object.values(begun.starts)[$("start").selectedIndex - 1];
  if (line) ask({ line, ends: null });
};
$("copy-link").onclick = () => copy($("copy-link"), location.href);
$("copy-python").onclick = () => copy($("copy-python"), shown.python);
$("controls").onsubmit = (event) => event.preventDefault();
dark.addEventListener("change", draw);
const given = decodeURIComponent(location.hash.slice(1));
window.addEventListener("hashchange", () => ask({ line: decodeURIComponent(location.hash.slice(1)), ends: null }));
await draw();
say();
showControls();
document.body.dataset.first = "drawn";
$("state-of").textContent = "Drawn beforehand; the simulator is starting.";
if (given.includes("=") && given !== shown.line) ask({ line: given, ends: null });
ready.then(
  () => ($("state-of").textContent = "Live: the simulator runs in this page."),
  (error) => ($("state-of").textContent = `The simulator cannot run in this browser (${error.message}); the figure stands still.`),
);
