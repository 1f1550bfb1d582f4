// Charts in SVG: treemap, lines, columns, scatter plot. Each has a name for screen readers.

import { printable, svg } from "./dom.js";
import { bytes } from "./format.js";

/** Return [x, y, width, height] of a rectangle for each value, with areas proportional to the values. Together they
 * fill the given rectangle. `values` are sorted, the largest first.
 *
 * This is a squarified treemap (Bruls, Huizing, van Wijk, 2000): each row or column takes the next value as long as that
 * makes its rectangles closer to squares. */
export function squarify(values, x, y, width, height) {
  const total = values.reduce((sum, value) => sum + value, 0);
  const scale = total > 0 ? (width * height) / total : 0;
  const placed = [];
  let row = [];
  let sum = 0;
  const worst = (area, parts) => {
    const side = Math.min(width, height);
    const thick = area / side;
    return Math.max(...parts.map((part) => Math.max(part / thick / thick, (thick * thick) / part)));
  };
  const lay = () => {
    const across = width >= height;
    const thick = sum / (across ? height : width);
    let offset = 0;
    for (const area of row) {
      const length = area / thick;
      placed.push(across ? [x, y + offset, thick, length] : [x + offset, y, length, thick]);
      offset += length;
    }
    if (across) [x, width] = [x + thick, width - thick];
    else [y, height] = [y + thick, height - thick];
    row = [];
    sum = 0;
  };
  for (const value of values) {
    const area = Math.max(value * scale, 1e-9);
    if (row.length && worst(sum + area, [...row, area]) > worst(sum, row)) lay();
    row.push(area);
    sum += area;
  }
  if (row.length) lay();
  return placed;
}

/** Return a text, cut so that it fits into `width` pixels with a font of `size` pixels; "" if fewer than 5 letters fit. */
const fits = (text, width, size) => {
  const letters = Math.floor((width - 16) / (size * 0.6));
  if (letters >= text.length) return text;
  return letters > 4 ? `${text.slice(0, letters - 1)}…` : "";
};

/** Return a treemap of items, which are sorted, the largest first. An item has `key`, `value`, `name`, `note` (a second
 * line), `kind` (a CSS class), `title` (the text under the pointer), and `opens`, which is true if its tile is a button.
 * `choose` is called with the key of a pressed button. `chosen` is the key of the highlighted tile, or null. `name` is
 * the text for screen readers. Arrow keys move the focus from tile to tile. */
export function treemap(items, { width, height, name, choose, chosen }) {
  const box = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": name });
  const places = squarify(items.map((item) => item.value), 0, 0, width, height);
  const current = Math.max(0, items.findIndex((item) => item.key === chosen));
  items.forEach((item, index) => {
    const [x, y, w, h] = places[index];
    const label = h > 26 ? fits(printable(item.name), w, 13) : "";
    const note = label && h > 46 ? fits(item.note, w, 12) : "";
    const press = item.opens ? () => choose(item.key) : null;
    box.append(
      svg(
        "g",
        {
          class: `tile ${item.kind}${item.key === chosen ? " chosen" : ""}`,
          role: item.opens ? "button" : "img",
          tabindex: index === current ? 0 : -1,
          "aria-label": `${item.name}: ${item.title}`,
          "aria-pressed": item.opens ? String(item.key === chosen) : null,
          click: press,
          keydown: (event) => walk(event, press),
        },
        svg("title", {}, `${item.name}: ${item.title}`),
        svg("rect", { x, y, width: w, height: h, rx: Math.min(8, w / 3, h / 3) }),
        label ? svg("text", { x: x + 10, y: y + 21 }, label) : null,
        note ? svg("text", { x: x + 10, y: y + 38, class: "small" }, note) : null,
      ),
    );
  });
  return box;
}

/** Handle a key that was pressed in a child of a group: arrow keys move the focus to the next or the previous child, so
 * that only one child is a stop of the tab key. Enter and space call `press`, if it is not null. */
export function walk(event, press) {
  const here = event.currentTarget;
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (press && (event.key === "Enter" || event.key === " ")) press();
  else if (!step) return;
  event.preventDefault();
  const next = step > 0 ? here.nextElementSibling : here.previousElementSibling;
  if (!step || !next) return;
  here.setAttribute("tabindex", -1);
  next.setAttribute("tabindex", 0);
  next.focus();
}

const LEFT = 58; // pixels of the axis with its numbers

/** Return an empty chart with a name for screen readers. */
const chart = ({ width, height, name }) =>
  svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": name });

/** Return a line across a chart, and its number at the axis. */
const rule = (width, y, number) => [
  svg("line", { class: "rule", x1: LEFT, x2: width, y1: y, y2: y }),
  svg("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, number),
];

/** Return the labels at both ends of a time axis. `span` is the left one, for example "5 min ago". */
const times = ({ width, height, span }) =>
  [svg("text", { x: LEFT, y: height - 4 }, span), svg("text", { x: width, y: height - 4, "text-anchor": "end" }, "now")];

/** Return the end of an axis for values up to `value`: the next number of the form 1, 2 or 5 times a power of 10. */
const nice = (value) => {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((times) => times * power).find((step) => step >= value);
};

/** Return the end of an axis for bytes: the next round number of bytes, KiB, MiB and so on. */
const niceBytes = (value) => {
  const unit = 1024 ** Math.max(0, Math.floor(Math.log2(value) / 10));
  return [1, 2, 4, 10, 20, 40, 100, 200, 400, 1024].map((times) => times * unit).find((step) => step >= value);
};

/** Return a chart of lines over time. `series` is a list of {kind, values}: a CSS class, and the values, oldest first. A
 * null is an unknown value, and makes a gap in the line. `format` returns the text of a number at the axis. `top` is the
 * end of the axis, by default a round number above the largest value. `shape` has width and height in pixels, `name`, and
 * `span`, the text at the left end of the time axis. */
export function lines(series, { format, top, ...shape }) {
  const { width, height } = shape;
  const floor = height - 22;
  const highest = Math.max(...series.flatMap(({ values }) => values.filter((value) => value !== null)), 0);
  const end = top ?? (format === bytes ? niceBytes(highest || 1024) : nice(highest || 1));
  const slots = Math.max(...series.map(({ values }) => values.length), 2);
  const x = (index) => LEFT + ((width - LEFT) * index) / (slots - 1);
  const y = (value) => floor - (floor - 8) * Math.min(1, value / end);
  const box = chart(shape);
  for (const part of [0, 0.5, 1]) box.append(...rule(width, y(part * end), format(part * end)));
  box.append(...times(shape));
  for (const { kind, values } of series) {
    let path = "";
    let gap = true;
    values.forEach((value, index) => {
      if (value !== null) path += `${gap ? "M" : "L"}${x(index + slots - values.length).toFixed(1)} ${y(value).toFixed(1)}`;
      gap = value === null;
    });
    if (path) box.append(svg("path", { class: `stroke ${kind}`, d: path }));
  }
  return box;
}

/** Return a chart of stacked bars over time. `series` has a list for each bar, oldest first, with [CSS class, value] from
 * the bottom to the top. `format` and `shape` are as for `lines`. */
export function columns(series, { format, ...shape }) {
  const { width, height } = shape;
  const floor = height - 22;
  const highest = Math.max(...series.map((parts) => parts.reduce((sum, [, value]) => sum + value, 0)), 0);
  const end = nice(highest || 1);
  const step = (width - LEFT) / Math.max(series.length, 1);
  const box = chart(shape);
  for (const part of [0, 1]) box.append(...rule(width, floor - (floor - 8) * part, format(part * end)));
  series.forEach((parts, index) => {
    let y = floor;
    for (const [kind, value] of parts) {
      const tall = ((floor - 8) * value) / end;
      if (tall <= 0) continue;
      y -= tall;
      box.append(svg("rect", { class: kind, x: LEFT + index * step, y, width: Math.max(1, step - 2), height: tall, rx: 1 }));
    }
  });
  box.append(...times(shape));
  return box;
}

// marks of the tiers; they differ in shape as well as in colour, for readers who cannot distinguish the colours
const SHAPES = {
  none: (x, y) => svg("circle", { cx: x, cy: y, r: 5 }),
  hot: (x, y) => svg("rect", { x: x - 5, y: y - 5, width: 10, height: 10, rx: 2 }),
  prefix: (x, y) => svg("path", { d: `M${x} ${y - 6.5}L${x + 6.5} ${y}L${x} ${y + 6.5}L${x - 6.5} ${y}Z` }),
  page: (x, y) => svg("path", { d: `M${x} ${y - 6.5}L${x + 6} ${y + 4.5}L${x - 6} ${y + 4.5}Z` }),
  cold: (x, y) => svg("path", { d: `M${x} ${y + 6.5}L${x + 6} ${y - 4.5}L${x - 6} ${y - 4.5}Z` }),
};

/** Return the mark of a tier (a key of SHAPES), for a legend. */
export function mark(kind) {
  const shape = SHAPES[kind](7, 7);
  shape.setAttribute("class", kind);
  return svg("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" }, shape);
}

/** Return a scatter plot of {x, y, kind, title} with `y` on a logarithmic scale. `kind` is a key of SHAPES, `title` the
 * text under the pointer. `formatX` and `formatY` return the texts of numbers at the axes, `labelX` is the label of the x
 * axis. `shape` has width, height and name, as for `lines`. */
export function scatter(points, { formatX, formatY, labelX, ...shape }) {
  const { width, height } = shape;
  const floor = height - 40;
  const box = chart(shape);
  const low = Math.floor(Math.log10(Math.min(...points.map((point) => point.y), 1)) + 1e-9);
  const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...points.map((point) => point.y), 0.1)) - 1e-9));
  const end = nice(Math.max(...points.map((point) => point.x), 10));
  const x = (value) => LEFT + 8 + ((width - LEFT - 22) * value) / end;
  const y = (value) => floor - ((floor - 10) * (Math.log10(Math.max(value, 10 ** low)) - low)) / (high - low);
  for (let power = low; power <= high; power += 1) box.append(...rule(width, y(10 ** power), formatY(10 ** power)));
  for (const part of [0, 0.5, 1]) {
    box.append(svg("text", { x: x(part * end), y: floor + 18, "text-anchor": "middle" }, formatX(part * end)));
  }
  box.append(svg("text", { x: (LEFT + width) / 2, y: height - 4, "text-anchor": "middle" }, labelX));
  for (const point of points) {
    const shape = SHAPES[point.kind](x(point.x), y(point.y));
    shape.setAttribute("class", `dot ${point.kind}`);
    shape.append(svg("title", {}, point.title));
    box.append(shape);
  }
  return box;
}
