// Will it fit? The form is asked of the simulator; then, which takes longer, what would make it fit.
import { call } from "./python.js";
import { answering, element, list, paragraph, table } from "./page.js";

const form = document.getElementById("form");
const colours = JSON.parse(document.getElementById("colours").textContent);

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
  const said = `${peak} at the peak, of ${limit} that a process can use; the table has the parts`;
  return element(
    "div", { class: "bar", role: "img", "aria-label": said },
    element("div", { class: "limit-words" }, `a process can use ${limit}`), element("div", { class: "parts" }, ...parts), line,
  );
}

answering(form, async (say, show) => {
  const question = asked();
  say("The step is simulated.");
  const found = await call("fit", question);
  const rows = found.memory.map(({ category, name, text }) => [[key(category, "key"), name], text]);
  show(
    paragraph(found.answer), paragraph(found.why),
    element("h2", {}, "Memory of a rank at the peak"), paragraph(`${found.peak}; ${found.moment}`), bar(found),
    table("Memory of a rank at the peak", ["what", "memory"], rows, [1]),
    element("h2", {}, "The step"), table("The step", null, found.numbers, [1]),
  );
  document.querySelector("#result p").className = "answer";
  say("Changes are simulated.");
  const told = await call("changes", question);
  for (const { sentence, changes } of told) show(element("h2", {}, sentence.replace(/:$/, "")), list(changes));
  if (found.notes.length) show(element("h2", {}, "Taken as given"), list(found.notes));
  say("");
});
