// The list of runs: rows, the choice among them, and the charts of the chosen ones. The URL holds choice and settings.

import { ask, repeat } from "./api.js";
import { Comparison, MAX_CHOSEN } from "./compare.js";
import { el, empty } from "./dom.js";
import { count } from "./format.js";
import { RunTable } from "./run_table.js";
import { rememberList } from "./state.js";
import { setUpTheme, toggleTheme } from "./theme.js";

const LIST_S = 1;
const DEFAULTS = { runs: "", x: "step", log: "", smooth: "", all: "", metric: "", find: "", order: "" };
const AXES = ["step", "tokens", "time"];
const home = document.getElementById("view");
const banner = document.getElementById("banner");
let list = null;
let settings = readSettings();

const table = new RunTable({
  onChoose: (id, isChosen) => choose(isChosen ? [...chosen(), id] : chosen().filter((other) => other !== id)),
  onFind: (find) => change({ find }),
  onOrder: (order) => change({ order }),
});
const comparison = new Comparison({ onChange: change });

function readSettings() {
  const given = new URLSearchParams(location.hash.split("?")[1] || "");
  const found = Object.fromEntries(Object.entries(DEFAULTS).map(([name, value]) => [name, given.get(name) ?? value]));
  if (!AXES.includes(found.x)) found.x = DEFAULTS.x;
  return found;
}

function chosen() {
  return [...new Set(settings.runs.split(",").filter(Boolean))];
}

function choose(ids) {
  change({ runs: ids.slice(0, MAX_CHOSEN).join(",") });
}

function change(some) {
  settings = { ...settings, ...some };
  const given = Object.entries(settings).filter(([name, value]) => value !== DEFAULTS[name]);
  // Ids hold no character that needs an escape, and a readable address is easier to share.
  const query = given.map(([name, value]) => `${name}=${encodeURIComponent(value).replaceAll("%3A", ":").replaceAll("%2C", ",")}`).join("&");
  history.replaceState(null, "", query ? `#/?${query}` : "#/");
  rememberList(location.hash);
  draw();
}

function draw() {
  if (!list) return;
  if (!list.runs.length) {
    if (!home.querySelector(".no-runs")) home.replaceChildren(noRuns());
    return;
  }
  if (!table.node.isConnected) home.replaceChildren(table.node, comparison.node);
  const ids = chosen();
  const rows = new Map(list.runs.map((run) => [run.id, run]));
  comparison.choose(ids.map((id) => rows.get(id)).filter((run) => run && run.has_page), ids.filter((id) => !rows.has(id)), settings);
  table.update(list, settings, new Set(ids), comparison.colours(), ids.length >= MAX_CHOSEN);
}

function noRuns() {
  const code = (text) => el("code", {}, text);
  return el("div", { class: "card no-runs" }, empty(`No runs in ${list.path} yet`,
    "A run that starts here appears by itself, for instance ", code(`m2forge pretrain CONFIG --runs ${list.path}`), ". ",
    code("make demo"), " trains a small agent into ", code("runs/demo"), " in minutes. If your runs are elsewhere: ", code("m2forge page FOLDER"), "."));
}

async function watch() {
  try {
    list = await ask("api/runs");
    banner.classList.toggle("hidden", !list.problems.length);
    banner.classList.add("note");
    banner.textContent = list.problems.join("; ");
    document.title = `${list.name} · m2forge`;
    document.getElementById("folder-name").textContent = list.name;
    const running = list.runs.filter((run) => run.state === "running").length;
    const tally = `${count(list.runs.length)} ${list.runs.length === 1 ? "run" : "runs"}, ${count(running)} running`;
    const shown = document.getElementById("tally");
    if (shown.textContent !== tally) shown.textContent = tally;
    draw();
    await comparison.refresh();
  } catch (error) {
    if (error.reason === undefined && !(error instanceof TypeError)) throw error;
    banner.classList.remove("hidden", "note");
    banner.textContent = error.reason === undefined ? "The page's server does not answer; it is asked again." : error.message;
  }
}

function onKey(event) {
  const isTyping = event.target.closest("input:not([type=checkbox]), select, textarea");
  if (event.key === "Escape" && isTyping) return event.target.blur();
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return undefined;
  const actions = {
    t: toggleTheme, "?": openKeys, "/": () => table.focus(), c: () => choose([]),
    x: () => change({ x: AXES[(AXES.indexOf(settings.x) + 1) % AXES.length] }),
    l: () => change({ log: settings.log ? "" : "1" }), s: () => change({ smooth: settings.smooth ? "" : "1" }),
  };
  if (!actions[event.key]) return undefined;
  event.preventDefault();
  return actions[event.key]();
}

function openKeys() {
  document.getElementById("keys").showModal();
}

setUpTheme(document.getElementById("theme-button"));
document.getElementById("keys-button").addEventListener("click", openKeys);
document.getElementById("keys-close").addEventListener("click", () => document.getElementById("keys").close());
document.addEventListener("keydown", onKey);
addEventListener("hashchange", () => {
  settings = readSettings();
  rememberList(location.hash);
  draw();
  comparison.refresh();
});
rememberList(location.hash);
repeat(watch, LIST_S);
