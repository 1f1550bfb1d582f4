// The context of one agent, as a row of blocks, and one block of it, as a matrix of layers and heads.

import { at, el, first, list, say, soon, svg } from "./dom.js";
import { bytes, count, moment, plural, seconds } from "./format.js";
import { walk } from "./charts.js";

const MAX_BLOCKS = 600; // in a row; the number of further blocks is shown as text
const REFRESH_MS = 5000; // between two reads of the open context
const PLANES = ["K", "V", "K scales", "K biases", "V scales", "V biases"];

let agent = null; // the id of the agent with the open context
let opened = 0; // time of the last read, in milliseconds of `performance.now`
let block = null; // the request id of the open block
let loading = false; // whether a request for a context is in progress

/** Return the id of the agent with the open context, or null. */
export const chosen = () => agent;

/** Open the context of an agent: read it, show it, and scroll to it. */
export function openAgent(id) {
  [agent, block, opened] = [id, null, 0];
  at("context").hidden = false;
  at("block").replaceChildren();
  say(at("context-title"), `The context of ${id}`);
  load().then(() => {
    at("context").scrollIntoView({ block: "nearest" });
    at("context-title").focus({ preventScroll: true });
  });
}

/** Read the open context again, if the last read was more than REFRESH_MS ago. */
export function showContext() {
  if (agent !== null && performance.now() - opened > REFRESH_MS) load();
}

/** Read the context of `agent` from the server, and show it. There is only one request at a time; if another agent was
 * opened meanwhile, its context is read next. */
async function load() {
  if (loading) return;
  loading = true;
  opened = performance.now();
  const wanted = agent;
  try {
    const reply = await fetch(`/page/agent?id=${encodeURIComponent(wanted)}`);
    const found = reply.ok ? await reply.json() : null;
    if (found && wanted === agent) soon(() => showContexts(found));
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // a TypeError is a lost connection, which the page's head shows
  } finally {
    loading = false;
    if (wanted !== agent && agent !== null) load();
  }
}

/** Show an agent's contexts, one for each model, as rows of blocks with a legend. */
function showContexts(contexts) {
  at("contexts").hidden = false;
  say(at("context-note"), contexts.length ? contexts.map((context) =>
    `${context.model}: ${plural(context.tokens, "token")}, ${context.found === context.tokens ? "all" : count(context.found)} restorable`).join("; ")
    : "The store has no context of this agent any more.");
  list(at("contexts"), contexts.map(({ id, model }) => ({ id, model })), ({ id, model }) => `${model} ${id}`, ({ model }) =>
    el("div", {}, el("div", { class: "blocks", role: "group", "aria-label": `Blocks under ${model}` }), el("p", { class: "soft" })));
  contexts.forEach(({ blocks }, i) => showBlocks(blocks, ...at("contexts").children[i].children));
  const words = [["page", "in memory"], ["cold", "on disk only"], ["shared", "top edge: shared"],
    ["page leased", "bottom bar: leased, pinned or kept"], ["missing", "missing"]];
  list(at("context-legend"), words, ([kind]) => kind, ([kind, word]) => el("li", {}, el("span", { class: `key ${kind}` }), word));
}

/** Show blocks as buttons in `box`, and the number of blocks beyond MAX_BLOCKS in `more`. The focus keeps its position. */
function showBlocks(blocks, box, more) {
  const focused = [...box.children].indexOf(document.activeElement);
  const shown = first(blocks, MAX_BLOCKS, more).map((each, index) => [each, index]);
  list(box, shown, ([, index]) => index, ([each, index]) => blockButton(each, index));
  box.children[focused]?.focus();
  if (!box.querySelector("[tabindex='0']")) box.firstElementChild?.setAttribute("tabindex", 0);
}

/** Return the button that opens a block. Its colour shows the tier, its marks show sharing, leases and pins. */
function blockButton(each, index) {
  const kind = each.there ? (each.tier === "disk" ? "cold" : "page") : "missing";
  const marks = `${each.shared > 1 ? " common" : ""}${each.lease || each.pinned || each.kept_until ? " leased" : ""}`;
  return el("button", {
    class: `block ${kind}${marks}`,
    type: "button",
    tabindex: index ? -1 : 0,
    title: describe(each, index),
    "aria-pressed": String(each.name === block),
    "data-name": each.name,
    click: () => open(each, index),
    keydown: (event) => walk(event, () => open(each, index)),
  });
}

/** Return a block as text: index, tokens, size and tier or the reason of its removal, sharing agents, lifetime, lease or pin. */
function describe(each, index) {
  const where = each.there ? `${bytes(each.bytes)} ${each.tier === "disk" ? "on disk" : "in memory"}` : `missing: ${each.why}${each.by ? ` by ${each.by}` : ""}${each.at ? ` at ${moment(each.at / 1000)}` : ""}`;
  const others = each.shared > 1 ? `, shared with ${each.with.join(", ")}${each.shared - 1 > each.with.length ? " and others" : ""}` : "";
  const lifetime = each.kept_until ? `, kept until ${moment(each.kept_until / 1000)}${each.kept_by ? ` for ${each.kept_by}` : ""}` : "";
  const kept = lifetime + (each.pinned ? ", pinned" : each.lease ? `, leased for ${seconds(each.lease / 1000)}` : "");
  return `Block ${count(index)}, ${plural(each.tokens, "token")}: ${where}${others}${kept}`;
}

/** Mark the button of the open block as pressed, and all others as not pressed. */
function markOpen() {
  for (const button of at("contexts").querySelectorAll(".block")) {
    const pressed = String(button.dataset.name === block);
    if (button.getAttribute("aria-pressed") !== pressed) button.setAttribute("aria-pressed", pressed);
  }
}

/** Open a block: read it from the server, and show it page by page, unless another one was opened meanwhile. */
async function open(each, index) {
  block = each.name;
  markOpen();
  const head = el("p", { class: "block-head" }, describe(each, index));
  at("block").replaceChildren(head);
  if (!each.there) return;
  const reply = await fetch(`/page/block?name=${each.name}`);
  const pages = reply.ok ? await reply.json() : null;
  if (block !== each.name) return;
  if (!pages) head.append(". Its pages cannot be shown: it was removed meanwhile, or is too large.");
  else at("block").append(...blockView(pages));
}

/** Return the elements that show a block: its shape, a matrix for each plane, and a table. `pages` is the server's reply:
 * planes, dtypes and page sizes in bytes of each plane, the numbers of layers and heads, and norms by layer, plane and
 * head. */
function blockView(pages) {
  const planes = pages.planes.map((plane) => PLANES[plane] ?? `plane ${plane}`);
  const sizes = planes.map((plane, i) => `${plane} ${pages.dtypes[i]}, ${bytes(pages.sizes[i])} a page`).join("; ");
  const note = el("p", { class: "soft" }, `${plural(pages.layers, "layer")}, ${plural(pages.heads, "head")}: ${sizes}.`);
  if (!pages.norms) return [note];
  const readout = el("p", { class: "soft" }, "Each square is a page: layers from left to right, heads from top to bottom. A stronger colour is a larger root mean square.");
  return [note, el("div", { class: "planes" }, ...planes.map((plane, i) => matrix(pages, plane, i, readout))), readout, byLayer(pages, planes)];
}

/** Return plane number `i` of a block as a matrix of squares: a column for each layer, a row for each head. The shade of
 * a square shows the root mean square of its page, and the pointer over it shows the number in `readout`. All squares of
 * a shade are one path, so the number of elements does not depend on the number of pages. */
function matrix(pages, plane, i, readout) {
  const norms = pages.norms.map((layer) => layer[i]);
  const known = norms.flat().filter((norm) => norm !== null);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const side = pages.heads > 32 || pages.layers > 64 ? 8 : 18;
  const shade = (norm) => Math.min(4, Math.floor((5 * (norm - low)) / Math.max(high - low, 1e-9)));
  const paths = ["", "", "", "", ""];
  norms.forEach((heads, layer) => heads.forEach((norm, head) => {
    if (norm !== null) paths[shade(norm)] += `M${layer * side} ${head * side}h${side - 1}v${side - 1}h${1 - side}z`;
  }));
  const width = pages.layers * side;
  const height = pages.heads * side;
  const name = `${plane}: root mean squares from ${low.toPrecision(3)} to ${high.toPrecision(3)}`;
  const point = (event) => {
    const layer = Math.floor(event.offsetX / side);
    const head = Math.floor(event.offsetY / side);
    const norm = norms[layer]?.[head];
    if (norm !== undefined && norm !== null) say(readout, `${plane}, layer ${layer}, head ${head}: root mean square ${norm}, ${bytes(pages.sizes[i])}`);
  };
  return el("figure", {},
    el("figcaption", { class: "soft" }, name),
    svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name, pointermove: point },
      ...paths.map((d, level) => svg("path", { d, class: `heat-${level}` }))));
}

/** Return a collapsed table with the root mean squares of each layer and plane, averaged over the heads. */
function byLayer(pages, planes) {
  const mean = (heads) => heads.reduce((sum, norm) => sum + (norm ?? 0), 0) / heads.length;
  return el("details", {},
    el("summary", {}, "Table by layer"),
    el("table", {},
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Layer"), ...planes.map((plane) => el("th", { scope: "col", class: "num" }, plane)))),
      el("tbody", {}, ...pages.norms.slice(0, 128).map((layer, number) =>
        el("tr", {}, el("td", {}, count(number)), ...layer.map((heads) => el("td", { class: "num" }, mean(heads).toFixed(3))))))));
}

at("context-close").addEventListener("click", () => {
  [agent, block] = [null, null];
  at("context").hidden = true;
  at("agents-title").scrollIntoView({ block: "nearest" });
});
