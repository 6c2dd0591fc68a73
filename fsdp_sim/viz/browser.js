// What figures do beyond plotly. In a page (see page.js): select an operation by click or key and light up what it
// depends on, and say it in a sentence. In a live notebook: move a figure as the kernel says, and copy text. No
// dependency but Plotly itself.
//
// A figure brings `layout.meta.timeline` (see `_links` in timeline_figure.py): bars are numbered through all traces
// with `meta.op`, in order; `cause[n]` is the bar that made bar n begin when it did (-1: none), `waits[n]` those it
// waited for beside, `paths[p]` the critical path of panel p.

export const HELP =
  "Click an operation, or use the arrow keys, to see what it waited for and what waited for it; " +
  "Enter or C shows the critical path, Escape clears.";
const FAINT = 0.13;

/** The bars of a drawn figure, by number: where each lies and what it is called. */
export function barsOf(gd) {
  const bars = [];
  gd._fullData.forEach((trace, t) => {
    if (trace.type !== "bar" || trace.meta?.op === undefined) return;
    for (let i = 0; i < trace.x.length; i++) {
      const [unit, duration, more] = trace.customdata[i];
      const name = trace.meta.op ? `${trace.meta.op} ${unit}`.trim() : unit;
      bars.push({
        trace: t, point: i, axis: trace.yaxis, row: trace.y[i],
        start: trace.base[i], end: trace.base[i] + trace.x[i],
        width: typeof trace.width === "number" ? trace.width : trace.width[i],
        op: trace.meta.op, name, duration, more,
      }); // prettier-ignore
    }
  });
  return bars;
}

/** Of each bar those that waited for it: `waits` and `cause` turned round. */
export function awaitedBy({ cause, waits }) {
  const after = cause.map(() => []);
  cause.forEach((before, n) => before >= 0 && after[before].push(n));
  waits.forEach((some, n) => some.forEach((before) => after[before].includes(n) || after[before].push(n)));
  return after;
}

/** The bars back to the start, each the one that made the one before it begin; the bar itself comes first. */
export function chainOf(cause, n) {
  const seen = new Set();
  for (; n >= 0 && !seen.has(n); n = cause[n]) seen.add(n);
  return [...seen];
}

/** The bar an arrow key leads to: the next or last one on the lane, or the nearest in time on the lane above or below. */
export function moved(bars, n, key) {
  if (n < 0) return bars.reduce((best, bar, k) => (best < 0 || bar.start < bars[best].start ? k : best), -1);
  const panel = (bar) => Number(bar.axis.slice(1) || 1);
  const here = bars[n];
  const numbers = bars.map((_, k) => k);
  if (key === "ArrowLeft" || key === "ArrowRight") {
    const lane = numbers.filter((k) => bars[k].axis === here.axis && bars[k].row === here.row);
    lane.sort((a, b) => bars[a].start - bars[b].start || a - b);
    return lane[lane.indexOf(n) + (key === "ArrowRight" ? 1 : -1)] ?? n;
  }
  const sign = key === "ArrowDown" ? 1 : -1;
  const height = (bar) => 1000 * panel(bar) + bar.row;
  const beyond = numbers.filter((k) => sign * (height(bars[k]) - height(here)) > 1e-6);
  if (!beyond.length) return n;
  const nearest = Math.min(...beyond.map((k) => sign * height(bars[k])));
  const gap = (bar) => Math.max(bar.start - here.end, here.start - bar.end, 0);
  return beyond
    .filter((k) => sign * height(bars[k]) - nearest < 1e-6)
    .reduce((best, k) => (gap(bars[k]) < gap(bars[best]) ? k : best));
}

const human = (ms) => `${Number(ms >= 100 ? ms.toFixed(0) : ms.toPrecision(3)).toLocaleString("en")} ms`;
const plain = (html) => {
  const box = document.createElement("template");
  box.innerHTML = html.replaceAll("<br>", "; ");
  return box.content.textContent.replace(/^[;, ]+/, "");
};

/** What is selected, in a sentence. */
export function sentence(bar) {
  const more = plain(bar.more);
  return `${plain(bar.name)}, ${bar.duration}${more ? `: ${more}` : ""}.`;
}

/** What the critical path consists of, in a sentence. */
export function pathSentence(bars, path, span) {
  const spent = new Map();
  path.forEach((n) => {
    const name = bars[n].op || "several";
    spent.set(name, (spent.get(name) ?? 0) + bars[n].end - bars[n].start);
  });
  const together = [...spent.values()].reduce((a, b) => a + b, 0);
  const told = [...spent].sort((a, b) => b[1] - a[1]).map(([op, ms]) => `${op} ${human(ms)}`);
  return (
    `The critical path of this step of ${human(span)}: ${path.length} operations drawn here take ${human(together)} ` +
    `of it: ${told.slice(0, 4).join(", ")}${told.length > 4 ? " and others" : ""}.`
  );
}

/** Lines from the end of each bar to the start of the next, as one plotly shape per axis. */
function arrows(bars, pairs, color, dash) {
  const paths = new Map();
  for (const [a, b] of pairs) {
    const [one, two] = [bars[a], bars[b]];
    if (one.axis !== two.axis) continue;
    const line = `M${Math.min(one.end, two.start)},${one.row} L${two.start},${two.row}`;
    paths.set(one.axis, `${paths.get(one.axis) ?? ""} ${line}`);
  }
  return [...paths].map(([yref, path]) => ({
    type: "path", path, xref: "x", yref, line: { color, width: 1.2, dash }, name: "browser",
  })); // prettier-ignore
}

/** Makes the timeline of a drawn figure selectable; returns what selects, for whoever embeds it. */
export function selectable(gd, said) {
  const links = gd.layout.meta.timeline;
  const after = awaitedBy(links);
  const shapes = gd.layout.shapes ?? [];
  let selected = -1;
  let path = -1;

  function light(some, extra) {
    const bars = barsOf(gd);
    const traces = gd._fullData.flatMap((trace, t) => (trace.type === "bar" ? [t] : []));
    const points = new Map(traces.map((t) => [t, []]));
    some?.forEach((n) => points.get(bars[n].trace).push(bars[n].point));
    const update = {
      selectedpoints: traces.map((t) => (some ? points.get(t) : null)),
      "unselected.marker.opacity": FAINT,
    };
    return window.Plotly.update(gd, update, { shapes: [...shapes, ...extra] }, traces);
  }

  function select(n) {
    const bars = barsOf(gd);
    [selected, path] = [n, -1];
    if (n < 0) {
      said.textContent = HELP;
      return light(null, []);
    }
    const bar = bars[n];
    const ink = gd._fullLayout.font.color;
    const chain = chainOf(links.cause, n);
    const lit = new Set([...chain, ...links.waits[n], ...after[n]]);
    const frame = {
      type: "rect", x0: bar.start, x1: bar.end, y0: bar.row - bar.width / 2, y1: bar.row + bar.width / 2,
      xref: "x", yref: bar.axis, line: { color: ink, width: 2.5 }, name: "browser",
    }; // prettier-ignore
    const back = chain.slice(1).map((k, i) => [k, chain[i]]);
    said.textContent = sentence(bar);
    return light(lit, [
      ...arrows(bars, [...back, ...links.waits[n].map((k) => [k, n])], ink, "solid"),
      ...arrows(bars, after[n].map((k) => [n, k]), ink, "dot"), // prettier-ignore
      frame,
    ]);
  }

  function showPath() {
    if (!links.paths.length) return undefined;
    const bars = barsOf(gd);
    path = (path + 1) % links.paths.length;
    selected = -1;
    const some = links.paths[path];
    const steps = some.slice(1).map((n, i) => [some[i], n]);
    const last = Math.max(...bars.filter((bar) => bar.axis === bars[some[0]].axis).map((bar) => bar.end));
    said.textContent = pathSentence(bars, some, last);
    return light(new Set(some), arrows(bars, steps, gd._fullLayout.font.color, "solid"));
  }

  gd.on("plotly_click", ({ points }) => {
    const [{ curveNumber, pointNumber }] = points;
    const n = barsOf(gd).findIndex((bar) => bar.trace === curveNumber && bar.point === pointNumber);
    if (n >= 0) select(n === selected ? -1 : n);
  });
  gd.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key.startsWith("Arrow")) select(moved(barsOf(gd), selected, event.key));
    else if (event.key === "Enter" || event.key.toLowerCase() === "c") showPath();
    else if (event.key === "Escape") select(-1);
    else return;
    event.preventDefault();
  });
  return { select, showPath };
}

export const PLAYER_HELP = "Arrow keys step, Home and End go to the first and the last moment, the space bar plays and pauses.";
const NOW = { mode: "immediate", frame: { duration: 0, redraw: true }, transition: { duration: 0 } };

/** Makes a figure with frames and a slider movable by keys; says where it is. */
export function movable(gd, said) {
  const slider = () => gd.layout.sliders[0];
  const steps = slider().steps.map((step) => step.args[0][0]);
  const play = gd.layout.updatemenus?.[0]?.buttons?.[0]?.args?.[1];
  let playing = false;
  const tell = () => (said.textContent = plain(slider().steps[slider().active ?? 0].label ?? ""));
  const animate = (to, how) => window.Plotly.animate(gd, to, how).catch(() => {}); // an animation that another one ends
  gd.on("plotly_sliderchange", () => setTimeout(tell));
  gd.on("plotly_animated", () => {
    playing = false;
    tell();
  });
  gd.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const active = slider().active ?? 0;
    const to = { ArrowLeft: active - 1, ArrowRight: active + 1, Home: 0, End: steps.length - 1 }[event.key];
    if (event.key === " " && play) {
      animate(playing ? [null] : null, playing ? NOW : play);
      playing = !playing;
    } else if (to !== undefined) {
      playing = false;
      animate([steps[Math.min(Math.max(to, 0), steps.length - 1)]], NOW);
    } else return;
    event.preventDefault();
  });
}

/** Gives a figure its title as a name for screen readers and, if it is a timeline or moves, keys and a sentence below. */
export function describe(gd, title) {
  gd.setAttribute("aria-label", title || "figure");
  const moves = gd.layout.sliders?.[0]?.steps?.length > 0;
  if (!gd.layout.meta?.timeline && !moves) {
    gd.setAttribute("role", "group");
    return null;
  }
  const help = moves ? PLAYER_HELP : HELP;
  const said = document.createElement("p");
  said.className = "said";
  said.setAttribute("aria-live", "polite");
  said.textContent = help;
  (gd.closest("figure")?.querySelector("figcaption")?.previousElementSibling ?? gd).after(said);
  gd.tabIndex = 0;
  gd.setAttribute("role", "application");
  gd.setAttribute("aria-label", `${title} ${help}`.trim());
  return moves ? movable(gd, said) : selectable(gd, said);
}

// ---- in a live notebook: the explorer's two widgets ----

const pageIsDark = () => {
  const light = document.body.dataset.jpThemeLight;
  return light === undefined ? matchMedia("(prefers-color-scheme: dark)").matches : light === "false";
};

function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  return Promise.reject(new Error("this page may not write to the clipboard"));
}

function nameSliders(box) {
  for (const slider of box.querySelectorAll("[role=slider]:not([aria-label])")) {
    const label = slider.closest(".widget-inline-hbox, .widget-slider")?.querySelector(".widget-label");
    if (label) slider.setAttribute("aria-label", label.textContent);
  }
}

/** A button that copies, and what the page around it looks like. */
function bridge({ model, el }) {
  const button = document.createElement("button");
  button.className = "jupyter-button widget-button fsdp-copy";
  button.textContent = model.get("label");
  const status = document.createElement("span");
  status.setAttribute("role", "status");
  status.style.marginLeft = "8px";
  button.onclick = () =>
    copied(model.get("text")).then(
      () => (status.textContent = "copied"),
      () => (status.textContent = "the browser does not allow it; the text below is selected, press Ctrl+C"),
    ).then(() => {
      const area = el.closest(".fsdp-explorer")?.querySelector("textarea");
      if (status.textContent !== "copied" && area) area.select();
    });
  model.on("change:text", () => (status.textContent = ""));
  el.append(button, status);

  const tell = () => {
    if (model.get("page_is_dark") === pageIsDark()) return;
    model.set("page_is_dark", pageIsDark());
    model.save_changes();
  };
  const watch = new MutationObserver(tell);
  watch.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  tell();

  let box = null;
  // Not by watching the whole box: a figure that is redrawn changes thousands of its elements.
  const name = () => nameSliders(box);
  // A FigureWidget is drawn before it has a place; plotly looks at its size again when the window's changes.
  let width = 0;
  const sized = new ResizeObserver(() => {
    if (box.clientWidth === width) return;
    width = box.clientWidth;
    window.dispatchEvent(new Event("resize"));
  });
  const wait = setInterval(() => {
    box = el.closest(".fsdp-explorer");
    if (!box) return;
    clearInterval(wait);
    nameSliders(box);
    sized.observe(box);
    box.addEventListener("focusin", name);
    for (const later of [500, 1500, 4000]) setTimeout(name, later);
    // A still copy of the explorer stands behind it in the notebook, for readers without a kernel.
    box.closest(".jp-OutputArea-child")?.classList.add("fsdp-explorer-lives");
  }, 50);
  return () => {
    watch.disconnect();
    box?.removeEventListener("focusin", name);
    sized.disconnect();
    clearInterval(wait);
  };
}

const ARRAYS = { f4: Float32Array, i4: Int32Array };

/** Numbers as they came, as arrays. */
function decoded(value) {
  if (Array.isArray(value)) return typeof value[0] === "string" ? value : value.map(decoded);
  if (value === null || typeof value !== "object" || ArrayBuffer.isView(value)) return value;
  if (value.bytes !== undefined && value.dtype in ARRAYS) {
    const { buffer, byteOffset, byteLength } = value.bytes;
    return new ARRAYS[value.dtype](buffer.slice(byteOffset, byteOffset + byteLength));
  }
  return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, decoded(one)]));
}

/** A figure whose numbers the kernel moves: one drawing for each move, and of moves that come too fast the last. */
function livePlot({ model, el }) {
  const gd = document.createElement("div");
  el.append(gd);
  let told = {}; // of the layout what the kernel has said last: the rest is the reader's, who may have zoomed
  let busy = false;
  let wanted = [];

  async function draw() {
    const { data, layout, config } = decoded(model.get("figure"));
    told = {};
    await window.Plotly.react(gd, data, layout, config);
  }

  function move() {
    const { traces, layout } = model.get("moved");
    if (!traces || traces.length !== gd.data.length) return undefined;
    const names = new Set(traces.flatMap(Object.keys));
    const style = {};
    for (const name of names) style[name] = traces.map((trace) => decoded(trace[name]));
    const changed = Object.entries(layout).filter(([name, value]) => told[name] !== JSON.stringify(value));
    for (const [name, value] of changed) told[name] = JSON.stringify(value);
    return window.Plotly.update(gd, style, Object.fromEntries(changed));
  }

  // What comes while it draws waits; of many moves the last.
  async function serve(what) {
    if (!wanted.includes(what)) wanted.push(what);
    if (busy) return;
    busy = true;
    while (wanted.length) {
      const next = wanted.includes(draw) ? draw : move;
      wanted = wanted.filter((one) => one !== next);
      await next();
    }
    busy = false;
  }

  const onFigure = () => serve(draw);
  const onMoved = () => serve(move);
  model.on("change:figure", onFigure);
  model.on("change:moved", onMoved);
  serve(draw).then(() => {
    if (model.get("moved").serial > model.get("figure").serial) onMoved();
    gd.on("plotly_click", ({ points }) => model.send({ clicked: [points[0].curveNumber, points[0].base ?? 0] }));
    gd.on("plotly_relayout", (changed) => {
      if (Object.keys(changed).some((name) => name.startsWith("xaxis."))) model.send({ window: gd.layout.xaxis.range });
    });
  });
  const sized = new ResizeObserver(() => {
    if (gd.clientWidth && gd._fullLayout && gd.clientWidth !== gd._fullLayout.width) window.Plotly.Plots.resize(gd);
  });
  sized.observe(el);
  return () => {
    sized.disconnect();
    model.off("change:figure", onFigure);
    model.off("change:moved", onMoved);
    window.Plotly.purge(gd);
  };
}

/** What anywidget calls for each of them. */
export default { render: (at) => (at.model.get("figure") === undefined ? bridge(at) : livePlot(at)) };
