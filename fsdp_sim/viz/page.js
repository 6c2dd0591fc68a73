// A saved page: plotly.js is unpacked, figures are drawn with the width and the scheme that there are.
//
// Figures are laid out for a screen of some 850 pixels or more. Where a page is narrower, their title, notes and legends
// become text of the page, which wraps; on a phone type is a little smaller, and annotations are wrapped, moved into
// view, or take the short text that a figure gives them as `name: "narrow:..."`. A figure may say what its lower margin
// holds besides legends: `layout.meta.below_px`.

const NARROW = 848;
const PHONE = 560;
const NARROWEST_TABLE = 820; // as in the page's style
const SMALLEST = 10; // px, of type on a phone

/** plotly.js out of its gzipped base64, as a global of the page. */
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(plain).text();
  document.head.append(script);
}

const textOf = (html) => {
  const box = document.createElement("template");
  box.innerHTML = String(html ?? "").replaceAll("<br>", " ");
  return box.content.textContent.trim();
};

const pen = document.createElement("canvas").getContext("2d");
function widthOf(html, size, family) {
  pen.font = `${/<b>/.test(html) ? 600 : 400} ${size}px ${family}`;
  return Math.max(...String(html).split("<br>").map((line) => pen.measureText(textOf(line)).width));
}

/** Text with its lines broken anew, so that none is wider than there is room. */
function wrapped(html, room, size, family) {
  const lines = [""];
  for (const word of html.replaceAll("<br>", " ").split(" ")) {
    const longer = lines.at(-1) ? `${lines.at(-1)} ${word}` : word;
    if (lines.at(-1) && widthOf(longer, size, family) > room) lines.push(word);
    else lines[lines.length - 1] = longer;
  }
  return lines.join("<br>");
}

/** What the legends of a figure tell: for each legend its entries, in order. */
export function legendsOf({ data, layout }) {
  const colors = layout.template?.layout?.colorway ?? ["#0072B2"];
  const found = {};
  if (layout.showlegend === false || (data.length < 2 && !layout.showlegend)) return found;
  data.forEach((trace, n) => {
    if (!trace.name || trace.showlegend === false || trace.visible === false) return;
    const first = (value) => (Array.isArray(value) ? value[0] : value);
    const line = trace.type === "scatter" && !trace.fillcolor && trace.mode !== "markers";
    const color = first((line ? trace.line?.color : trace.marker?.color ?? trace.fillcolor) ?? colors[n % colors.length]);
    const pattern = first(trace.marker?.pattern?.shape ?? trace.fillpattern?.shape ?? "");
    const entry = { name: textOf(trace.name), color, line, dash: trace.line?.dash, pattern, rank: trace.legendrank ?? 1000 };
    const entries = (found[trace.legend ?? "legend"] ??= []);
    if (!entries.some(({ name }) => name === entry.name)) entries.push(entry);
  });
  Object.values(found).forEach((entries) => entries.sort((a, b) => a.rank - b.rank));
  return found;
}

/** The figure for a place of a width: a new one, without what `words` of the page say in its stead. */
export function narrowed(figure, width, family) {
  const { data, layout, frames } = structuredClone(figure);
  const phone = width < PHONE;
  const size = (given) => (phone ? Math.max(SMALLEST, Math.min(given ?? 12, 11)) : (given ?? 12));
  const words = { title: textOf(layout.title?.text), notes: [], legends: legendsOf(figure) };
  const old = { t: 100, b: 80, l: 80, r: 80, ...layout.margin };
  const margin = { ...old, b: layout.meta?.below_px ?? old.b, autoexpand: false };
  const axes = Object.entries(layout).filter(([name]) => /^[xy]axis\d*$/.test(name));
  delete layout.title;
  layout.showlegend = false;

  if (phone) {
    margin.r = Math.min(old.r, 12);
    margin.l = 40;
    for (const [name, axis] of axes) {
      axis.tickfont = { ...axis.tickfont, size: SMALLEST };
      if (name[0] === "x" || axis.visible === false) continue;
      const widest = Math.max(0, ...(axis.ticktext ?? []).map((text) => widthOf(text, SMALLEST, family)));
      margin.l = Math.max(margin.l, widest + 12 + (axis.title?.text ? 16 : 0));
    }
    layout.updatemenus?.forEach((menu) => (menu.font = { ...menu.font, size: 11 }));
  }
  const plot = width - margin.l - margin.r;

  /** The pixel of a place on a horizontal axis or the paper; undefined where only plotly knows its range. */
  function pixel(ref, x) {
    const axis = layout[ref.replace(/^x/, "xaxis").replace(" domain", "")] ?? {};
    const [from, to] = ref === "paper" ? [0, 1] : (axis.domain ?? [0, 1]);
    const [low, high] = ref === "paper" || ref.endsWith("domain") ? [0, 1] : (axis.range ?? []);
    return low === undefined ? undefined : margin.l + plot * (from + ((to - from) * (x - low)) / (high - low));
  }

  const taken = [];
  layout.annotations = (layout.annotations ?? []).filter((note) => {
    if (note.name === "notes") {
      words.notes.push(textOf(note.text));
      return false;
    }
    const px = size(note.font?.size ?? 12);
    if (phone && note.name?.startsWith("narrow:")) note.text = note.name.slice(7);
    if (!note.text || note.showarrow !== false) return Boolean(note.text) || note.showarrow !== false;
    if (widthOf(note.text, px, family) > width - 8) note.text = wrapped(note.text, width - 8, px, family);
    note.font = { ...note.font, size: px };
    const at = pixel(note.xref ?? "paper", note.x);
    if (at === undefined) return true;
    const wide = widthOf(note.text, px, family);
    const start = at + (note.xshift ?? 0) - wide * ({ left: 0, right: 1 }[note.xanchor] ?? 0.5);
    const moved = Math.max(3, Math.min(start, width - 3 - wide));
    note.xshift = (note.xshift ?? 0) + moved - start;
    const row = `${note.yref} ${note.y} ${note.yshift ?? 0}`;
    const free = !taken.some((other) => other.row === row && moved < other.end + 2 && other.start < moved + wide + 2);
    if (free) taken.push({ row, start: moved, end: moved + wide });
    return free;
  });
  const above = layout.annotations
    .filter((note) => note.yref === "paper" && note.y >= 0.999 && note.yanchor === "bottom")
    .map((note) => (note.yshift ?? 0) + 1.4 * (note.font?.size ?? 12) * note.text.split("<br>").length);
  margin.t = 12 + Math.max(0, ...above);

  for (const [name, axis] of axes) {
    if (name[0] !== "x" || !axis.title?.text) continue;
    const px = size(axis.title.font?.size ?? 12);
    const text = wrapped(axis.title.text, plot, px, family);
    axis.title = { ...axis.title, text, font: { ...axis.title.font, size: px } };
    margin.b = Math.max(margin.b, (layout.meta?.below_px ?? old.b) + 14 * (text.split("<br>").length - 1));
  }

  // The sentence of a figure that moves stands in a trace of its own.
  const told = data.map((trace) => trace.type === "scatter" && trace.mode === "text" && trace.xaxis === "x2");
  const px = phone ? 12 : 15;
  const retold = (texts) =>
    texts.map((text) => text.split("</b><br>").map((part) => wrapped(part, plot, px, family)).join("</b><br>"));
  data.forEach((trace, n) => {
    if (told[n]) Object.assign(trace, { text: retold(trace.text), textfont: { ...trace.textfont, size: px } });
  });
  if (layout.height) layout.height += margin.t - old.t + margin.b - old.b;
  frames?.forEach((frame) => {
    frame.data?.forEach((trace, n) => told[frame.traces?.[n]] && (trace.text = retold(trace.text)));
    if (frame.layout?.height) frame.layout.height = layout.height;
  });
  layout.margin = margin;
  return { figure: { data, layout, frames }, words };
}

const HATCHES = { "/": 135, "\\": 45, "-": 0, "|": 90 };

function paragraph(kind, text) {
  const p = document.createElement("p");
  p.className = kind;
  p.textContent = text;
  return p;
}

function legend(entries) {
  const list = paragraph("legend", "");
  for (const { name, color, line, dash, pattern } of entries) {
    const item = document.createElement("span");
    const swatch = document.createElement("i");
    swatch.style.background = color;
    if (pattern) {
      const hatch = `${HATCHES[pattern] ?? 135}deg, rgba(255,255,255,.6) 0 1.5px, transparent 1.5px 5px`;
      swatch.style.backgroundImage = `repeating-linear-gradient(${hatch})`;
    }
    if (line) swatch.style = `background: none; height: 0; border-top: 3px ${dash && dash !== "solid" ? "dashed" : "solid"} ${color}`;
    item.append(swatch, name);
    list.append(item);
  }
  return list;
}

/** Where a page is narrow a table is folded away, and each row of it is a list of names and values: see the page's style. */
function foldTables(page) {
  page.querySelectorAll(".scroll").forEach((scroll) => {
    const names = [...scroll.querySelectorAll("thead th")].map((cell) => cell.textContent);
    scroll.querySelectorAll("tbody tr").forEach((row) => {
      [...row.cells].forEach((cell, n) => (cell.dataset.name = names[n]));
    });
    if (window.innerWidth > NARROWEST_TABLE || scroll.closest("details")) return;
    const details = document.createElement("details");
    const summary = document.createElement("summary");
    summary.textContent = scroll.querySelector("caption").textContent;
    scroll.replaceWith(details);
    details.append(summary, scroll);
  });
}

/** Draws a figure into its place, as wide as that is; `read` gives it anew each time. */
async function drawn(place, read, template) {
  const width = place.clientWidth;
  const narrow = width < NARROW;
  const { config, ...whole } = read();
  whole.layout.template = template;
  const old = place.querySelector(".drawing");
  const gd = Object.assign(document.createElement("div"), { id: old.id, className: "drawing" });
  const { figure, words } = narrow
    ? narrowed(whole, width, template.layout.font.family)
    : { figure: whole, words: { notes: [], legends: {} } };
  const { legend: first, ...others } = words.legends;
  const rest = Object.values(others).map(legend);
  place.querySelectorAll(":scope > :not(figcaption)").forEach((part) => part.remove());
  if (old.data) window.Plotly.purge(old);
  place.prepend(
    ...(words.title ? [paragraph("title", words.title)] : []),
    ...words.notes.map((text) => paragraph("notes", text)),
    ...(first ? [legend(first)] : []),
    gd, ...rest,
  ); // prettier-ignore
  place.dataset.width = narrow ? width : "wide";
  await window.Plotly.newPlot(gd, { ...figure, config: narrow ? { ...config, displayModeBar: false } : config });
  describe(gd, textOf(whole.layout.title?.text));
}

/** Draws a figure with the template of a scheme, "light" or "dark", where it has another. */
function paint(gd, template) {
  if (gd._fullLayout.paper_bgcolor === template.layout.paper_bgcolor) return undefined;
  return window.Plotly.relayout(gd, { template });
}

/** A page: every figure drawn and described, and a button that changes the scheme, at first that of the system. */
export async function start(page) {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const button = page.getElementById("scheme");
  const templates = JSON.parse(page.getElementById("templates").textContent);
  const places = [...page.querySelectorAll("figure")];
  let scheme = system.matches ? "dark" : "light";
  const dress = () => {
    page.documentElement.dataset.scheme = scheme;
    button.textContent = scheme === "dark" ? "Light page" : "Dark page";
  };
  dress();
  foldTables(page);
  try {
    await unpack(page.getElementById("plotly").textContent);
  } catch (error) {
    places.forEach((place) => place.prepend(paragraph("title", `This browser cannot draw the figures (${error.message}); its words and tables are below. Any browser since 2023 can.`)));
    return;
  }
  const readers = places.map((place) => {
    const json = place.querySelector("script").textContent;
    return () => JSON.parse(json);
  });
  const draw = (n) => drawn(places[n], readers[n], templates[scheme]);
  await Promise.all(places.map((_, n) => draw(n)));
  const show = (wanted) => {
    scheme = wanted;
    dress();
    return Promise.all(places.map((place) => paint(place.querySelector(".drawing"), templates[scheme])));
  };
  button.hidden = false;
  button.addEventListener("click", () => show(scheme === "dark" ? "light" : "dark"));
  system.addEventListener("change", () => show(system.matches ? "dark" : "light"));
  const sized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const width = target.clientWidth < NARROW ? String(target.clientWidth) : "wide";
      if (target.dataset.width !== width) draw(places.indexOf(target));
    }
  });
  places.forEach((place) => sized.observe(place));
}
