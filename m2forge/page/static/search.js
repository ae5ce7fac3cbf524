// Search inside an episode: the server returns the calls, the browser highlights the matches in visible ones.

import { ask } from "./api.js";
import { el } from "./dom.js";
import { count } from "./format.js";

const MAX_MARKS = 2000;

export class Search {
  constructor(path, go, home) {
    Object.assign(this, { path, go, home, text: "", calls: [], places: new Set(), at: -1 });
    this.input = el("input", { type: "search", placeholder: "Search this episode", "aria-label": "Search this episode", maxlength: 200, oninput: () => this.wait(), onkeydown: (event) => {
      if (event.key === "Enter") this.step(event.shiftKey ? -1 : 1);
    } });
    this.found = el("span", { class: "found", role: "status" });
    this.node = el("span", { class: "tools", role: "search" }, this.input, this.found,
      el("button", { class: "icon", onclick: () => this.step(-1), title: "Previous match (p)", "aria-label": "Previous match" }, "↑"),
      el("button", { class: "icon", onclick: () => this.step(1), title: "Next match (n)", "aria-label": "Next match" }, "↓"));
  }

  focus() {
    this.input.focus();
    this.input.select();
  }

  wait() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.start(), 200);
  }

  async start() {
    const text = this.input.value;
    this.text = text;
    if (!text) return this.take({ total: 0, calls: [] }, "");
    this.found.textContent = "…";
    try {
      const answer = await ask(`${this.path}/search`, { text });
      if (text === this.text) this.take(answer, answer.total ? `${count(answer.total)} in ${count(answer.calls.length)} calls` : "nothing found");
    } catch (error) {
      this.found.textContent = error.message;
    }
    return undefined;
  }

  take(answer, label) {
    this.calls = answer.calls.map(([call]) => call);
    this.places = new Set(this.calls);
    this.at = -1;
    this.found.textContent = label;
    if (this.calls.length) this.step(1);
    this.paint();
  }

  has(call) {
    return this.places.has(call);
  }

  step(by) {
    if (!this.calls.length) return;
    this.at = (this.at + by + this.calls.length) % this.calls.length;
    this.found.textContent = `call ${count(this.calls[this.at])}, ${this.at + 1} of ${count(this.calls.length)}`;
    this.go(this.calls[this.at]);
  }

  // A match may span several tokens, so it is highlighted as a range, not as an element.
  paint() {
    if (!globalThis.CSS?.highlights) return;
    CSS.highlights.delete("found");
    const wanted = this.text.toLowerCase();
    if (!wanted) return;
    const ranges = [];
    for (const block of this.home.querySelectorAll(".part > .text")) {
      for (const range of rangesIn(block, wanted)) {
        ranges.push(range);
        if (ranges.length >= MAX_MARKS) break;
      }
    }
    if (ranges.length) CSS.highlights.set("found", new Highlight(...ranges));
  }

  close() {
    clearTimeout(this.timer);
    globalThis.CSS?.highlights?.delete("found");
  }
}

function* rangesIn(block, wanted) {
  const text = block.textContent.toLowerCase();
  let at = text.indexOf(wanted);
  if (at < 0 || text.length !== block.textContent.length) return;
  const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
  let [node, begin] = [walker.nextNode(), 0];
  const seek = (place) => {
    while (node && begin + node.length < place) {
      begin += node.length;
      node = walker.nextNode();
    }
    return node;
  };
  while (at >= 0) {
    const range = new Range();
    if (!seek(at)) return;
    range.setStart(node, at - begin);
    if (!seek(at + wanted.length)) return;
    range.setEnd(node, at + wanted.length - begin);
    yield range;
    at = text.indexOf(wanted, at + wanted.length);
  }
}
