// The report of a finished run: the same charts, from data embedded in the file.

import { Chart } from "./chart.js";
import { checkSeries, Columns, CurveGrid, rewardSeries, timeBar } from "./curves.js";
import { el, empty } from "./dom.js";
import { count, duration, number, percent } from "./format.js";
import { makeStats } from "./stats.js";
import { setUpTheme } from "./theme.js";
import { drawPart, explainTokens, logprobLook, problemChips, shadeScale } from "./turn.js";
import { WindowChart } from "./window.js";

const data = JSON.parse(document.getElementById("data").textContent);
setUpTheme(document.getElementById("theme-button"));
document.getElementById("report").append(...drawReport());

function drawReport() {
  const columns = new Columns();
  columns.take(data.curves);
  const grid = new CurveGrid();
  const lead = [];
  if (data.run.checks.length) {
    const chart = new Chart({ title: "Held-out success", format: percent, low: 0, high: 1, smooth: false, note: "with its 95% interval" });
    chart.update(checkSeries(data.run.checks), { xName: "step" });
    lead.push(chart);
  }
  if (data.past && Object.keys(data.past.rewards).length) {
    const chart = new Chart({ title: "Reward by domain", note: "by the step that trained it" });
    chart.update(rewardSeries(data.past.rewards), { xName: "step" });
    lead.push(chart);
  }
  grid.update(columns, { smooth: columns.steps.length > 40 });
  const bar = timeBar(columns);
  const card = (title, note, ...children) => el("section", { class: "card section", "aria-label": title },
    el("header", {}, el("h2", {}, title), note ? el("span", { class: "faint" }, note) : ""), children);
  return [
    data.notes.length ? el("div", { class: "section" }, data.notes.map((note) => el("p", { class: "soft" }, note))) : "",
    el("div", { class: "stats" }, makeStats(data.run, columns)),
    lead.length ? el("div", { class: "grid section" }, lead.map((chart) => chart.node)) : "",
    hasLevels() ? card("Held-out success by family and level", "by the first evaluation and by the last", drawLevels()) : "",
    data.past ? card("The window as it moved", `queue positions, by the step that trained them; W = ${count(data.past.window)}`, drawWindow()) : "",
    bar ? card("Where the trainer's time went", columns.steps.length ? `${count(columns.steps.length)} steps in ${duration(columns.times.at(-1) - columns.times[0])}` : "", bar) : "",
    data.run.has_pool ? card("Before and after", data.sides ? data.sides.note : "", data.sides ? drawSides() : empty("Nothing to compare", data.why)) : "",
    el("div", { class: "section" }, el("header", {}, el("h2", {}, "Curves")), grid.node),
  ];
}

function hasLevels() {
  const { checks } = data.run;
  return checks.length > 1 && Object.keys(checks[0].by_level).length && Object.keys(checks.at(-1).by_level).length;
}

function drawLevels() {
  const [first, last] = [data.run.checks[0], data.run.checks.at(-1)];
  const row = (family, level, num, before, after) => el("tr", {}, el("td", {}, family), el("td", {}, level), el("td", { class: "n" }, count(num)),
    el("td", { class: "n" }, before === undefined ? "–" : percent(before)), el("td", { class: "n" }, percent(after)));
  const rows = Object.entries(last.by_level).flatMap(([family, levels]) => [
    ...Object.entries(levels).map(([level, found]) => row(family, level, found.num_tasks, first.by_level[family]?.[level]?.success, found.success)),
    row(family, "all", Object.values(levels).reduce((sum, found) => sum + found.num_tasks, 0), first.by_family[family], last.by_family[family]),
  ]);
  return el("table", { class: "plain" }, el("thead", {}, el("tr", {}, ["family", "level"].map((name) => el("th", {}, name)),
    ["tasks", `step ${first.step}`, `step ${last.step}`].map((name) => el("th", { class: "n" }, name)))), el("tbody", {}, rows));
}

function drawWindow() {
  const chart = new WindowChart(300);
  chart.update(data.past);
  return chart.node;
}

function drawSides() {
  const sides = el("div", { class: "sides" }, drawSide("Before", data.sides.before), drawSide("After", data.sides.after));
  explainTokens(sides);
  return [el("div", {}, shadeScale("logprob")), sides];
}

function drawSide(label, side) {
  const { head, calls, num_left: left } = side;
  const solved = head.reward_parts && head.reward_parts.perf >= 1;
  return el("div", {},
    el("h3", {}, `${label}: `, el("span", { class: `chip ${solved ? "good" : "bad"}` }, solved ? "solved" : "not solved"),
      el("span", { class: "faint" }, ` ${head.name}, sampled by version ${head.oldest_step ?? "–"}, reward ${number(head.reward)}`)),
    el("div", { class: "quote soft" }, head.task.instruction),
    el("div", { class: "turns" }, calls.map((call) => el("article", { class: "turn" }, el("div", {}),
      el("div", { class: "body" }, el("div", { class: "line" }, el("span", { class: "number" }, `Call ${call.call}`), problemChips(call)),
        call.parts.filter((part) => part.kind !== "marker" && part.kind !== "system").map((part) => drawPart(part, call.call, logprobLook)))))),
    left ? el("p", { class: "faint" }, `and ${count(left)} more calls`) : "");
}
