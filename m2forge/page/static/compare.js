// Curves of several runs in common charts: one chart per metric, one curve per run, live.

import { ask } from "./api.js";
import { Chart, COLOURS } from "./chart.js";
import { Columns, panelOf, place } from "./curves.js";
import { el } from "./dom.js";
import { count, duration, number, words } from "./format.js";

export const MAX_CHOSEN = 16;
const HELD_OUT = "held-out success";
const AXES = {
  step: { label: "by step", xName: "step", xFormat: number },
  tokens: { label: "by tokens", xName: "tokens", xFormat: count },
  time: { label: "by time", xName: "after", xFormat: duration },
};

export class Comparison {
  constructor({ onChange }) {
    Object.assign(this, { onChange, runs: [], loaded: new Map(), slots: new Map(), charts: new Map(), settings: null, isAsking: false });
    this.note = el("span", { class: "faint" });
    this.controls = new Map();
    this.metric = el("input", { type: "search", placeholder: "Filter metrics", "aria-label": "Filter metrics", maxlength: 100, oninput: () => onChange({ metric: this.metric.value.trim() }) });
    this.main = el("div", { class: "grid" });
    this.rest = el("div", { class: "grid" });
    this.more = el("details", { class: "section" }, el("summary", {}, "More metrics"), this.rest);
    this.more.addEventListener("toggle", () => this.draw());
    this.nothing = el("div", { class: "card empty hidden" });
    this.node = el("section", { class: "section", "aria-label": "Curves" },
      el("header", {}, el("h2", {}, "Curves"), this.note, el("span", { class: "grow" }), this.metric,
        this.control("all", "Metrics shown", [["", "shared"], ["1", "all metrics"]]),
        this.control("x", "Horizontal axis", Object.entries(AXES).map(([name, { label }]) => [name, label])),
        this.control("log", "Vertical axis", [["", "linear"], ["1", "log"]]),
        this.control("smooth", "Smoothing", [["", "as recorded"], ["1", "smoothed"]])),
      this.nothing, this.main, this.more);
  }

  control(name, label, choices) {
    const buttons = choices.map(([value, text]) => el("button", { onclick: () => this.onChange({ [name]: value }), "data-value": value }, text));
    this.controls.set(name, buttons);
    return el("span", { class: "segmented", role: "group", "aria-label": label }, buttons);
  }

  // A run keeps its colour while it is chosen; beyond eight, curves are dashed.
  colours() {
    return new Map([...this.slots].map(([id, slot]) => [id, COLOURS[slot % COLOURS.length]]));
  }

  choose(runs, missing, settings) {
    const before = JSON.stringify([this.runs.map((run) => run.id), this.settings, this.missing]);
    const ids = new Set(runs.map((run) => run.id));
    for (const id of this.slots.keys()) if (!ids.has(id)) this.slots.delete(id);
    for (const id of this.loaded.keys()) if (!ids.has(id)) this.loaded.delete(id);
    for (const run of runs) {
      if (this.slots.has(run.id)) continue;
      const taken = new Set(this.slots.values());
      this.slots.set(run.id, [...Array(MAX_CHOSEN).keys()].find((slot) => !taken.has(slot)));
    }
    Object.assign(this, { runs, missing, settings: { x: settings.x, log: settings.log, smooth: settings.smooth, all: settings.all, metric: settings.metric } });
    if (before === JSON.stringify([runs.map((run) => run.id), this.settings, missing])) return;
    this.draw();
    this.refresh();
  }

  // Requests what is new of runs that have written since; others are left alone.
  async refresh() {
    if (this.isAsking) return;
    this.isAsking = true;
    try {
      const stale = this.runs.filter((run) => this.loaded.get(run.id)?.written !== run.written_s || run.state === "running");
      const changed = await Promise.all(stale.map((run) => this.load(run)));
      if (changed.some(Boolean)) this.draw();
    } finally {
      this.isAsking = false;
    }
    if (this.runs.some((run) => !this.loaded.has(run.id))) await this.refresh();
  }

  async load(run) {
    const known = this.loaded.get(run.id) || { columns: new Columns(), checks: [], problem: "" };
    const { columns } = known;
    let isChanged = !this.loaded.has(run.id);
    try {
      const [answer, about] = await Promise.all([
        ask(`runs/${run.id}/api/curves`, { revision: columns.revision, step: columns.last }),
        run.stage === "rl" ? ask(`runs/${run.id}/api/run`) : { checks: [] }]);
      isChanged = columns.take(answer) || isChanged || about.checks.length !== known.checks.length;
      known.checks = about.checks;
      known.problem = "";
    } catch (error) {
      if (error.reason === undefined) throw error;
      isChanged ||= known.problem !== error.message;
      known.problem = error.message;
    }
    known.written = run.written_s;
    if (this.slots.has(run.id)) this.loaded.set(run.id, known);
    return isChanged;
  }

  // -- charts --

  draw() {
    if (!this.settings) return;
    const { settings } = this;
    for (const [name, buttons] of this.controls) for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.value === settings[name]));
    if (document.activeElement !== this.metric) this.metric.value = settings.metric;
    const shown = this.runs.filter((run) => this.loaded.has(run.id));
    const metrics = this.metrics(shown);
    const least = settings.all || shown.length < 2 ? 1 : 2;
    const wanted = settings.metric.toLowerCase();
    const names = [...metrics.keys()].filter((name) => metrics.get(name).length >= least && (name.includes(wanted) || words(name).includes(wanted)));
    const leading = names.filter((name) => wanted || panelOf(name).rank !== null).sort((one, other) => rank(one) - rank(other) || one.localeCompare(other, "en", { numeric: true }));
    const others = names.filter((name) => !leading.includes(name)).sort((one, other) => one.localeCompare(other, "en", { numeric: true }));
    place(this.main, leading.map((name) => this.fill(name, metrics.get(name))));
    this.more.classList.toggle("hidden", !others.length);
    this.more.firstChild.textContent = `More metrics (${count(others.length)})`;
    place(this.rest, this.more.open ? others.map((name) => this.fill(name, metrics.get(name))) : []);
    this.say(shown, names.length, metrics.size);
  }

  // The curves of each metric: [run, points] of every run that recorded it.
  metrics(shown) {
    const found = new Map();
    const add = (name, run, points) => points.length && found.set(name, [...(found.get(name) || []), [run, points]]);
    for (const run of shown) {
      const { columns, checks } = this.loaded.get(run.id);
      const x = axis(columns, this.settings.x);
      if (!x) continue;
      for (const [name, values] of Object.entries(columns.all())) {
        add(name, run, values.flatMap((value, index) => (value === null ? [] : [[x(index), value]])));
      }
      add(HELD_OUT, run, checks.map((check) => [x(columns.steps.findLastIndex((step) => step <= check.step)), check.success]));
    }
    return found;
  }

  fill(name, curves) {
    const { settings } = this;
    if (!this.charts.has(name)) this.charts.set(name, new Chart({ title: words(name), format: panelOf(name).format, smooth: name !== HELD_OUT }));
    const chart = this.charts.get(name);
    const { xName, xFormat } = AXES[settings.x];
    chart.update(curves.map(([run, points]) => {
      const slot = this.slots.get(run.id);
      return { name: run.id, label: run.name, colour: COLOURS[slot % COLOURS.length], dash: slot >= COLOURS.length, points };
    }), { smooth: Boolean(settings.smooth), log: Boolean(settings.log), xName, xFormat, isNearest: true });
    return chart.node;
  }

  say(shown, numShown, numMetrics) {
    const problems = shown.flatMap((run) => (this.loaded.get(run.id).problem ? [`${run.name}: ${this.loaded.get(run.id).problem}`] : []));
    if (this.missing.length) problems.push(`not in this folder: ${this.missing.join(", ")}`);
    const without = shown.filter((run) => this.loaded.get(run.id).columns.steps.length && !axis(this.loaded.get(run.id).columns, this.settings.x));
    if (without.length) problems.push(`no count of tokens, so not shown: ${without.map((run) => run.name).join(", ")}`);
    this.note.textContent = problems.join("; ");
    this.nothing.classList.toggle("hidden", numShown > 0);
    this.nothing.textContent = !this.runs.length ? "Choose runs in the list above to see their curves here, in common charts."
      : shown.length < this.runs.length ? "Reading the runs…"
      : this.settings.metric ? "No metric has this in its name."
      : numMetrics ? "These runs share no metric; “all metrics” shows each of them."
      : "No metrics yet: they appear with the first step.";
  }
}

// Position of a row on the horizontal axis, of index -1 before the first row; null if the run does not record it.
function axis(columns, kind) {
  if (kind === "tokens") return columns.tokens ? (index) => columns.tokens[index] ?? 0 : null;
  if (kind === "time") return (index) => (index < 0 ? 0 : columns.times[index] - columns.times[0]);
  return (index) => columns.steps[index] ?? 0;
}

function rank(name) {
  return name === HELD_OUT ? -1 : panelOf(name).rank ?? 1000;
}
