// Curves over the epochs and the reliability diagram, as SVG.
const LEFT = 44, RIGHT = 8, TOP = 10, BOTTOM = 24;

/** Round numbers between two ends, about `count` of them. */
function ticks(low, high, count) {
  const span = high - low || 1;
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((s) => s >= rough);
  const found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + 1e-9 * span; t += step) found.push(Math.abs(t) < step / 1e6 ? 0 : t);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) {
    for (const f of high / low > 1000 ? [1] : high / low > 30 ? [1, 3] : [1, 2, 5]) {
      const t = f * 10 ** p;
      if (t >= low * 0.999 && t <= high * 1.001) found.push(t);
    }
  }
  return found.length > 7 ? found.filter((_, i) => i % 2 === 0) : found;
}

/** A figure with lines; `chart` has title, unit, log, epochs and series by name. */
function lineChart(chart, W = 340, H = 190) {
  const names = Object.keys(chart.series);
  const { epochs } = chart;
  const values = names.flatMap((n) => chart.series[n]).filter((v) => v !== null);
  const change = chart.log ? Math.log : (v) => v;
  let low = Math.min(...values), high = Math.max(...values);
  if (chart.cut && values.length > 20) { // where the settings differ, not where they start
    const sorted = [...values].sort((a, b) => a - b);
    low = Math.max(low, high - 2.5 * (high - sorted[Math.floor(0.25 * sorted.length)]), 0);
  }
  else if (!chart.log && low > 0 && low < 0.5 * high) low = 0;
  if (low === high) { low -= Math.abs(low) * 0.1 || 1; high += Math.abs(high) * 0.1 || 1; if (chart.log) low = Math.max(low, high / 10); }
  const first = epochs[0], last = epochs[epochs.length - 1];
  const x = (e) => LEFT + (W - LEFT - RIGHT) * (last === first ? 0.5 : (e - first) / (last - first));
  const y = (v) => TOP + (H - TOP - BOTTOM) * (1 - (change(v) - change(low)) / (change(high) - change(low)));

  const described = names.map((n) => {
    const own = chart.series[n].filter((v) => v !== null);
    return `${n} from ${show(own[0])} to ${show(own[own.length - 1])}`;
  });
  const label = `${chart.title} over ${epochs.length} epochs: ${described.join("; ")}${chart.unit && ` ${chart.unit}`}`;
  const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label });
  const read = make("output");
  const keys = make("ul", { class: "keys" });
  const marks = make("g");

  function paint() {
    svg.replaceChildren();
    for (const t of chart.log ? logTicks(low, high) : ticks(low, high, 4)) {
      svg.append(make("line", { x1: LEFT, x2: W - RIGHT, y1: y(t), y2: y(t), stroke: css("--grid") }));
      svg.append(make("text", { x: LEFT - 6, y: y(t) + 4, "text-anchor": "end" }, show(t)));
    }
    const at = ticks(first, last, 5).filter((t) => Number.isInteger(t));
    for (const t of at) svg.append(make("text", { x: x(t), y: H - 6, "text-anchor": "middle" }, String(t)));
    svg.append(make("text", { x: LEFT - 6, y: H - 6, "text-anchor": "end" }, "epoch"));
    names.forEach((name, i) => {
      let path = "", pen = "M";
      chart.series[name].forEach((v, j) => {
        if (v === null) return;
        path += `${pen}${x(epochs[j]).toFixed(1)},${Math.min(y(v), H - BOTTOM).toFixed(1)}`;
        pen = "L";
      });
      const only = chart.series[name].filter((v) => v !== null).length === 1;
      const look = { fill: "none", stroke: pick(i), "stroke-width": only ? 6 : i ? 1.7 : 2.2, "stroke-linejoin": "round", "stroke-linecap": "round" };
      svg.append(make("path", { d: only ? `${path}l0.1,0` : path, ...look, "stroke-dasharray": DASHES[i % 10] }));
    });
    svg.append(marks);
    keys.replaceChildren();
    if (names.length > 1) names.forEach((name, i) => {
      const swatch = make("span", { class: "swatch" });
      swatch.style.background = pick(i);
      keys.append(make("li", {}, swatch, name));
    });
  }
  const pick = (i) => (names.length === 1 ? css("--accent") : colour(ORDER[i % 10]));

  function point(event) {
    const box = svg.getBoundingClientRect();
    const where = ((event.clientX - box.left) / box.width) * W;
    let near = 0;
    epochs.forEach((e, j) => { if (Math.abs(x(e) - where) < Math.abs(x(epochs[near]) - where)) near = j; });
    marks.replaceChildren(make("line", { x1: x(epochs[near]), x2: x(epochs[near]), y1: TOP, y2: H - BOTTOM, stroke: css("--soft"), "stroke-dasharray": "2 3" }));
    const told = [];
    names.forEach((name, i) => {
      const v = chart.series[name][near];
      if (v === null) return;
      marks.append(make("circle", { cx: x(epochs[near]), cy: Math.min(y(v), H - BOTTOM), r: 3.5, fill: pick(i), stroke: css("--paper") }));
      told.push(`${names.length > 1 ? `${name} ` : ""}${show(v)}${chart.unit && ` ${chart.unit}`}`);
    });
    tip(`epoch ${epochs[near]}: ${told.join(", ")}`, event);
  }
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerleave", () => { marks.replaceChildren(); tip(""); });
  if (names.length === 1) {
    const own = chart.series[names[0]].filter((v) => v !== null);
    read.textContent = `${show(own[own.length - 1])}${chart.unit && ` ${chart.unit}`} at the end`;
  }
  painters.push(paint);
  return make("figure", {}, make("figcaption", {}, make("strong", {}, chart.title), read), keys, svg);
}
const ORDER = [0, 6, 2, 5, 3, 7, 1, 8, 4, 9]; // colours that differ most come first
const DASHES = ["none", "none", "none", "none", "6 3", "6 3", "6 3", "2 3", "2 3", "2 3"];

/** Accuracy per bin of confidence against the diagonal. */
function reliabilityChart(found) {
  const size = 300, left = 58, top = 8, bottom = 40;
  const width = left + size + 8, height = top + size + bottom;
  const full = found.bins.length;
  const label = `Reliability diagram of ${found.images} test images: ${found.bins
    .filter((b) => b[0])
    .map((b) => `${b[0]} images with mean probability ${percent(b[1])} are right in ${percent(b[2])}`)
    .join("; ")}`;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  function paint() {
    svg.replaceChildren();
    for (const t of [0, 0.25, 0.5, 0.75, 1]) {
      const at = top + size * (1 - t);
      svg.append(make("line", { x1: left, x2: left + size, y1: at, y2: at, stroke: css("--grid") }));
      svg.append(make("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, `${100 * t} %`));
      svg.append(make("text", { x: left + size * t, y: top + size + 16, "text-anchor": "middle" }, `${100 * t} %`));
    }
    const most = Math.max(...found.bins.map((b) => b[0]));
    found.bins.forEach(([count, confidence, accuracy], i) => {
      if (!count) return;
      const bar = { x: left + (size * i) / full + 1, width: size / full - 2, fill: css("--accent"), opacity: 0.35 + 0.65 * Math.sqrt(count / most) };
      const rect = make("rect", { ...bar, y: top + size * (1 - accuracy), height: Math.max(1, size * accuracy) });
      const told = `${count} images: mean probability ${percent(confidence)}, right ${percent(accuracy)}`;
      rect.addEventListener("pointermove", (event) => tip(told, event));
      rect.addEventListener("pointerleave", () => tip(""));
      svg.append(rect);
    });
    svg.append(make("line", { x1: left, y1: top + size, x2: left + size, y2: top, stroke: css("--soft"), "stroke-dasharray": "4 4" }));
    svg.append(make("text", { x: left + size / 2, y: height - 6, "text-anchor": "middle" }, "probability of the answer"));
    svg.append(make("text", { x: -(top + size / 2), y: 10, transform: "rotate(-90)", "text-anchor": "middle" }, "share of right answers"));
  }
  painters.push(paint);
  return make("figure", {}, svg, make("p", { class: "hint" }, "The stronger the colour of a bar, the more images it holds."));
}
