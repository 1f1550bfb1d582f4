// Where a prompt's beginning was found: in this order everywhere, with these words and marks.

import { el } from "./dom.js";
import { mark } from "./charts.js";

export const TIERS = ["hot", "prefix", "page", "cold"];

export const WORDS = {
  hot: "memory",
  prefix: "shared prefix",
  page: "page server",
  cold: "file",
  none: "computed",
};

/** The mark of a tier, and its word. */
export function chip(tier) {
  return el("span", { class: "chip" }, key(tier), WORDS[tier] ?? tier);
}

/** The mark alone. */
export function key(tier) {
  const drawn = mark(tier);
  drawn.classList.add("key");
  return drawn;
}
