// The schedule puzzle: draws the state that Python sends, and sends the order that the learner makes. It computes no
// times: what an order is worth is for the engine to say. All text goes in as textContent.

const STARS = ["", "★", "★★"];

function make(parent, tag, cls = "", text = "") {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (text) node.textContent = text;
  parent.append(node);
  return node;
}

const ms = (number) => `${Number(number.toFixed(1))} ms`;

function isDark() {
  const { jpThemeLight: jupyter, theme } = document.body.dataset; // of JupyterLab, and of the web edition
  if (theme === "light" || theme === "dark") return theme === "dark";
  return jupyter ? jupyter === "false" : window.matchMedia("(prefers-color-scheme: dark)").matches;
}

function render({ model, el }) {
  const root = make(el, "section", "puzzle");
  root.setAttribute("aria-label", "schedule puzzle");
  const tint = () => root.classList.toggle("dark", isDark());
  tint();
  const watch = new MutationObserver(tint);
  watch.observe(document.body, { attributes: true });
  const media = window.matchMedia("(prefers-color-scheme: dark)");
  media.addEventListener("change", tint);

  const head = make(root, "div", "head");
  const levels = make(head, "nav", "levels");
  levels.setAttribute("aria-label", "levels");
  const title = make(head, "h3");
  title.setAttribute("aria-level", "2");
  const goal = make(head, "p", "goal");
  const numbers = make(root, "div", "numbers");
  const body = make(root, "div", "body");
  const code = make(body, "ol", "code");
  code.setAttribute("aria-label", "the program, from top to bottom");
  const right = make(body, "div", "right");
  const chart = make(right, "div", "chart");
  const said = make(right, "div", "said");
  said.setAttribute("role", "status");
  said.setAttribute("aria-live", "polite");
  const buttons = make(right, "div", "buttons");
  make(right, "p", "how", "Move a hatched line: drag it or its bar; or focus it and press [ or ], or Alt with an arrow. It runs beside the compute lines below it.");
  const bars = new Map(); // of the lanes, kept from one order to the next, so that they slide
  const rows = new Map();
  // Place of the line that was moved, and where it was held, until Python has answered; keys pressed meanwhile wait
  let focus = null;
  let level = null;

  const send = (message) => model.send(message);
  const button = (label, name) => {
    const node = make(buttons, "button", name, label);
    node.type = "button";
    node.addEventListener("click", () => send({ button: name }));
    return node;
  };
  const undo = button("Undo", "undo");
  button("Reset", "reset");
  button("Hint", "hint");
  const next = button("Next level", "next");

  function move(from, to, held = "line") {
    const state = model.get("state");
    const order = state.lines.map((line) => line.text);
    to = Math.max(0, Math.min(order.length - 1, to));
    if (from === to) return;
    if (!state.lines[from].moves) {
      said.firstChild.textContent = "The model computes in its own order; move the collectives around it.";
      return;
    }
    order.splice(to, 0, ...order.splice(from, 1));
    focus = { from, to, held, then: 0 };
    send({ order });
  }

  function keys(event, place, held) {
    const back = event.key === "[" || (event.altKey && ["ArrowUp", "ArrowLeft"].includes(event.key));
    const on = event.key === "]" || (event.altKey && ["ArrowDown", "ArrowRight"].includes(event.key));
    const walk = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!back && !on && !walk) return;
    event.preventDefault();
    event.stopPropagation();
    if (back || on) focus ? (focus.then += on ? 1 : -1) : move(place, place + (on ? 1 : -1), held);
    else code.children[place + walk]?.focus();
  }

  function light(place, on) {
    const line = model.get("state").lines[place];
    for (const node of root.querySelectorAll(`[data-place="${place}"], .span[data-unit="${line?.unit}"]`))
      node.classList.toggle("lit", on);
  }

  function hold(node, place) {
    node.addEventListener("pointerenter", () => light(place, true));
    node.addEventListener("pointerleave", () => light(place, false));
    node.addEventListener("focus", () => light(place, true));
    node.addEventListener("blur", () => light(place, false));
  }

  function dragLine(node, place) {
    node.addEventListener("pointerdown", (down) => {
      if (down.button) return;
      const height = node.getBoundingClientRect().height;
      node.setPointerCapture(down.pointerId);
      const by = (event) => Math.round((event.clientY - down.clientY) / height);
      const drag = (event) => {
        node.classList.add("held");
        node.style.transform = `translateY(${event.clientY - down.clientY}px)`;
      };
      const end = (event) => {
        node.removeEventListener("pointermove", drag);
        node.classList.remove("held");
        node.style.transform = "";
        if (event.type === "pointerup" && by(event)) move(place, place + by(event));
      };
      node.addEventListener("pointermove", drag);
      node.addEventListener("pointerup", end, { once: true });
      node.addEventListener("pointercancel", end, { once: true });
    });
  }

  // Where a bar that is dropped so that it begins at a time stands in the program: above the compute lines whose middle
  // is later, and above the collectives that were issued later; at least one line from where it was.
  function placeAt(lines, place, at, left) {
    const when = (line) => (line.moves ? line.issue_ms ?? -1 : (line.start_ms + line.end_ms) / 2);
    let to = 0;
    lines.forEach((line, n) => {
      if (n !== place && when(line) < at) to += 1;
    });
    return left ? Math.min(to, place - 1) : Math.max(to, place + 1);
  }

  function dragBar(node) {
    node.addEventListener("pointerdown", (down) => {
      const state = model.get("state");
      const place = Number(node.dataset.place);
      const line = state.lines[place];
      if (down.button || !line.moves) return;
      const perPixel = state.until_ms / node.parentElement.getBoundingClientRect().width;
      node.setPointerCapture(down.pointerId);
      const drag = (event) => {
        node.classList.add("held");
        node.style.transform = `translateX(${event.clientX - down.clientX}px)`;
      };
      const end = (event) => {
        node.removeEventListener("pointermove", drag);
        node.classList.remove("held");
        node.style.transform = "";
        const by = event.clientX - down.clientX;
        if (event.type !== "pointerup" || Math.abs(by) < 6) return;
        move(place, placeAt(state.lines, place, line.start_ms + by * perPixel, by < 0), "bar");
      };
      node.addEventListener("pointermove", drag);
      node.addEventListener("pointerup", end, { once: true });
      node.addEventListener("pointercancel", end, { once: true });
    });
  }

  function drawHead(state) {
    levels.replaceChildren();
    state.levels.forEach((one, n) => {
      const dot = make(levels, "button", `dot s${one.stars}`, String(n + 1));
      dot.type = "button";
      dot.title = `${one.title} ${STARS[one.stars]}`.trim();
      dot.setAttribute("aria-label", `level ${n + 1}: ${one.title}${one.stars ? `, ${one.stars} of 2 stars` : ""}`);
      if (one.name === state.level) dot.setAttribute("aria-current", "true");
      dot.addEventListener("click", () => send({ level: one.name }));
    });
    title.textContent = state.title;
    goal.textContent = state.goal;
    numbers.replaceChildren();
    const number = (name, value, beside, cls) => {
      const box = make(numbers, "div", `number ${cls}`);
      make(box, "span", "name", name);
      make(box, "b", "", value);
      make(box, "span", "beside", beside);
    };
    number("step", ms(state.step_ms), `goal ${ms(state.goal_ms)}, best known ${ms(state.best_ms)}`, state.step_ms <= state.goal_ms + 1e-6 ? "good" : "");
    const limit = state.whole_limit === null ? "no limit" : `at most ${state.whole_limit}`;
    number("units whole at once", String(state.whole), `${state.memory}; ${limit}`, state.fits ? "" : "bad");
    number("exposed communication", state.exposed, "nothing computes beside it", "");
    make(numbers, "div", "stars", STARS[state.stars] || "☆").setAttribute("aria-label", `${state.stars} of 2 stars`);
  }

  function drawCode(state) {
    code.replaceChildren();
    state.lines.forEach((line, place) => {
      const node = make(code, "li", `line ${line.kind.toLowerCase()}${line.moves ? " moves" : ""}${line.idle ? " idle" : ""}`);
      node.tabIndex = 0;
      node.dataset.place = place;
      node.setAttribute("aria-label", `line ${place + 1}: ${line.name}${line.idle ? ", nothing to do" : ""}`);
      make(node, "i", "swatch");
      make(node, "code", "", line.text);
      make(node, "span", "note", line.idle ? "nothing to do" : "end_ms" in line ? `${ms(line.end_ms - line.start_ms)}` : "frees");
      node.addEventListener("keydown", (event) => keys(event, place, "line"));
      hold(node, place);
      if (line.moves) dragLine(node, place);
    });
  }

  function row(name, cls) {
    const node = make(chart, "div", `row ${cls}`);
    make(node, "span", "label", cls === "top" ? "" : name);
    const track = make(node, "div", "track");
    rows.set(name, track);
    return track;
  }

  function frame(state) {
    chart.replaceChildren();
    rows.clear();
    bars.clear();
    const goalAt = `${(100 * state.goal_ms) / state.until_ms}%`;
    const named = make(row("goal", "top"), "span", "goal-name", `goal ${ms(state.goal_ms)}`);
    named.style.right = `calc(100% - ${goalAt})`;
    state.lanes.forEach((name) => row(name, "lane"));
    const axis = row("", "axis");
    make(chart, "div", "caption", "whole parameters in memory");
    state.units.forEach((unit) => row(unit.name, "unit"));
    const pace = [1, 2, 5, 10, 20, 25, 50, 100, 200].find((one) => state.until_ms / one <= 10) || 500;
    for (let at = 0; at <= state.until_ms + 1e-6; at += pace) {
      const tick = make(axis, "span", at > 0.96 * state.until_ms ? "tick last" : "tick", at ? String(at) : "0 ms");
      tick.style.left = `${(100 * at) / state.until_ms}%`;
    }
    for (const track of rows.values()) make(track, "i", "goal-line").style.left = goalAt;
  }

  function drawChart(state) {
    const shape = JSON.stringify([state.level, state.until_ms, state.lanes]);
    if (shape !== level) frame(state);
    level = shape;
    const left = (at) => `${(100 * at) / state.until_ms}%`;
    const seen = {};
    const now = new Set();
    state.lines.forEach((line, place) => {
      if (!("lane" in line)) return;
      seen[line.text] = (seen[line.text] || 0) + 1;
      const key = `${line.text}#${seen[line.text]}`;
      now.add(key);
      let bar = bars.get(key);
      if (!bar) {
        bar = make(rows.get(line.lane), "div", `bar ${line.kind.toLowerCase()}${line.moves ? " moves" : ""}`);
        make(bar, "span", "", String(line.unit));
        bar.tabIndex = line.moves ? 0 : -1;
        bar.setAttribute("role", "img");
        bar.addEventListener("keydown", (event) => keys(event, Number(bar.dataset.place), "bar"));
        for (const [name, on] of [["pointerenter", true], ["pointerleave", false], ["focus", true], ["blur", false]])
          bar.addEventListener(name, () => light(Number(bar.dataset.place), on));
        dragBar(bar);
        bars.set(key, bar);
      }
      bar.dataset.place = place;
      bar.classList.remove("lit");
      bar.style.left = left(line.start_ms);
      bar.style.width = left(line.end_ms - line.start_ms);
      bar.title = `${line.name}: ${ms(line.start_ms)} to ${ms(line.end_ms)}`;
      bar.setAttribute("aria-label", bar.title);
    });
    for (const [key, bar] of bars) if (!now.has(key)) (bar.remove(), bars.delete(key));
    state.units.forEach((unit, n) => {
      const track = rows.get(unit.name);
      track.querySelectorAll(".span").forEach((old) => old.remove());
      for (const [from, to] of unit.spans) {
        const span = make(track, "div", "span");
        span.dataset.unit = n;
        span.style.left = left(from);
        span.style.width = left(to - from);
        span.title = `${unit.name} is whole from ${ms(from)} to ${ms(to)}`;
      }
    });
  }

  function drawSaid(state) {
    said.replaceChildren();
    make(said, "p", "refused", state.refused);
    if (state.said) {
      const won = make(said, "p", state.stars ? "won" : "bad", state.said);
      if (state.torch) {
        won.append(" In torch: ");
        const link = make(won, "a", "", state.torch.name);
        link.href = state.torch.url;
        link.target = "_blank";
        link.rel = "noopener";
      }
    }
    const waits = make(said, "p", "waits");
    make(waits, "b", "", "What waits now: ");
    waits.append(state.waits);
    if (state.hint) make(said, "p", "hint", `Hint: ${state.hint}`);
    if (state.trouble) make(said, "p", "bad", state.trouble);
  }

  function draw() {
    const state = model.get("state");
    if (!state || !state.lines) return;
    const inside = root.contains(document.activeElement);
    drawHead(state);
    drawCode(state);
    drawChart(state);
    drawSaid(state);
    undo.disabled = !state.can_undo;
    next.classList.toggle("go", state.stars > 0);
    if (focus && (inside || document.activeElement === document.body)) {
      const place = state.refused ? focus.from : focus.to;
      root.querySelector(`.${focus.held}[data-place="${place}"]`)?.focus();
    }
    const moved = focus;
    focus = null;
    if (moved?.then && !state.refused) move(moved.to, moved.to + moved.then, moved.held);
  }

  model.on("change:state", draw);
  draw();
  return () => {
    watch.disconnect();
    media.removeEventListener("change", tint);
    model.off("change:state", draw);
  };
}

export default { render };
