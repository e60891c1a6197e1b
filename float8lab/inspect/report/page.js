// Reads the embedded data (data.py says how it is laid out) and draws. A state, and one function
// for each part of the page that draws it from the state.
const { layers, operands, cells, histograms, summary } = data;
const count = cells.first.length;
const centers = cells.first.map((first, i) => (first + cells.last[i]) / 2);
const names = {
  x: "x, input", w: "w, weight", dy: "dy, gradient", q: "q, queries", k: "k, keys", v: "v, values",
};
const SHOWN = 10;      // rows of the table before "show all"
const FIELDS = ["amax", "scale_min", "scale_max", "saturated", "flushed", "subnormal", "nan", "inf", "sqnr", "staleness", "elements"];
const FLOOR = -6;      // log10 of the smallest share that has a color of its own

const state = {
  operand: "all", metric: "flushed", search: "", sort: null, all: false,
  layer: 0, at: operands[0], cell: count - 1,
};

// --- data ---------------------------------------------------------------------------------------

const columns = new Map();

/** One embedded column as a Float32Array, decoded when it is first asked for; null if absent. */
function column(name) {
  if (!columns.has(name)) {
    const element = $("column-" + name);
    columns.set(name, element ? decode(element.textContent) : Promise.resolve(null));
  }
  return columns.get(name);
}

async function decode(text) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Float32Array(await new Response(stream).arrayBuffer());  // little-endian, as browsers are
}

const fields = (operand, list) => Promise.all(list.map((field) => column(`${operand}-${field}`)));

const steps = (cell) =>
  cells.first[cell] === cells.last[cell] ? `step ${cells.first[cell]}`
    : `steps ${cells.first[cell]} to ${cells.last[cell]}`;

// --- quantities ---------------------------------------------------------------------------------

const log = (v) => (v > 0 ? Math.max(Math.log10(v), FLOOR) : v === 0 ? FLOOR : NaN);
const share = (label, hint) => ({
  label, hint, fields: [], of: log, show: percent, ramp: "heat", range: [FLOOR, 0],
  ticks: [[-6, -5, -4, -3, -2, -1, 0], ["\u2264 1 ppm", "10 ppm", "0.01 %", "0.1 %", "1 %", "10 %", "100 %"]],
});
const powers = (base) => (low, high) => {
  const values = [], by = Math.max(1, Math.ceil((high - low) / 6));
  for (let v = Math.ceil(low); v <= high; v += by) values.push(v);
  return [values, values.map((v) => `${base}<sup>${String(v).replace("-", MINUS)}</sup>`)];
};
// of: the fields' values -> the number that has a color; worse: 1 where large is bad, -1 where small.
const METRICS = {
  flushed: { ...share("Underflow", "Share of elements that became zero in the cast and were not; logarithmic."), fields: ["flushed"] },
  saturated: { ...share("Saturation", "Share of elements at the largest finite code; logarithmic."), fields: ["saturated"] },
  sqnr: { label: "SQNR", hint: "Signal to quantization noise in dB; low is bad.", blank: ", or all is exact, or nothing is finite",
    fields: ["sqnr"], of: (v) => v, show: decibels, ramp: "heat", worse: -1, suffix: " dB" },
  subnormal: { ...share("Subnormal", "Share of elements with a subnormal code; logarithmic."), fields: ["subnormal"] },
  amax: { label: "Amax", hint: "Largest magnitude before the cast; logarithmic.",
    fields: ["amax"], of: (v) => Math.log10(v), show: (v) => plain(v), ramp: "calm", axis: powers(10) },
  scale: { label: "Scale", hint: "Largest decode scale; logarithmic.",
    fields: ["scale_max"], of: (v) => Math.log2(v), show: (v) => plain(v), ramp: "calm", axis: powers(2) },
  staleness: { label: "Staleness", hint: "log2 of amax over the amax that the scale was made for: above 0 the cast clipped.",
    fields: ["staleness"], of: (v) => v, show: signed, ramp: "around" },
  nonfinite: { label: "NaN, inf", hint: "How many elements were NaN or infinite before the cast; logarithmic.",
    fields: ["nan", "inf"], join: (nan, inf) => nan + inf, of: (v) => Math.log10(1 + v), show: whole, ramp: "heat",
    ticks: [[0, 1, 2, 3, 6, 9], ["0", "9", "99", "1 k", "1 M", "1 G"]], floor: 1 },
};

/** The chosen quantity of all layers: values, the operand that each is of. */
async function quantity(metric, operand) {
  const chosen = operand === "all" ? operands : [operand];
  const size = layers.length * count;
  const values = new Float32Array(size).fill(NaN), from = new Uint8Array(size);
  const sign = metric.worse || 1;
  for (const name of chosen) {
    const [first, second] = await fields(name, metric.fields);
    const number = operands.indexOf(name);
    for (let i = 0; i < size; i++) {
      const value = metric.join ? metric.join(first[i], second[i]) : first[i];
      if (value === value && !(sign * value <= sign * values[i])) {
        values[i] = value;
        from[i] = number;
      }
    }
  }
  return { values, from };
}

const narrow = () => $("map").clientWidth < 700;
/** Tells that the page is drawing, until what is given is done. */
let drawing = 0;
async function busy(done) {
  drawing++;
  document.querySelector("main").setAttribute("aria-busy", "true");
  await done;
  if (!--drawing) document.querySelector("main").removeAttribute("aria-busy");
}
const cursor = (step) => ({
  type: "line", xref: "x", yref: "paper", x0: step, x1: step, y0: 0, y1: 1,
  line: { color: css("muted"), width: 1, dash: "dot" },
});

// --- heat map -----------------------------------------------------------------------------------

let shown = [];        // rows of the map, from the top: layer numbers
let current = null;    // what quantity() gave
let drawn = 0;         // counts the drawings: of two that overlap the later one stays

const matching = () => {
  const wanted = state.search.toLowerCase().split(/\s+/).filter(Boolean);
  return layers.map((_, i) => i)
    .filter((i) => wanted.every((part) => layers[i].toLowerCase().includes(part)));
};

const common = commonStart(layers);
const label = (row) => shortened(layers[shown[row]].slice(common), narrow() ? 16 : 34);

function labels(low, high, height) {
  const first = Math.max(0, Math.ceil(low)), last = Math.min(shown.length - 1, Math.floor(high));
  const every = Math.max(1, Math.ceil((last - first + 1) * 14 / height));
  const at = [];
  for (let row = first; row <= last; row += every) at.push(row);
  return { tickvals: at, ticktext: at.map((row) => escaped(label(row))) };
}

/** Pixels of the widest of some labels. */
function widest(texts) {
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  return Math.max(...texts.map((text) => pen.measureText(text).width));
}

function marker() {
  const row = shown.indexOf(state.layer);
  if (row < 0 || !count || !current) return [];
  const line = { color: css("text"), width: 1 };
  const x = centers[state.cell];
  return [
    { type: "rect", xref: "paper", x0: 0, x1: 1, y0: row - 0.5, y1: row + 0.5, line },
    { type: "line", yref: "paper", y0: 0, y1: 1, x0: x, x1: x, line: { ...line, dash: "dot" } },
  ];
}

async function drawMap() {
  const turn = ++drawn;
  const metric = METRICS[state.metric];
  $("map-title").textContent = `${metric.label}: layers over steps`;
  $("map-hint").textContent = metric.hint
    + (state.operand === "all" ? " Of the operands, the worst." : "")
    + (cells.stride > 1 ? ` A cell is the worst of ${cells.stride} watched steps.` : "")
    + ` Blank: nothing was recorded${metric.blank || ""}.`;
  shown = matching();
  current = null;
  $("matches").textContent = state.search ? `${shown.length} of ${layers.length} layers` : "";
  if (!count) return empty("map", "No step was watched.");
  if (!shown.length) return empty("map", missing());
  const found = await quantity(metric, state.operand);
  if (turn !== drawn) return undefined;
  let low = Infinity, high = -Infinity;
  const z = shown.map((layer) => {
    const row = new Array(count);
    for (let i = 0; i < count; i++) {
      const v = metric.of(found.values[layer * count + i]);
      row[i] = Number.isFinite(v) ? v : null;
      if (row[i] !== null && v < low) low = v;
      if (row[i] !== null && v > high) high = v;
    }
    return row;
  });
  if (low > high) return empty("map", `${metric.label} was not recorded here: no value is a finite number.`);
  if (metric.ramp === "around") high = Math.max(Math.abs(low), Math.abs(high), 0.5), low = -high;
  if (metric.floor !== undefined) low = 0, high = Math.max(high, metric.floor);
  if (metric.range) [low, high] = metric.range;
  if (low === high) low -= 0.5, high += 0.5;
  const every = narrow() ? 2 : 1;
  const [tickvals, ticktext] = (metric.ticks || (metric.axis ? metric.axis(low, high) : []))
    .map((list) => list.filter((_, i) => i % every === 0));
  const height = Math.min(640, Math.max(180, 18 * shown.length + 52)) + (narrow() ? 58 : 0);
  const size = height - (narrow() ? 110 : 52);
  const flat = { orientation: "h", y: -52 / size,  yanchor: "top", len: 0.94, thickness: 10, tickangle: 0 };
  const trace = {
    type: "heatmap", x: centers, z, zmin: low, zmax: high, hoverinfo: "none",
    colorscale: ramp(metric.ramp, metric.worse === -1),
    colorbar: {
      thickness: 12, outlinewidth: 0, tickvals, ticktext, ticksuffix: metric.suffix || "",
      ...(narrow() ? flat : {}),
    },
  };
  if (!tickvals) delete trace.colorbar.tickvals, delete trace.colorbar.ticktext;
  const bottom = shown.length - 0.5;
  current = found;
  await draw("map", [trace], {
    height, shapes: marker(), hovermode: "closest", plot_bgcolor: css("blank"), dragmode: "zoom",
    margin: { l: 14 + widest(shown.map((_, i) => label(i))), r: narrow() ? 14 : 86, t: 10, b: narrow() ? 100 : 42 },
    yaxis: axis({ range: [bottom, -0.5], showgrid: false, tickmode: "array", ...labels(-0.5, bottom, size) }),
    xaxis: axis({ title: { text: "step" }, showgrid: false }),
  });
  if (turn !== drawn) return undefined;
  const map = $("map");
  map.removeAllListeners("plotly_click").on("plotly_click", ({ points: [p] }) => choose(p.pointNumber[0], p.pointNumber[1]));
  map.removeAllListeners("plotly_hover").on("plotly_hover", ({ points: [p], event }) => tip(p.pointNumber, event));
  map.removeAllListeners("plotly_unhover").on("plotly_unhover", () => { $("tip").hidden = true; });
  map.removeAllListeners("plotly_relayout").on("plotly_relayout", (change) => {
    const low = change["yaxis.range[1]"], high = change["yaxis.range[0]"];
    if (low !== undefined) rows(low, high, size);
    else if (change["yaxis.autorange"]) rows(-0.5, bottom, size, [bottom, -0.5]);
  });
  return undefined;
}

function rows(low, high, size, range) {
  const { tickvals, ticktext } = labels(low, high, size);
  const more = range ? { "yaxis.range": range } : {};
  Plotly.relayout($("map"), { "yaxis.tickvals": tickvals, "yaxis.ticktext": ticktext, ...more });
}

function tip([row, cell], event) {
  const at = shown[row] * count + cell, metric = METRICS[state.metric], box = $("tip");
  box.textContent = `${layers[shown[row]]}\n${operands[current.from[at]]}, ${steps(cell)}: `
    + metric.show(current.values[at]);
  box.hidden = false;
  const { clientWidth: width } = document.documentElement;
  box.style.left = Math.max(4, Math.min(event.clientX + 14, width - box.offsetWidth - 8)) + "px";
  const below = event.clientY + 16;
  const fits = below + box.offsetHeight < innerHeight;
  box.style.top = (fits ? below : event.clientY - box.offsetHeight - 12) + "px";
}

/** A cell of the map by its row and column. */
function choose(row, cell) {
  const layer = shown[row];
  const at = state.operand === "all" && current ? operands[current.from[layer * count + cell]] : state.operand;
  select({ layer, cell, at });
}

function select(change) {
  Object.assign(state, change);
  busy(drawDrill());
  mark();
  remember();
}

/** Keep what is selected in the page's address, so that a link to it opens it. */
function remember() {
  if (!count) return;
  const { layer, at, cell, metric } = state;
  const selected = { layer: layers[layer], operand: at, step: cells.first[cell], quantity: metric };
  history.replaceState(null, "", "#" + new URLSearchParams(selected));
}

/** Take over what an address selects, as far as this run has it; whether it selects anything. */
function recall() {
  const wanted = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const layer = layers.indexOf(wanted.layer), step = Number.parseInt(wanted.step, 10);
  if (layer >= 0) state.layer = layer;
  if (operands.includes(wanted.operand)) state.at = wanted.operand;
  if (step >= 0 && count) state.cell = cellOf(step);
  if (Object.hasOwn(METRICS, wanted.quantity)) state.metric = wanted.quantity;
  return layer >= 0;
}

function mark() {
  if ($("map").data) Plotly.relayout($("map"), { shapes: marker() });
  for (const row of $("rows").children) {
    const here = +row.dataset.layer === state.layer && row.dataset.operand === state.at;
    if (here) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
  }
}

$("map").addEventListener("keydown", (event) => {
  const row = Math.max(0, shown.indexOf(state.layer)), { cell } = state;
  const to = {
    ArrowUp: [row - 1, cell], ArrowDown: [row + 1, cell], ArrowLeft: [row, cell - 1], ArrowRight: [row, cell + 1],
    PageUp: [row - 10, cell], PageDown: [row + 10, cell], Home: [row, 0], End: [row, count - 1],
  }[event.key];
  if (!to || !count || !shown.length || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  const within = (v, length) => Math.max(0, Math.min(length - 1, v));
  choose(within(to[0], shown.length), within(to[1], count));
});

// --- worst first --------------------------------------------------------------------------------

const cellOf = (step) => {
  let low = 0, high = count - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (cells.first[middle] <= step) low = middle; else high = middle - 1;
  }
  return low;
};
const peak = (key, show) => (row) => row[key] && [show(row[key][1]), row[key][2]];
/** A column that is shown where the table is ranked by it. */
const extra = (label, field, show) => ({
  label, field, extra: true, key: (row) => row[field]?.[1], text: peak(field, show),
});
// label, sort key (large is worse), [text, step]; a null key goes last.
const COLUMNS = {
  layer: { label: "Layer", key: (row) => -row.layer },
  operand: { label: "Operand", key: (row) => -row.operand },
  flushed: { label: "Underflow, most", key: (row) => row.flushed?.[1], text: peak("flushed", percent) },
  flushedMean: { label: "mean", key: (row) => row.flushed?.[0], text: (row) => row.flushed && [percent(row.flushed[0])] },
  saturated: { label: "Saturation, most", key: (row) => row.saturated?.[1], text: peak("saturated", percent) },
  saturatedMean: { label: "mean", key: (row) => row.saturated?.[0], text: (row) => row.saturated && [percent(row.saturated[0])] },
  sqnr: { label: "SQNR, least", key: (row) => row.sqnr && -row.sqnr[1], text: peak("sqnr", decibels) },
  sqnrMean: { label: "mean", key: (row) => row.sqnr && -row.sqnr[0], text: (row) => row.sqnr && [decibels(row.sqnr[0])] },
  subnormal: extra("Subnormal, most", "subnormal", percent),
  amax: extra("Amax, most", "amax", plain),
  scale: extra("Scale, most", "scale_max", plain),
  staleness: { ...extra("Staleness, most", "staleness", signed), extra: !summary.some((row) => row.staleness) },
  nonfinite: { label: "NaN, inf", key: (row) => (row.nonfinite ? row.nonfinite[0] : 0),
    text: (row) => (row.nonfinite ? [whole(row.nonfinite[0]), row.nonfinite[2]] : ["0"]), bad: (row) => row.nonfinite },
};
/** The column to rank by: the one clicked, else that of the chosen quantity. */
const ranking = () => state.sort || (state.metric in COLUMNS ? state.metric : "flushed");

/** The rows of the table, all of them. */
function ranked() {
  const by = ranking(), names_ = new Set(matching());
  const rank = (row) => {
    const key = COLUMNS[by].key(row);
    return key === null || key === undefined ? -Infinity : key;
  };
  return summary
    .filter((row) => names_.has(row.layer))
    .filter((row) => state.operand === "all" || operands[row.operand] === state.operand)
    .sort((a, b) => { const x = rank(a), y = rank(b); return x === y ? 0 : y - x; });
}

function drawTable() {
  const by = ranking(), found = ranked();
  for (const head of $("heads").children) {
    head.hidden = COLUMNS[head.dataset.column].extra && head.dataset.column !== by;
    if (head.dataset.column !== by) head.removeAttribute("aria-sort");
    else head.setAttribute("aria-sort", /^(sqnr|layer|operand)/.test(by) ? "ascending" : "descending");
  }
  $("rows").replaceChildren(...found.slice(0, state.all ? undefined : SHOWN).map(tableRow));
  if (!found.length) {
    const why = element("td", missing(), { colSpan: Object.keys(COLUMNS).length });
    $("rows").append(element("tr"));
    $("rows").lastChild.append(why);
  }
  $("more").hidden = found.length <= SHOWN;
  $("more").textContent = state.all ? `Show ${SHOWN}` : `Show all ${found.length}`;
  $("offenders-hint").textContent = summary.length
    ? `Operands of layers over all ${cells.steps} watched steps, ranked by what is chosen above or by the column clicked. `
      + "Small numbers: the step. A layer's name opens it below."
    : "Nothing was recorded.";
  mark();
}

/** Why there is no row. */
const missing = () => (!summary.length ? "Nothing was recorded."
  : matching().length ? "These layers have no such operand."
  : `No layer has "${state.search}" in its name.`);

function tableRow(row) {
  const by = ranking();
  const line = element("tr");
  line.dataset.layer = row.layer;
  line.dataset.operand = operands[row.operand];
  for (const [name, { text, bad, extra }] of Object.entries(COLUMNS)) {
    if (extra && name !== by) continue;
    const cell = element("td");
    if (name === "layer") {
      const button = element("button", layers[row.layer], { type: "button" });
      button.addEventListener("click", () => open(row));
      cell.append(button);
    } else if (name === "operand") {
      cell.textContent = operands[row.operand];
    } else {
      const [value, step] = text(row) || [DASH];
      cell.textContent = value;
      if (step !== undefined) cell.append(" ", element("small", String(step), { title: `at step ${step}` }));
      if (bad && bad(row)) cell.className = "bad";
    }
    line.append(cell);
  }
  return line;
}

/** A row of the table in the drill-down, at the step of what it is ranked by. */
function open(row) {
  const by = ranking(), found = row[COLUMNS[by].field || by.replace("Mean", "")];
  const step = Array.isArray(found) ? found[2] : undefined;
  select({ layer: row.layer, at: operands[row.operand], ...(step === undefined ? {} : { cell: cellOf(step) }) });
  $("drill").scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
}

// --- one layer ----------------------------------------------------------------------------------

let drilled = 0;

function fact(name, value, className = "") {
  const box = element("div", undefined, { className });
  box.append(element("dt", name), element("dd", value));
  return box;
}

function gemms(layer, step) {
  let text = null;
  for (const [from, number] of data.gemms.changes[layer] || []) if (from <= step) text = data.gemms.texts[number];
  return text;
}

async function drawDrill() {
  const turn = ++drilled;
  const { layer, at, cell } = state;
  if (!count) {
    for (const id of ["sqnr", "shares", "scales", "bars", "exponents"]) empty(id, "Nothing was recorded.");
    return;
  }
  $("drill-title").textContent = `${layers[layer]}, ${names[at] || at}, ${steps(cell)}`;
  $("layer").value = layer;
  $("operand").value = at;
  $("step").value = cell;
  $("step-value").textContent = steps(cell).replace(/steps? /, "");
  $("shares-of").textContent = `of ${at}`;
  const wanted = FIELDS;
  const [all, counts, ...sqnrs] = await Promise.all([
    fields(at, wanted), column(`${at}-exponents-${layer}`), ...operands.map((name) => column(`${name}-sqnr`)),
  ]);
  if (turn !== drilled) return;
  const row = (values) => values.subarray(layer * count, (layer + 1) * count);
  const of = Object.fromEntries(wanted.map((name, i) => [name, row(all[i])]));
  const here = Object.fromEntries(wanted.map((name) => [name, of[name][cell]]));
  const bad = here.nan + here.inf > 0;
  const one = here.scale_min === here.scale_max || Number.isNaN(here.scale_min);
  const ran = gemms(layer, cells.first[cell]);
  $("facts").replaceChildren(
    ...(Number.isNaN(here.elements) ? [fact("Record", "none of this operand here")] : [
      fact("Underflow", percent(here.flushed)), fact("Saturation", percent(here.saturated)),
      fact("Subnormal", percent(here.subnormal)), fact("SQNR", decibels(here.sqnr)),
      fact("Amax", plain(here.amax, 4)),
      fact("Scale", one ? plain(here.scale_max, 4) : `${plain(here.scale_min)} to ${plain(here.scale_max)}`),
      fact("Staleness", Number.isNaN(here.staleness) ? "none" : signed(here.staleness)),
      fact("NaN, inf", `${whole(here.nan)}, ${whole(here.inf)}`, bad ? "bad" : ""), fact("Elements", whole(here.elements)),
    ]), ...(ran === null ? [] : [fact("GEMMs", ran, "long")]));

  const colors = [css("first"), css("second"), css("third")];
  const shapes = [cursor(centers[cell])];
  const lines = (y, name, color, more = {}) => ({
    type: "scatter", mode: count === 1 ? "markers" : "lines", x: centers, y: Array.from(y, (v) => (Number.isFinite(v) ? v : null)),
    name: escaped(name), line: { color, width: 1.6 }, marker: { color }, ...more,
  });
  // A layer has some of the operands: those of a linear layer, or those of attention.
  const recorded = operands.map((name, i) => [name, row(sqnrs[i])]).filter(([name, values]) => name === at || values.some(Number.isFinite));
  draw("sqnr", recorded.map(([name, values], i) => lines(values, name, colors[i % 3], {
    line: { color: colors[i % 3], width: name === at ? 2.4 : 1 }, opacity: name === at ? 1 : 0.55,
    hovertemplate: "%{y:.1f} dB" })), { shapes, showlegend: true, yaxis: axis({ ticksuffix: " dB" }) });
  const [tickvals, ticktext] = METRICS.flushed.ticks;
  draw("shares", [["flushed", "underflow"], ["saturated", "saturation"], ["subnormal", "subnormal"]].map(([name, label], i) =>
    lines(Array.from(of[name], log), label, colors[i], { text: Array.from(of[name], percent), hovertemplate: "%{text}" })),
    { shapes, showlegend: true, yaxis: axis({ tickvals, ticktext, range: [FLOOR - 0.2, 0.2] }) });
  const ranges = [...of.scale_min].some((v, i) => v !== of.scale_max[i] && v === v);
  const positive = (values) => Array.from(values, (v) => (v > 0 ? v : NaN));
  draw("scales", [
    lines(positive(of.amax), "amax", colors[0], { hovertemplate: "%{y:.4g}" }),
    lines(positive(of.scale_max), ranges ? "largest scale" : "scale", colors[1], { hovertemplate: "%{y:.4g}" }),
    ...(ranges ? [lines(positive(of.scale_min), "smallest scale", colors[2], { hovertemplate: "%{y:.4g}" })] : []),
  ], { shapes, showlegend: true, yaxis: axis({ type: "log", exponentformat: "power", dtick: decades(of) }) });
  drawExponents(counts, here, colors[0], shapes);
}

/** The distance of the ticks of amax and scales, so that about five fit. */
function decades(of) {
  let low = Infinity, high = -Infinity;
  for (const values of [of.amax, of.scale_min, of.scale_max]) {
    for (const v of values) if (v > 0 && v < Infinity) low = Math.min(low, v), high = Math.max(high, v);
  }
  return low < high ? Math.max(1, Math.ceil(Math.log10(high / low) / 5)) : 1;
}

function drawExponents(counts, here, color, shapes) {
  const width = histograms.high - histograms.low + 1;
  const exponents = Array.from({ length: width }, (_, i) => histograms.low + i);
  const kept = counts ? histograms.steps.map((_, i) => i).filter((i) => !Number.isNaN(counts[i * width])) : [];
  if (!kept.length) {
    $("bars-title").textContent = "Exponents of the FP8 codes";
    $("kept").textContent = "";
    empty("bars", "No histogram was recorded for this operand.");
    empty("exponents", "No histogram was recorded for this operand.");
    return;
  }
  const first = cells.first[state.cell], last = cells.last[state.cell];
  const far = (i) => Math.max(first - histograms.steps[i], histograms.steps[i] - last, 0);
  const near = kept.reduce((best, i) => (far(i) < far(best) ? i : best));
  const bars = counts.subarray(near * width, (near + 1) * width);
  const exact = far(near) === 0;
  $("bars-title").textContent = `Exponents of the FP8 codes, step ${histograms.steps[near]}` + (exact ? "" : " (the nearest kept)");
  $("kept").textContent = `Histograms are kept of ${histograms.steps.length} of ${cells.steps} watched steps.`;
  draw("bars", [{ type: "bar", x: exponents, y: Array.from(bars), marker: { color }, hovertemplate: "2<sup>%{x}</sup>: %{y:,} elements<extra></extra>" }], {
    bargap: 0.12, hovermode: "closest", xaxis: axis({ title: { text: "floor(log<sub>2</sub>|code|)" }, showgrid: false }),
    yaxis: axis({ title: { text: "elements" }, rangemode: "tozero" }),
  });
  const sums = kept.map((i) => counts.subarray(i * width, (i + 1) * width).reduce((a, b) => a + b, 0));
  const z = exponents.map((_, e) => kept.map((i, k) => (sums[k] ? counts[i * width + e] / sums[k] : 0)));
  draw("exponents", [{
    type: "heatmap", x: kept.map((i) => histograms.steps[i]), y: exponents, z, zmin: 0, colorscale: ramp("calm"),
    colorbar: { thickness: 12, outlinewidth: 0, tickformat: ".0%" },
    hovertemplate: "step %{x}, exponent %{y}: %{z:.2%}<extra></extra>",
  }], { shapes, hovermode: "closest", plot_bgcolor: css("blank"), margin: { l: 58, r: 70, t: 10, b: 42 },
    xaxis: axis({ title: { text: "step" }, showgrid: false }), yaxis: axis({ title: { text: "exponent" }, showgrid: false }) });
}

// --- loss, cards --------------------------------------------------------------------------------

function drawLoss() {
  const { steps: at, values } = data.loss;
  const finite = values.filter((v) => v !== null), { baseline } = data;
  if (!finite.length && !baseline?.loss.values.length) return empty("loss", "No finite loss was recorded.");
  const missing = values.length - finite.length;
  const from = values.findIndex((v) => v === null);
  $("loss-hint").textContent = "Training loss of each step given to the watcher."
    + (missing ? ` NaN or infinite in ${missing} of ${values.length}, first at step ${at[from]}.` : "");
  const curve = (loss, name, color) => ({ type: "scatter", mode: loss.values.length === 1 ? "markers" : "lines", x: loss.steps, y: loss.values,
    name: escaped(shortened(name, 40)), line: { color: css(color), width: 1.5 }, hovertemplate: "%{y:.4f}" });
  const curves = baseline ? [curve(baseline.loss, baseline.name, "second"), curve(data.loss, baseline.log, "first")] : [curve(data.loss, "loss", "first")];
  return draw("loss", curves, { height: 280, showlegend: Boolean(baseline) });
}

function card(label, value, detail, { row, key, bad } = {}) {
  const box = element("li", undefined, { className: bad ? "bad" : "" });
  box.append(element("span", label), element("strong", value));
  const more = element("span");
  if (row) {
    const button = element("button", shortened(layers[row.layer].slice(common), 20), { type: "button", title: layers[row.layer], className: "name" });
    button.addEventListener("click", () => { state.sort = key; drawTable(); open(row); });
    more.append(button);
    if (detail) more.append(element("span", detail));
  } else {
    more.textContent = detail;
  }
  box.append(more);
  return box;
}

function drawCards() {
  const made = [card("Watched", `${whole(cells.steps)} steps`, count ? `${cells.first[0]} to ${cells.last[count - 1]}, ${layers.length} layers` : "")];
  const losses = data.loss.values, last = losses[losses.length - 1];
  if (losses.length) {
    made.push(card("Last loss", last === null ? "not finite" : plain(last, 4), `step ${data.loss.steps[losses.length - 1]}`, { bad: last === null }));
  }
  for (const [key, label, show, sign] of [["flushed", "Most underflow", percent, 1], ["saturated", "Most saturation", percent, 1], ["sqnr", "Least SQNR", decibels, -1]]) {
    const known = summary.filter((row) => row[key]);
    if (!known.length) continue;
    const row = known.reduce((a, b) => (sign * b[key][1] > sign * a[key][1] ? b : a));
    made.push(card(label, show(row[key][1]), `${operands[row.operand]}, step ${row[key][2]}`, { row, key }));
  }
  const broken = summary.filter((row) => row.nonfinite);
  const total = broken.reduce((sum, row) => sum + row.nonfinite[0], 0);
  const first = broken.length && broken.reduce((a, b) => (b.nonfinite[2] < a.nonfinite[2] ? b : a));
  made.push(broken.length
    ? card("NaN and inf", whole(total), `first: ${operands[first.operand]}, step ${first.nonfinite[2]}`, { row: first, key: "nonfinite", bad: true })
    : card("NaN and inf", "none", "before any cast"));
  $("cards").replaceChildren(...made);
}

// --- controls -----------------------------------------------------------------------------------

function choices(id, name, entries) {
  for (const [value, label] of entries) {
    const box = element("label");
    box.append(element("input", undefined, { type: "radio", name, value, checked: state[name] === value }), element("span", label));
    $(id).append(box);
  }
  $(id).addEventListener("change", ({ target }) => {
    Object.assign(state, { [name]: target.value, sort: null });
    if (name === "operand" && target.value !== "all" && count) select({ at: target.value });
    drawTable();
    busy(drawMap());
    remember();
  });
}

/** One row for each operand of a layer, as the table ranks them. */
function saveTable() {
  const kinds = ["flushed", "saturated", "subnormal", "sqnr", "staleness", "amax", "scale_max"];
  const heads = kinds.flatMap((kind) => [`${kind} mean`, `${kind} worst`, `${kind} worst at step`]);
  saveCsv("operands.csv", [["layer", "operand", ...heads, "nan and inf"], ...ranked().map((row) => [
    layers[row.layer], operands[row.operand], ...kinds.flatMap((kind) => row[kind] || ["", "", ""]), row.nonfinite?.[0] || 0,
  ])]);
}

/** One row for each cell of the operand of the layer that is shown. */
async function saveLayer() {
  const { layer, at } = state, all = await fields(at, FIELDS);
  const rows = centers.map((_, cell) => [cells.first[cell], cells.last[cell], ...all.map((values) => values[layer * count + cell])]);
  saveCsv(`${layers[layer]}.${at}.csv`.replace(/[^\w.-]/g, "_"), [["first step", "last step", ...FIELDS], ...rows]);
}

function start() {
  choices("operands", "operand", [["all", "all"], ...operands.map((name) => [name, name])]);
  choices("metrics", "metric", Object.entries(METRICS).map(([name, { label }]) => [name, label]));
  for (const [name, { label }] of Object.entries(COLUMNS)) {
    const head = element("th", undefined, { scope: "col" }), button = element("button", label, { type: "button" });
    head.dataset.column = name;
    button.addEventListener("click", () => { state.sort = name; drawTable(); });
    head.append(button);
    $("heads").append(head);
  }
  $("layer").append(...layers.map((name, i) => element("option", name, { value: i })));
  $("operand").append(...operands.map((name) => element("option", names[name] || name, { value: name })));
  $("step").max = Math.max(0, count - 1);
  for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());
  let waiting = 0;
  $("search").addEventListener("input", ({ target }) => {
    state.search = target.value;
    clearTimeout(waiting);
    waiting = setTimeout(() => { drawTable(); busy(drawMap()); }, 120);
  });
  $("more").addEventListener("click", () => { state.all = !state.all; drawTable(); });
  $("layer").addEventListener("change", ({ target }) => select({ layer: +target.value }));
  $("operand").addEventListener("change", ({ target }) => select({ at: target.value }));
  $("step").addEventListener("input", ({ target }) => select({ cell: +target.value }));
  $("save-table").addEventListener("click", saveTable);
  $("save-layer").addEventListener("click", () => busy(saveLayer()));
  addEventListener("hashchange", () => {
    if (!recall()) return;
    document.querySelector(`#metrics input[value="${state.metric}"]`).checked = true;
    drawTable();
    busy(Promise.all([drawMap(), drawDrill()]));
  });
  dark.addEventListener("change", () => busy(drawAll()));
  addEventListener("scroll", () => { $("tip").hidden = true; }, { passive: true });
  let wide = narrow();
  addEventListener("resize", () => { if (narrow() !== wide) { wide = narrow(); busy(drawMap()); } });
}

async function drawAll() {
  drawCards();
  drawTable();
  await readPlotly();
  await drawMap();
  await onScreen();
  document.body.dataset.ready ??= performance.now();  // ms since the page was asked for
  await drawDrill();
  await onScreen();
  drawLoss();
  await onScreen();
  document.body.dataset.complete ??= performance.now();
}

if (typeof DecompressionStream === "undefined") {
  $("notice").hidden = false;
  $("notice").textContent = "This page needs a browser of 2023 or later: it lacks DecompressionStream.";
} else {
  const worst = summary.filter((row) => row.flushed).reduce((a, b) => (a && a.flushed[1] >= b.flushed[1] ? a : b), null);
  if (worst) Object.assign(state, { layer: worst.layer, at: operands[worst.operand], cell: cellOf(worst.flushed[2]) });
  const isLink = recall();
  start();
  busy(drawAll()).then(() => { if (isLink) $("drill").scrollIntoView(); });
}
