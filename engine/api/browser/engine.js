// The engine's page: it receives the server's events, and shows its state, answers and agents.

import { at, bar, el, first, list, meter, say, soon, themes, widthOf } from "./dom.js";
import { ago, bytes, clock, count, median, percent, plural, seconds } from "./format.js";
import { scatter } from "./charts.js";
import { listen } from "./events.js";
import { TIERS, WORDS, chip, key } from "./tiers.js";
import { chat } from "./chat.js";
import { askForToken, authHeaders } from "./token.js";

const MAX_ROWS = 50; // of each table
const POINTS = 200; // answers in the chart

let state = null;
let agents = { count: 0, agents: [] };
let answers = []; // newest first

listen("/page/events", {
  headers: authHeaders,
  denied: askForToken,
  state: (now) => {
    at("status").dataset.state = now;
    say(at("status"), now === "live" ? "live" : "disconnected, reconnecting");
  },
  received(name, data) {
    if (name === "state") state = data;
    else if (name === "agents") agents = data;
    else {
      // After a reconnection, the server sends all answers that it has. They replace the page's answers with the same
      // and higher numbers, because the numbers of a restarted engine begin again.
      const older = answers.filter((answer) => answer.number < data[0].number);
      answers = [...data.reverse(), ...older].slice(0, 500);
    }
    soon(...PARTS[name]);
  },
});

const reused = () => TIERS.reduce((sum, tier) => sum + (state.totals.reused[tier] ?? 0), 0);
const computed = () => answers.filter((answer) => !answer.reused);
const restored = () => answers.filter((answer) => answer.reused);

/** Return the mean time to first token of answers, in seconds per thousand prompt tokens; null without answers. */
function secondsPerThousand(those) {
  const tokens = those.reduce((sum, answer) => sum + answer.prompt, 0);
  return tokens ? (1000 * those.reduce((sum, answer) => sum + answer.first_seconds, 0)) / tokens : null;
}

/** Return a description of the page server's failure; null if there is none. The text changes only with the state, because
 * screen readers read it aloud. */
function storeFailure({ store, at: now }) {
  if (store.store === "unreachable")
    return `The page server cannot be reached since ${clock(now - store.seconds)} (${store.reason}). Contexts stay in this engine's memory.`;
  if (store.store === "connecting") return "The page server has not answered yet. Contexts stay in this engine's memory.";
  if (store.store === "not saving") return `The page server refuses contexts (${store.reason}). They stay in this engine's memory.`;
  return null;
}

function showAlarm() {
  const words = storeFailure(state);
  at("alarm").hidden = words === null;
  say(at("alarm"), words ?? "");
  showAgents();
}

const unsaved = () => (!state?.saves ? "in memory only" : storeFailure(state) ? "not saved" : "being saved");

function showFigures() {
  const { totals, memory, running } = state;
  const share = totals.prompt ? reused() / totals.prompt : null;
  say(at("share"), share === null ? "–" : percent(share));
  say(at("share-note"), totals.prompt ? `of ${plural(totals.prompt, "prompt token")}` : "no prompts yet");
  const [cold, cached] = [secondsPerThousand(computed()), secondsPerThousand(restored())];
  say(at("computed"), cold === null ? "–" : seconds(cold));
  say(at("computed-note"), cold === null ? "no answers yet" : "per 1,000 prompt tokens");
  say(at("restored"), cached === null ? "–" : seconds(cached));
  say(at("restored-note"), cached === null ? "no answers yet"
    : `per 1,000 prompt tokens${cold > cached ? `; ${(cold / cached).toFixed(1)} times faster` : ""}`);
  say(at("batch-count"), count(running.length));
  const waiting = running.filter((each) => each.stage !== "running").length;
  say(at("batch-note"), `${count(waiting)} waiting`);
  at("memory-box").hidden = !memory;
  if (memory) {
    say(at("memory"), bytes(memory.used));
    say(at("memory-note"), `of ${bytes(memory.total)}`);
  }
  say(at("summary"), summary(totals, share));
}

function summary(totals, share) {
  if (!totals.answers) return "No requests yet. Try an agent: its second turn reuses the tokens of the first one.";
  const most = [...TIERS].sort((a, b) => (totals.reused[b] ?? 0) - (totals.reused[a] ?? 0))[0];
  const from = { hot: "memory", prefix: "shared prefixes", page: "the page server", cold: "files" }[most];
  if (!share) return `${plural(totals.answers, "answer")}, and no prompt tokens were reused.`;
  return `${percent(share)} of the prompt tokens of ${plural(totals.answers, "answer")} were reused, most of them from ${from}.`;
}

function showTiers() {
  const { totals } = state;
  const parts = [...TIERS.map((tier) => [tier, totals.reused[tier] ?? 0]), ["none", totals.prompt - reused()]];
  at("from").replaceChildren(bar(parts, totals.prompt, true));
  list(at("from-legend"), parts, ([tier]) => tier, ([tier, tokens]) =>
    el("li", {}, key(tier), WORDS[tier], el("b", {}, count(tokens)), totals.prompt ? percent(tokens / totals.prompt) : ""));
}

function showFirst() {
  const points = answers.slice(0, POINTS).map((answer) => ({
    x: answer.prompt,
    y: answer.first_seconds,
    kind: answer.reused ? answer.tier : "none",
    title: `${answer.agent ?? (answer.label || "no agent")}: ${seconds(answer.first_seconds)} for ${plural(answer.prompt, "token")}, `
      + `${count(answer.reused)} reused`,
  }));
  const kinds = ["computed", "restored"].map((word) => [word, word === "computed" ? computed() : restored()]);
  const medians = kinds.map(([word, those]) => `${word}: ${those.length
    ? `median ${seconds(median(those.map((answer) => answer.first_seconds)))} of ${those.length}` : "none"}`);
  const box = at("first");
  box.replaceChildren(scatter(points, {
    width: Math.max(widthOf(box, showFirst), 260),
    height: 230,
    name: `Time to first token. ${medians.join("; ")}.`,
    formatX: count,
    formatY: seconds,
    labelX: "prompt tokens",
  }));
}

const STAGES = { // of a request before its first token
  submitted: "waiting for memory",
  loading: "loading its context",
  waiting: "waiting for blocks of another request",
  ready: "scheduled",
  running: "prefill",
};

function showBatch() {
  const running = first(state.running, MAX_ROWS, at("batch-more"));
  at("batch-empty").hidden = running.length > 0;
  at("batch-box").hidden = !running.length;
  list(at("batch"), running, (each) => `${each.uid} ${each.model}`, (each) =>
    el("tr", {},
      el("td", {}, name(each.agent_id ?? (each.label || null))),
      el("td", { class: "soft" }, each.generated ? "decode" : STAGES[each.stage]),
      meter(prompt(each), `${count(each.reused)} of ${count(each.prompt)}`),
      el("td", { class: "num" }, plural(each.generated, "token")),
      el("td", { class: "num" }, seconds(each.seconds))));
}

/** Return whether an answer's prompt was pre-warmed, its breakpoints, and its tokens that are kept until when. */
function lifetime({ prewarmed, breakpoints, kept, kept_until: until }) {
  const parts = prewarmed ? ["pre-warmed"] : [];
  if (breakpoints) parts.push(plural(breakpoints, "breakpoint"));
  if (kept !== null) parts.push(kept ? `${plural(kept, "token")} until ${clock(until)}` : "nothing kept");
  return parts.join(", ");
}

function showAnswers() {
  const shown = first(answers, MAX_ROWS, at("answers-more"));
  at("answers-empty").hidden = shown.length > 0;
  at("answers-box").hidden = !shown.length;
  list(at("answers"), shown, (answer) => answer.number, (answer) =>
    el("tr", {},
      el("td", {}, name(answer.agent ?? (answer.label || null))),
      meter(prompt(answer), `${count(answer.reused)} of ${count(answer.prompt)}`),
      el("td", {}, chip(answer.reused ? answer.tier : "none")),
      el("td", { class: "num" }, seconds(answer.first_seconds)),
      el("td", { class: "soft" }, lifetime(answer)),
      el("td", { class: "soft" }, answer.why ?? ""),
      el("td", { class: "num soft" }, clock(answer.at))));
}

function showAgents() {
  const wanted = at("agents-find").value.trim();
  const found = agents.agents.filter((agent) => agent.id.includes(wanted));
  const largest = Math.max(...agents.agents.map((agent) => agent.bytes), 1);
  const several = new Set(agents.agents.map((agent) => agent.model)).size > 1;
  const shown = first(found, MAX_ROWS, at("agents-more"));
  say(at("agents-note"), agents.count ? `${plural(agents.count, "agent")}, the largest first` : "");
  at("agents-empty").hidden = agents.count > 0;
  at("agents-box").hidden = !agents.count;
  list(at("agents"), shown, (agent) => `${agent.id} ${agent.model}`, (agent) =>
    el("tr", {},
      el("td", {}, name(agent.id), several ? el("span", { class: "soft" }, ` ${agent.model}`) : ""),
      el("td", { class: "num" }, count(agent.tokens)),
      meter(bar([[agent.tiers[0] ?? "none", agent.bytes]], largest), bytes(agent.bytes)),
      el("td", {}, ...agent.tiers.map(chip)),
      el("td", { class: "soft num" }, [agent.pinned ? "pinned" : "", agent.saved ? "" : unsaved()].filter(Boolean).join(", "))));
}

const name = (agent) => el("span", { class: agent === null ? "soft" : "name clip", title: agent }, agent ?? "no agent");

const prompt = (each) =>
  bar([[each.tier, each.reused], ["none", each.prompt - each.reused]], each.prompt);

const PARTS = { // the functions that draw the data of each event
  state: [showAlarm, showFigures, showTiers, showBatch],
  answers: [showFigures, showFirst, showAnswers],
  agents: [showAgents],
};

at("agents-find").addEventListener("input", () => soon(showAgents));
themes(at("theme"));
chat().then((models) => say(at("model"), models.join(", ")));
