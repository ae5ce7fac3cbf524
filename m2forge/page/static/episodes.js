// The list of episodes: filters in the URL, pages of rows fetched as they come into view.

import { ask } from "./api.js";
import { el, empty } from "./dom.js";
import { count, duration, number } from "./format.js";
import { VirtualList } from "./virtual.js";

const PAGE = 100;
const STATES = ["queued", "running", "finished", "failed", "training", "trained", "dropped"];
const ORDERS = [["newest", "newest first"], ["oldest", "oldest first"], ["best", "best reward"], ["worst", "worst reward"], ["longest", "most calls"]];
const FILTERS = ["domain", "state", "task", "text", "least", "most", "order"];

export function showEpisodes(home, parameters) {
  const wanted = Object.fromEntries(FILTERS.map((name) => [name, parameters.get(name) || ""]));
  const pages = new Map();
  let [upto, total, isOpen, version] = [null, 0, true, 0];
  const found = el("span", { class: "found", role: "status" });
  const holder = el("div", {});
  const list = new VirtualList({ draw: (index) => drawRow(rowAt(index)), estimate: 42, onRange: load, label: "Episodes" });

  function rowAt(index) {
    return pages.get(Math.floor(index / PAGE))?.[index % PAGE] || null;
  }

  async function load(first, last) {
    for (let page = Math.floor(first / PAGE); page <= Math.floor(last / PAGE); page += 1) {
      if (pages.has(page)) continue;
      pages.set(page, []);
      fetchPage(page, version);
    }
  }

  async function fetchPage(page, asked) {
    try {
      const answer = await ask("api/episodes", { ...wanted, upto, offset: page * PAGE, limit: PAGE });
      if (!isOpen || asked !== version) return;
      pages.set(page, answer.episodes);
      if (page === 0 && upto === null) begin(answer);
      list.refresh(page * PAGE, (page + 1) * PAGE - 1);
    } catch (error) {
      if (asked !== version) return;
      pages.delete(page);
      if (page === 0) holder.replaceChildren(el("div", { class: "card" }, empty("No trajectories to show", error.message)));
    }
  }

  function begin(answer) {
    upto = answer.newest;
    total = answer.total;
    found.textContent = `${count(total)} ${total === 1 ? "episode" : "episodes"}`;
    domain.replaceChildren(...options([["", "all domains"], ...answer.domains.map((name) => [name, name])], wanted.domain));
    if (!total) {
      const isNarrow = FILTERS.some((name) => wanted[name] && name !== "order");
      holder.replaceChildren(el("div", { class: "card" }, isNarrow
        ? empty("No episode matches", "Change the filters, or remove them.")
        : empty("No episodes yet", "They appear as soon as the loop has queued tasks.")));
      return;
    }
    holder.replaceChildren(el("div", { class: "card list" },
      el("div", { class: "list-head" }, ["Episode", "State", "Task"].map((name) => el("span", {}, name)),
        ["Level", "Reward", "Calls", "Tokens", "Step"].map((name) => el("span", { class: "n" }, name))), list.node));
    list.setCount(total);
  }

  function start() {
    version += 1;
    upto = null;
    pages.clear();
    pages.set(0, []);
    fetchPage(0, version);
  }

  let timer = null;
  const change = (name) => (event) => {
    wanted[name] = event.target.value.trim();
    clearTimeout(timer);
    timer = setTimeout(() => {
      const given = Object.entries(wanted).filter(([, value]) => value);
      history.replaceState(null, "", `#/episodes${given.length ? `?${new URLSearchParams(given)}` : ""}`);
      list.node.scrollTop = 0;
      start();
    }, 250);
  };
  const select = (name, choices) => el("select", { "aria-label": name, onchange: change(name) }, options(choices, wanted[name]));
  const input = (name, attributes) => el("input", { value: wanted[name], "aria-label": attributes.placeholder, oninput: change(name), ...attributes });
  const domain = select("domain", [["", "all domains"], ...(wanted.domain ? [[wanted.domain, wanted.domain]] : [])]);
  const search = input("text", { type: "search", placeholder: "Search task, answer, evidence", maxlength: 200 });
  home.replaceChildren(el("div", { class: "tools", role: "search" }, search, domain,
    select("state", [["", "all states"], ...STATES.map((name) => [name, name])]),
    input("task", { type: "search", placeholder: "Task, family or id", maxlength: 200 }),
    el("span", { class: "field" }, "reward", input("least", { type: "number", step: "any", placeholder: "from" }), "–",
      input("most", { type: "number", step: "any", placeholder: "to" })),
    select("order", ORDERS), found, el("button", { class: "button", onclick: start, title: "Look for newer episodes" }, "Refresh")),
  el("div", { class: "section" }, holder));
  start();
  return { close: () => { isOpen = false; }, keys: { "/": () => search.focus() } };
}

function options(choices, chosen) {
  return choices.map(([value, label]) => el("option", { value, selected: value === chosen }, label));
}

function drawRow(episode) {
  if (!episode) return el("div", { class: "item waiting" }, "…");
  const cell = (value, look = "n") => el("span", { class: look }, value);
  return el("a", { class: "item", href: `#/episode/${episode.id}` },
    el("span", { class: "mono wide" }, episode.name), el("span", { class: "wide" }, stateChip(episode)),
    el("span", { class: "cut", title: episode.instruction }, el("span", { class: "soft" }, `${episode.family || episode.domain}  `), episode.instruction),
    cell(number(episode.difficulty), "n wide"), cell(rewardChip(episode.reward)), cell(count(episode.num_calls)),
    cell(count(episode.num_tokens), "n wide"), cell(episode.step ?? "–", "n wide"));
}

export function stateChip(episode) {
  const look = { trained: "good", training: "hot", failed: "bad", dropped: "bad" }[episode.state] || "";
  const why = episode.failure || episode.reason || (episode.duration_s ? `took ${duration(episode.duration_s)}` : "");
  return el("span", { class: `chip ${look}`, title: why }, episode.state);
}

export function rewardChip(reward) {
  if (reward === null || reward === undefined) return "–";
  return el("span", { class: `chip ${reward >= 0.5 ? "good" : "bad"}` }, number(reward));
}
