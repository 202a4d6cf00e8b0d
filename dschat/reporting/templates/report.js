"use strict";
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const figures = read("figure-data");
const samples = read("sample-data");
const root = document.documentElement;

// -- Theme: the system's until the button is pressed.
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);

function template() {
  const style = getComputedStyle(root);
  const [text, line, back] = ["--text", "--line", "--card"].map((name) => style.getPropertyValue(name).trim());
  const axis = { gridcolor: line, linecolor: line };
  const clear = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" };
  const hoverlabel = { bgcolor: back, font: { color: text } };
  return { layout: { font: { color: text }, hoverlabel, xaxis: axis, yaxis: axis, ...clear } };
}

function recolor() {
  for (const chart of document.querySelectorAll(".chart.drawn")) Plotly.relayout(chart, { template: template() });
}

document.getElementById("theme").addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  recolor();
});
prefersDark.addEventListener("change", recolor);

// -- Figures are drawn when they come into view, as much higher as their legend needs.
function legendHeight(spec, width) {
  if (!spec.layout.showlegend) return 0;
  const names = spec.data.filter((trace) => trace.showlegend !== false).map((trace) => trace.name.length);
  const columns = Math.max(1, Math.floor((width - 70) / (45 + 6.5 * Math.max(...names))));
  return 20 * Math.ceil(names.length / columns);
}

// The range of a loss without its values from before training and from the first steps, which are far above.
function trainedRange(traces) {
  const end = Math.max(...traces.flatMap((trace) => trace.x));
  const ys = traces.flatMap((trace) => trace.y.filter((_, i) => trace.x[i] > Math.max(1, end / 20)));
  const [low, high] = [Math.min(...ys), Math.max(...ys)];
  const margin = 0.05 * (high - low);
  return margin > 0 ? [low - margin, high + margin] : null;
}

// Points of curves that have their iterations as `meta`, from blue to orange.
function colorByIteration(spec) {
  const traces = spec.data.filter((trace) => trace.meta);
  const cmax = Math.max(...traces.flatMap((trace) => trace.meta));
  const [low, high] = ["--low", "--high"].map((name) => `rgb(${getComputedStyle(root).getPropertyValue(name)})`);
  traces.forEach((trace, i) => {
    const colors = { color: trace.meta, cmin: 0, cmax, colorscale: [[0, low], [1, high]], showscale: i === 0 };
    const colorbar = { title: { text: "iteration" }, thickness: 10, outlinewidth: 0 };
    trace.marker = { size: 8, symbol: ["circle", "square"][i], ...colors, colorbar };
    trace.mode = trace.mode.includes("lines") ? "lines+markers" : "markers";
    trace.line = { color: "#7a7f87", width: 1 };
    trace.text = trace.meta.map((number) => `iteration ${number}`);
    spec.layout.hovermode = "closest";
  });
}

// A figure is one tab stop: its buttons are a toolbar, where arrow keys go from one to the next.
function joinButtons(chart) {
  const buttons = [...chart.querySelectorAll(".modebar-btn")];
  buttons.forEach((button, i) => button.setAttribute("tabindex", i ? -1 : 0));
}

function moveFocus(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const buttons = [...event.currentTarget.querySelectorAll(".modebar-btn")];
  const at = buttons.indexOf(document.activeElement);
  if (!step || at < 0) return;
  buttons[(at + step + buttons.length) % buttons.length].focus();
  event.preventDefault();
}

function draw(chart) {
  if (chart.classList.contains("drawn")) return;
  chart.classList.add("drawn");
  const spec = figures[chart.dataset.figure];
  chart.style.height = `${chart.clientHeight + legendHeight(spec, chart.clientWidth)}px`;
  const config = {
    responsive: true,
    displaylogo: false,
    showSendToCloud: false, // plotly.js 4 has it on
    modeBarButtonsToRemove: ["toImage", "select2d", "lasso2d"],
    modeBarButtonsToAdd: [{ name: "Save as SVG", icon: Plotly.Icons.camera, click: save }],
  };
  const isLoss = /^step[123]_[a-z]+-loss$/.test(chart.dataset.figure);
  const range = isLoss && trainedRange(spec.data);
  const first = range && Math.max(...spec.data.map((trace) => trace.y[0]));
  if (first > range?.[1]) {
    spec.layout.yaxis = { ...spec.layout.yaxis, range };
    add(chart.parentElement, "figcaption", "", `It begins at ${first.toPrecision(3)}, above the axis.`);
  }
  colorByIteration(spec);
  Plotly.newPlot(chart, spec.data, { ...spec.layout, font: { size: 12 }, template: template() }, config);
  chart.on("plotly_afterplot", () => joinButtons(chart));
  chart.addEventListener("keydown", moveFocus);
}

// As it is shown, but in plotly's own colors, which are dark on white.
function save(chart) {
  const figure = { data: chart.data, layout: { ...chart.layout, template: null } };
  const [filename, width, height] = [chart.dataset.figure, chart.clientWidth, chart.clientHeight];
  Plotly.downloadImage(figure, { format: "svg", filename, width, height });
}

const seen = new IntersectionObserver(
  (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => draw(entry.target)),
  { rootMargin: "600px" },
);
document.querySelectorAll(".chart").forEach((chart) => seen.observe(chart));
window.addEventListener("beforeprint", () => document.querySelectorAll(".chart").forEach(draw));

// -- Sample answers. Text goes into the page as text only.
const selects = [...document.querySelectorAll(".column select")];
const radios = [...document.querySelectorAll("input[name=color]")];

// Control characters, and marks that reorder the text around them, are escaped.
const UNSEEN = /[\0-\x08\v-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const escaped = (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`;

function add(parent, tag, className, text) {
  const child = document.createElement(tag);
  child.className = className;
  if (text !== undefined) child.textContent = String(text).replace(UNSEEN, escaped);
  parent.append(child);
  return child;
}

function shown(value, digits = 2) {
  return value === null || value === undefined ? "-" : value.toFixed(digits);
}

// The largest magnitude that is common: 95 of 100 tokens lie below it.
function scaleOf(kind) {
  const all = samples.flatMap((row) => row.answers.flatMap((answer) => answer[kind] || []));
  const sizes = all.filter((value) => value !== null).map(Math.abs).sort((a, b) => a - b);
  return sizes.length ? sizes[Math.floor(0.95 * (sizes.length - 1))] || sizes[sizes.length - 1] : 0;
}

function addAnswer(parent, answer, kind, scale) {
  const box = add(parent, "article", "answer");
  add(box, "div", "prompt", answer.prompt);
  const tokens = add(box, "div", "tokens");
  answer.tokens.forEach((text, i) => {
    const span = add(tokens, "span", "", text);
    const kl = answer.token_kl ? answer.token_kl[i] : null;
    const advantage = answer.advantages ? answer.advantages[i] : null;
    span.title = `KL ${shown(kl, 3)}, advantage ${shown(advantage, 3)}`;
    const value = kind && answer[kind] ? answer[kind][i] : null;
    if (value !== null && scale > 0) {
      const alpha = 0.75 * Math.min(Math.abs(value) / scale, 1);
      span.style.background = `rgba(var(${value < 0 ? "--low" : "--high"}), ${alpha.toFixed(3)})`;
    }
  });
  if (answer.tokens.length < answer.answer_length) add(tokens, "span", "", " …");
  const facts = [`score ${shown(answer.score)}`, `${answer.answer_length} tokens`];
  if (answer.kl !== null) facts.push(`KL ${shown(answer.kl)} nats`);
  if (!answer.finished) facts.push("not finished");
  add(box, "div", "facts", facts.join(", "));
}

function showSamples() {
  const kind = radios.find((radio) => radio.checked).value;
  const scale = kind ? scaleOf(kind) : 0;
  const isColored = selects.some((select) => samples[select.selectedIndex].answers.some((answer) => answer[kind]));
  document.querySelector(".scale").hidden = !(scale && isColored);
  document.getElementById("low").textContent = `≤ ${shown(-scale)}`;
  document.getElementById("high").textContent = `≥ ${shown(scale)}`;
  for (const select of selects) {
    const answers = select.parentElement.querySelector(".answers");
    answers.replaceChildren();
    const row = samples[select.selectedIndex];
    row.answers.forEach((answer) => addAnswer(answers, answer, kind, scale));
  }
}

if (samples.length) {
  for (const select of selects) {
    samples.forEach((row) => add(select, "option", "", row.label));
    select.addEventListener("change", showSamples);
  }
  // The first, a middle and the last of one run, or the last ones of several: of evaluations, if there are any.
  const runs = [...new Set(samples.map((row) => row.run))];
  const kindOf = (run) => samples.find((row) => row.run === run).kind;
  const lastOf = (run) => samples.findLastIndex((row) => row.run === run && row.kind === kindOf(run));
  const last = lastOf(runs[0]);
  const shown = runs.length > 1 ? runs.map(lastOf).slice(0, 3) : [0, Math.floor(last / 2), last];
  const columns = [...new Set(shown)];
  selects.splice(columns.length).forEach((select) => select.parentElement.remove());
  selects.forEach((select, i) => { select.selectedIndex = columns[i]; });
  const hasKl = samples.some((row) => row.answers.some((answer) => answer.token_kl));
  radios.find((radio) => radio.value === (hasKl ? "token_kl" : "advantages")).checked = true;
  radios.forEach((radio) => radio.addEventListener("change", showSamples));
  showSamples();
}
