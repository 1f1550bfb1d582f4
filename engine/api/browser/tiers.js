// The tiers that supply prompt tokens: their order, and their names and marks on the page.

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

/** Return the mark and the name of a tier. */
export function chip(tier) {
  return el("span", { class: "chip" }, key(tier), WORDS[tier] ?? tier);
}

/** Return the mark of a tier. */
export function key(tier) {
  const drawn = mark(tier);
  drawn.classList.add("key");
  return drawn;
}
