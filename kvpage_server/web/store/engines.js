// Statistics of engines: the share of reused prompt tokens, and a table with the tokens of each engine by source.

import { at, bar, el, first, list, meter, say } from "./dom.js";
import { bytes, count, percent, plural, seconds } from "./format.js";

const TIERS = [["hot", "memory"], ["prefix", "shared prefixes"], ["page", "this store"], ["cold", "files"]];

// the reused prompt tokens of an engine, and all its prompt tokens
const sum = (values) => values.reduce((all, value) => all + value, 0);
const found = (engine) => sum(TIERS.map(([tier]) => engine.tiers[tier].tokens));
const prompts = (engine) => found(engine) + engine.computed;

/** Return the share of reused prompt tokens of all engines, from 0 to 1; null without prompts. */
export const reusedShare = (engines) => (engines.some(prompts) ? sum(engines.map(found)) / sum(engines.map(prompts)) : null);

/** Return the share part / all as text; "–" if `all` is 0. */
const ratio = (part, all) => (all ? percent(part / all) : "–");

/** Show the share of reused prompt tokens, and a table of engines. Both are hidden if the user lacks access to some keys,
 * and no engine has logged in as the same user. */
export function showEngines({ engines, everything }) {
  at("engines-card").hidden = at("spared-box").hidden = !everything && !engines.length;
  const [reused, all] = [sum(engines.map(found)), sum(engines.map(prompts))];
  say(at("spared"), ratio(reused, all));
  const spared = sum(engines.map((engine) => engine.seconds_saved));
  const saved = spared >= 1 ? `, ${seconds(Math.round(spared))} of prefill saved` : "";
  say(at("spared-note"), `${count(reused)} of ${plural(all, "token")}, ${plural(engines.length, "engine")}${saved}`);
  at("engines-empty").hidden = engines.length > 0;
  at("engines-box").hidden = !engines.length;
  list(at("engines"), first(engines, 20, at("engines-more")), (engine) => engine.name, (engine) =>
    el("tr", {},
      el("td", {}, el("span", { class: "name clip", title: engine.name }, engine.name), el("div", { class: "soft clip", title: engine.model }, engine.model)),
      meter(bar(parts(engine), prompts(engine)), `${ratio(found(engine), prompts(engine))} of ${plural(prompts(engine), "token")}`),
      ...TIERS.map(([tier]) => el("td", { class: "num" }, count(engine.tiers[tier].tokens))),
      el("td", { class: "num" }, bytes(engine.tiers.page.bytes)),
      el("td", { class: "num" }, count(engine.answers)),
      el("td", { class: "num" }, bytes(engine.used) + (engine.room ? ` of ${bytes(engine.room)}` : ""))));
}

/** Return the parts of an engine's bar: its reused tokens by tier. */
const parts = (engine) => TIERS.map(([tier, name]) =>
  [tier, engine.tiers[tier].tokens, `${plural(engine.tiers[tier].tokens, "token")} from ${name}`]);
