// Why is my step slow? Files are handed to the worker, which reads them where they lie; nothing is sent.
import { $, answering, drawing, element, fill, isDark, list, paragraph, table, whenDark } from "./page.js";
import { call, cancel } from "./python.js";
import { WORDS } from "./words.js";

const MOST_BYTES = 200e6; // of a file as it lies; unpacked it may be more (web/live/calls/trace.py)
const form = $("form");
const drop = $("drop");
const input = form.elements.files;
const templates = JSON.parse($("templates").textContent);

for (const [kind, over] of [["dragover", true], ["dragleave", false], ["drop", false]])
  drop.addEventListener(kind, (event) => {
    event.preventDefault();
    drop.classList.toggle("over", over);
    if (kind === "drop" && event.dataTransfer.files.length) {
      input.files = event.dataTransfer.files;
      form.requestSubmit();
    }
  });

const size = (bytes) => `${(bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0)} MB`;

/** A bar while a file is read and while its step is looked into, and a button that ends both. */
function reading(names, say) {
  const bar = element("progress", { max: 1, value: 0, "aria-label": fill(WORDS.reading, { names }) });
  const stop = element("button", { type: "button", class: "button" }, WORDS.cancel);
  stop.onclick = () => cancel(WORDS.cancelled);
  $("progress").replaceChildren(bar, stop);
  return (done, all) => {
    if (done < all) return (bar.value = done / all);
    bar.removeAttribute("value"); // how long the rest takes is not known: it moves
    say(fill(WORDS.finding, { names }));
  };
}

/** The step, drawn as the explorer draws one. */
function picture({ data, layout, legend }, name) {
  const place = element("div", { class: "figure", role: "img", "aria-label": name });
  const below = element("div", { class: "legend" });
  below.innerHTML = legend; // of our own words alone: fsdp_sim.viz.explorer.drawing
  const draw = async () => {
    await drawing;
    const given = structuredClone(layout);
    given.template = templates[isDark() ? "dark" : "light"];
    if (place.clientWidth < 600) given.margin.l = 84;
    await window.Plotly.react(place, data, given, { responsive: true, displaylogo: false, displayModeBar: false });
  };
  whenDark(() => place.isConnected && draw());
  return { parts: [element("h2", {}, name), place, below], draw };
}

answering(form, async (say, show) => {
  const files = [...input.files];
  const twice = files.find((file, n) => files.findIndex((other) => other.name === file.name) < n);
  if (twice) throw new Error(fill(WORDS.same_name, { name: twice.name }));
  const large = files.find((file) => file.size > MOST_BYTES);
  if (large) throw new Error(fill(WORDS.too_large, { name: large.name, size: size(large.size), most: size(MOST_BYTES) }));
  const names = files.map((file) => `${file.name} (${size(file.size)})`).join(", ");
  say(fill(WORDS.reading, { names }));
  const settings = ["rank", "step", "bandwidth_gbps"].filter((name) => form.elements[name].value !== "");
  const chosen = Object.fromEntries(settings.map((name) => [name, Number(form.elements[name].value)]));
  let found;
  try {
    found = await call("trace", chosen, files, reading(names, say));
  } finally {
    $("progress").replaceChildren();
  }
  const { parts, draw } = picture(found.figure, fill(WORDS.picture_of_step, found));
  show(
    element("p", { class: "answer" }, found.headline), ...parts,
    element("h2", {}, WORDS.where_time_goes), table(WORDS.where_time_goes, [WORDS.what, WORDS.time, WORDS.of_step], found.totals, [1, 2]),
    ...found.culprits.flatMap(({ name, time, sentence, advice }) => [
      element("h2", {}, `${name}: ${time}`), paragraph(sentence), ...advice.map((tip) => paragraph(element("b", {}, `${WORDS.try} `), tip)),
    ]),
  );
  await draw();
  if (found.rows.length) {
    const caption = fill(WORDS.most_exposed, { count: found.collectives });
    show(element("h2", {}, caption), table(caption, found.columns, found.rows, [2, 3, 4, 5, 6]));
  }
  if (found.notes.length) show(element("h2", {}, WORDS.notes), list(found.notes));
  say(fill(WORDS.step_of_rank, { ...found, names, events: found.events.toLocaleString("en") }));
});
