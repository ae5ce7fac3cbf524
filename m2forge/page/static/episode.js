// One episode: its task, its reward, its token tree, and its calls, which are loaded as they are scrolled to.

import { ask } from "./api.js";
import { el, empty, svg } from "./dom.js";
import { rewardChip, stateChip } from "./episodes.js";
import { count, duration, number } from "./format.js";
import { Search } from "./search.js";
import { TreeMap } from "./tree_map.js";
import { drawPart, drawTurnLine, explainTokens, problemChips, shadeScale } from "./turn.js";
import { VirtualList } from "./virtual.js";

const PAGE = 24;
const FIRST = 12;
const MAX_LANES = 7;
const LANE_PX = 13;
const SHOWN = [["prompt", "prompts", ["system", "user", "assistant", "context", "marker"]], ["observation", "observations", ["observation"]],
  ["thinking", "thinking", ["thinking"]], ["call", "calls", ["call"]], ["content", "content", ["content"]]];
const saved = { colour: "logprob", hidden: new Set() };

export function showEpisode(home, id, parameters) {
  const view = new EpisodeView(home, id, Number(parameters.get("call") || 0));
  view.start();
  return { close: () => view.close(), keys: view.keys() };
}

class EpisodeView {
  constructor(home, id, call) {
    Object.assign(this, { home, id, target: call, isOpen: true, calls: new Map(), asked: new Set(), head: null, shape: null });
    this.path = `api/episodes/${id}`;
    this.map = new TreeMap((chosen) => this.list.scrollTo(chosen));
    this.list = new VirtualList({ draw: (index) => this.drawTurn(index), estimate: 220, onRange: (...range) => this.look(...range), label: "Calls" });
    this.search = new Search(this.path, (chosen) => this.list.scrollTo(chosen), this.list.node);
    this.scale = el("span", {});
    explainTokens(this.list.node);
  }

  close() {
    this.isOpen = false;
    this.map.close();
    this.search.close();
  }

  keys() {
    const move = (by) => () => this.list.scrollTo(this.list.first + by);
    return { "/": () => this.search.focus(), n: () => this.search.step(1), p: () => this.search.step(-1), j: move(1), k: move(-1) };
  }

  // The first calls and the head are requested separately; the outline of a long tree takes longer.
  async start() {
    this.home.replaceChildren(el("div", { class: "empty" }, "Reading the episode…"));
    try {
      const [head, first] = await Promise.all([ask(this.path), ask(`${this.path}/calls`, { start: 0, end: FIRST })]);
      if (!this.isOpen) return;
      this.head = head;
      this.look_ = this.makeLook();
      this.take(first);
      this.drawFrame();
      this.list.setCount(head.num_calls);
      this.shape = await ask(`${this.path}/outline`);
      if (!this.isOpen) return;
      this.map.update(this.shape);
      this.treeFacts.replaceChildren(...this.describeTree());
      this.list.setCount(this.shape.num_calls);
      this.list.refresh();
      if (this.target) this.list.scrollTo(this.target);
    } catch (error) {
      if (this.isOpen) this.home.replaceChildren(el("div", { class: "card" }, empty("This episode cannot be shown", error.message, el("p", {}, el("a", { href: "#/episodes" }, "All trajectories")))));
      if (error.reason === undefined && !(error instanceof TypeError)) throw error;
    }
  }

  makeLook() {
    const advantages = this.head.advantages;
    const largest = advantages ? advantages.reduce((most, value) => Math.max(most, Math.abs(value)), 0) : 0;
    return { colour: saved.colour, advantages, largest };
  }

  // -- calls, loaded on demand --

  take(answer) {
    answer.calls.forEach((call) => this.calls.set(call.call, call));
    return answer.calls.length;
  }

  look(first, last, top) {
    this.map.look(top, Math.max(top, this.list.at(this.list.node.scrollTop + this.list.node.clientHeight - 4)));
    this.search.paint();
    let start = null;
    for (let call = first; call <= last; call += 1) {
      if (!this.calls.has(call) && !this.asked.has(call)) {
        start = call;
        break;
      }
    }
    if (start !== null) this.fetch(start, Math.min(this.list.count, Math.max(last + 1, start + PAGE)));
  }

  async fetch(start, end) {
    for (let call = start; call < end; call += 1) this.asked.add(call);
    try {
      const answer = await ask(`${this.path}/calls`, { start, end });
      if (!this.isOpen) return;
      const number = this.take(answer);
      for (let call = start + number; call < end; call += 1) this.asked.delete(call);
      this.list.refresh(start, start + Math.max(0, number - 1));
    } catch {
      // Requested again when it is scrolled to again.
      for (let call = start; call < end; call += 1) this.asked.delete(call);
    }
  }

  // -- rendering --

  drawFrame() {
    const { head } = this;
    const others = head.group_episodes.length > 1 ? el("section", { class: "card" }, el("h2", {}, `Group ${head.group}`),
      el("div", { class: "tools" }, head.group_episodes.map((other) => el("a", { href: `#/episode/${other.id}`, class: `chip ${other.id === head.id ? "current" : ""} ${other.reward === null ? "" : other.reward >= 0.5 ? "good" : "bad"}`,
        "aria-current": other.id === head.id ? "true" : null }, other.reward === null ? other.state : number(other.reward))))) : "";
    const found = (head.reward_parts && head.reward_parts.evidence) || {};
    const verifier = found.verifier || {};
    const { traceback, problem } = verifier;
    const output = verifier.stdout ?? verifier.output;
    const evidence = head.reward_parts ? [
      found.criteria ? describe(Object.entries(found.criteria).map(([name, score]) => [name, number(score)])) : "",
      problem ? el("div", { class: "banner" }, String(problem)) : "",
      traceback ? el("div", { class: "banner" }, "The verifier raised:", el("pre", { class: "traceback" }, String(traceback))) : "",
      output === undefined ? "" : el("details", { class: "output", open: true }, el("summary", {}, "Output of the tests"), el("pre", {}, String(output) || "(none)")),
      el("details", {}, el("summary", {}, "What the verifier saw"), el("pre", {}, JSON.stringify(found, null, 2)))] : "";
    this.treeFacts = el("div", { class: "faint" }, "reading the tree…");
    const side = el("aside", { class: "side" },
      el("section", { class: "card" }, el("h2", {}, "Task"), el("div", { class: "quote" }, head.task.instruction), describe([["domain", head.domain], ["family", head.family || "–"], ["difficulty", number(head.difficulty)], ["id", head.task.id]]), describeFiles(head.files)),
      el("section", { class: "card" }, el("h2", {}, "Reward"), describe(rewardRows(head)), evidence),
      el("section", { class: "card" }, el("h2", {}, "Token tree"), this.map.canvas, this.treeFacts), others);
    const nothing = head.num_calls ? this.list.node : empty("No calls recorded", head.state === "running" ? "They are stored when the attempt has ended." : "This attempt made none.");
    const reader = el("section", { class: "card reader", "aria-label": "Calls" }, el("div", { class: "tools" }, this.search.node, el("span", { class: "grow" }), this.scale, this.makeColours()), this.makeShown(),
      head.has_text ? "" : el("div", { class: "banner note" }, "No tokenizer is found beside this run, so token ids are shown."), nothing);
    this.home.replaceChildren(el("div", { class: "crumbs" }, el("a", { href: "#/episodes" }, "Trajectories"), el("span", { class: "faint" }, "/"), el("h1", {}, head.name), stateChip(head), rewardChip(head.reward),
      el("span", { class: "faint" }, `${count(head.num_calls)} ${head.num_calls === 1 ? "call" : "calls"}, ${count(head.num_tokens)} tokens${head.duration_s ? `, ${duration(head.duration_s)}` : ""}${head.step === null ? "" : `, step ${head.step}`}`)),
    head.failure ? el("div", { class: "banner" }, head.failure) : "", el("div", { class: "episode" }, side, reader));
  }

  describeTree() {
    const { shape } = this;
    const numBranches = shape.chains.filter((chain, call) => chain === call).length;
    return [`${count(shape.num_tokens)} tokens for ${count(shape.num_input_tokens)} sent and sampled, on ${count(numBranches)} ${numBranches === 1 ? "branch" : "branches"}`];
  }

  makeColours() {
    const choices = [["logprob", "log-prob", ""], ["advantage", "advantage", this.head.advantages ? "" : "its group has no rewards yet"],
      ["ratio", "ratio", ""], ["none", "plain", ""]];
    if (saved.colour === "advantage" && !this.head.advantages) this.look_.colour = "logprob";
    this.scale.replaceChildren(shadeScale(this.look_.colour, this.head.no_ratios));
    const buttons = choices.map(([value, label, why]) => el("button", {
      disabled: Boolean(why), title: why, "aria-pressed": String(this.look_.colour === value), "data-colour": value,
      onclick: (event) => {
        saved.colour = this.look_.colour = value;
        buttons.forEach((button) => button.setAttribute("aria-pressed", String(button === event.currentTarget)));
        this.scale.replaceChildren(shadeScale(value, this.head.no_ratios));
        this.list.refresh();
      },
    }, label));
    return el("span", { class: "segmented", role: "group", "aria-label": "Colour of tokens" }, buttons);
  }

  makeShown() {
    return el("div", { class: "tools shown", role: "group", "aria-label": "Parts that are shown" }, SHOWN.map(([name, label]) => el("button", {
      class: name, "aria-pressed": String(!saved.hidden.has(name)),
      onclick: (event) => {
        saved.hidden.has(name) ? saved.hidden.delete(name) : saved.hidden.add(name);
        event.currentTarget.setAttribute("aria-pressed", String(!saved.hidden.has(name)));
        this.list.refresh();
      },
    }, label)));
  }

  drawTurn(index) {
    const call = this.calls.get(index);
    const line = this.shape ? drawTurnLine(index, this.shape, this.head) : { left: [el("span", { class: "number" }, `Call ${count(index)}`)], right: [] };
    const hidden = new Set(SHOWN.filter(([name]) => saved.hidden.has(name)).flatMap(([, , kinds]) => kinds));
    const parts = call ? call.parts.filter((part) => !hidden.has(part.kind) && (part.kind !== "marker" || part.texts.join("").trim()))
      .map((part) => drawPart(part, index, this.look_, (start, end) => ask(`${this.path}/tokens`, { call: index, start, end }))) : [el("div", {}, "…")];
    return el("article", { class: `turn ${call ? "" : "pending"} ${this.search.has(index) ? "marked" : ""}`, "aria-label": `Call ${index}`, style: { "--rail": `${this.railWidth()}px` } },
      el("div", { class: "rail" }, this.shape ? this.drawRail(index) : ""),
      el("div", { class: "body" }, el("div", { class: "line" }, line.left, call ? problemChips(call) : "", el("span", { class: "right" }, line.right)), parts));
  }

  railWidth() {
    if (!this.shape) return 30;
    this.numLanes ??= Math.min(MAX_LANES, 1 + this.shape.lanes.reduce((most, lane) => Math.max(most, lane), 0));
    return 18 + LANE_PX * this.numLanes;
  }

  // Lines of the chains that are active at this call, and a dot on its own.
  drawRail(index) {
    const { lanes, chains } = this.shape;
    this.last ??= new Map(chains.map((chain, call) => [chain, call]));
    const x = (lane) => 12 + LANE_PX * Math.min(lane, MAX_LANES - 1);
    const lines = [];
    const running = this.runningAt(index);
    for (const chain of running) {
      const isOwn = chain === chains[index];
      const from = isOwn && chain === index ? 18 : 0;
      const to = isOwn && this.last.get(chain) === index ? 18 : 9999;
      const colour = `var(--c${(lanes[chain] % 8) + 1})`;
      if (to > from) lines.push(svg("line", { x1: x(lanes[chain]), x2: x(lanes[chain]), y1: from, y2: to, style: { stroke: colour, "stroke-width": "2", opacity: isOwn ? "1" : "0.45" } }));
    }
    return svg("svg", { "aria-hidden": "true" }, lines, svg("circle", { cx: x(lanes[index]), cy: 20, r: 4.5, style: { fill: `var(--c${(lanes[index] % 8) + 1})` } }));
  }

  // Chains that begin at or before a call and continue at or after it; the nearest if there are very many.
  runningAt(index) {
    const { chains } = this.shape;
    const found = new Set([chains[index]]);
    for (let call = index; call >= Math.max(0, index - 400) && found.size < MAX_LANES; call -= 1) {
      if (this.last.get(chains[call]) >= index) found.add(chains[call]);
    }
    return found;
  }
}

function describe(rows) {
  return el("dl", {}, rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function describeFiles(files) {
  return files.map((file) => el("details", { class: "file" }, el("summary", {}, `${file.path}, ${count(file.num_bytes)} bytes`),
    el("pre", {}, file.text === null ? "It is not text, or too long to be shown." : file.text)));
}

function rewardRows(head) {
  const parts = head.reward_parts;
  if (!parts) return [["total", "not judged yet"]];
  const verdict = head.artifacts.verdict ? JSON.parse(head.artifacts.verdict) : null;
  const rows = [["total", number(parts.total)], ["perf", number(parts.perf)], ["process", number(parts.process)], ["speed", number(parts.speed)]];
  if (verdict) rows.push(["verdict", verdict.reason]);
  const first = head.advantages?.find((value) => value !== null);
  if (first !== undefined) rows.push(["advantage, first call", number(first)]);
  if (head.artifacts.answer !== undefined) rows.push(["answer", head.artifacts.answer.slice(0, 300) || "(empty)"]);
  return rows;
}
