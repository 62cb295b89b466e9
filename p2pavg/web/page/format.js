// Numbers and times as people read them. Every function takes anything and returns text.

const NOTHING = "–";

const known = (x) => typeof x === "number" && Number.isFinite(x);

const grouped = (x, digits) =>
  x.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });

export function number(x) {
  if (!known(x)) return NOTHING;
  const size = Math.abs(x);
  if (size >= 1e7) return x.toExponential(2);
  return grouped(x, size >= 100 || size === 0 ? 0 : size >= 10 ? 1 : 2);
}

export function whole(x) {
  return known(x) ? grouped(Math.round(x), 0) : NOTHING;
}

export const counted = (x, noun) => `${whole(x)} ${noun}${x === 1 ? "" : "s"}`;

// The labels of an axis, without the zeros that all of them end in.
export function labels(values, format) {
  const parts = values.map((value) => /^([^\d]*)([\d,.]*)(.*)$/.exec(format(value)).slice(1));
  const told = parts.filter((part) => part[1].includes("."));
  while (told.length && told.every((part) => part[1].endsWith("0"))) told.forEach((part) => (part[1] = part[1].slice(0, -1)));
  return parts.map(([before, digits, after]) => before + digits.replace(/\.$/, "") + after);
}

function scaled(x, units) {
  if (!known(x)) return NOTHING;
  let place = 0;
  while (Math.abs(x) >= 999.5 && place < units.length - 1) {
    x /= 1000;
    place += 1;
  }
  return `${grouped(x, x >= 100 || place === 0 ? 0 : x >= 10 ? 1 : 2)} ${units[place]}`;
}

export const bytes = (x) => scaled(x, ["B", "kB", "MB", "GB", "TB", "PB"]);
export const bits = (x) => scaled(x, ["b/s", "kb/s", "Mb/s", "Gb/s", "Tb/s"]);

export function dollars(x) {
  return known(x) ? `$ ${grouped(x, x >= 100 ? 0 : 2)}` : NOTHING;
}

export function percent(x) {
  return known(x) ? `${grouped(100 * x, 0)}%` : NOTHING;
}

export function milliseconds(seconds) {
  if (!known(seconds)) return NOTHING;
  const x = 1000 * seconds;
  return `${grouped(x, x >= 10 ? 0 : 1)} ms`;
}

export function duration(seconds) {
  if (!known(seconds)) return NOTHING;
  if (seconds < 1) return `${grouped(1000 * seconds, 0)} ms`;
  if (seconds < 10) return `${grouped(seconds, 1)} s`;
  if (seconds < 120) return `${grouped(seconds, 0)} s`;
  if (seconds < 7200) return `${grouped(seconds / 60, 0)} min`;
  return seconds < 172800 ? `${grouped(seconds / 3600, 1)} h` : `${grouped(seconds / 86400, 1)} d`;
}

// A loss has to show small changes: four significant digits, as the peers' own words do.
export function loss(x) {
  if (!known(x)) return NOTHING;
  const size = Math.abs(x);
  return size >= 1e5 || (size > 0 && size < 1e-3) ? x.toExponential(2) : x.toPrecision(4);
}

const pad = (x) => String(x).padStart(2, "0");

export function clock(at, seconds = true) {
  const day = new Date(1000 * at);
  const text = `${pad(day.getHours())}:${pad(day.getMinutes())}`;
  return seconds ? `${text}:${pad(day.getSeconds())}` : text;
}

export function date(at) {
  const day = new Date(1000 * at);
  return `${day.getFullYear()}-${pad(day.getMonth() + 1)}-${pad(day.getDate())}`;
}
