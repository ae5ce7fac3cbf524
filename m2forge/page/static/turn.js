// One call of an episode: the new part of its prompt, and its sampled tokens, part by part, with coloured tokens.

import { el, hideTip, showTip, tipRow } from "./dom.js";
import { count, duration, number, signed } from "./format.js";

export const KINDS = {
  system: "System", user: "User", observation: "Observation", assistant: "Assistant, as sent", thinking: "Thinking",
  content: "Content", call: "Call", marker: "", context: "Context",
};
const LONG = 420;
const BELOW = [-0.1, -0.5, -1.2, -2.5, -4.5];
const facts = new WeakMap();
const FACTORS = [1.05, 1.25, 2];
export const logprobLook = { colour: "logprob", advantages: null, largest: 0 };

// Surprise of the policy: six shades from a logprob of 0 down.
export function logprobShade(logprob) {
  let shade = 0;
  while (shade < BELOW.length && logprob < BELOW[shade]) shade += 1;
  return shade ? `l${shade}` : "";
}

// Relative to the largest of the episode; values near 0 have no colour.
export function advantageShade(advantage, largest) {
  if (!advantage || !largest) return "";
  const level = Math.ceil((3 * Math.abs(advantage)) / largest - 0.01);
  return level < 1 ? "" : `${advantage > 0 ? "p" : "n"}${Math.min(3, level)}`;
}

// Importance ratio when the token was trained: a factor of more than 1.05, 1.25 or 2 either way.
export function ratioShade(ratio) {
  if (ratio === null || ratio === undefined) return "";
  const factor = Math.max(ratio, 1 / ratio);
  const level = FACTORS.filter((least) => factor > least).length;
  return level ? `${ratio > 1 ? "p" : "n"}${level}` : "";
}

export function shadeScale(colour, noRatios = null) {
  if (colour === "logprob") {
    return el("span", { class: "scale" }, "likely", [1, 2, 3, 4, 5].map((shade) => el("i", { class: `l${shade}` })), "unlikely");
  }
  if (colour === "advantage") {
    return el("span", { class: "scale" }, "worse", ["n3", "n2", "n1", "p1", "p2", "p3"].map((shade) => el("i", { class: shade })), "better");
  }
  if (colour === "ratio") {
    return el("span", { class: "scale" }, noRatios ? `no ratios: ${noRatios}` : ["less likely", ["n3", "n2", "n1", "p1", "p2", "p3"].map((shade) => el("i", { class: shade })), "likelier when trained"]);
  }
  return "";
}

function shadeOf(look, logprob, advantage, ratio) {
  if (look.colour === "advantage") return advantageShade(advantage, look.largest);
  return look.colour === "ratio" ? ratioShade(ratio) : logprobShade(logprob);
}

export function drawPart(part, call, look, onMore = null) {
  const text = el("pre", { class: "text" });
  const isSampled = part.logprobs !== undefined;
  const shown = el("div", { class: `part ${part.kind}` }, el("div", { class: "name" }, KINDS[part.kind] ?? part.kind), text);
  write(text, part, call, look, isSampled);
  const length = part.texts.reduce((sum, piece) => sum + piece.length, 0);
  if (!isSampled && part.kind !== "observation" && length > LONG) {
    shown.classList.add("long");
    shown.append(el("button", { class: "more", onclick: (event) => {
      event.target.textContent = shown.classList.toggle("open") ? "show less" : "show all";
    } }, "show all"));
  }
  const left = part.num_tokens - part.texts.length;
  if (left > 0) {
    shown.append(el("button", { class: "more", disabled: !onMore, onclick: async (event) => {
      event.target.disabled = true;
      const more = await onMore(part.start + part.texts.length, part.start + part.num_tokens);
      event.target.remove();
      shown.classList.add("open");
      write(text, { ...part, ...more }, call, look, isSampled);
    } }, ` ${count(left)} more tokens`));
  }
  return shown;
}

function write(home, part, call, look, isSampled) {
  if (!isSampled || look.colour === "none") {
    home.append(part.texts.join(""));
    return;
  }
  const advantage = look.advantages?.[call] ?? null;
  part.texts.forEach((text, index) => {
    const logprob = part.logprobs[index];
    const ratio = part.ratios?.[index] ?? null;
    const shade = shadeOf(look, logprob, advantage, ratio);
    const token = el("span", { class: shade ? `t ${shade}` : "t" }, text);
    facts.set(token, { text, logprob, advantage, ratio, place: part.start + index });
    home.append(token);
  });
}

// One event listener for all tokens below `home`.
export function explainTokens(home) {
  home.addEventListener("pointerover", (event) => {
    const fact = event.target.classList?.contains("t") ? facts.get(event.target) : null;
    if (!fact) return hideTip();
    return showTip(event.clientX, event.clientY, el("pre", {}, JSON.stringify(fact.text)),
      tipRow("transparent", "log-probability", number(fact.logprob)), tipRow("transparent", "probability", number(Math.exp(fact.logprob))),
      fact.ratio === null ? "" : tipRow("transparent", "ratio when trained", number(fact.ratio)),
      fact.advantage === null ? "" : tipRow("transparent", "advantage of its call", signed(fact.advantage)),
      tipRow("transparent", "position in the context", count(fact.place)));
  });
  home.addEventListener("pointerleave", hideTip);
}

export function drawTurnLine(call, shape, head) {
  const { parents, starts, prompts, ends, logprobs, durations_s: seconds } = shape;
  const parent = parents[call];
  const isBranch = parent >= 0 && (starts[call] !== ends[parent] || shape.chains[call] === call);
  const numNew = prompts[call] - Math.min(starts[call], prompts[call]);
  const reward = head.step_rewards?.[call];
  const advantage = head.advantages?.[call];
  const fact = (label, value, title) => el("span", { title }, `${label} `, el("b", {}, value));
  return {
    isBranch,
    left: [el("span", { class: "number" }, `Call ${count(call)}`),
      parent < 0 ? el("span", { class: "chip" }, call ? "new root" : "root") : "",
      roleChip(head, call),
      isBranch ? el("a", { class: "chip hot", href: `#/episode/${head.id}?call=${parent}` }, `branches off call ${count(parent)} at token ${count(starts[call])}`) : "",
      el("span", {}, `+${count(numNew)} sent, ${count(ends[call] - prompts[call])} sampled`)],
    right: [reward ? fact("reward", number(reward), "of this step") : "", advantage === undefined || advantage === null ? "" : fact("advantage", signed(advantage), "by the rewards of its group"),
      logprobs[call] === null ? "" : fact("log-prob", number(logprobs[call]), "mean of the sampled tokens"), fact("took", duration(seconds[call]))],
  };
}

const ROLES = {
  side: ["side call", "one request without tools beside a conversation that has them"],
  sub_agent: ["sub-agent", "another conversation than the main one"],
};

function roleChip(head, call) {
  const [name, title] = ROLES[head.roles?.[call]] ?? [];
  if (!name) return "";
  const isTrained = !head.advantages || head.advantages[call] !== null;
  return el("span", { class: "chip", title }, isTrained ? name : `${name}, not trained`);
}

export function problemChips(call) {
  return [
    ...call.tools.map((name) => el("span", { class: "chip" }, `⚒ ${name}`)),
    ...call.problems.map((problem) => el("span", { class: "chip bad", title: problem.detail }, problem.kind.replaceAll("_", " "))),
    call.finish_reason === "stop" ? "" : el("span", { class: "chip bad" }, call.finish_reason === "length" ? "cut off by its length" : "aborted"),
    call.asked ? el("span", { class: "chip", title: `the request asked for ${JSON.stringify(call.asked)}` }, "sampling set by the run") : "",
    ...call.notices.map((notice) => el("span", { class: "chip", title: `not honoured by the gateway: ${notice}` }, notice.split(":")[0])),
  ];
}
