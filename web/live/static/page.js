// What the pages share: elements made of text alone, so that nothing that a file says becomes a part of the page.

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

/** Answer a form: `answer()` fills the section; what is refused or fails is said. */
export function answering(form, answer) {
  const [status, result, button] = ["#status", "#result", "button"].map((at) => document.querySelector(at));
  const say = (words, refused = false) => {
    status.textContent = words;
    status.classList.toggle("refused", refused);
  };
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
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
