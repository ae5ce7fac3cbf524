// How the state of a run is named and coloured.

import { el } from "./dom.js";

const STATES = {
  running: ["running", "good running"], finished: ["finished", "good"], failed: ["failed", "bad"], stopped: ["stopped", "hot"], empty: ["nothing written yet", ""],
};

export function stateOf(run) {
  const [label, look] = STATES[run.state] || [run.state, ""];
  return { label, look };
}

export function runChip(run, title) {
  const { label, look } = stateOf(run);
  return el("span", { class: `chip ${look}`, title }, el("i", { class: "dot" }), el("span", {}, label));
}
