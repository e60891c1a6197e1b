// Shared by the pages that float8lab writes: numbers as text, colors, charts by plotly, files to save.
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const DASH = "\u2013", MINUS = "\u2212";

// --- numbers as text ----------------------------------------------------------------------------

const plain = (v, digits = 3) =>
  Number.isFinite(v) ? String(Number(v.toPrecision(digits))).replace("-", MINUS)
    : v === Infinity ? "inf" : v === -Infinity ? MINUS + "inf" : DASH;
const whole = (v) => (Number.isFinite(v) ? Math.round(v).toLocaleString("en") : DASH);
const decibels = (v) => (Number.isFinite(v) ? v.toFixed(1).replace("-", MINUS) + " dB" : "none");
const signed = (v) =>
  Number.isFinite(v) ? (v < 0 ? MINUS : "+") + Math.abs(v).toFixed(2) : plain(v);
function percent(v) {
  if (!Number.isFinite(v)) return DASH;
  if (v === 0) return "0 %";
  return v < 1e-4 ? plain(1e6 * v, 2) + " ppm" : plain(100 * v, 3) + " %";
}
/** Plotly reads tags in its texts. */
const escaped = (text) =>
  text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
/** The middle left out. */
function shortened(text, most) {
  const head = Math.ceil((most - 1) / 2);
  return text.length <= most ? text : text.slice(0, head) + "\u2026" + text.slice(head + 1 - most);
}
/** How many characters of all names are the same whole components, such as "model.layers." */
function commonStart([first = "", ...others]) {
  let length = 0;
  for (let i = first.indexOf(".") + 1; i > 0; i = first.indexOf(".", i) + 1) {
    if (others.length && others.every((name) => name.startsWith(first.slice(0, i)))) length = i;
    else break;
  }
  return length;
}

// --- looks --------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const RAMPS = {
  light: {
    heat: ["#fdf6ec", "#fde0b8", "#fbbd7c", "#f48f51", "#df5a35", "#b32b28", "#6f0f22"],
    calm: ["#eef3fb", "#c9dcf2", "#93bbe3", "#5a93cc", "#3069ad", "#1c4585", "#122a57"],
    around: ["#1c4585", "#5a93cc", "#c9dcf2", "#f4f4f2", "#fbc9a0", "#df5a35", "#8a1a24"],
  },
  dark: {
    heat: ["#202634", "#43284a", "#74304f", "#aa3d47", "#d9622f", "#f59b32", "#ffe08a"],
    calm: ["#1d2636", "#20385c", "#265289", "#3271b5", "#4f95d3", "#86bdea", "#d3eaff"],
    around: ["#86bdea", "#3271b5", "#20385c", "#232a36", "#6b3340", "#d9622f", "#ffd07a"],
  },
};
function ramp(name, reversed) {
  const colors = [...RAMPS[dark.matches ? "dark" : "light"][name]];
  if (reversed) colors.reverse();
  return colors.map((color, i) => [i / (colors.length - 1), color]);
}
// Margins are given and labels may overflow: measuring them took plotly half of its time.
const axis = (more) => ({
  gridcolor: css("line"), zeroline: false, linecolor: css("line"), automargin: false, ticklabeloverflow: "allow",
  ...more, title: { text: "", standoff: 8, ...more?.title },
});
function layout(more) {
  return {
    paper_bgcolor: css("panel"), plot_bgcolor: "rgba(0,0,0,0)", height: 240,
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("text") },
    margin: { l: 58, r: 14, t: 24, b: 42 }, showlegend: false, hovermode: "x unified",
    hoverlabel: { bgcolor: css("panel"), bordercolor: css("line"), font: { color: css("text") } },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    xaxis: axis({ title: { text: "step" } }), yaxis: axis(), ...more,
  };
}
const CONFIG = {
  responsive: true, displaylogo: false, modeBarButtons: [["toImage"]],
  toImageButtonOptions: { format: "png", scale: 2, filename: "float8lab" },
};
const draw = (id, traces, more) => Plotly.react($(id), traces, layout(more), CONFIG);
function element(tag, text, more = {}) {
  const made = Object.assign(document.createElement(tag), more);
  if (text !== undefined) made.textContent = text;
  return made;
}
/** In place of a chart. */
function empty(id, why) {
  const text = escaped(why).replace(": ", ":<br>");
  const hidden = { visible: false, fixedrange: true };
  return draw(id, [], {
    height: 120, margin: { l: 0, r: 0, t: 0, b: 0 }, xaxis: { ...hidden }, yaxis: { ...hidden }, shapes: [],
    annotations: [{ text, showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5, font: { color: css("muted") } }],
  });
}
/** Offer rows of values as a CSV file. */
function saveCsv(name, rows) {
  const cell = (v) => (/[",\n]/.test(v ?? "") ? `"${String(v).replace(/"/g, '""')}"` : Number.isNaN(v) ? "" : v ?? "");
  const text = rows.map((row) => row.map(cell).join(",") + "\n").join("");
  const link = element("a", undefined, { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
/** What was drawn is on the screen, and the page has answered what was clicked meanwhile. */
const onScreen = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));

/** Read plotly, which takes a second, after what stands on the page without it is shown. */
async function readPlotly() {
  if (typeof Plotly !== "undefined") return;
  await onScreen();
  document.body.dataset.table ??= performance.now();
  document.head.append(element("script", $("plotly").textContent));
}
