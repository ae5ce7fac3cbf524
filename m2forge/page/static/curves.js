// Columns of metrics in, charts out: which curves share a chart, derived curves, and time per step.

import { Chart, COLOURS } from "./chart.js";
import { el } from "./dom.js";
import { duration, number, percent, words } from "./format.js";

// In this order; metrics that a run has not recorded are skipped, others follow below under their own names.
const PANELS = [
  { title: "Reward", names: ["reward", "perf"], note: "mean of each batch" },
  { title: "Loss", names: ["loss", "eval/loss", "loss/"] },
  { title: "Held-out loss by domain", names: ["eval/loss/"] },
  { title: "Entropy", names: ["entropy"] },
  { title: "Importance ratio", names: ["ratio_mean", "ratio_max"], note: "trained over sampled" },
  { title: "Ratios by size", names: ["ratio_share/"], kind: "areas", format: percent, high: 1, note: "share of tokens" },
  { title: "Clipped share", names: ["clipped_share"], format: percent },
  { title: "Divergence from the sampler", names: ["kl_k3", "kl_k1"] },
  { title: "Staleness and lag", names: ["staleness", "lag", "version_lag"], note: "versions; units" },
  { title: "Tokens per second", names: ["tokens_per_s"] },
  { title: "Gradient norm", names: ["grad_norm"] },
  { title: "MTP loss", names: ["mtp_loss/", "eval/mtp_loss/"] },
  { title: "MTP draft agreement", names: ["draft_agreement/"], format: percent },
  { title: "Learning rate", names: ["lr", "rate"], smooth: false },
];

// Where a metric stands among the panels, null if it is in none, and how its values are written.
export function panelOf(name) {
  const rank = PANELS.findIndex(({ names }) => names.some((own) => (own.endsWith("/") ? name.startsWith(own) : name === own)));
  const isShare = ["perf", "held-out success"].includes(name);
  return rank < 0 ? { rank: isShare ? 0 : null, format: isShare ? percent : number } : { rank, format: isShare ? percent : PANELS[rank].format || number };
}

export class Columns {
  constructor() {
    this.revision = -1;
    this.steps = [];
    this.times = [];
    this.tokens = null;
    this.series = {};
    this.numUnread = 0;
  }

  // Takes a response of /api/curves: everything, or the steps from the last one on.
  take(answer) {
    if (answer.is_whole) Object.assign(this, { steps: [], times: [], tokens: null, series: {} });
    let keep = this.steps.length;
    while (keep && answer.steps.length && this.steps[keep - 1] >= answer.steps[0]) keep -= 1;
    const changed = answer.is_whole || keep < this.steps.length - 1 || answer.steps.length > 1 || keep === this.steps.length;
    this.steps = [...this.steps.slice(0, keep), ...answer.steps];
    this.times = [...this.times.slice(0, keep), ...answer.times_s];
    if (answer.tokens) this.tokens = [...(this.tokens || Array(keep).fill(0)).slice(0, keep), ...answer.tokens];
    const names = new Set([...Object.keys(this.series), ...Object.keys(answer.series)]);
    for (const name of names) {
      const before = (this.series[name] || Array(keep).fill(null)).slice(0, keep);
      while (before.length < keep) before.push(null);
      this.series[name] = [...before, ...(answer.series[name] || Array(answer.steps.length).fill(null))];
    }
    this.revision = answer.revision;
    this.numUnread = answer.num_unread;
    return changed && answer.steps.length > 0;
  }

  get last() {
    return this.steps.length ? this.steps.at(-1) : 0;
  }

  latest(name) {
    return (this.series[name] || []).findLast((value) => value !== null) ?? null;
  }

  points(name, x) {
    const values = this.series[name] || [];
    const points = [];
    for (let index = 0; index < values.length; index += 1) {
      if (values[index] !== null) points.push([x(index), values[index]]);
    }
    return points;
  }

  // Seconds between the ends of two steps.
  stepSeconds(index) {
    return index ? Math.max(0, this.times[index] - this.times[index - 1]) : null;
  }

  // Derived metrics that the run has not recorded itself.
  derive() {
    if (this.series.tokens_per_s || !this.series.tokens_computed) return;
    this.derived = this.series.tokens_computed.map((value, index) => {
      const seconds = this.stepSeconds(index);
      return value !== null && seconds && this.steps[index] === this.steps[index - 1] + 1 ? value / seconds : null;
    });
  }

  all() {
    this.derive();
    return this.derived ? { ...this.series, tokens_per_s: this.derived } : this.series;
  }

  secondNames() {
    return Object.keys(this.series).filter((name) => name.endsWith("_s") && !name.endsWith("_per_s"));
  }
}

// Time per step by recorded phase, and the remainder between the ends of two steps.
export function timeSplit(columns) {
  const names = columns.secondNames();
  const totals = names.map((name) => [name, columns.series[name].reduce((sum, value) => sum + (value || 0), 0)]);
  const rest = columns.steps.reduce((sum, _, index) => {
    const named = names.reduce((total, name) => total + (columns.series[name][index] || 0), 0);
    return sum + Math.max(0, (columns.stepSeconds(index) || 0) - named);
  }, 0);
  return names.length ? [...totals, ["other_s", rest]].filter(([, seconds]) => seconds > 0) : [];
}

const SECONDS = { waited_s: "waiting for a batch", claimed_s: "claiming it", trained_s: "training", published_s: "publishing weights", other_s: "between steps" };

export function secondsName(name) {
  return SECONDS[name] || words(name.slice(0, -2));
}

export function timeBar(columns) {
  const split = timeSplit(columns);
  const total = split.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (!total) return null;
  const label = split.map(([name, seconds]) => `${secondsName(name)} ${percent(seconds / total)}`).join(", ");
  return el("div", {},
    el("div", { class: "split", role: "img", "aria-label": label }, split.map(([, seconds], index) =>
      el("i", { style: { width: `${(100 * seconds) / total}%`, background: COLOURS[index % 8] } }))),
    el("div", { class: "key" }, split.map(([name, seconds], index) =>
      el("span", {}, el("i", { style: { background: COLOURS[index % 8], "border-color": "transparent" } }),
        `${secondsName(name)} `, el("b", {}, percent(seconds / total)), el("span", { class: "faint" }, duration(seconds))))));
}

export class CurveGrid {
  constructor() {
    this.charts = new Map();
    this.main = el("div", { class: "grid" });
    this.rest = el("div", { class: "grid" });
    this.more = el("details", { class: "section" }, el("summary", {}, "More metrics"), this.rest);
    this.more.addEventListener("toggle", () => this.redraw());
    this.node = el("div", {}, this.main, this.more);
    this.leading = [];
  }

  // Charts that are updated elsewhere come first.
  lead(...charts) {
    this.leading = charts;
  }

  update(columns, { axis = "step", smooth = false } = {}) {
    this.given = [columns, { axis, smooth }];
    const begin = columns.times[0] || 0;
    const x = axis === "time" ? (index) => columns.times[index] - begin : (index) => columns.steps[index];
    const options = { smooth, xName: axis === "time" ? "after" : "step", xFormat: axis === "time" ? duration : number };
    const all = columns.all();
    const left = new Set(Object.keys(all));
    const points = (name) => {
      const values = all[name];
      return values.flatMap((value, index) => (value === null ? [] : [[x(index), value]]));
    };
    const fill = (panel, names, home) => {
      names.forEach((name) => left.delete(name));
      const chart = this.chart(panel, home);
      chart.update(names.map((name) => ({ name, label: label(name, names), points: points(name) })), options);
      return chart.node;
    };
    const main = PANELS.map((panel) => [panel, panel.names.flatMap((name) => matching(name, left))])
      .filter(([, names]) => names.length).map(([panel, names]) => fill(panel, names, "main"));
    const seconds = columns.secondNames();
    if (seconds.length) main.push(fill({ title: "Seconds of each step", kind: "areas", format: duration }, seconds, "main"));
    place(this.main, [...this.leading.map((chart) => chart.node), ...main]);
    const groups = new Map();
    for (const name of [...left].sort()) {
      const group = name.split("/")[0];
      groups.set(group, [...(groups.get(group) || []), name]);
    }
    this.more.classList.toggle("hidden", !groups.size);
    if (this.more.open) place(this.rest, [...groups].map(([group, names]) => fill({ title: words(group) }, names, "rest")));
  }

  redraw() {
    if (this.given) this.update(...this.given);
  }

  chart(panel, home) {
    const key = `${home}/${panel.title}`;
    if (!this.charts.has(key)) this.charts.set(key, new Chart(panel));
    return this.charts.get(key);
  }
}

function matching(name, left) {
  if (!name.endsWith("/")) return left.has(name) ? [name] : [];
  return [...left].filter((other) => other.startsWith(name)).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
}

function label(name, names) {
  const short = name.includes("/") && names.length > 1 ? name.slice(name.indexOf("/") + 1) : name;
  return name.endsWith("_s") && !name.endsWith("_per_s") ? secondsName(name) : words(short);
}

// Reorders without removing elements that stay: a chart keeps its focus.
export function place(home, nodes) {
  nodes.forEach((node, index) => {
    if (home.children[index] !== node) home.insertBefore(node, home.children[index] || null);
  });
  while (home.children.length > nodes.length) home.lastChild.remove();
}

export function checkSeries(checks) {
  const whole = {
    name: "all tasks",
    points: checks.map((check) => [check.step, check.success]),
    band: checks.map((check) => [check.step, Math.max(0, check.success - check.margin), Math.min(1, check.success + check.margin)]),
  };
  const families = [...new Set(checks.flatMap((check) => Object.keys(check.by_family)))].sort();
  if (families.length < 2) return [whole];
  return [whole, ...families.map((name) => ({
    name: `family ${name}`,
    label: name,
    points: checks.filter((check) => name in check.by_family).map((check) => [check.step, check.by_family[name]]),
  }))];
}

export function rewardSeries(rewards) {
  return Object.keys(rewards).sort().map((name) => ({ name, points: rewards[name].map(([step, mean]) => [step, mean]) }));
}
