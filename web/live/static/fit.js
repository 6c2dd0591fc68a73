// Will it fit? The form is asked of the simulator; then, which takes longer, what would make it fit.
import { $, answering, element, fill, list, paragraph, table } from "./page.js";
import { call } from "./python.js";
import { WORDS } from "./words.js";

const form = $("form");
const colours = JSON.parse($("colours").textContent);

function asked() {
  const texts = Object.fromEntries([...new FormData(form)].filter(([, text]) => text !== ""));
  return { texts, config: form.elements.config.value };
}

function key(category, classes) {
  const [colour, hatched] = colours[category] ?? ["#D9CFC3", false];
  return element("span", { class: `${classes}${hatched ? " hatched" : ""}`, style: `--colour: ${colour}` });
}

function bar({ memory, limit_bytes, limit, peak }) {
  const whole = Math.max(limit_bytes, memory.reduce((sum, part) => sum + part.bytes, 0)) * 1.01;
  const parts = memory.map(({ category, bytes, name, text }) => {
    const part = key(category, "");
    part.style.width = `${(100 * bytes) / whole}%`;
    part.title = `${name}: ${text}`;
    return part;
  });
  const line = element("div", { class: "limit", style: `left: ${(100 * limit_bytes) / whole}%` });
  return element(
    "div", { class: "bar", role: "img", "aria-label": fill(WORDS.of_limit, { peak, limit }) },
    element("div", { class: "limit-words" }, fill(WORDS.can_use, { limit })), element("div", { class: "parts" }, ...parts), line,
  );
}

/** The form as it is asked, as a link; a pasted config stays here. */
function link() {
  const texts = new URLSearchParams([...new FormData(form)].filter(([, text]) => text !== ""));
  if (!form.elements.config.value) history.replaceState(null, "", `#${texts}`);
}

answering(form, async (say, show) => {
  const question = asked();
  if (!question.config.trim() && !question.texts.model) throw new Error(WORDS.no_model);
  link();
  say(WORDS.simulating);
  const found = await call("fit", question);
  const rows = found.memory.map(({ category, name, text }) => [[key(category, "key"), name], text]);
  show(
    element("p", { class: "answer" }, found.answer), paragraph(found.why),
    element("h2", {}, WORDS.memory_at_the_peak), paragraph(`${found.peak}, ${found.moment}`), bar(found),
    table(WORDS.memory_at_the_peak, [WORDS.what, WORDS.memory], rows, [1]),
    element("h2", {}, WORDS.step), table(WORDS.step, null, found.numbers, [1]),
  );
  say(WORDS.trying);
  const told = await call("changes", question);
  for (const { sentence, changes } of told) show(element("h2", {}, sentence.replace(/:$/, "")), list(changes));
  if (found.notes.length) show(element("h2", {}, WORDS.taken), list(found.notes));
  say("");
});

const given = new URLSearchParams(location.hash.slice(1));
for (const [name, text] of given) if (form.elements[name]) form.elements[name].value = text;
if (given.size) form.requestSubmit();
