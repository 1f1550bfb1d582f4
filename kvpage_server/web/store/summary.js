// The summary at the top of the page. It repeats the figures in words.

import { spared } from "./engines.js";
import { bytes, count, percent, plural } from "./format.js";

const REASONS = { // of misses: the verb after "the keys"
  "never stored": "were never stored",
  evicted: "had been evicted",
  expired: "had expired",
  deleted: "had been deleted",
  "over quota": "were evicted for a quota",
};

/** Return the summary as text. `now`, `holdings` and `more` are the data of the last events; `holdings` and `more` are
 * null before the first one. */
export function summary(now, holdings, more) {
  if (!holdings) return "Looking through the store.";
  const sentences = [holdings.unseen || (holdings.agents.length ? most(holdings) : withoutAgents(now, holdings))];
  const [prefix] = holdings.prefixes;
  if (prefix) sentences.push(`${plural(prefix.count, "agent")} share their first ${plural(prefix.tokens, "token")}.`);
  const { hit_ratio: ratio } = now.traffic;
  const reused = spared(now.engines);
  if (ratio !== null) sentences.push(`${percent(ratio)} of reads found what they asked for${ratio < 1 ? missed(now.misses) : ""}.`);
  if (reused) sentences.push(`${percent(reused)} of the engines' prompt tokens were reused.`);
  const holes = holdings.agents.filter((agent) => agent.missing).length;
  if (holes) sentences.push(`${plural(holes, "context has", "contexts have")} lost blocks${evicted(more)}.`);
  return sentences.join(" ");
}

/** Return the first sentence for a store without agents. */
function withoutAgents({ contents, everything }, holdings) {
  if (!everything && holdings.request_count) return `${plural(holdings.request_count, "request")} without an agent, ${bytes(holdings.request_bytes)}.`;
  if (contents.blocks) return `${plural(contents.blocks, "block")} without an agent.`;
  if (contents.keys) return `${plural(contents.keys, "key")}, none of them a page.`;
  return everything ? "The store is empty." : "There is nothing that you may see.";
}

/** Return the first sentence for a store with agents: which one uses most memory, or has most stored. */
function most({ agents, agent_bytes: all }) {
  const [largest] = agents;
  if (!largest.bytes) return "No block of any agent is stored.";
  const part = `${bytes(largest.bytes)} of ${bytes(all)}`;
  const alike = agents.filter((agent) => agent.bytes === largest.bytes).length;
  if (alike > 1) return `${plural(alike, "context")} hold most, each ${part} stored.`;
  const inMemory = largest.memory >= largest.bytes && agents.every((agent) => agent.memory <= largest.memory);
  const alone = largest.own < largest.bytes ? `; ${bytes(largest.own)} of it no other agent has` : "";
  if (inMemory) return `${largest.id} uses most memory, ${part}${alone}.`;
  return `${largest.id} holds most: ${part} stored, ${bytes(largest.memory)} in memory.`;
}

/** Return the number of reads of pages, blocks and strings that missed, and the most frequent reason, as the end of a
 * sentence; "" without misses. `misses` are counts by reason. */
function missed(misses) {
  const all = Object.values(misses).reduce((sum, times) => sum + times, 0);
  if (!all) return "";
  const [[reason, times]] = Object.entries(misses).sort((a, b) => b[1] - a[1]);
  const part = times === all ? "" : `${count(times)} of them `;
  return `; ${plural(all, "read")} missed, ${part}because the keys ${REASONS[reason] ?? `are counted as "${reason}"`}`;
}

/** Return the end of a sentence about lost blocks: whether some of them were evicted. */
const evicted = (more) => (more?.losses.some((loss) => loss.why === "evicted") ? ", some of them evicted" : "");
