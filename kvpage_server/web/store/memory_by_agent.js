// Memory by agent: a treemap that shows every stored byte once, and the list of shared prefixes.

import { at, el, first, list, say, widthOf } from "./dom.js";
import { ago, bytes, count, plural } from "./format.js";
import { treemap } from "./charts.js";
import { chosen } from "./context.js";

const TILES = 60; // at most; one more tile shows the sum of the others
const HEAT = [[60, 4], [600, 3], [3600, 2], [86400, 1]]; // [seconds since the last use, shade]
/** Return the CSS class of a tile. `idle` is seconds since the last use, null if unknown. */
const heat = (idle) => `heat-${HEAT.find(([within]) => idle !== null && idle < within)?.[1] ?? 0}`;

/** Return the bytes that sharing saves: the additional bytes if each agent stored its own copy of shared blocks. */
export const savedBySharing = (holdings) => holdings.shared.reduce((sum, group) => sum + group.bytes * (group.count - 1), 0);

/** Return `number`, a count as text, with "at least" before it if the server did not read all items of `kind`: "agents",
 * "blocks" or "requests". */
export const atLeast = (holdings, kind, number) => (holdings.cut.includes(kind) ? `at least ${number}` : number);

/** Return the note above the treemap: its meaning, the number of unreadable manifests, and exceeded limits. */
const remarks = ({ cut, unreadable, unseen }, { disk }) => unseen ? "" : [
  "one area for each agent, shared blocks once",
  ...(disk ? ["in memory or on disk"] : []),
  ...(unreadable ? [`${plural(unreadable, "manifest")} cannot be read`] : []),
  ...(cut.length ? [`incomplete: there are more ${cut.join(" and ")}`] : []),
].join("; ");

/** Draw the treemap, unless it is unchanged. `open` is called with the id of an agent whose tile is pressed, `redraw`
 * after a change of the width. */
export function showMemory(holdings, now, open, redraw) {
  say(at("memory-note"), remarks(holdings, now));
  const by = at("by").value;
  const tiles = { agent: byAgent, tenant: byTenant, tier: byTier }[by](holdings, now).filter((tile) => tile.value > 0);
  tiles.sort((a, b) => b.value - a.value);
  at("memory-empty").hidden = tiles.length > 0;
  say(at("memory-empty"), holdings.unseen || (now.everything
    ? "No pages are stored. Start an engine with this store, and its agents appear here." : "This user has access to no stored page."));
  const rest = tiles.splice(TILES);
  if (rest.length) {
    const value = rest.reduce((sum, tile) => sum + tile.value, 0);
    tiles.push({ key: "rest", name: `${count(rest.length)} more`, note: bytes(value), value, kind: "none", title: bytes(value) });
  }
  const box = at("memory");
  const width = Math.max(widthOf(box, redraw), 260);
  const drawn = JSON.stringify([tiles, width, chosen()]);
  if (box.drawn === drawn) return;
  box.drawn = drawn;
  const focused = box.contains(document.activeElement) ? [...box.querySelectorAll(".tile")].indexOf(document.activeElement) : -1;
  box.replaceChildren(tiles.length ? treemap(tiles, {
    width,
    height: width < 500 ? 320 : 400,
    name: `Memory by ${by}`,
    chosen: chosen() === null ? null : `agent ${chosen()}`,
    choose: (key) => open(key.slice("agent ".length)),
  }) : "");
  box.querySelectorAll(".tile")[focused]?.focus();
  legend(by);
}

/** Return the tiles of agents with their unshared bytes, of shared blocks and of other requests. */
function byAgent(holdings) {
  const own = holdings.agents.map((agent) => ({
    key: `agent ${agent.id}`,
    opens: true,
    name: agent.id,
    note: bytes(agent.own),
    value: agent.own,
    kind: heat(agent.idle),
    title: `${bytes(agent.own)} unshared, ${bytes(agent.bytes)} with shared blocks, ${plural(agent.tokens, "token")}`
      + (agent.idle === null ? "" : `, used ${ago(agent.idle)}`),
  }));
  return [...own, ...shared(holdings), ...others(holdings)];
}

/** Return a tile for the blocks of each group of agents that share them. */
const shared = (holdings) => holdings.shared.map((group, index) => ({
  key: `shared ${index}`,
  name: `shared by ${plural(group.count, "agent")}`,
  note: bytes(group.bytes),
  value: group.bytes,
  kind: "shared",
  title: `${bytes(group.bytes)}, ${plural(group.tokens, "token")}: ${group.agents.join(", ")}${group.count > group.agents.length ? " and others" : ""}`,
}));

/** Return a tile for each of the largest requests without an agent, one for the sum of the other requests, and one for
 * the sum of the agents that the server did not list. */
function others(holdings) {
  const named = holdings.requests.slice(0, 12);
  const listed = named.map((request) => ({
    key: `request ${request.id}`,
    name: request.id,
    note: bytes(request.bytes),
    value: request.bytes,
    kind: "none",
    title: `${bytes(request.bytes)}, without an agent`,
  }));
  const rest = holdings.request_bytes - named.reduce((sum, request) => sum + request.bytes, 0);
  const more = [
    ["requests", atLeast(holdings, "requests", plural(holdings.request_count - named.length, "other request")), rest],
    ["agents", atLeast(holdings, "agents", `${count(holdings.agent_count - holdings.agents.length)} other agents`), holdings.more_agents],
  ].map(([key, name, value]) => ({ key, name, note: bytes(value), value, kind: "none", title: bytes(value) }));
  return [...listed, ...more];
}

/** Return the tiles of tenants with their agents' unshared bytes, of shared blocks and of other requests. */
function byTenant(holdings) {
  const own = Object.entries(holdings.tenants).map(([tenant, value]) => ({
    key: `tenant ${tenant}`, name: tenant || "no tenant", note: bytes(value), value, kind: "heat-3", title: bytes(value),
  }));
  return [...own, ...shared(holdings), ...others(holdings)];
}

/** Return two tiles: bytes in memory, and bytes that are only on disk. */
function byTier(holdings, now) {
  const all = holdings.agent_bytes + holdings.request_bytes;
  const memory = Math.min(all, now.memory.live || all);
  return [["in memory", memory, "heat-3"], ["on disk only", all - memory, "heat-1"]].map(([name, value, kind]) => ({
    key: name, name, note: bytes(value), value, kind, title: bytes(value),
  }));
}

/** Show the legend of the treemap. `by` is the grouping that the user has chosen: "agent", "tenant" or "tier". */
function legend(by) {
  const kinds = by === "agent"
    ? [["heat-4", "used in the last minute"], ["heat-3", "10 minutes"], ["heat-2", "hour"], ["heat-1", "day"], ["heat-0", "longer ago"]]
    : by === "tenant" ? [["heat-3", "unshared blocks of a tenant"]] : [["heat-3", "memory"], ["heat-1", "disk"]];
  const both = by === "tier" ? [] : [["shared", "shared blocks"], ["none", "without an agent"]];
  list(at("memory-legend"), [...kinds, ...both], ([kind]) => kind, ([kind, word]) =>
    el("li", {}, el("span", { class: `key ${kind}` }), word));
}

/** Show the list of shared prefixes, each with its tokens, its agents, and the bytes that sharing saves. */
export function showSharedPrefixes(holdings) {
  at("shared-empty").hidden = holdings.prefixes.length > 0;
  say(at("shared-empty"), holdings.unseen ? "–" : holdings.agents.length ? "No agents share a prefix." : "There are no agents.");
  const most = Math.max(...holdings.prefixes.map((prefix) => prefix.saved), 1);
  list(at("shared"), first(holdings.prefixes, 6, at("shared-more")), (prefix) => prefix.agents.join() + prefix.tokens, (prefix) => {
    const line = el("i", { class: "shared" });
    line.style.width = `${(100 * prefix.saved) / most}%`;
    return el("li", {},
      el("b", {}, `${plural(prefix.tokens, "token")}, ${plural(prefix.count, "agent")}`),
      el("div", { class: "bar" }, line),
      el("span", { class: "soft" }, `${bytes(prefix.bytes)} once instead of ${count(prefix.count)} times: ${bytes(prefix.saved)} saved. `
        + names(prefix)));
  });
}

/** Return a name, cut to 32 characters, so that several fit into a line. */
const shortened = (name) => (name.length > 32 ? `${name.slice(0, 31)}…` : name);
/** Return the names of the first agents that share a prefix, and the number of the others. */
const names = (prefix) => prefix.agents.slice(0, 5).map(shortened).join(", ") + (prefix.count > 5 ? ` and ${count(prefix.count - 5)} more` : "");
