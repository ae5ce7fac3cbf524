// The token tree of an episode in one picture: calls from left to right, tokens downwards. A call starts at the token
// where it branches off its parent; its prompt is pale, its sampled tokens strong. Many calls share a column.

import { el, hideTip, showTip, tipRow } from "./dom.js";
import { count } from "./format.js";

const HEIGHT = 132;
const MAX_COLUMN = 22;

export class TreeMap {
  constructor(onChoose) {
    this.canvas = el("canvas", { class: "map", tabindex: "0", role: "img" });
    this.shape = null;
    this.view = [0, 0];
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      onChoose(this.callAt(event));
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (event.buttons) onChoose(this.callAt(event));
      this.explain(event);
    });
    this.canvas.addEventListener("pointerleave", hideTip);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    this.redraw = () => this.draw();
    document.addEventListener("themechange", this.redraw);
  }

  close() {
    document.removeEventListener("themechange", this.redraw);
  }

  update(shape) {
    this.shape = shape;
    this.picture = null;
    const numBranches = shape.chains.filter((chain, call) => chain === call).length;
    this.canvas.setAttribute("aria-label", `The token tree: ${shape.num_calls} calls on ${numBranches} branches, ${shape.num_tokens} tokens`);
    this.draw();
  }

  look(first, last) {
    if (this.view[0] === first && this.view[1] === last) return;
    this.view = [first, last];
    this.draw();
  }

  callAt(event) {
    const box = this.canvas.getBoundingClientRect();
    return Math.max(0, Math.min(this.shape.num_calls - 1, Math.floor((event.clientX - box.left) / this.columnWidth())));
  }

  columnWidth() {
    return Math.min(MAX_COLUMN, this.canvas.clientWidth / this.shape.num_calls);
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!width || !this.shape) return;
    const ratio = devicePixelRatio || 1;
    const theme = document.documentElement.dataset.theme;
    if (!this.picture || this.picture.width !== Math.round(width * ratio) || this.theme !== theme) {
      this.theme = theme;
      this.picture = this.paint(width, ratio);
    }
    this.canvas.width = this.picture.width;
    this.canvas.height = this.picture.height;
    const pen = this.canvas.getContext("2d");
    pen.drawImage(this.picture, 0, 0);
    pen.scale(ratio, ratio);
    const step = this.columnWidth();
    pen.strokeStyle = getComputedStyle(this.canvas).getPropertyValue("--ink");
    pen.strokeRect(this.view[0] * step + 0.5, 0.5, Math.max(3, (this.view[1] - this.view[0] + 1) * step) - 1, HEIGHT - 1);
  }

  paint(width, ratio) {
    const picture = document.createElement("canvas");
    picture.width = Math.round(width * ratio);
    picture.height = HEIGHT * ratio;
    const pen = picture.getContext("2d");
    pen.scale(ratio, ratio);
    const { parents, starts, prompts, ends, chains, num_calls: total } = this.shape;
    const style = getComputedStyle(this.canvas);
    const colour = (name) => style.getPropertyValue(name).trim();
    const deepest = ends.reduce((most, end) => Math.max(most, end), 1);
    const step = this.columnWidth();
    const y = (tokens) => 3 + (tokens / deepest) * (HEIGHT - 6);
    const bar = (call, from, to, name) => {
      pen.fillStyle = colour(name);
      pen.fillRect(call * step, y(from), Math.max(1, step - (step > 5 ? 1.5 : 0)), Math.max(1, y(to) - y(from)));
    };
    pen.globalAlpha = 0.9;
    for (let call = 0; call < total; call += 1) {
      bar(call, 0, Math.min(starts[call], prompts[call]), "--sunk");
      bar(call, Math.min(starts[call], prompts[call]), prompts[call], "--line-strong");
      bar(call, prompts[call], ends[call], "--accent");
    }
    pen.globalAlpha = 1;
    pen.strokeStyle = colour("--c3");
    for (let call = 0; call < total; call += 1) {
      if (parents[call] < 0 || chains[call] !== call) continue;
      pen.beginPath();
      pen.moveTo((parents[call] + 0.5) * step, y(starts[call]));
      pen.lineTo((call + 0.5) * step, y(starts[call]));
      pen.stroke();
    }
    return picture;
  }

  explain(event) {
    if (!this.shape) return;
    const call = this.callAt(event);
    const { starts, prompts, ends, parents } = this.shape;
    showTip(event.clientX, event.clientY, el("div", { class: "head" }, `call ${count(call)}`),
      tipRow("transparent", "context", `${count(ends[call])} tokens`), tipRow("transparent", "shared with earlier calls", count(starts[call])),
      tipRow("transparent", "sampled", count(ends[call] - prompts[call])), tipRow("transparent", "continues", parents[call] < 0 ? "nothing" : `call ${count(parents[call])}`));
  }
}
