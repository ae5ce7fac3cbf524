// What the list of runs and the page of a run share: how a state is named and coloured, and the way back to the list.

import { el } from "./dom.js";

const STATES = {
  running: ["running", "good running"], finished: ["finished", "good"], failed: ["failed", "bad"], stopped: ["stopped", "hot"], empty: ["nothing written yet", ""],
};

const LIST_KEY = "m2forge-list";

// The list's choice and settings, so that the link from a run's page leads back to them.
export function rememberList(hash) {
  try {
    sessionStorage.setItem(LIST_KEY, hash);
  } catch {
    // Without storage the link leads to the list with nothing chosen.
  }
}

export function listHash() {
  try {
    return sessionStorage.getItem(LIST_KEY) || "";
  } catch {
    return "";
  }
}

export function stateOf(run) {
  const [label, look] = STATES[run.state] || [run.state, ""];
  return { label, look };
}

export function runChip(run, title) {
  const { label, look } = stateOf(run);
  return el("span", { class: `chip ${look}`, title }, el("i", { class: "dot" }), el("span", {}, label));
}
