const ARRAYS = { f4: Float32Array, i4: Int32Array };

/** Numbers as they came, as arrays. */
function decoded(value) {
  if (Array.isArray(value)) return value.map(decoded);
  if (value === null || typeof value !== "object" || ArrayBuffer.isView(value)) return value;
  if (value.bytes !== undefined && value.dtype in ARRAYS) {
    const { buffer, byteOffset, byteLength } = value.bytes;
    return new ARRAYS[value.dtype](buffer.slice(byteOffset, byteOffset + byteLength));
  }
  return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, decoded(one)]));
}

function render({ model, el }) {
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

export default { render };
