// Draws the exponents of a checkpoint's quantized tensors: all as a heat map, one as bars.
const { names, exponents, counts } = data;
const lowest = Math.min(...exponents.map((row) => row[0]));
const highest = Math.max(...exponents.map((row) => row[row.length - 1]));
const ZERO = lowest - 2;  // where the zeros stand
const x = [ZERO, ...Array.from({ length: highest - lowest + 1 }, (_, i) => lowest + i)];
const narrow = () => $("map").clientWidth < 700;
const common = commonStart(names), suffix = names.every((name) => name.endsWith(".weight")) ? 7 : 0;
const exponentAxis = (ticks = [ZERO, ...x.filter((e) => e > ZERO + 3 && e % (narrow() ? 8 : 4) === 0)]) => axis({
  title: { text: "floor(log<sub>2</sub>|FP8 value|)" }, showgrid: false, tickvals: ticks, tickangle: 0,
  ticktext: ticks.map((e) => (e === ZERO ? "zero" : String(e).replace("-", MINUS))),
});
const count = (tensor, e) =>
  (e === ZERO ? counts[tensor][0] : counts[tensor][1 + e - exponents[tensor][0]]) || 0;
const totals = counts.map((row) => row.reduce((a, b) => a + b, 0) || 1);
let chosen = 0;

function drawBars() {
  $("name").textContent = names[chosen];
  return draw("bars", [{
    type: "bar", x, y: x.map((e) => count(chosen, e)), marker: { color: x.map((e) => css(e === ZERO ? "second" : "first")) },
    customdata: x.map((e) => percent(count(chosen, e) / totals[chosen])), hovertemplate: "%{y:,} elements, %{customdata}<extra></extra>",
  }], { bargap: 0.12, hovermode: "closest", xaxis: exponentAxis(), yaxis: axis({ title: { text: "elements" }, rangemode: "tozero" }) });
}

async function drawAll() {
  await readPlotly();
  const labels = names.map((name) => escaped(shortened(name.slice(common, name.length - suffix), narrow() ? 16 : 40)));
  const z = names.map((_, tensor) => x.map((e) => (x.indexOf(e) && (e < exponents[tensor][0] || e > exponents[tensor].at(-1)) ? null : count(tensor, e) / totals[tensor])));
  const height = Math.min(900, 90 + 18 * names.length);
  const every = Math.max(1, Math.ceil(names.length * 18 / (height - 90)));
  const shown = names.map((_, i) => i).filter((i) => i % every === 0);
  await draw("map", [{
    type: "heatmap", x, y: names.map((_, i) => i), z, zmin: 0, colorscale: ramp("calm"), customdata: names.map((name) => x.map(() => escaped(name))),
    colorbar: { thickness: 10, outlinewidth: 0, tickformat: ".0%" }, hovertemplate: "%{customdata}<br>%{z:.2%}<extra></extra>",
  }], {
    height, hovermode: "closest", plot_bgcolor: css("blank"), margin: { l: narrow() ? 125 : 260, r: 60, t: 10, b: 42 }, xaxis: exponentAxis(),
    yaxis: axis({ autorange: "reversed", showgrid: false, tickvals: shown, ticktext: shown.map((i) => labels[i]) }),
  });
  $("map").removeAllListeners("plotly_click").on("plotly_click", ({ points: [point] }) => { chosen = point.y; drawBars(); });
  await drawBars();
  await onScreen();
  document.body.dataset.ready = document.body.dataset.complete = performance.now();
}

if (!names.length) {
  $("charts").remove();
} else {
  dark.addEventListener("change", drawAll);
  drawAll();
}
