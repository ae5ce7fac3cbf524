// The queue and its window: units as cells in their current state, and positions over steps, as they were trained.

import { el, hideTip, showTip, tipRow } from "./dom.js";
import { count, number } from "./format.js";
import { COLOURS, niceTicks } from "./chart.js";

export class QueueStrip {
  constructor() {
    this.cells = new Map();
    this.strip = el("div", { class: "queue", role: "img" });
    this.facts = el("div", { class: "facts" });
    this.key = el("div", { class: "key" }, [["ready", "ready"], ["open", "in progress, filled as attempts end"], ["", "waiting"],
      ["head", "head"], ["inside", "inside the window"]].map(([name, label]) => el("span", {}, el("i", { class: name }), label)));
    this.node = el("div", {}, this.facts, this.strip, this.key);
  }

  update(queue) {
    const head = queue.units.length ? queue.units[0].place : queue.next_place;
    const inside = queue.units.filter((unit) => unit.place < head + queue.window);
    const ready = inside.filter((unit) => unit.state === "ready").length;
    const facts = [["N", count(queue.queue)], ["W", count(queue.window)], ["head at position", count(head)], ["queued", count(queue.num_queued)],
      ["ready in the window", `${ready} of ${inside.length}`], ["being trained", count(queue.num_training)]];
    this.facts.replaceChildren(...facts.map(([name, value]) => el("span", { class: "soft" }, `${name} `, el("b", {}, value))));
    const nodes = queue.units.map((unit) => this.cell(unit, unit.place === head, unit.place < head + queue.window, queue.unit));
    if (queue.num_queued > queue.units.length) nodes.push(el("span", { class: "faint" }, `and ${count(queue.num_queued - queue.units.length)} more`));
    if (!nodes.length) nodes.push(el("span", { class: "faint" }, "The queue is empty."));
    this.strip.replaceChildren(...nodes);
    this.strip.setAttribute("aria-label", `${queue.num_queued} units queued, ${ready} of ${inside.length} in the window are ready`);
    this.cells = new Map(queue.units.map((unit, index) => [unit.place, nodes[index]]));
  }

  cell(unit, isHead, isInside, kind) {
    const node = this.cells.get(unit.place) || el("div", {}, el("i", {}));
    node.className = ["cell", unit.state, isHead && "head", isInside && "inside"].filter(Boolean).join(" ");
    const share = unit.state === "open" ? unit.num_ended / unit.size : 0;
    node.firstChild.style.height = `${100 * share}%`;
    node.onpointerleave = hideTip;
    node.onpointerenter = (event) => showTip(event.clientX, event.clientY,
      el("div", { class: "head" }, `position ${count(unit.place)}, ${kind} ${unit.group}`),
      ...[["state", unit.state], ["domain", unit.domain], ["difficulty", number(unit.difficulty)],
        ["attempts ended", `${unit.num_ended} of ${unit.size}`], ["oldest version", unit.oldest_step ?? "–"]]
        .map(([name, value]) => tipRow("transparent", name, String(value))));
    return node;
  }
}

const PAD = { left: 46, right: 12, top: 8, bottom: 24 };

export class WindowChart {
  constructor(height = 250) {
    this.height = height;
    this.canvas = el("canvas", { class: "map", style: { height: `${height}px`, cursor: "default" }, role: "img", tabindex: "0" });
    this.legend = el("div", { class: "key" });
    this.node = el("div", {}, this.canvas, this.legend);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    document.addEventListener("themechange", () => this.draw());
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", hideTip);
  }

  update(past) {
    this.past = past;
    const domains = [...new Set(past.taken.map((unit) => unit[2]))].sort();
    this.colours = new Map(domains.map((name, index) => [name, `--c${(index % 8) + 1}`]));
    this.legend.replaceChildren(
      ...domains.map((name, index) => el("span", {}, el("i", { style: { background: COLOURS[index % 8], "border-color": "transparent", "border-radius": "50%" } }), name)),
      past.lost.length ? el("span", {}, el("b", {}, "×"), "dropped") : "",
      el("span", {}, el("i", { style: { background: "var(--accent-soft)", "border-color": "var(--accent)" } }), "reached by the window"));
    const lags = past.taken.map((unit) => unit[3]).filter((lag) => lag !== null);
    this.canvas.setAttribute("aria-label", `The window as it moved: ${past.taken.length} units trained in ${past.steps.length} steps, largest lag ${lags.length ? Math.max(...lags) : 0}`);
    this.draw();
  }

  draw() {
    const { past, canvas } = this;
    const [width, height] = [canvas.clientWidth, this.height];
    if (!width || !past) return;
    const ratio = devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const style = getComputedStyle(canvas);
    const colour = (name) => style.getPropertyValue(name).trim();
    pen.font = `11px ${colour("--sans") || "sans-serif"}`;
    if (!past.steps.length) {
      pen.fillStyle = colour("--faint");
      pen.textAlign = "center";
      pen.fillText("no unit has been trained yet", width / 2, height / 2);
      this.scale = null;
      return;
    }
    const scale = this.makeScale(width, height);
    this.drawAxes(pen, scale, colour);
    this.drawBand(pen, scale, colour);
    const radius = Math.max(1.4, Math.min(3.4, (scale.right - scale.left) / past.steps.length / 2.4));
    for (const [step, place, domain] of past.taken) {
      pen.fillStyle = colour(this.colours.get(domain));
      pen.beginPath();
      pen.arc(scale.x(step), scale.y(place), radius, 0, 7);
      pen.fill();
    }
    pen.strokeStyle = colour("--bad");
    for (const [step, place] of past.lost) {
      const [x, y] = [scale.x(step + 0.5), scale.y(place)];
      pen.beginPath();
      pen.moveTo(x - 2.5, y - 2.5); pen.lineTo(x + 2.5, y + 2.5);
      pen.moveTo(x - 2.5, y + 2.5); pen.lineTo(x + 2.5, y - 2.5);
      pen.stroke();
    }
  }

  makeScale(width, height) {
    const { past } = this;
    const [x0, x1] = [past.steps[0] - 0.6, past.steps.at(-1) + 0.6];
    const places = past.taken.map((unit) => unit[1]);
    const low = Math.min(past.heads[0], ...places.slice(0, 64));
    const high = Math.max(past.heads.at(-1) + past.window, places.reduce((most, place) => Math.max(most, place), 0));
    const [left, right, top, bottom] = [PAD.left, width - PAD.right, PAD.top, height - PAD.bottom];
    this.scale = {
      x0, x1, low, high, left, right, top, bottom,
      x: (step) => left + ((step - x0) / (x1 - x0)) * (right - left),
      y: (place) => bottom - ((place - low) / Math.max(1, high - low)) * (bottom - top),
    };
    return this.scale;
  }

  drawAxes(pen, scale, colour) {
    pen.fillStyle = colour("--faint");
    pen.strokeStyle = colour("--line");
    pen.textAlign = "right";
    for (const tick of niceTicks(scale.low, scale.high, 4).filter((value) => value >= scale.low && value <= scale.high)) {
      pen.beginPath();
      pen.moveTo(scale.left, scale.y(tick));
      pen.lineTo(scale.right, scale.y(tick));
      pen.stroke();
      pen.fillText(number(tick), scale.left - 7, scale.y(tick) + 4);
    }
    pen.textAlign = "center";
    for (const tick of niceTicks(scale.x0, scale.x1, 6).filter((value) => Number.isInteger(value) && value >= scale.x0 && value <= scale.x1)) {
      pen.fillText(number(tick), scale.x(tick), scale.bottom + 16);
    }
  }

  // From the head when a batch was taken, to W positions from the head afterwards.
  drawBand(pen, scale, colour) {
    const { steps, heads, window } = this.past;
    pen.beginPath();
    steps.forEach((step, index) => [step - 0.5, step + 0.5].forEach((x) => pen.lineTo(scale.x(x), scale.y(heads[index] - 0.5))));
    [...steps.keys()].reverse().forEach((index) => [steps[index] + 0.5, steps[index] - 0.5]
      .forEach((x) => pen.lineTo(scale.x(x), scale.y(heads[index + 1] + window - 0.5))));
    pen.closePath();
    pen.globalAlpha = 0.75;
    pen.fillStyle = colour("--accent-soft");
    pen.fill();
    pen.globalAlpha = 1;
    pen.strokeStyle = colour("--accent");
    pen.lineWidth = 1.2;
    pen.beginPath();
    steps.forEach((step, index) => [step - 0.5, step + 0.5].forEach((x) => pen.lineTo(scale.x(x), scale.y(heads[index] - 0.5))));
    pen.stroke();
    pen.lineWidth = 1;
  }

  point(event) {
    const { scale, past } = this;
    if (!scale) return;
    const box = this.canvas.getBoundingClientRect();
    const step = Math.round(scale.x0 + ((event.clientX - box.left - scale.left) / (scale.right - scale.left)) * (scale.x1 - scale.x0));
    const index = past.steps.indexOf(step);
    if (index < 0) return hideTip();
    const units = past.taken.filter((unit) => unit[0] === step);
    const lags = units.map((unit) => unit[3]).filter((lag) => lag !== null);
    showTip(event.clientX, event.clientY, el("div", { class: "head" }, `step ${count(step)}`),
      tipRow("transparent", "head at position", count(past.heads[index])), tipRow("transparent", "units trained", count(units.length)),
      tipRow("transparent", "largest lag", lags.length ? count(Math.max(...lags)) : "–"),
      ...[...this.colours.keys()].map((name) => [name, units.filter((unit) => unit[2] === name).length]).filter(([, number]) => number)
        .map(([name, number]) => tipRow(`var(${this.colours.get(name)})`, name, count(number))));
  }
}
