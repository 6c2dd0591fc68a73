// What the pages share: elements made of text alone, so that nothing that a file says becomes a part of the page.
import { WORDS } from "./words.js";

export const $ = (id) => document.getElementById(id);
export const fill = (words, values) => words.replace(/\{(\w+)\}/g, (_, name) => values[name]);

/** An element with children; a text becomes text. */
export function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export const paragraph = (...children) => element("p", {}, ...children);
export const list = (texts) => element("ul", {}, ...texts.map((text) => element("li", {}, text)));

/** A table in a box that scrolls; numbers: the columns that are set to the right. */
export function table(caption, head, rows, numbers = []) {
  const cell = (tag, scope) => (child, n) =>
    element(tag, { ...(scope && { scope }), ...(numbers.includes(n) && { class: "number" }) }, ...[child].flat());
  const made = element("table", {}, element("caption", { hidden: "" }, caption));
  if (head) made.append(element("thead", {}, element("tr", {}, ...head.map(cell("th", "col")))));
  made.append(element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cell("td"))))));
  return element("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": caption }, made);
}

/** Whether the page is dark: by the reader's choice, else as the system is. `seen` is called when that changes. */
const system = matchMedia("(prefers-color-scheme: dark)");
export function isDark() {
  const { theme } = document.body.dataset;
  return theme === "dark" || (theme !== "light" && system.matches);
}
export function whenDark(seen) {
  system.addEventListener("change", seen);
  addEventListener("themechange", seen);
}

/** plotly.js, which loads while the page is read already. */
export const drawing = new Promise((resolve, reject) => {
  const script = $("plotly");
  if (!script || window.Plotly) return resolve();
  script.addEventListener("load", resolve);
  script.addEventListener("error", () => reject(new Error("plotly.js")));
});

export async function copy(button, text) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = WORDS.copied;
  } catch {
    window.prompt(WORDS.not_copied, text);
  }
  setTimeout(() => (button.textContent = before), 1500);
}

/** A notebook as a file to download. */
export function notebook(link, cells) {
  const made = {
    cells: cells.map(([cell_type, source], n) => ({
      cell_type, id: `cell-${n}`, source, metadata: {}, ...(cell_type === "code" && { execution_count: null, outputs: [] }),
    })), // prettier-ignore
    metadata: { kernelspec: { name: "python3", display_name: "Python 3", language: "python" } }, nbformat: 4, nbformat_minor: 5,
  }; // prettier-ignore
  if (link.href.startsWith("blob:")) URL.revokeObjectURL(link.href);
  link.href = URL.createObjectURL(new Blob([JSON.stringify(made, null, 1)], { type: "application/x-ipynb+json" }));
}

/** Answer a form: `answer()` fills the section; what is refused or fails is said. */
export function answering(form, answer) {
  const [status, result] = [$("status"), $("result")];
  const button = form.querySelector("button");
  const say = (words, refused = false) => {
    status.textContent = words;
    status.classList.toggle("refused", refused);
  };
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (button.disabled) return;
    button.disabled = true;
    result.hidden = true;
    result.replaceChildren();
    try {
      await answer(say, (...parts) => {
        result.append(...parts);
        result.hidden = false;
      });
    } catch (error) {
      say(error.message, true);
    }
    button.disabled = false;
  });
}
