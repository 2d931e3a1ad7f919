"use strict";
// A pointer on a chart shows the values of that step in all charts. A run's button hides the run.
const data = JSON.parse(document.getElementById("data").textContent);
const step = document.getElementById("step");
const panels = [...document.querySelectorAll("[data-panel]")].map((figure) => ({
  cursor: figure.querySelector(".cursor"),
  plot: figure.querySelector(".plot"),
  values: [...figure.querySelectorAll(".readout b")],
  last: [...figure.querySelectorAll(".readout b")].map((value) => value.textContent),
  numbers: data.panels[figure.dataset.panel],
}));

// As tools/report/numbers.py::short.
function short(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e15) return value.toExponential(2).replace("e+", "e");
  for (const [unit, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
    if (size >= unit && size >= 1e4) return digits(value / unit, 3) + suffix;
  return digits(value, 4);
}

function digits(value, count) {
  const before = Math.abs(value) >= 1 ? String(Math.trunc(Math.abs(value))).length : 0;
  return value.toFixed(Math.max(0, count - before));
}

function shown(value, percent) {
  if (!percent) return short(value);
  const size = Math.abs(100 * value);
  return (100 * value).toFixed(size < 1 ? 2 : size < 100 ? 1 : 0) + "%";
}

// The last point at or before a step; the first point if there is none.
function indexAt(steps, wanted) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (steps[middle] <= wanted) low = middle; else high = middle - 1;
  }
  return low;
}

function read(series, wanted, percent) {
  if (!series.steps.length) return "not finite";
  let i = indexAt(series.steps, wanted);
  if (i + 1 < series.steps.length && series.steps[i + 1] - wanted < wanted - series.steps[i]) i += 1;
  const end = series.steps.length - 1;
  const slack = Math.max(series.width, data.lastStep / 100);
  if (wanted > series.steps[end] + slack) return "–";
  const mean = shown(series.mean[i], percent);
  if (!series.low || series.low[i] === series.high[i]) return mean;
  return `${mean} (${shown(series.low[i], percent)} to ${shown(series.high[i], percent)})`;
}

function point(plot, x) {
  const box = plot.getBoundingClientRect();
  const share = Math.min(1, Math.max(0, (x - box.left) / box.width));
  const wanted = Math.round(share * data.lastStep);
  step.textContent = `step ${wanted.toLocaleString("en")}`;
  for (const panel of panels) {
    panel.cursor.hidden = false;
    panel.cursor.style.left = `${100 * share}%`;
    panel.numbers.series.forEach((series, i) => {
      panel.values[i].textContent = read(series, wanted, panel.numbers.percent);
    });
  }
}

function leave() {
  step.textContent = "";
  for (const panel of panels) {
    panel.cursor.hidden = true;
    panel.values.forEach((value, i) => { value.textContent = panel.last[i]; });
  }
}

for (const { plot } of panels) {
  plot.addEventListener("pointerdown", (event) => point(plot, event.clientX));
  plot.addEventListener("pointermove", (event) => point(plot, event.clientX));
  plot.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") leave(); });
}
for (const button of document.querySelectorAll("[data-run]"))
  button.addEventListener("click", () => {
    const hidden = document.body.classList.toggle(`off${button.dataset.run}`);
    button.setAttribute("aria-pressed", String(!hidden));
  });
