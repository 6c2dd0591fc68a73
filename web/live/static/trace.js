// Why is my step slow? Files are handed to the worker, which reads them where they lie; nothing is sent.
import { call } from "./python.js";
import { answering, element, list, paragraph, table } from "./page.js";

const form = document.getElementById("form");
const drop = document.getElementById("drop");
const input = form.elements.files;

for (const [kind, over] of [["dragover", true], ["dragleave", false], ["drop", false]])
  drop.addEventListener(kind, (event) => {
    event.preventDefault();
    drop.classList.toggle("over", over);
    if (kind === "drop" && event.dataTransfer.files.length) {
      input.files = event.dataTransfer.files;
      form.requestSubmit();
    }
  });

answering(form, async (say, show) => {
  const files = [...input.files];
  const twice = files.find((file, n) => files.findIndex((other) => other.name === file.name) < n);
  if (twice) throw new Error(`Two files are called ${twice.name}; give each a name of its own.`);
  const names = files.map((file) => `${file.name} (${(file.size / 1e6).toFixed(1)} MB)`).join(", ");
  say(`Reading ${names}.`);
  const settings = ["rank", "step", "bandwidth_gbps"].filter((name) => form.elements[name].value !== "");
  const chosen = Object.fromEntries(settings.map((name) => [name, Number(form.elements[name].value)]));
  const found = await call("trace", chosen, files);
  show(
    paragraph(found.headline),
    table("Where the time goes", ["what", "time", "of the step"], found.totals, [1, 2]),
    ...found.culprits.flatMap(({ name, time, sentence, advice }) => [
      element("h2", {}, `${name}: ${time}`), paragraph(sentence), ...advice.map((tip) => paragraph(element("b", {}, "Try: "), tip)),
    ]),
  );
  document.querySelector("#result p").className = "answer";
  if (found.rows.length) {
    const caption = `The most exposed of ${found.collectives} collectives`;
    show(element("h2", {}, caption), table(caption, found.columns, found.rows, [2, 3, 4, 5, 6]));
  }
  if (found.notes.length) show(element("h2", {}, "Notes"), list(found.notes));
  say(`Step ${found.step} of rank ${found.rank}, from ${names}: ${found.events.toLocaleString("en")} operations.`);
});
