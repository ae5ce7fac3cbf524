// The run: its results, its curves, the window's state and history, time per step. All of it updates live.

import { ask, repeat } from "./api.js";
import { Chart } from "./chart.js";
import { checkSeries, Columns, CurveGrid, rewardSeries, timeBar } from "./curves.js";
import { el, empty } from "./dom.js";
import { count, number, percent, words } from "./format.js";
import { makeStats } from "./stats.js";
import { QueueStrip, WindowChart } from "./window.js";

const CURVES_S = 1.5;
const QUEUE_S = 1;
const PAST_S = 4;
const saved = { axis: "step", smooth: false };

export function showOverview(home) {
  const columns = new Columns();
  const parts = makeParts();
  let [run, tellKnown] = [null, null];
  const known = new Promise((resolve) => { tellKnown = resolve; });

  const drawCurves = () => {
    parts.nothing.classList.toggle("hidden", columns.steps.length > 0 || Boolean(run?.yields));
    parts.curves.classList.toggle("hidden", columns.steps.length === 0);
    parts.grid.update(columns, saved);
    const bar = timeBar(columns);
    parts.time.classList.toggle("hidden", !bar);
    parts.bar.replaceChildren(...(bar ? [bar] : []));
    drawStats();
  };
  const drawStats = () => parts.stats.replaceChildren(...(run && !run.yields ? makeStats(run, columns) : []));
  const drawLead = () => {
    const lead = [parts.checks, parts.domains].filter((chart) => chart.series.length);
    if (lead.length === parts.grid.leading.length) return;
    parts.grid.lead(...lead);
    drawCurves();
  };
  const takeRun = (event) => {
    run = event.detail;
    if (run.checks.length) parts.checks.update(checkSeries(run.checks), { xName: "step" });
    drawLead();
    tellKnown();
    parts.pool.classList.toggle("hidden", !run.has_pool);
    parts.sandboxes.replaceChildren(...makeSandboxes(run.sandboxes));
    parts.processes.classList.toggle("hidden", !run.processes.length);
    parts.processTable.replaceChildren(...makeProcesses(run.processes));
    parts.yields.classList.toggle("hidden", !run.yields);
    if (run.yields) {
      parts.nothing.classList.add("hidden");
      parts.yieldTable.replaceChildren(...makeYields(run.yields));
    }
    drawStats();
  };
  parts.axis.onchange = drawCurves;
  home.replaceChildren(parts.node);
  document.addEventListener("run", takeRun);

  const stops = [
    repeat(() => quiet(async () => {
      if (columns.take(await ask("api/curves", { revision: columns.revision, step: columns.last }))) drawCurves();
      parts.unread.textContent = columns.numUnread ? `${count(columns.numUnread)} lines of metrics.jsonl could not be read and are left out` : "";
    }), CURVES_S),
    repeat(() => quiet(async () => {
      await known;
      if (!run.has_pool) return;
      const queue = await ask("api/queue");
      parts.strip.update(queue);
      parts.tally.replaceChildren(...makeTally(queue));
      parts.poolNote.textContent = "";
    }, (error) => { parts.poolNote.textContent = error.message; }), QUEUE_S),
    repeat(() => quiet(async () => {
      await known;
      if (!run.has_pool) return;
      const past = await ask("api/past");
      parts.past.update(past);
      parts.domains.update(rewardSeries(past.rewards), { xName: "step" });
      drawLead();
    }), PAST_S),
  ];
  return {
    close: () => {
      document.removeEventListener("run", takeRun);
      stops.forEach((stop) => stop());
    },
  };
}

// The banner reports an unreachable server; the view stays unchanged until it responds again.
async function quiet(work, onRefused = () => {}) {
  try {
    await work();
  } catch (error) {
    if (error.reason !== undefined) onRefused(error);
    else if (!(error instanceof TypeError)) throw error;
  }
}

function makeParts() {
  const parts = {
    stats: el("div", { class: "stats" }),
    checks: new Chart({ title: "Held-out success", format: percent, low: 0, high: 1, smooth: false, note: "with its 95% interval" }),
    domains: new Chart({ title: "Reward by domain", note: "by the step that trained it" }),
    grid: new CurveGrid(),
    strip: new QueueStrip(),
    past: new WindowChart(),
    tally: el("div", {}),
    sandboxes: el("div", { class: "facts section sandboxes" }),
    processTable: el("table", { class: "plain" }),
    bar: el("div", {}),
    poolNote: el("span", { class: "faint" }),
    unread: el("span", { class: "faint" }),
    axis: {},
  };
  const choose = (name, choices) => {
    const buttons = choices.map(([value, label]) => el("button", {
      "aria-pressed": String(saved[name] === value),
      onclick: (event) => {
        saved[name] = value;
        buttons.forEach((button) => button.setAttribute("aria-pressed", String(button === event.currentTarget)));
        parts.axis.onchange();
      },
    }, label));
    return el("span", { class: "segmented", role: "group" }, buttons);
  };
  parts.pool = el("div", { class: "two section hidden" },
    el("section", { class: "card", "aria-label": "The window now" }, el("header", {}, el("h2", {}, "The window now"), parts.poolNote), parts.strip.node, parts.sandboxes, parts.tally),
    el("section", { class: "card", "aria-label": "The window as it moved" },
      el("header", {}, el("h2", {}, "The window as it moved"), el("span", { class: "faint" }, "queue positions, by the step that trained them")), parts.past.node));
  parts.time = el("section", { class: "card section hidden", "aria-label": "Where the time went" }, el("header", {}, el("h2", {}, "Where the trainer's time went")), parts.bar);
  parts.processes = el("section", { class: "card section hidden", "aria-label": "Processes" }, el("header", {}, el("h2", {}, "Processes"),
    el("span", { class: "faint" }, "ends that were not requested are deaths")), parts.processTable);
  parts.curves = el("div", { class: "section" },
    el("header", {}, el("h2", {}, "Curves"), parts.unread, el("span", { class: "grow" }),
      choose("axis", [["step", "by step"], ["time", "by time"]]), choose("smooth", [[false, "as recorded"], [true, "smoothed"]])), parts.grid.node);
  parts.yieldTable = el("div", {});
  parts.yields = el("section", { class: "card section hidden", "aria-label": "Yields" }, el("header", {}, el("h2", {}, "Yields"),
    el("span", { class: "faint" }, "items in = passed + rejected + failed, by stage")), parts.yieldTable);
  parts.nothing = el("div", { class: "card section hidden" }, empty("No metrics yet", "They appear with the first step; this page looks by itself."));
  parts.node = el("div", {}, parts.stats, parts.yields, parts.pool, parts.time, parts.nothing, parts.curves, parts.processes);
  return parts;
}

// A row for each stage of a pipeline, below it one for each reason.
function makeYields(yields) {
  const headings = ["in", "passed", "rejected", "failed", "made", "asked", "cached", "tokens", "seconds"];
  const sum = (reasons) => Object.values(reasons).reduce((total, found) => total + found, 0);
  const row = (name, cells) => el("tr", {}, el("td", {}, name), cells.map((cell) => el("td", { class: "n" }, cell)));
  const reasonRows = (reasons, place) => Object.entries(reasons).map(([reason, found]) =>
    row(el("span", { class: "soft" }, `\u2003${reason}`), headings.map((_, index) => (index === place ? count(found) : ""))));
  const stageRows = (stage) => [
    row(stage.name, [stage.num_in, stage.num_passed, sum(stage.rejected), sum(stage.failed), stage.num_made, stage.num_asked, stage.num_cached,
      stage.num_prompt + stage.num_sampled].map(count).concat(number(stage.seconds))),
    reasonRows(stage.rejected, 2), reasonRows(stage.failed, 3),
  ];
  return [
    el("table", { class: "plain" }, el("thead", {}, el("tr", {}, el("th", {}, "Stage"), headings.map((name) => el("th", { class: "n" }, name)))),
      el("tbody", {}, yields.stages.map(stageRows))),
    el("p", { class: "soft" }, `${count(yields.num_accepted)} items accepted${yields.is_finished ? "" : " so far"}`),
  ];
}

function makeSandboxes(found) {
  if (!found) return [];
  const facts = [["alive", found.num_alive], ["forked", found.num_forked], ["failed", found.num_failed]];
  return [el("span", { class: "soft" }, `Sandboxes (${found.backend}):`), ...facts.map(([name, number]) => el("span", {}, `${name} `, el("b", {}, count(number))))];
}

function makeProcesses(processes) {
  const head = ["Process", "node", "state", "version", "starts", "deaths"].map((name, index) => el("th", { class: index > 2 ? "n" : "" }, name));
  const rows = processes.map((found) => el("tr", {},
    el("td", {}, found.name), el("td", {}, found.node), el("td", {}, found.is_running ? "running" : "ended"),
    el("td", { class: "n" }, found.version === null ? "" : count(found.version)),
    el("td", { class: "n" }, count(found.num_starts)),
    el("td", { class: "n", title: found.deaths.map((death) => `${new Date(1000 * death.at_s).toLocaleString()}: status ${death.status}`).join("\n") }, count(found.num_deaths))));
  return [el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)];
}

function makeTally(queue) {
  const kinds = Object.entries(queue.tally);
  const states = Object.entries(queue.episodes).filter(([, number]) => number);
  return [
    el("div", { class: "facts section" }, el("span", { class: "soft" }, "Episodes:"), states.map(([state, number]) =>
      el("a", { href: `#/episodes?state=${state}` }, `${state} `, el("b", {}, count(number))))),
    kinds.length ? el("table", { class: "plain section" },
      el("thead", {}, el("tr", {}, el("th", {}, "Units"), el("th", { class: "n" }, "number"), el("th", { class: "n" }, "mean difficulty"))),
      el("tbody", {}, kinds.map(([kind, found]) => el("tr", {}, el("td", {}, words(kind).replace("dropped ", "dropped: ")),
        el("td", { class: "n" }, count(found.num_units)), el("td", { class: "n" }, number(found.mean_difficulty)))))) : "",
  ];
}
