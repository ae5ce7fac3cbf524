// The results of a run, in a row of figures.

import { el } from "./dom.js";
import { count, number, percent, signed } from "./format.js";

// The policy versions that sampled an evaluation's tokens, with their shares if there are several.
export function versionsOf(check) {
  const seen = Object.entries(check.versions || {}).sort((one, other) => one[0] - other[0]);
  if (seen.length < 2) return `step ${check.step}`;
  return `steps ${seen.map(([step, share]) => `${step} (${percent(share)})`).join(", ")}`;
}

export function makeStats(run, columns) {
  const stats = [];
  const add = (label, value, more = null, look = "") => stats.push(el("div", { class: `card stat ${look}` },
    el("div", { class: "label" }, label), el("div", { class: "value" }, value), more));
  if (run.checks.length) {
    const [first, last] = [run.checks[0], run.checks.at(-1)];
    const value = run.checks.length > 1 ? [el("span", { class: "from" }, percent(first.success)), el("span", { class: "arrow" }, "→"), percent(last.success)] : percent(last.success);
    add("Held-out success", value, el("div", { class: "faint" }, `${count(last.num_tasks)} tasks, ±${percent(last.margin)}, ${versionsOf(last)}`), "first");
  }
  const step = Math.max(run.step, columns.last);
  const bar = run.num_steps ? el("div", { class: "bar", role: "progressbar", "aria-valuenow": step, "aria-valuemax": run.num_steps, "aria-label": "Steps" },
    el("i", { style: { width: `${Math.min(100, (100 * step) / run.num_steps)}%` } })) : null;
  add("Step", [count(step), run.num_steps ? el("small", {}, ` of ${count(run.num_steps)}`) : ""], bar);
  for (const [name, label, format] of [["reward", "Reward", number], ["loss", "Loss", number], ["staleness", "Staleness", number]]) {
    const value = columns.latest(name);
    if (value === null || (name === "loss" && run.stage === "rl")) continue;
    const before = (columns.series[name] || []).find((item) => item !== null);
    add(label, format(value), el("div", { class: "faint" }, name === "staleness" ? "versions, last batch" : `${signed(value - before)} since the first step`));
  }
  const speed = (columns.all().tokens_per_s || []).findLast((value) => value !== null);
  if (speed) add("Tokens per second", count(speed), el("div", { class: "faint" }, "of the trainer, last step"));
  const waited = columns.latest("waited_s");
  const trained = columns.latest("trained_s");
  if (waited !== null && trained !== null) {
    const busy = trained + (columns.latest("published_s") || 0);
    add("Trainer busy", percent(busy / Math.max(1e-9, busy + waited)), el("div", { class: "faint" }, "last step"));
  }
  return stats;
}
