// The page: selects the view by URL, shows the run's state, handles global keys.

import { ask, repeat } from "./api.js";
import { hideTip } from "./dom.js";
import { showEpisode } from "./episode.js";
import { showEpisodes } from "./episodes.js";
import { duration } from "./format.js";
import { showOverview } from "./overview.js";
import { listHash, stateOf } from "./state.js";
import { setUpTheme, toggleTheme } from "./theme.js";

const RUN_S = 2;
const home = document.getElementById("view");
const banner = document.getElementById("banner");
let close = () => {};
let keys = {};
let lastRun = null;

function route() {
  const [path, query] = location.hash.replace(/^#/, "").split("?");
  const parts = path.split("/").filter(Boolean);
  const parameters = new URLSearchParams(query || "");
  close();
  hideTip();
  keys = {};
  const name = parts[0] === "episode" || parts[0] === "episodes" ? "episodes" : "overview";
  for (const tab of document.querySelectorAll(".tabs a")) {
    if (tab.dataset.view === name) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  const isEpisode = parts[0] === "episode" && /^\d{1,15}$/.test(parts[1] || "");
  const view = isEpisode ? showEpisode(home, Number(parts[1]), parameters) : name === "episodes" ? showEpisodes(home, parameters) : showOverview(home);
  close = view.close || (() => {});
  keys = view.keys || {};
  scrollTo(0, 0);
  if (lastRun) tellRun();
}

async function watchRun() {
  try {
    const run = await ask("api/run");
    const said = [...(run.failure ? [`The run failed: ${run.failure}`] : []), ...run.problems];
    banner.classList.toggle("hidden", !said.length);
    banner.classList.toggle("note", !run.failure);
    banner.textContent = said.join("; ");
    const back = document.getElementById("list-link");
    back.classList.toggle("hidden", run.list_url === null);
    if (run.list_url !== null) back.href = `${run.list_url}${listHash()}`;
    document.title = `${run.name} · m2forge`;
    document.getElementById("run-name").textContent = run.name;
    const { label, look } = stateOf(run);
    const state = document.getElementById("run-state");
    state.className = `chip ${look}`;
    const age = run.age_s !== null && run.state !== "finished" ? `, last written ${duration(run.age_s)} ago` : "";
    state.title = `${label}${age}`;
    if (state.lastChild.textContent !== label) state.lastChild.textContent = label;
    lastRun = run;
    tellRun();
  } catch (error) {
    banner.classList.remove("hidden", "note");
    banner.textContent = error.reason === undefined ? "The page's server does not answer; it is asked again." : error.message;
  }
}

function tellRun() {
  document.dispatchEvent(new CustomEvent("run", { detail: lastRun }));
}

function onKey(event) {
  const isTyping = event.target.closest("input, select, textarea");
  if (event.key === "Escape" && isTyping) return event.target.blur();
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return undefined;
  const everywhere = { t: toggleTheme, g: () => { location.hash = "#/"; }, e: () => { location.hash = "#/episodes"; }, "?": openKeys };
  const action = keys[event.key] || everywhere[event.key];
  if (!action) return undefined;
  event.preventDefault();
  return action();
}

function openKeys() {
  document.getElementById("keys").showModal();
}

setUpTheme(document.getElementById("theme-button"));
document.getElementById("keys-button").addEventListener("click", openKeys);
document.getElementById("keys-close").addEventListener("click", () => document.getElementById("keys").close());
document.addEventListener("keydown", onKey);
addEventListener("hashchange", route);
route();
repeat(watchRun, RUN_S);
