// SVG charts: lines with bands, or stacked areas. A chart is created once and updated as data arrives.
//
//   const chart = new Chart({ title: "Reward", format: percent });
//   chart.update([{ name: "reward", points: [[step, value], …], band: [[step, low, high], …] }], { xFormat });

import { el, hideTip, showTip, svg, tipRow } from "./dom.js";
import { number } from "./format.js";

export const COLOURS = [1, 2, 3, 4, 5, 6, 7, 8].map((index) => `var(--c${index})`);
const MARGIN = { top: 8, right: 10, bottom: 22, left: 46 };
const SMOOTHING = 0.75;
const MAX_POINTS = 600;

export class Chart {
  constructor({ title, note = "", height = 190, format = number, kind = "lines", low = null, high = null, smooth = true }) {
    Object.assign(this, { title, format, height, kind, low, high, smooth });
    this.series = [];
    this.hidden = new Set();
    this.options = {};
    this.cursor = null;
    this.latest = el("span", { class: "latest" });
    this.figure = svg("svg", { role: "img", tabindex: "0", height });
    this.legend = el("div", { class: "legend" });
    this.body = el("div", { class: "chart" }, this.figure);
    this.note = el("span", { class: "faint" }, note);
    this.node = el("section", { class: "card", "aria-label": title },
      el("header", {}, el("h3", {}, title), this.note, this.latest), this.body, this.legend);
    this.figure.addEventListener("pointermove", (event) => this.point(event));
    this.figure.addEventListener("pointerleave", () => this.leave());
    this.figure.addEventListener("blur", () => this.leave());
    this.figure.addEventListener("keydown", (event) => this.walk(event));
    new ResizeObserver(() => this.draw()).observe(this.body);
  }

  update(series, options = {}) {
    this.series = series.map((item, index) => ({ colour: COLOURS[index % COLOURS.length], ...item }));
    this.options = options;
    this.draw();
  }

  shown() {
    return this.series.filter((item) => !this.hidden.has(item.name));
  }

  draw() {
    const width = this.body.clientWidth;
    if (!width) return;
    const items = this.lines();
    const xs = items.flatMap((item) => item.points.map((point) => point[0]));
    this.figure.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.figure.replaceChildren();
    this.drawLegend();
    this.scale = null;
    if (!xs.length) {
      const why = this.options.log && this.shown().some((item) => item.points.length) ? "nothing above zero" : "nothing recorded yet";
      this.latest.textContent = "";
      this.figure.setAttribute("aria-label", `${this.title}: ${why}`);
      this.figure.append(svg("text", { class: "none", x: width / 2, y: this.height / 2 }, why));
      return;
    }
    this.scale = this.makeScale(items, xs, width);
    this.drawAxes(width);
    // The first is drawn on top.
    for (const item of [...items].reverse()) this.drawItem(item);
    this.marks = svg("g", {});
    this.figure.append(this.marks);
    const first = (items[0].raw || items[0].points).at(-1);
    const value = this.kind === "areas" ? "" : this.format(first[1]);
    this.latest.textContent = this.options.isNearest && items.length > 1 ? "" : value;
    this.figure.setAttribute("aria-label", `${this.title}: ${items.length} curves, ${xs.length / items.length | 0} points, last ${value}`);
  }

  // The series as drawn: areas are stacked, lines may be smoothed. A logarithm has no values at zero or below.
  lines() {
    const { log } = this.options;
    const items = this.shown().map((item) => (log ? { ...item, points: item.points.filter((point) => point[1] > 0) } : item)).filter((item) => item.points.length);
    if (this.kind !== "areas") {
      return items.map((item) => (this.smooth && this.options.smooth ? { ...item, raw: item.points, points: smoothed(item.points) } : item));
    }
    const below = new Map();
    return items.map((item) => {
      const points = item.points.map(([x, y]) => {
        const base = below.get(x) || 0;
        below.set(x, base + y);
        return [x, base + y, base, y];
      });
      return { ...item, points };
    });
  }

  makeScale(items, xs, width) {
    let [x0, x1] = [least(xs), most(xs)];
    if (x0 === x1) [x0, x1] = [x0 - 1, x1 + 1];
    const ys = items.flatMap((item) => [
      ...item.points.map((point) => point[1]),
      ...(item.raw || []).map((point) => point[1]),
      ...(item.band || []).flatMap((point) => [point[1], point[2]]),
    ]);
    const { log } = this.options;
    let low = (log ? null : this.low) ?? (this.kind === "areas" ? 0 : least(ys));
    let high = (log ? null : this.high) ?? most(ys);
    if (log && low === high) [low, high] = [low / 2, high * 2];
    if (low === high) [low, high] = [low - (Math.abs(low) * 0.1 || 1), high + (Math.abs(high) * 0.1 || 1)];
    const ticks = log ? logTicks(low, high) : niceTicks(low, high, 4);
    if (log) [low, high] = [Math.min(low, ticks[0]), Math.max(high, ticks.at(-1))];
    else if (this.low === null && this.kind !== "areas") low = Math.min(low, ticks[0]);
    if (!log && this.high === null) high = Math.max(high, ticks.at(-1));
    const share = log ? (value) => Math.log(value / low) / Math.log(high / low) : (value) => (value - low) / (high - low);
    const [left, right] = [MARGIN.left, width - MARGIN.right];
    const [top, bottom] = [MARGIN.top, this.height - MARGIN.bottom];
    return {
      x0, x1, ticks, left, right, top, bottom,
      x: (value) => left + ((value - x0) / (x1 - x0)) * (right - left),
      y: (value) => bottom - share(value) * (bottom - top),
    };
  }

  drawAxes(width) {
    const { x0, x1, ticks, left, right, bottom, x, y } = this.scale;
    const label = this.format === number && !this.options.log ? tickFormat(ticks) : this.format;
    for (const tick of ticks) {
      this.figure.append(
        svg("line", { class: "axis", x1: left, x2: right, y1: y(tick), y2: y(tick) }),
        svg("text", { class: "tick", x: left - 7, y: y(tick) + 4, "text-anchor": "end" }, label(tick)));
    }
    const format = this.options.xFormat || ((value) => number(value));
    for (const tick of niceTicks(x0, x1, Math.max(2, Math.min(6, width / 90))).filter((value) => value >= x0 && value <= x1)) {
      this.figure.append(svg("text", { class: "tick", x: x(tick), y: bottom + 16, "text-anchor": "middle" }, format(tick)));
    }
  }

  drawItem(item) {
    const { x, y } = this.scale;
    const place = (points) => points.map(([px, py]) => `${x(px).toFixed(1)},${y(py).toFixed(1)}`).join(" ");
    const paint = { stroke: item.colour, ...(item.dash ? { "stroke-dasharray": "6 4" } : {}) };
    if (this.kind === "areas") {
      const upper = item.points.map(([px, py]) => [px, py]);
      const lower = item.points.map(([px, , base]) => [px, base]).reverse();
      this.figure.append(svg("polygon", { class: "area", points: place([...upper, ...lower]), style: { fill: item.colour } }));
      return;
    }
    if (item.band) {
      const points = [...item.band.map(([px, , high]) => [px, high]), ...item.band.map(([px, low]) => [px, low]).reverse()];
      this.figure.append(svg("polygon", { class: "band", points: place(points), style: { fill: item.colour } }));
    }
    if (item.raw) this.figure.append(svg("polyline", { class: "curve raw", points: place(reduced(item.raw)), style: paint }));
    this.figure.append(svg("polyline", { class: "curve", points: place(reduced(item.points)), style: paint }));
    if (item.points.length <= 24) {
      for (const [px, py] of item.points) this.figure.append(svg("circle", { cx: x(px), cy: y(py), r: 2.6, style: { fill: item.colour } }));
    }
  }

  drawLegend() {
    if (this.series.length < 2) return this.legend.replaceChildren();
    return this.legend.replaceChildren(...this.series.map((item) => el("button", {
      "aria-pressed": String(!this.hidden.has(item.name)),
      onclick: () => {
        this.hidden.has(item.name) ? this.hidden.delete(item.name) : this.hidden.add(item.name);
        this.draw();
      },
    }, el("i", { style: { background: item.colour } }), item.label || item.name)));
  }

  // -- the crosshair and its tooltip --

  point(event) {
    if (!this.scale) return;
    const box = this.figure.getBoundingClientRect();
    const { x0, x1, left, right } = this.scale;
    this.mark(x0 + ((event.clientX - box.left - left) / (right - left)) * (x1 - x0), event.clientX, event.clientY);
  }

  walk(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!by || !this.scale) return;
    event.preventDefault();
    const xs = [...new Set(this.lines().flatMap((item) => item.points.map((point) => point[0])))].sort((a, b) => a - b);
    const at = this.cursor === null ? xs.length : nearest(xs.map((x) => [x]), this.cursor);
    const x = xs[Math.max(0, Math.min(xs.length - 1, at + by))];
    const box = this.figure.getBoundingClientRect();
    this.mark(x, box.left + this.scale.x(x), box.top + 30);
  }

  mark(wanted, clientX, clientY) {
    const items = this.lines();
    const points = items.map((item) => item.points[nearest(item.points, wanted)]);
    const x = points.reduce((best, point) => (Math.abs(point[0] - wanted) < Math.abs(best - wanted) ? point[0] : best), points[0][0]);
    // Curves of several runs have points at different steps: each shows its own nearest, unless it has ended before.
    const { isNearest } = this.options;
    const isInside = (item) => isNearest && item.points[0][0] <= x && x <= item.points.at(-1)[0];
    const rows = items.map((item, index) => [item, points[index]]).filter(([item, point]) => point[0] === x || isInside(item));
    this.cursor = x;
    this.marks.replaceChildren(
      svg("line", { class: "cross", x1: this.scale.x(x), x2: this.scale.x(x), y1: this.scale.top, y2: this.scale.bottom }),
      ...rows.map(([item, point]) => svg("circle", { cx: this.scale.x(point[0]), cy: this.scale.y(point[1]), r: 3.6, style: { fill: item.colour } })));
    const head = (this.options.xName || "step") + " " + (this.options.xFormat || number)(x);
    showTip(clientX, clientY, el("div", { class: "head" }, head),
      ...rows.slice(0, 14).map(([item, point]) => tipRow(item.colour, item.label || item.name, this.format(this.kind === "areas" ? point[3] : point[1]))));
  }

  leave() {
    this.cursor = null;
    if (this.marks) this.marks.replaceChildren();
    hideTip();
  }
}

export function niceTicks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999) || 10 * power;
  const ticks = [];
  for (let index = Math.floor(low / step + 1e-9); index * step <= high + step * 0.5 && ticks.length < 20; index += 1) {
    const tick = Number((index * step).toPrecision(12));
    if (tick >= low - step * 1e-6 - step * 0.5 && tick <= high + step * 0.5) ticks.push(tick);
  }
  return ticks.length ? ticks : [low, high];
}

// Values whose first digit is 1, 2 or 5; only powers of ten if those are many, evenly spaced values if they are too few.
function logTicks(low, high) {
  const powers = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)) && powers.length < 40; power += 1) powers.push(power);
  const inside = (ticks) => ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  const fine = inside(powers.flatMap((power) => [1, 2, 5].map((digit) => Number((digit * 10 ** power).toPrecision(3)))));
  const ticks = fine.length <= 7 ? fine : inside(powers.filter((_, index) => index % Math.ceil(powers.length / 7) === 0).map((power) => 10 ** power));
  if (ticks.length > 1) return ticks;
  const even = inside(niceTicks(low, high, 3));
  return even.length > 1 ? even : [low, high];
}

// At most MAX_POINTS points, more than a chart has pixels: the lowest and the highest of each bucket, so that no spike is
// lost, and both ends.
function reduced(points) {
  if (points.length <= MAX_POINTS) return points;
  const size = (points.length - 2) / (MAX_POINTS / 2 - 1);
  const found = [points[0]];
  for (let bucket = 0; bucket < MAX_POINTS / 2 - 1; bucket += 1) {
    const inside = points.slice(1 + Math.floor(bucket * size), 1 + Math.floor((bucket + 1) * size));
    const low = inside.reduce((best, point) => (point[1] < best[1] ? point : best));
    const high = inside.reduce((best, point) => (point[1] > best[1] ? point : best));
    found.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
  }
  return [...found, points.at(-1)];
}

// Spread arguments are limited in number; curves of many runs have more points.
function least(values) {
  return values.reduce((best, value) => Math.min(best, value), Infinity);
}

function most(values) {
  return values.reduce((best, value) => Math.max(best, value), -Infinity);
}

// As many digits as distinguish adjacent values, the same on every line.
function tickFormat(ticks) {
  const step = ticks[1] - ticks[0];
  const largest = Math.max(...ticks.map(Math.abs));
  if (largest >= 10000 || largest < 0.01 || !step) return number;
  const digits = [0, 1, 2, 3, 4, 5].find((count) => Math.abs(step * 10 ** count - Math.round(step * 10 ** count)) < 1e-6) ?? 5;
  return (tick) => (largest >= 1000 ? number(tick) : tick.toFixed(digits));
}

function nearest(points, x) {
  let [low, high] = [0, points.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle;
    else high = middle;
  }
  return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? low : high;
}

function smoothed(points) {
  let [sum, weight] = [0, 0];
  return points.map(([x, y]) => {
    sum = SMOOTHING * sum + (1 - SMOOTHING) * y;
    weight = SMOOTHING * weight + (1 - SMOOTHING);
    return [x, sum / weight];
  });
}
