// Numbers, sizes and times as text.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 }); // creating a format takes longer than using it
const CLOCK = new Intl.DateTimeFormat("en", { timeStyle: "medium", hourCycle: "h23" });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** Return a number of bytes as text: 1536 is "1.5 KiB". */
export function bytes(value) {
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${UNITS[unit]}`;
}

/** Return a count as text: 1234567 is "1,234,567". */
export const count = (value) => WHOLE.format(value);

/** Return a duration in seconds as text, in a unit from µs to days: 0.0123 is "12 ms". */
export function seconds(value) {
  if (value === 0) return "0 s";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1e3)} ms`;
  if (value < 100) return `${value % 1 ? value.toFixed(value < 10 ? 2 : 1) : value} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${Math.round(value / 3600)} h`;
  return `${Math.round(value / 86400)} days`;
}

/** Return an age in seconds as text: "now" below 2 seconds, otherwise "12 s ago". */
export const ago = (value) => (value < 2 ? "now" : `${seconds(Math.round(value))} ago`);

/** Return a share from 0 to 1 as text: 0.9876 is "98.8 %". Only exactly 0 and 1 are "0 %" and "100 %". */
export function percent(part) {
  const value = 100 * part;
  if (value > 0 && value < 0.1) return "< 0.1 %";
  if (value > 99.9 && value < 100) return "> 99.9 %";
  return `${value % 1 ? value.toFixed(1) : value} %`;
}

/** Return a count with its noun: "1 agent", "2 agents". */
export const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;

/** Return the time of day of unix seconds as text, in the browser's time zone: 14:05:09. */
export const clock = (unix) => CLOCK.format(1000 * unix);

/** Return unix seconds as text, with the date unless it is today: 14:05:09, or 2027-03-01 14:05:09. */
export function moment(unix) {
  const [at, now] = [new Date(1000 * unix), new Date()];
  const day = [at.getFullYear(), at.getMonth() + 1, at.getDate()].map((part) => String(part).padStart(2, "0")).join("-");
  return at.toDateString() === now.toDateString() ? clock(unix) : `${day} ${clock(unix)}`;
}

/** Return the median, and of an even number of values the upper of the two middle ones; null without values. */
export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : null;
}
