// Draws the figures of a slide when it is shown, and makes its text as large as there is room for.
"use strict";

const SMALLEST_PX = 22, NARROWEST_PX = 28, WRAPPED_PX = 36;
const FEW_LINES = 2, FEW_PX = 44;  // of so few lines each is wrapped before it is smaller
const CONFIG = { displayModeBar: false, displaylogo: false, showSendToCloud: false, responsive: false };

function draw(slide) {
  const places = [...slide.querySelectorAll(".plot:not(.js-plotly-plot)")];
  return Promise.all(places.map(async (place) => {
    const { data, layout, frames } = JSON.parse(place.nextElementSibling.textContent);
    await Plotly.newPlot(place, data, layout, CONFIG);
    if (frames) await Plotly.addFrames(place, frames);
  }));
}

// In print a hatched bar would be a bitmap of its own, thousands of them; a figure is one.
async function asImage(slide) {
  for (const place of slide.querySelectorAll(".plot")) {
    const { width, height } = place.layout;
    const image = new Image(width, height);
    image.src = await Plotly.toImage(place, { format: "png", width, height, scale: 2 });
    await image.decode();
    Plotly.purge(place);
    place.replaceChildren(image);
  }
}

// Each piece of text is as large as its lines allow, or is wrapped; then all shrink until they fit one below the other.
function fit(slide) {
  for (const body of slide.querySelectorAll(".body:has(.fit)")) {
    const parts = [...body.querySelectorAll(".fit")];
    for (const part of parts) {
      part.style.fontSize = "";
      part.classList.remove("wrap");
      const few = part.matches(".printed") && part.textContent.trim().split("\n").length <= FEW_LINES;
      shrink([part], () => part.scrollWidth > part.clientWidth + 1, few ? FEW_PX : NARROWEST_PX);
      if (part.scrollWidth <= part.clientWidth + 1) continue;
      part.classList.add("wrap");
      part.style.fontSize = `${few ? FEW_PX : WRAPPED_PX}px`;
    }
    shrink(parts, () => body.scrollHeight > body.clientHeight + 1, SMALLEST_PX);
  }
}

function shrink(parts, tooLarge, smallest) {
  const size = (part) => parseFloat(getComputedStyle(part).fontSize);
  while (tooLarge() && parts.some((part) => size(part) > smallest))
    for (const part of parts) part.style.fontSize = `${Math.max(size(part) - 1, smallest)}px`;
}

async function show(slide) {
  fit(slide);
  await draw(slide);
  slide.classList.add("ready");
}

const printed = /print-pdf/.test(location.search);
Reveal.initialize({
  width: 1920, height: 1080, margin: 0, center: false, hash: true, slideNumber: "c/t", transition: "none",
  backgroundTransition: "none", pdfSeparateFragments: false, plugins: [RevealNotes],
});
Reveal.on("ready", (event) => { if (!printed) show(event.currentSlide); });
Reveal.on("slidechanged", (event) => show(event.currentSlide));
Reveal.on("pdf-ready", async () => {
  for (const slide of Reveal.getSlides()) {
    await show(slide);
    await asImage(slide);
  }
  document.body.classList.add("printable");
});
