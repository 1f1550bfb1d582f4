// Elements, made without any HTML: what users have written is text, whatever it says.

const SVG = "http://www.w3.org/2000/svg";

/** An element. Attributes that are functions are listeners, null ones are left out; children are nodes or text. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same, of a drawing. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** The element of that id. */
export const at = (id) => document.getElementById(id);

/** Set a text if it is another: an unchanged one costs nothing, and is not read out again. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Have `parent` show these items, in their order: a node each, made anew only when its key or its content is new. */
export function list(parent, items, key, make) {
  const old = parent.shown ?? new Map();
  const now = new Map();
  let before = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    const content = JSON.stringify(item);
    let entry = old.get(name);
    if (!entry || entry.content !== content) {
      const node = make(item);
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
  parent.shown = now;
}

const due = new Set();

/** Do `work` in the next frame, once however often it is asked for. */
export function soon(work) {
  if (!due.size) requestAnimationFrame(() => {
    const all = [...due];
    due.clear();
    for (const each of all) each();
  });
  due.add(work);
}

/** The first `limit` of the items, and a note of how many there are more. */
export function first(items, limit, note) {
  const more = items.length - limit;
  note.hidden = more <= 0;
  if (more > 0) say(note, `and ${more.toLocaleString("en")} more`);
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
