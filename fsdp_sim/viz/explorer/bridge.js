// What only a browser can do for the explorer: copy text, say whether the page is dark, name sliders for screen readers,
// and give the figure the width of its place. Everything else is Python.
const theme = () => {
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

function render({ model, el }) {
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
    if (model.get("page_is_dark") === theme()) return;
    model.set("page_is_dark", theme());
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

export default { render };
