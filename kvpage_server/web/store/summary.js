// The summary at the top of the page: the most important figures as sentences.

import { reusedShare } from "./engines.js";
import { bytes, count, percent, plural } from "./format.js";

const REASONS = { // reasons of misses as a verb that follows "the keys"
  "never stored": "were never stored",
  evicted: "were evicted",
  expired: "had expired",
  deleted: "were deleted",
  "over quota": "were evicted for a quota",
};

/** Return the summary as text. `now`, `holdings` and `more` are the data of the last event of each name; `holdings` and
 * `more` are null before the first one. */
export function summary(now, holdings, more) {
  if (!holdings) return "Reading the store.";
  const sentences = [holdings.unseen || (holdings.agents.length ? most(holdings) : withoutAgents(now, holdings))];
  const [prefix] = holdings.prefixes;
  if (prefix) sentences.push(`${plural(prefix.count, "agent")} share their first ${plural(prefix.tokens, "token")}.`);
  const { hit_ratio: ratio } = now.traffic;
  const reused = reusedShare(now.engines);
  if (ratio !== null) sentences.push(`Hit ratio ${percent(ratio)}${ratio < 1 ? missed(now.misses) : ""}.`);
  if (reused) sentences.push(`${percent(reused)} of the engines' prompt tokens were reused.`);
  const holes = holdings.agents.filter((agent) => agent.missing).length;
  if (holes) sentences.push(`${plural(holes, "context has", "contexts have")} missing blocks${evicted(more)}.`);
  return sentences.join(" ");
}

/** Return the first sentence for a store without agents. */
function withoutAgents({ contents, everything }, holdings) {
  if (!everything && holdings.request_count) return `${plural(holdings.request_count, "request")} without an agent, ${bytes(holdings.request_bytes)}.`;
  if (contents.blocks) return `${plural(contents.blocks, "block")} without an agent.`;
  if (contents.keys) return `${plural(contents.keys, "key")}, none of them a page.`;
  return everything ? "The store is empty." : "This user has access to no stored key.";
}

/** Return the first sentence for a store with agents: the largest context, or contexts if several have its size. */
function most({ agents, agent_bytes: all }) {
  const [largest] = agents;
  if (!largest.bytes) return "No block of any agent is stored.";
  const part = `${bytes(largest.bytes)} of ${bytes(all)}`;
  const equal = agents.filter((agent) => agent.bytes === largest.bytes).length;
  if (equal > 1) return `The ${plural(equal, "largest context", "largest contexts")} use ${part} each.`;
  const inMemory = largest.memory >= largest.bytes && agents.every((agent) => agent.memory <= largest.memory);
  const unshared = largest.own < largest.bytes ? `; ${bytes(largest.own)} of it unshared` : "";
  if (inMemory) return `${largest.id} uses most memory, ${part}${unshared}.`;
  return `${largest.id} has the largest context: ${part} stored, ${bytes(largest.memory)} in memory.`;
}

/** Return the end of a sentence: the number of missed reads of pages, blocks and strings, and their most frequent reason.
 * Return "" without misses. `misses` are counts by reason. */
function missed(misses) {
  const all = Object.values(misses).reduce((sum, times) => sum + times, 0);
  if (!all) return "";
  const [[reason, times]] = Object.entries(misses).sort((a, b) => b[1] - a[1]);
  const part = times === all ? "" : `${count(times)} of them `;
  return `; ${plural(all, "read")} missed, ${part}because the keys ${REASONS[reason] ?? `are counted as "${reason}"`}`;
}

/** Return the end of a sentence about lost blocks: whether some of them were evicted. */
const evicted = (more) => (more?.losses.some((loss) => loss.why === "evicted") ? ", some of them evicted" : "");
