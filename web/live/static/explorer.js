// The explorer of the start page. What it shows at first was drawn when the site was built; then Python answers.
import { $, copy, drawing, element, fill, isDark, notebook, paragraph, whenDark } from "./page.js";
import { Refused, call, ready } from "./python.js";
import { WORDS } from "./words.js";

const begun = await (await fetch(new URL("./first.json", import.meta.url))).json();
let shown = begun.first; // the last plan that works
let told = { line: shown.line, fits: shown.fits, sentences: shown.sentences }; // what is said of a plan
let asked = null; // what is to be asked next: only the latest counts
let busy = false;
let drawnOnce = false;

async function draw() {
  await drawing;
  const figure = $("figure");
  const layout = structuredClone(shown.layout);
  layout.template = begun.templates[isDark() ? "dark" : "light"];
  if (figure.clientWidth < 600) {
    layout.margin.l = 84;
    layout.yaxis.tickfont = layout.yaxis2.tickfont = layout.yaxis3.tickfont = { size: 10 };
  }
  if (!drawnOnce) figure.replaceChildren();
  const done = await window.Plotly.react(figure, shown.data, layout, begun.config);
  if (!drawnOnce) {
    figure.on("plotly_click", ({ points: [{ curveNumber, base }] }) => {
      if (base !== undefined) ask({ clicked: [shown.drawn[curveNumber], base] });
    });
    figure.on("plotly_relayout", (changed) => {
      if (changed["xaxis.autorange"]) ask({ window: null, ends: null });
      else if (Object.keys(changed).some((name) => name.startsWith("xaxis.range"))) ask({ window: figure.layout.xaxis.range });
    });
    new ResizeObserver(() => {
      if (figure.clientWidth && figure.clientWidth !== figure._fullLayout?.width) window.Plotly.Plots.resize(figure);
    }).observe(figure);
  }
  drawnOnce = true;
  return done;
}

function control(setting) {
  const read = setting.options.map(([text]) => text);
  const move = (at) => ask({ moves: { [setting.key]: setting.options[at][1] } });
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

/** The link to what is shown: the plan, and where there are any the pinned plan and the goal. */
function link() {
  const parts = { plan: shown.line, pinned: shown.pinned, goal: shown.goal };
  return `#${new URLSearchParams(Object.entries(parts).filter(([, value]) => value))}`;
}

function linked() {
  const given = new URLSearchParams(location.hash.slice(1));
  return given.get("plan") && { line: given.get("plan"), pinned: given.get("pinned"), goal: given.get("goal") };
}

/** What stands beside the figure, and comes with it. */
function besides() {
  $("numbers").replaceChildren(...shown.numbers.map(([name, text, since]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, text), ...(since ? [element("dd", {}, since)] : [])))); // prettier-ignore
  $("reached").replaceChildren(...shown.reached.map(([text, holds]) =>
    element("span", { class: holds ? "holds" : "bad" }, element("b", {}, holds ? "✓ " : "✗ "), text))); // prettier-ignore
  $("legend").innerHTML = shown.legend;
  $("seen").classList.remove("stale");
  $("number").max = shown.operations;
  $("number").value = shown.number;
  $("number").setAttribute("aria-valuetext", shown.about || WORDS.no_operation);
  $("about").textContent = shown.about || WORDS.no_operation;
  $("about").classList.toggle("told", Boolean(shown.about));
  $("back").hidden = $("unpin").hidden = !shown.pinned;
  $("start").selectedIndex = Object.values(begun.starts).indexOf(shown.line) + 1;
  $("goal").selectedIndex = Object.keys(begun.goals).indexOf(shown.goal) + 1;
  notebook($("notebook"), [
    ["markdown", `# ${WORDS.notebook_title}\n\n${WORDS.notebook_about}`],
    ["code", `from fsdp_sim.viz import explorer\n\nexplorer(state=${JSON.stringify(shown.line)})`],
    ["code", shown.python],
  ]);
}

/** What is said of the plan, and whether it fits: both follow the figure. */
function say() {
  const [headline, memory, why, ...remarks] = shown.sentences;
  const peak = shown.numbers.findIndex(([name]) => name === "peak memory");
  $("numbers").children[peak].querySelector("dd").classList.toggle("bad", !shown.fits);
  $("words").replaceChildren(
    paragraph(element("b", {}, headline)),
    element("p", shown.fits ? {} : { class: "refused" }, memory),
    paragraph(why),
    ...remarks.map((text) => element("p", { class: "remark" }, text)),
  );
}

function refuse(error) {
  const words = error instanceof Refused ? WORDS.impossible : WORDS.stopped;
  $("words").replaceChildren(
    element("p", { class: "refused" }, fill(words, { why: error.message })),
    paragraph(fill(WORDS.last_that_works, { line: shown.line })),
  );
  $("seen").classList.add("stale");
}

/** Ask for a plan. While one is answered a newer question replaces the one that waits. */
async function ask(change) {
  const { line, ends, window, pinned, goal, operation } = shown;
  const moves = change.line ? {} : { ...asked?.moves, ...change.moves }; // of several levers each move counts
  asked = { line, ends, window, pinned, goal, operation, ...asked, number: null, clicked: null, ...change, moves };
  if (busy) return;
  busy = true;
  while (asked) {
    const now = asked;
    asked = null;
    try {
      shown = await call("see", now);
      await draw();
      besides();
      showControls();
      if (link() !== location.hash) history.replaceState(null, "", link());
      if (asked) continue; // a newer question goes before the words
      if (told.line !== shown.line) told = { line: shown.line, ...(await call("say", { line: shown.line })) };
      Object.assign(shown, told);
      say();
      document.body.dataset.drawn = Number(document.body.dataset.drawn ?? 0) + 1;
    } catch (error) {
      refuse(error);
    }
  }
  busy = false;
}

const from = (menu, lines) => Object.values(lines)[menu.selectedIndex - 1];
$("start").append(...[WORDS.this_plan, ...Object.keys(begun.starts)].map((name) => element("option", {}, name)));
$("goal").append(...[WORDS.no_goal, ...Object.keys(begun.goals)].map((name) => element("option", {}, name)));
$("start").onchange = () => from($("start"), begun.starts) && ask({ line: from($("start"), begun.starts), ends: null, operation: null });
$("goal").onchange = () => {
  const name = Object.keys(begun.goals)[$("goal").selectedIndex - 1];
  ask(name ? { goal: name, line: begun.goals[name], ends: null, operation: null } : { goal: null });
};
$("pin").onclick = () => ask({ pinned: shown.line, ends: null, window: null });
$("unpin").onclick = () => ask({ pinned: null, ends: null, window: null });
$("back").onclick = () => ask({ line: shown.pinned });
$("number").oninput = () => ask({ number: Number($("number").value), operation: null });
$("next").onclick = () => ask({ number: (shown.number % shown.operations) + 1 });
$("previous").onclick = () => ask({ number: shown.number > 1 ? shown.number - 1 : shown.operations });
$("copy-link").onclick = () => copy($("copy-link"), location.href.split("#")[0] + link());
$("copy-python").onclick = () => copy($("copy-python"), shown.python);
$("controls").onsubmit = (event) => event.preventDefault();
whenDark(draw);
window.addEventListener("hashchange", () => linked() && ask({ ...linked(), ends: null, window: null, operation: null }));
besides();
say();
showControls();
$("state-of").textContent = WORDS.starting;
ready.then(
  () => ($("state-of").textContent = WORDS.live),
  (error) => ($("state-of").textContent = fill(WORDS.no_python, { why: error.message })),
);
if (linked()) ask({ ...linked(), ends: null, window: null });
else await draw();
