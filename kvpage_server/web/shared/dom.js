// Elements, made without any HTML: what users have written is text, whatever it says, and all of it can be seen.

import { count } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

/** An element. Attributes that are functions are listeners, null ones are left out; children are nodes or text. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same, of a drawing. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

const UNPRINTABLE = /[\p{C}\p{Z}]/gu;

/** With escapes for what cannot be seen, ends lines or turns the direction of writing, as `kvpage ls` writes it. */
export const printable = (text) => text.replace(UNPRINTABLE, (letter) => {
  if (letter === " ") return letter;
  const code = letter.codePointAt(0);
  const [kind, digits] = code < 256 ? ["x", 2] : code < 65536 ? ["u", 4] : ["U", 8];
  return `\\${kind}${code.toString(16).padStart(digits, "0")}`;
});

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : printable(String(value)));
  }
  const there = children.filter((child) => child !== null && child !== undefined);
  node.append(...there.map((child) => (child instanceof Node ? child : printable(String(child)))));
  return node;
}

/** The element of that id. */
export const at = (id) => document.getElementById(id);

/** Set a text if it is another: an unchanged one costs nothing, and is not read out again. */
export function say(node, text) {
  text = printable(String(text));
  if (node.textContent !== text) node.textContent = text;
}

const MADE = 150; // elements that are made in a frame

/** Have `parent` show these items, in their order: a node each, made anew only when its key or its content is new. Where
 * there are many new ones, the next frames make the rest. */
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
    while (now.has(name)) name = `${name}+`; // of another item, which calls itself the same
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

const FRAME_MS = 4; // of a frame: what is left waits for the next one

const due = new Set();
let framed = false;

/** Do these in the next frames, each once however often it is asked for. */
export function soon(...works) {
  for (const work of works) due.add(work);
  if (due.size && !framed) requestAnimationFrame(frame);
  framed = due.size > 0;
}

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

/** How wide a box is; to ask costs no layout. `redraw` is done when it has changed. */
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

/** The first `limit` of the items, and a note of how many there are more. */
export function first(items, limit, note) {
  const more = items.length - limit;
  note.hidden = more <= 0;
  if (more > 0) say(note, `and ${count(more)} more`);
  return items.slice(0, limit);
}

/** A bar whose parts are [class, value, title]. */
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

/** A cell of a table: a bar, and what it says. */
export const meter = (drawn, text) =>
  el("td", { class: "wide" }, el("div", { class: "meter" }, drawn, el("span", { class: "soft" }, text)));

/** A button in the page's head that goes from theme to theme, and remembers. */
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
