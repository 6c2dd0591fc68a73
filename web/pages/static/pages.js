// Predictions, and the buttons of figures. Without this script a page is read as it is, and what is folded opens by hand.
"use strict";

const fill = (words, values) => words.replace(/\{(\w+)\}/g, (_, name) => values[name]);

// ---- judging an answer, as fsdp_sim.learn.predictions does; the units are data

const even = (value) => {  // halves go to the even neighbour, as Python has it
  const below = Math.floor(value);
  return value - below === 0.5 ? below + (below % 2 ? 1 : 0) : Math.round(value);
};

function digits3(value) {  // format(value, ".3g")
  if (value === 0) return "0";
  const scale = 10 ** (2 - Math.floor(Math.log10(Math.abs(value))));
  const rounded = Number((even(value * scale) / scale).toPrecision(3));
  const exponent = Number(rounded.toExponential().split("e")[1]);
  if (exponent >= -4 && exponent < 3) return String(rounded);
  return rounded.toExponential().replace(/e([-+])(\d)$/, "e$10$2");
}

const whole = (value) => even(value).toLocaleString("en-US");

function written(value, asked) {
  if (!asked.shown.length) {
    const number = value === Math.round(value) || Math.abs(value) >= 1000 ? whole(value) : digits3(value);
    return `${number} ${value === 1 ? asked.one : asked.unit}`;
  }
  const fitting = asked.shown.filter(([scale]) => scale <= Math.abs(value) * (1 + 1e-9));
  const [scale, name] = fitting.length ? fitting[fitting.length - 1] : asked.shown[0];
  const number = value / scale;
  const digits = Math.abs(number) < 1000 ? digits3(number) : whole(number);
  return name === "%" ? `${digits}%` : `${digits} ${name}`;
}

function off(ratio) {
  if (ratio <= 0) return WORDS.another_sign;
  if (ratio > 0.5 && ratio < 2) {
    return fill(ratio > 1 ? WORDS.too_high : WORDS.too_low, { percent: even(100 * Math.abs(ratio - 1)) });
  }
  const factor = Math.max(ratio, 1 / ratio);
  const near = Math.abs(factor - Math.round(factor)) <= 1e-9 * factor;
  const shown = factor >= 10 || near ? String(even(factor)) : (even(10 * factor) / 10).toFixed(1);
  return fill(ratio > 1 ? WORDS.times_high : WORDS.times_low, { factor: shown });
}

// What was answered: {sentence, right, ratio}, or {error}.
function judged(asked, text) {
  text = text.trim();
  if (!text || (asked.choices && !asked.choices.includes(text))) return { error: WORDS.answer_first };
  if (asked.choices) {
    const right = text === asked.answer;
    return { right, sentence: fill(right ? WORDS.right : WORDS.wrong, { answer: text, truth: asked.answer }) };
  }
  if (asked.needs_unit && /^[\s\d.,_+-]*$/.test(text)) return { error: fill(WORDS.of_what, { text, how: asked.how }) };
  const found = /^\s*([-+]?[\d_,]*\.?\d+(?:[eE][-+]?\d+)?)\s*(.*?)\s*$/.exec(text);
  if (!found || text.length > 40) return { error: fill(WORDS.no_quantity, { text: text.slice(0, 40), how: asked.how }) };
  let unit = found[2];
  if (!asked.shown.length) {
    for (const name of [asked.unit, asked.one]) if (unit.endsWith(name)) unit = unit.slice(0, -name.length).trim();
  }
  if (!Object.hasOwn(asked.scales, unit)) {
    const units = Object.keys(asked.scales).filter(Boolean).join(", ");
    return { error: fill(WORDS.other_unit, { text, units }) };
  }
  const value = Number(found[1].replace(/[_,]/g, "")) * asked.scales[unit];
  const ratio = value / asked.truth, answer = written(value, asked);
  const words = Math.abs(ratio - 1) < 0.005 ? WORDS.exact : WORDS.away;
  return {
    ratio, answer, right: Math.abs(ratio - 1) <= asked.close,
    sentence: fill(words, { answer, truth: asked.answer, off: off(ratio) }),
  };
}

// ---- the form

function made(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function bars(asked, verdict) {
  if (!(verdict.ratio > 0)) return [];
  const longest = Math.max(verdict.ratio, 1);
  const guess = verdict.right ? "var(--color-right)" : "var(--color-wrong)";
  const rows = [[WORDS.your_estimate, verdict.ratio, guess, verdict.answer], [WORDS.the_truth, 1, "var(--color-truth)", asked.answer]];
  return rows.map(([who, length, colour, text]) => made("div", { class: "bar" },
    made("span", {}, who),
    made("span", { style: `background:${colour};width:${Math.max(24 * length / longest, 0.15).toFixed(2)}em` }),
    made("span", {}, text)));
}

// What follows a question and gives the answer away is folded: up to the next question or heading it opens.
function unfold(place) {
  for (let next = place.nextElementSibling; next && !next.matches("section, .prediction"); next = next.nextElementSibling) {
    if (next.matches("details")) next.open = true;
    for (const folded of next.querySelectorAll("details.hide")) {
      if (!folded.matches(".above-input")) folded.open = true;
    }
  }
}

function ask(place) {
  const asked = JSON.parse(place.dataset.asked);
  const said = made("div", { role: "status" });
  const button = made("button", { type: "submit" }, WORDS.commit);
  const fields = made("fieldset", {}, made("legend", {}, WORDS.answer_label));
  if (asked.choices) {
    for (const choice of asked.choices) {
      fields.append(made("label", {}, made("input", { type: "radio", name: asked.name, value: choice }), choice));
    }
    fields.append(made("div", { class: "ask" }, button));
  } else {
    const how = made("span", { id: `how-${asked.name}` }, asked.how);
    const box = made("input", {
      type: "text", name: asked.name, autocomplete: "off", "aria-label": WORDS.answer_label, "aria-describedby": how.id,
    });
    fields.append(how, made("div", { class: "ask" }, box, button));
  }
  const form = made("form", {}, fields);
  const judge = (text) => {
    const verdict = judged(asked, text);
    if (verdict.error) {
      said.replaceChildren(made("p", {}, verdict.error));
      return;
    }
    const why = made("p");
    why.innerHTML = asked.why;  // made by web.pages.predictions, which escapes it
    const again = made("button", { type: "button" }, WORDS.again);
    again.addEventListener("click", () => {
      keep(asked.name, null);
      ask(place);
      place.querySelector("input").focus();
    });
    said.replaceChildren(made("p", { class: "sentence" }, `${verdict.right ? "✓" : "✗"} ${verdict.sentence}`),
      ...bars(asked, verdict), why, again);
    fields.disabled = true;
    keep(asked.name, text);
    unfold(place);
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    judge(String(new FormData(form).get(asked.name) ?? ""));
  });
  place.replaceChildren(form, said);
  const before = kept()[asked.name];
  if (before === undefined) return;
  const radio = [...form.querySelectorAll("input[type=radio]")].find((input) => input.value === before);
  if (radio) radio.checked = true;
  else form.querySelector("input[type=text]")?.setAttribute("value", before);
  judge(before);
}

// What one has answered stays in this browser: a page that is opened again shows it.
function kept() {
  try {
    return JSON.parse(localStorage.getItem("predictions") ?? "{}");
  } catch {  // the browser keeps nothing
    return {};
  }
}

function keep(name, answer) {
  const answers = kept();
  if (answer === null) delete answers[name];
  else answers[name] = answer;
  try {
    localStorage.setItem("predictions", JSON.stringify(answers));
  } catch { /* the same */ }
}

// ---- looking closer: the figure itself, where it answers the mouse

const drawn = {};  // of each file a promise
let drawFigure;  // what the file of a figure calls

function load(file) {
  return drawn[file] ??= new Promise((resolve, reject) => {
    let figure;
    drawFigure = (given) => { figure = given; };
    const source = `${document.documentElement.dataset.content_root}_static/${file}`;
    const script = made("script", { src: source });
    script.onload = () => resolve(figure);
    script.onerror = () => { delete drawn[file]; reject(new Error(source)); };
    document.head.append(script);
  });
}

function isDark() {
  const { theme } = document.body.dataset;
  return theme === "dark" || (theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
}

async function lookCloser(button) {
  const picture = button.closest(".figure-tools").previousElementSibling.querySelector("img");
  const close = made("button", { type: "button" }, WORDS.close);
  const place = made("div", { class: "place", role: "figure", "aria-label": picture?.alt ?? "" });
  const dialog = made("dialog", { class: "closer", "aria-label": button.textContent }, close, made("div", {}, place));
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => { Plotly.purge(place); dialog.remove(); button.focus(); });
  await load("figures/plotly.js");
  const { data, layout, config } = structuredClone(await load(button.dataset.figure));
  document.body.append(dialog);
  dialog.showModal();
  await Plotly.newPlot(place, data, { ...layout, template: TEMPLATES[isDark() ? "dark" : "light"] }, config);
}

// ---- copying

async function copy(button) {
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    const before = button.textContent;
    button.textContent = WORDS.copied;
    setTimeout(() => { button.textContent = before; }, 1500);
  } catch {  // no permission, or no secure page
    const text = made("textarea", { readonly: "", rows: "8", "aria-label": WORDS.not_copied }, button.dataset.copy);
    button.closest("div").after(made("p", {}, WORDS.not_copied), text);
    text.select();
  }
}

// ---- for keyboards and screen readers

// What scrolls sideways can be reached by keyboard, and says so.
function reachable() {
  for (const box of document.querySelectorAll("article pre, article div")) {
    const longer = box.scrollWidth > box.clientWidth + 1 || box.scrollHeight > box.clientHeight + 1;
    if (longer && !box.hasAttribute("tabindex") && /auto|scroll/.test(getComputedStyle(box).overflow)) {
      box.tabIndex = 0;
      box.setAttribute("role", "group");
      box.setAttribute("aria-label", WORDS.scrolls);
    }
  }
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelector(".sidebar-drawer")?.setAttribute("aria-label", WORDS.site);
  document.querySelector(".toc-drawer")?.setAttribute("aria-label", WORDS.on_this_page);
  document.querySelectorAll(".cell_output img").forEach((picture) => picture.addEventListener("load", reachable));
  reachable();
  addEventListener("resize", reachable);
  document.addEventListener("toggle", reachable, true);
  document.querySelectorAll(".prediction[data-asked]").forEach(ask);
  for (const button of document.querySelectorAll("button[data-figure]")) {
    button.hidden = false;
    button.addEventListener("click", () => lookCloser(button));
  }
  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.hidden = false;
    button.addEventListener("click", () => copy(button));
  }
});
