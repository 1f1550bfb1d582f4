// Creation of elements without HTML: names from clients are inserted as text, with escapes for unprintable characters.

import { count } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

/** Create an HTML element. An attribute that is a function is a listener for the event with the attribute's name; null,
 * undefined and false are omitted, true is an empty value. `children` are nodes, or values that become text; null ones
 * are omitted. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Create an SVG element, with the same arguments as `el`. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

const UNPRINTABLE = /[\p{C}\p{Z}]/gu;

/** Return text with escapes for invisible characters, line ends and changes of direction, as `kvpage ls` prints it. */
export const printable = (text) => text.replace(UNPRINTABLE, (letter) => {
  if (letter === " ") return letter;
  const code = letter.codePointAt(0);
  const [kind, digits] = code < 256 ? ["x", 2] : code < 65536 ? ["u", 4] : ["U", 8];
  return `\\${kind}${code.toString(16).padStart(digits, "0")}`;
});

/** Set attributes and listeners, and append children, as `el` describes. Return the node. */
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : printable(String(value)));
  }
  const there = children.filter((child) => child !== null && child !== undefined);
  node.append(...there.map((child) => (child instanceof Node ? child : printable(String(child)))));
  return node;
}

/** Return the element with this id. */
export const at = (id) => document.getElementById(id);

/** Set the text of a node if it differs, because screen readers repeat a text that is set again. */
export function say(node, text) {
  text = printable(String(text));
  if (node.textContent !== text) node.textContent = text;
}

const MADE = 150; // elements that one call of `list` creates before it leaves the rest to the next frame

/** Make the children of `parent` the nodes of `items`, in their order. `key(item)` identifies an item, `make(item)`
 * returns its node. A node is kept if the item with its key has the same JSON as in the last call. If many nodes are new,
 * the next frames create the rest; a later call with other items cancels that. */
export function list(parent, items, key, make) {
  const old = parent.shown ?? new Map();
  const now = new Map();
  const more = () => parent.items === items && list(parent, items, key, make);
  parent.items = items;
  parent.shown = now;
  let before = parent.firstElementChild;
  let made = 0;
  for (const item of items) {
    let name = key(item);
    while (now.has(name)) name = `${name}+`; // another item has the same key
    const content = JSON.stringify(item);
    let entry = old.get(name);
    if (!entry || entry.content !== content) {
      if (made > MADE) {
        for (const [each, there] of old) if (!now.has(each)) now.set(each, there);
        return soon(more);
      }
      const node = make(item);
      made += 1 + node.getElementsByTagName("*").length;
      if (entry) {
        if (before === entry.node) before = node;
        entry.node.replaceWith(node);
      }
      entry = { node, content };
    }
    now.set(name, entry);
    if (entry.node === before) before = before.nextElementSibling;
    else parent.insertBefore(entry.node, before);
  }
  for (const [name, { node }] of old) if (!now.has(name)) node.remove();
  return null;
}

const FRAME_MS = 4; // after which the remaining functions wait for the next frame

const due = new Set();
let framed = false;

/** Call functions in the next frames, in order. A function that waits already is not added again. */
export function soon(...works) {
  for (const work of works) due.add(work);
  if (due.size && !framed) requestAnimationFrame(frame);
  framed = due.size > 0;
}

/** Call the waiting functions for FRAME_MS at most. */
function frame() {
  const end = performance.now() + FRAME_MS;
  framed = false;
  try {
    for (const work of due) {
      due.delete(work);
      work();
      if (performance.now() > end) break;
    }
  } finally {
    soon();
  }
}

const widths = new WeakMap();

/** Return the width of a box in pixels. The first call measures it, and registers `redraw`, which is called in the next
 * frame after each change of the width. Further calls for the same box return the known width, and ignore `redraw`. */
export function widthOf(box, redraw) {
  if (!widths.has(box)) {
    widths.set(box, box.clientWidth);
    new ResizeObserver(() => {
      if (widths.get(box) === box.clientWidth) return;
      widths.set(box, box.clientWidth);
      soon(redraw);
    }).observe(box);
  }
  return widths.get(box);
}

/** Return the first `limit` items. Show the number of the others in the element `note`, which is hidden if there are
 * none. */
export function first(items, limit, note) {
  const more = items.length - limit;
  note.hidden = more <= 0;
  if (more > 0) say(note, `and ${count(more)} more`);
  return items.slice(0, limit);
}

/** Return a horizontal bar with parts [CSS class, value, title]. Each part has the share value / total of the width. */
export function bar(parts, total, tall = false) {
  const box = el("div", { class: tall ? "bar tall" : "bar" });
  for (const [name, value, title] of parts) {
    if (!(value > 0)) continue;
    const part = el("i", { class: name, title: title ?? null });
    part.style.width = `${(100 * value) / Math.max(total, 1)}%`;
    box.append(part);
  }
  return box;
}

/** Return a table cell with a bar and a text. */
export const meter = (drawn, text) =>
  el("td", { class: "wide" }, el("div", { class: "meter" }, drawn, el("span", { class: "soft" }, text)));

/** Apply the theme that the browser has stored, and let a button switch to the next one: auto, light, dark. */
export function themes(button) {
  const known = ["auto", "light", "dark"];
  const show = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    say(button, `Theme: ${theme}`);
  };
  let theme = localStorage.getItem("kvpage.theme") ?? "auto";
  show(known.includes(theme) ? theme : (theme = "auto"));
  button.addEventListener("click", () => {
    theme = known[(known.indexOf(theme) + 1) % known.length];
    localStorage.setItem("kvpage.theme", theme);
    show(theme);
  });
}
