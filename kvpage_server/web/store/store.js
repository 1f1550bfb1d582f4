// The page of the store: it receives the server's events, and shows their data as figures, charts and tables.

import { at, bar, el, first, list, meter, say, soon, themes, widthOf } from "./dom.js";
import { ago, bytes, clock, count, percent, plural, seconds } from "./format.js";
import { columns, lines } from "./charts.js";
import { listen } from "./events.js";
import { showEngines } from "./engines.js";
import { summary } from "./summary.js";
import { showContext, openAgent } from "./context.js";
import { atLeast, savedBySharing, showMemory, showSharedPrefixes } from "./memory_by_agent.js";

const MAX_ROWS = 50; // of the table of agents
const SECONDS = 300; // the time that charts show
const BUCKET = 10; // seconds of a bar, or of a point of the hit ratio
const MONITOR = "monitor"; // the user of connections for metrics
const HIDDEN = "needs a user with access to every key";

// the data of the last event of each name; web/routes.py has their fields
let now = null; // the state of the store
let moments = []; // rates of the last SECONDS seconds, oldest first
let holdings = null; // memory by agent
let more = null; // losses, slow calls and clients

listen("/page/events", {
  state: (state, why) => {
    at("status").dataset.state = state;
    say(at("status"), state === "live" ? "live" : `${why ? "refused" : "disconnected"}, reconnecting`);
    if (why) say(at("summary"), why);
  },
  denied: async () => location.assign("/login"),
  received(name, data) {
    if (name === "overview") now = data;
    else if (name === "holdings") holdings = data;
    else if (name === "more") more = data;
    else {
      const last = moments.at(-1)?.at ?? 0;
      moments = [...moments, ...data.filter((moment) => moment.at > last)].slice(-SECONDS);
    }
    soon(...PARTS[name]);
  },
});

// -- figures ---------------------------------------------------------------------------------------------------------

function showFigures() {
  const { memory, disk, traffic, server, connections } = now;
  const last = moments.at(-1);
  say(at("server"), `kvpage ${server.version}, up ${seconds(server.uptime)}, user ${now.user}`);
  const unseen = holdings?.unseen;
  say(at("used"), unseen && !now.everything ? "–" : bytes(now.everything ? memory.used : storedBytes()));
  const onDisk = disk ? `, ${bytes(disk.bytes)}${disk.for_values ? ` of ${bytes(disk.for_values)}` : ""} on disk` : "";
  say(at("used-note"), now.everything ? (memory.limit ? `of ${bytes(memory.limit)}` : "no limit") + onDisk : limits());
  say(at("hits"), traffic.hit_ratio === null ? "–" : percent(traffic.hit_ratio));
  say(at("hits-note"), now.everything ? `${count(traffic.hits)} of ${plural(traffic.hits + traffic.misses, "read")}` : HIDDEN);
  const saved = holdings ? savedBySharing(holdings) : 0;
  say(at("saved"), unseen ? "–" : bytes(saved));
  say(at("saved-note"), saved ? `${(1 + saved / Math.max(holdings.agent_bytes, 1)).toFixed(1)} times the memory without sharing` : unseen ? "" : "no shared prefix");
  say(at("out"), last && now.everything ? `${bytes(last.out)}/s` : "–");
  say(at("in"), now.everything ? (last ? `input ${bytes(last.in)}/s, ${count(last.commands)} commands/s` : "") : HIDDEN);
  say(at("agents-count"), holdings && !unseen ? atLeast(holdings, "agents", count(holdings.agent_count)) : "–");
  say(at("agents-note"), now.everything ? `${plural(now.contents.blocks, "block")}, ${plural(connections.now, "client")}` : "");
  at("failing").hidden = !disk?.failing;
  if (disk?.failing) say(at("failing"), `Writes to disk fail: ${disk.failing}`);
  at("full").hidden = !disk?.full;
  if (disk?.full) say(at("full"), `maxdisk is reached: ${bytes(disk.bytes)} of ${bytes(disk.for_values)} for values, ${plural(disk.evicted, "value")} evicted`);
}

/** Return the stored bytes of all agents and other requests that the user may access. */
const storedBytes = () => (holdings ? holdings.agent_bytes + holdings.request_bytes : 0);

/** Return the note below the memory of a user without access to every key. It has the limit of the quota if exactly one
 * quota has a limit. */
function limits() {
  const [quota, ...others] = now.quotas.filter(({ limit }) => limit);
  return `in keys that this user may access${quota && !others.length ? `; quota ${bytes(quota.limit)}` : ""}`;
}

// -- over time -------------------------------------------------------------------------------------------------------

// CSS class of each reason of misses
const KINDS = { "never stored": "none", evicted: "hot", expired: "prefix", deleted: "cold", "over quota": "page" };

/** Draw the hit ratio, the misses by reason and the throughput of the last SECONDS seconds. */
function showCharts() {
  const buckets = new Map();
  for (const moment of moments) {
    const key = Math.floor(moment.at / BUCKET);
    const bucket = buckets.get(key) ?? buckets.set(key, { hits: 0, misses: 0, why: {} }).get(key);
    bucket.hits += moment.hits;
    bucket.misses += moment.misses;
    for (const [reason, rate] of Object.entries(moment.why)) bucket.why[reason] = (bucket.why[reason] ?? 0) + rate;
  }
  const end = Math.floor((moments.at(-1)?.at ?? 0) / BUCKET);
  const slots = Array.from({ length: SECONDS / BUCKET }, (_, index) => buckets.get(end - SECONDS / BUCKET + 1 + index));
  const ratios = slots.map((bucket) => (bucket && bucket.hits + bucket.misses > 0
    ? bucket.hits / (bucket.hits + bucket.misses) : null));
  const span = `${SECONDS / 60} min ago`;
  const none = now.everything ? `no reads in the last ${SECONDS / 60} minutes` : HIDDEN;
  say(at("ratio-note"), ratios.some((ratio) => ratio !== null) ? "of reads" : none);
  draw("ratio", (width) => lines([{ kind: "page", values: ratios }], {
    width, height: 170, name: `Hit ratio of the last ${SECONDS / 60} minutes`, format: percent, top: 1, span,
  }));
  const reasons = Object.keys(KINDS);
  const parts = slots.map((bucket) => Object.entries(bucket?.why ?? {})
    .sort(([a], [b]) => reasons.indexOf(a) - reasons.indexOf(b))
    .map(([reason, misses]) => [KINDS[reason] ?? "heat-4", misses]));
  draw("why", (width) => columns(parts, { width, height: 140, name: "Misses by reason over time", format: count, span }));
  const total = Object.entries(now.misses).filter(([, misses]) => misses).sort((a, b) => b[1] - a[1]);
  say(at("why-note"), total.length || !now.everything ? "" : "no misses");
  list(at("why-legend"), total, ([reason]) => reason, ([reason, misses]) =>
    el("li", {}, el("span", { class: `key ${KINDS[reason] ?? "heat-4"}` }), reason, el("b", {}, count(misses))));
  const flows = ["out", "in"].map((way) => ({
    kind: way === "out" ? "page" : "hot",
    values: [...Array(SECONDS - moments.length).fill(null), ...moments.map((moment) => moment[way])],
  }));
  draw("flow", (width) => lines(flows, { width, height: 140, name: "Network output and input in bytes per second", format: bytes, span }));
  const last = moments.at(-1);
  const rates = now.everything ? [["page", "output", last?.out ?? 0], ["hot", "input", last?.in ?? 0]] : [];
  say(at("flow-note"), now.everything ? "bytes/s" : HIDDEN);
  list(at("flow-legend"), rates, ([, way]) => way, ([kind, way, rate]) =>
    el("li", {}, el("span", { class: `key ${kind}` }), way, el("b", {}, `${bytes(rate)}/s`)));
}

/** Replace the content of the element `id` by a chart. `make` returns the chart for a width in pixels. */
function draw(id, make) {
  const box = at(id);
  box.replaceChildren(make(Math.max(widthOf(box, showCharts), 240)));
}

// -- tables ----------------------------------------------------------------------------------------------------------

// sort functions of agents, by the order that the user has chosen
const ORDERS = {
  largest: (a, b) => b.bytes - a.bytes,
  hottest: (a, b) => (a.idle ?? Infinity) - (b.idle ?? Infinity) || b.bytes - a.bytes,
  missing: (a, b) => b.tokens - b.found - (a.tokens - a.found) || b.bytes - a.bytes,
};

function showAgents() {
  if (!holdings) return;
  const wanted = at("find").value.trim().toLowerCase();
  const found = holdings.agents.filter((agent) => agent.id.toLowerCase().includes(wanted));
  found.sort(ORDERS[at("order").value]);
  const largest = Math.max(...holdings.agents.map((agent) => agent.bytes), 1);
  list(at("agents"), first(found, MAX_ROWS, at("agents-more")), (agent) => `${agent.id} ${agent.model}`, (agent) =>
    el("tr", {},
      el("td", {}, el("button", { class: "link clip", type: "button", title: agent.id, click: () => open(agent.id) }, agent.id),
        el("div", { class: "soft clip", title: agent.model }, agent.model)),
      meter(bar([["page", agent.own], ["shared", agent.bytes - agent.own]], largest), bytes(agent.bytes)),
      el("td", { class: "num" }, bytes(agent.own)),
      el("td", { class: "num" }, count(agent.tokens)),
      el("td", { class: agent.missing ? "num bad" : "num" }, agent.missing ? `${count(agent.found)}, ${plural(agent.missing, "block")} missing` : "all"),
      el("td", { class: "num soft" }, agent.idle === null ? "" : ago(agent.idle))));
}

function showRequests() {
  at("requests-empty").hidden = holdings.request_count > 0;
  say(at("requests-empty"), holdings.unseen ? "–" : holdings.agents.length ? "Every block belongs to an agent." : "No requests.");
  at("requests-box").hidden = !holdings.request_count;
  say(at("requests-note"), holdings.request_count
    ? atLeast(holdings, "requests", `${plural(holdings.request_count, "request")}, ${bytes(holdings.request_bytes)}`) : "");
  list(at("requests"), first(holdings.requests, 10, at("requests-more")), (request) => request.id, (request) =>
    el("tr", {},
      el("td", {}, el("span", { class: "mono clip", title: request.id }, request.id)),
      el("td", { class: "num" }, count(request.blocks)),
      el("td", { class: "num" }, count(request.pages)),
      el("td", { class: "num" }, bytes(request.bytes))));
}

function showLost() {
  const evicted = now.evictions.filter(({ keys }) => keys).map(({ policy, reason, keys }) => `${count(keys)} by ${policy} (${reason} limit)`);
  const none = now.everything ? "no evictions" : "";
  say(at("lost-note"), evicted.length ? `evicted keys: ${evicted.join("; ")}` : none);
  at("lost-empty").hidden = more.losses.length > 0;
  say(at("lost-empty"), holdings.unseen ? "–" : holdings.agents.length ? "All contexts are complete." : "There are no agents.");
  at("lost-box").hidden = !more.losses.length;
  list(at("lost"), more.losses.slice(0, 10), (loss) => loss.agent, (loss) =>
    el("tr", {},
      el("td", {}, el("span", { class: "name clip", title: loss.agent }, loss.agent)),
      el("td", {}, `${plural(loss.tokens, "token")}, from block ${count(loss.block)} on`),
      el("td", {}, loss.why + (loss.by ? ` by ${loss.by}` : "")),
      el("td", { class: "soft" }, clipped(loss.next)),
      el("td", { class: "num soft" }, loss.at ? clock(loss.at / 1000) : "")));
}

const clipped = (name) => el("span", { class: "clip", title: name }, name);

function showClients() {
  const { connected } = more;
  at("clients-empty").hidden = connected !== null;
  at("clients-box").hidden = connected === null;
  if (!connected) return;
  say(at("clients-note"), plural(connected.count, "connection"));
  list(at("clients"), first(connected.clients, 12, at("clients-more")), (client) => client.id, (client) =>
    el("tr", {},
      el("td", {}, clipped(client.user === MONITOR ? "this page and /metrics" : client.name || client["lib-name"] || "no name")),
      el("td", { class: "mono" }, client.addr),
      el("td", {}, clipped(client.user === MONITOR ? "" : client.user)),
      el("td", { class: "soft" }, client.cmd),
      el("td", { class: "num" }, seconds(Number(client.idle)))));
}

function showSlow() {
  const slow = more.slow ?? [];
  at("slow-empty").hidden = slow.length > 0;
  say(at("slow-empty"), more.slow ? "The slow log is empty." : "This user lacks the permission for SLOWLOG.");
  at("slow-box").hidden = !slow.length;
  list(at("slow"), slow.slice(0, 12), (call) => call.number, (call) =>
    el("tr", {},
      el("td", {}, el("span", { class: "mono clip", title: call.command }, call.command)),
      el("td", { class: "num" }, seconds(call.seconds)),
      el("td", { class: "num soft" }, clock(call.at))));
}

function showTiers() {
  const { memory, disk, quotas } = now;
  const parts = [
    ["page", "values", memory.live],
    ["heat-1", "allocated, free", memory.spare],
    ["prefix", "fragmentation", memory.fragmentation],
    ["hot", "client buffers", memory.in_flight],
  ].filter(([, , value]) => value > 0);
  const total = parts.reduce((sum, [, , value]) => sum + value, 0);
  at("tiers").replaceChildren(bar(parts.map(([kind, name, value]) => [kind, value, `${name}: ${bytes(value)}`]), total, true));
  const onDisk = [ // not in the bar: it is not in memory, or is a part of the values
    ["", "on disk", disk?.bytes ?? 0],
    ["", "saved in memory by the code", memory.coded_raw - memory.coded],
    ["", "saved on disk by the code", disk ? disk.coded_raw_bytes - disk.coded_bytes : 0],
    ["", "write queue", disk?.waiting_bytes ?? 0],
  ].filter(([, , value]) => value > 0);
  list(at("tiers-legend"), [...parts, ...onDisk], ([, name]) => name, ([kind, name, value]) =>
    el("li", {}, el("span", { class: kind && `key ${kind}` }), name, el("b", {}, bytes(value))));
  list(at("quotas"), quotas.slice(0, 12), (quota) => quota.pattern, (quota) =>
    el("div", { class: "quota" },
      el("div", { class: "mono" }, quota.pattern),
      bar([["page", quota.bytes]], quota.limit || quota.bytes),
      el("span", { class: "soft" }, `${bytes(quota.bytes)}${quota.limit ? ` of ${bytes(quota.limit)}` : ""}, ${plural(quota.evicted, "key")} evicted`)));
}

// -- memory by agent -------------------------------------------------------------------------------------------------

function showTreemap() {
  if (holdings) showMemory(holdings, now, open, showTreemap);
}

/** Open the context of an agent, and highlight its tile. */
function open(agent) {
  openAgent(agent);
  soon(showTreemap);
}

// -- functions that draw the data of each event, in the order of their calls -----------------------------------------

const showSummary = () => say(at("summary"), summary(now, holdings, more));

const PARTS = {
  overview: [showFigures, showTiers, () => showEngines(now), showContext, showSummary],
  moments: [showFigures, showCharts],
  holdings: [showTreemap, () => showSharedPrefixes(holdings), showAgents, showRequests, showFigures, showSummary],
  more: [showLost, showClients, showSlow, showSummary],
};

for (const id of ["find", "order"]) at(id).addEventListener("input", () => soon(showAgents));
at("by").addEventListener("input", () => soon(showTreemap));
at("context-close").addEventListener("click", () => soon(showTreemap));
themes(at("theme"));
