// The table of runs: filter, order, a checkbox and a link for each. Rows are created once and updated in place, so that
// focus stays where it is while runs go on.

import { el } from "./dom.js";
import { count, duration, number, percent } from "./format.js";
import { runChip } from "./state.js";

const STAGES = ["rl", "sft", "pretrain", "run", "eval", "corpus"];
const STATES = ["running", "failed", "stopped", "empty", "finished"];
const ORDERS = {
  name: (one, other) => one.name.localeCompare(other.name, "en", { numeric: true }),
  stage: (one, other) => STAGES.indexOf(one.stage) - STAGES.indexOf(other.stage),
  state: (one, other) => STATES.indexOf(one.state) - STATES.indexOf(other.state),
  started: (one, other) => (other.started_s ?? other.written_s ?? 0) - (one.started_s ?? one.written_s ?? 0),
  step: (one, other) => (other.step ?? -1) - (one.step ?? -1),
};
const LARGEST_FIRST = ["started", "step"];
const COLUMNS = [["name", "Run", ""], ["stage", "Stage", "wide"], ["state", "State", ""], ["started", "Started", "wide"], ["step", "Step", "n"],
  [null, "Figures", "wide"], [null, "Model", "wide"]];
const FORMATS = { number, count, percent };

export class RunTable {
  constructor({ onChoose, onFind, onOrder }) {
    Object.assign(this, { onChoose, onFind, rows: new Map() });
    this.find = el("input", { type: "search", placeholder: "Filter runs", "aria-label": "Filter runs", title: "By name, stage, state or model", maxlength: 200,
      oninput: () => this.onFind(this.find.value.trim()) });
    this.found = el("span", { class: "found", role: "status" });
    this.heads = new Map();
    const heads = COLUMNS.map(([order, label, look]) => {
      const head = el("th", { scope: "col", class: look }, order ? el("button", { class: "sort", onclick: () => onOrder(order) }, label) : label);
      if (order) this.heads.set(order, head);
      return head;
    });
    this.body = el("tbody", {});
    this.node = el("section", { "aria-label": "Runs" },
      el("div", { class: "tools", role: "search" }, this.find, this.found),
      el("div", { class: "card list section run-table", tabindex: "-1" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col", class: "tick" }, el("span", { class: "unseen" }, "Chosen")), heads)), this.body)));
  }

  focus() {
    this.find.focus();
  }

  update(list, settings, chosen, colours, isFull) {
    if (document.activeElement !== this.find) this.find.value = settings.find;
    const order = ORDERS[settings.order] ? settings.order : "state";
    for (const [name, head] of this.heads) head.setAttribute("aria-sort", name !== order ? "none" : LARGEST_FIRST.includes(name) ? "descending" : "ascending");
    const wanted = settings.find.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (run) => `${run.name} ${run.stage} ${run.state} ${run.model || ""}`.toLowerCase();
    const shown = list.runs.filter((run) => wanted.every((word) => text(run).includes(word)))
      .sort((one, other) => ORDERS[order](one, other) || ORDERS.started(one, other) || ORDERS.name(one, other));
    this.found.textContent = wanted.length ? `${count(shown.length)} of ${count(list.runs.length)}` : "";
    const ids = new Set(list.runs.map((run) => run.id));
    for (const id of this.rows.keys()) if (!ids.has(id)) this.rows.delete(id);
    shown.forEach((run, index) => {
      const row = this.row(run);
      this.fill(row, run, list.now_s, chosen.has(run.id), colours.get(run.id), isFull);
      if (this.body.children[index] !== row.node) this.body.insertBefore(row.node, this.body.children[index] || null);
    });
    while (this.body.children.length > shown.length) this.body.lastChild.remove();
  }

  row(run) {
    if (!this.rows.has(run.id)) {
      const box = el("input", { type: "checkbox", onchange: () => this.onChoose(run.id, box.checked) });
      const cells = COLUMNS.map(([, , look]) => el("td", { class: look }));
      const node = el("tr", {}, el("td", { class: "tick" }, run.has_page ? box : ""), cells);
      this.rows.set(run.id, { box, cells, node, said: "" });
    }
    return this.rows.get(run.id);
  }

  fill(row, run, nowS, isChosen, colour, isFull) {
    row.box.checked = isChosen;
    row.box.disabled = isFull && !isChosen;
    row.box.title = row.box.disabled ? "As many runs are chosen as charts can tell apart" : "";
    row.box.setAttribute("aria-label", `Show the curves of ${run.name}`);
    // Times count up by themselves; the rest of a row is drawn again only if it changed.
    const said = JSON.stringify([run, colour, Math.floor((nowS - (run.written_s || 0)) / 10)]);
    if (said === row.said) return;
    row.said = said;
    const [name, stage, state, started, step, figures, model] = row.cells;
    const swatch = colour ? el("i", { class: "swatch", style: { background: colour } }) : "";
    const title = run.has_page ? el("a", { href: `runs/${run.id}/` }, run.name) : run.name;
    name.replaceChildren(el("div", { class: "cut", title: run.name }, swatch, title), ...notes(run));
    stage.replaceChildren(run.stage);
    const age = run.written_s === null ? "" : `last written ${duration(Math.max(0, nowS - run.written_s))} ago`;
    state.replaceChildren(runChip(run, age));
    started.replaceChildren(...date(run.started_s ?? run.written_s));
    step.replaceChildren(...steps(run));
    figures.replaceChildren(el("div", { class: "figures" }, run.figures.map(drawFigure)));
    model.replaceChildren(el("div", { class: "cut", title: run.model || "" }, run.model || "–"));
  }
}

function notes(run) {
  return [run.failure, run.problem].filter(Boolean).map((note) => el("div", { class: "faint cut bad-text", title: note }, note));
}

function date(seconds) {
  if (seconds === null) return ["–"];
  const moment = new Date(1000 * seconds);
  const two = (value) => String(value).padStart(2, "0");
  const day = `${moment.getFullYear()}-${two(moment.getMonth() + 1)}-${two(moment.getDate())}`;
  return [el("time", { datetime: moment.toISOString() }, `${day} ${two(moment.getHours())}:${two(moment.getMinutes())}`)];
}

function steps(run) {
  if (run.step === null) return ["–"];
  if (!run.num_steps) return [count(run.step)];
  const share = Math.min(100, (100 * run.step) / run.num_steps);
  return [count(run.step), el("small", { class: "soft" }, ` of ${count(run.num_steps)}`),
    el("div", { class: "bar", role: "progressbar", "aria-valuenow": run.step, "aria-valuemax": run.num_steps, "aria-label": "Steps" }, el("i", { style: { width: `${share}%` } }))];
}

function drawFigure(figure) {
  const format = FORMATS[figure.format] || number;
  return el("span", {}, el("span", { class: "soft" }, `${figure.label} `),
    el("b", {}, figure.first === null ? "" : `${format(figure.first)} → `, format(figure.value)));
}
