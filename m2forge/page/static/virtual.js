// A virtual list: only visible rows are in the DOM. Rows may have any height: each is measured when it is drawn, and the
// visible part stays in place while rows above it turn out taller or shorter than estimated.

import { el } from "./dom.js";

const AHEAD_PX = 700;

export class VirtualList {
  constructor({ draw, estimate = 60, onRange = () => {}, label = "" }) {
    Object.assign(this, { draw, estimate, onRange });
    this.rows = new Map();
    this.heights = [];
    this.spacer = el("div", { class: "spacer" });
    this.node = el("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": label }, this.spacer);
    this.node.addEventListener("scroll", () => this.schedule(), { passive: true });
    for (const kind of ["wheel", "touchstart", "pointerdown", "keydown"]) this.node.addEventListener(kind, () => { this.anchor = null; }, { passive: true });
    this.resized = new ResizeObserver((entries) => this.measure(entries));
    this.frame = new ResizeObserver(() => this.schedule());
    this.frame.observe(this.node);
    this.isDue = false;
    this.anchor = null;
    this.setCount(0);
  }

  setCount(count) {
    this.count = count;
    this.heights.length = Math.min(this.heights.length, count);
    while (this.heights.length < count) this.heights.push(this.estimate);
    for (const [index, row] of this.rows) if (index >= count) this.drop(index, row);
    this.place();
    this.schedule();
  }

  // Redraws rows, for example when their content has arrived.
  refresh(first = 0, last = this.count - 1) {
    for (const [index, row] of [...this.rows]) if (index >= first && index <= last) this.drop(index, row);
    this.schedule();
  }

  place() {
    this.offsets = new Float64Array(this.count + 1);
    for (let index = 0; index < this.count; index += 1) this.offsets[index + 1] = this.offsets[index] + this.heights[index];
    this.spacer.style.height = `${this.offsets[this.count]}px`;
  }

  at(y) {
    let [low, high] = [0, this.count];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.offsets[middle] <= y) low = middle;
      else high = middle;
    }
    return low;
  }

  get first() {
    return this.count ? this.at(this.node.scrollTop + 4) : 0;
  }

  schedule() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      this.render();
    });
  }

  render() {
    if (!this.count || !this.node.clientHeight) return;
    const top = this.node.scrollTop;
    const first = this.at(Math.max(0, top - AHEAD_PX));
    const last = Math.min(this.count - 1, this.at(top + this.node.clientHeight + AHEAD_PX));
    for (const [index, row] of [...this.rows]) if (index < first || index > last) this.drop(index, row);
    for (let index = first; index <= last; index += 1) {
      if (!this.rows.has(index)) {
        const row = this.draw(index);
        row.dataset.index = index;
        this.rows.set(index, row);
        this.spacer.append(row);
        this.resized.observe(row);
      }
      this.rows.get(index).style.transform = `translateY(${this.offsets[index]}px)`;
    }
    this.onRange(first, last, this.at(top + 4));
  }

  drop(index, row) {
    this.resized.unobserve(row);
    row.remove();
    this.rows.delete(index);
  }

  measure(entries) {
    const anchor = this.anchor ?? this.first;
    const within = this.node.scrollTop - this.offsets[anchor];
    let isChanged = false;
    for (const { target } of entries) {
      const index = Number(target.dataset.index);
      if (this.rows.get(index) !== target) continue;
      const height = target.offsetHeight;
      if (height && Math.abs(height - this.heights[index]) >= 1) {
        this.heights[index] = height;
        isChanged = true;
      }
    }
    if (!isChanged) return;
    this.place();
    this.node.scrollTop = this.anchor === null ? this.offsets[anchor] + within : this.offsets[anchor];
    this.render();
  }

  // Pins the row at the top until the user scrolls: its neighbours are measured only once they are drawn, which takes
  // seconds on a busy machine.
  scrollTo(index) {
    const wanted = Math.max(0, Math.min(this.count - 1, index));
    this.anchor = wanted;
    this.node.scrollTop = this.offsets[wanted];
    this.schedule();
  }
}
