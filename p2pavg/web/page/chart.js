// A figure over time: its mean as a line, least and most as a band. One drag selects a range for all charts.

import { draw, make, say } from "./dom.js";
import { clock, date, labels } from "./format.js";

const HEIGHT = 132;
const LEFT = 58;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 22;
const GAP = 2.5; // steps without a point, after which the line is broken
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800];

export class Chart {
  constructor(title, format, from_zero, select, move) {
    this.format = format;
    this.from_zero = from_zero;
    this.select = select;
    this.move = move;
    this.columns = [[], [], [], []];
    this.begin = 0;
    this.end = 1;
    this.width = 0;
    this.value = make("output", { class: "chart-value", text: "–" });
    this.picture = draw("svg", { height: HEIGHT, tabindex: "0", role: "img", "aria-label": title });
    this.band = draw("path", { class: "band" });
    this.line = draw("path", { class: "line" });
    this.axes = draw("g", { class: "axes" });
    this.brush = draw("rect", { class: "brush", y: TOP, height: HEIGHT - TOP - BOTTOM, width: 0 });
    this.cross = draw("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.empty = draw("text", { class: "empty", "text-anchor": "middle", y: HEIGHT / 2 });
    this.picture.append(this.axes, this.band, this.line, this.brush, this.cross, this.empty);
    const head = make("figcaption", {}, make("span", { text: title }), this.value);
    this.element = make("figure", { class: "chart" }, head, this.picture);
    this.picture.addEventListener("pointerdown", (event) => this.press(event));
    this.picture.addEventListener("pointermove", (event) => this.hover(event));
    this.picture.addEventListener("pointerleave", () => this.leave());
    this.picture.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.render()).observe(this.element);
  }

  show(columns, begin, end, empty) {
    this.columns = columns ?? [[], [], [], []];
    this.begin = begin;
    this.end = Math.max(end, begin + 1);
    this.element.classList.toggle("bare", !this.columns[0].length);
    say(this.empty, this.columns[0].length ? "" : empty);
    this.render();
  }

  x(at) {
    return LEFT + ((at - this.begin) / (this.end - this.begin)) * (this.width - LEFT - RIGHT);
  }

  at(x) {
    const share = (x - LEFT) / (this.width - LEFT - RIGHT);
    return this.begin + Math.min(1, Math.max(0, share)) * (this.end - this.begin);
  }

  render() {
    this.width = Math.max(220, this.element.clientWidth);
    this.picture.setAttribute("width", this.width);
    this.empty.setAttribute("x", (LEFT + this.width - RIGHT) / 2);
    const [times, means, least, most] = this.columns;
    let low = this.from_zero ? 0 : Infinity;
    let high = -Infinity;
    for (let i = 0; i < times.length; i += 1) {
      low = Math.min(low, least[i]);
      high = Math.max(high, most[i]);
    }
    if (!(high > -Infinity)) [low, high] = [0, 1];
    if ((!this.from_zero || high > 0) && high - low < 1e-9 * Math.max(1, Math.abs(high))) high = low + Math.max(1e-6, Math.abs(low) * 0.1);
    const [ticks, top] = !times.length ? [[], 1] : this.from_zero && high <= 0 ? [[0], 1] : levels(low, high);
    low = Math.min(low, ticks[0] ?? low);
    high = Math.max(high, top);
    const y = (value) => TOP + (1 - (value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    this.draw_axes(ticks, y);
    this.draw_line(times, means, least, most, y);
    const last = means.length - 1;
    if (this.cross.getAttribute("visibility") === "hidden") say(this.value, last < 0 ? "–" : this.format(means[last]));
  }

  draw_axes(ticks, y) {
    const made = [];
    const texts = labels(ticks, this.format);
    for (const [place, value] of ticks.entries()) {
      made.push(draw("line", { x1: LEFT, x2: this.width - RIGHT, y1: y(value), y2: y(value) }));
      made.push(draw("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end", text: texts[place] }));
    }
    const span = this.end - this.begin;
    const step = STEPS.find((one) => span / one <= this.width / 110) ?? STEPS[STEPS.length - 1];
    const zone = 60 * new Date().getTimezoneOffset();
    for (let at = Math.ceil((this.begin - zone) / step) * step + zone; at <= this.end; at += step) {
      if (this.x(at) > this.width - RIGHT - 18 || this.x(at) < LEFT + 8) continue;
      const text = step >= 86400 ? date(at).slice(5) : clock(at, step < 60);
      made.push(draw("text", { x: this.x(at), y: HEIGHT - 6, "text-anchor": "middle", text }));
    }
    this.axes.replaceChildren(...made);
  }

  draw_line(times, means, least, most, y) {
    const gaps = [];
    for (let i = 1; i < times.length; i += 1) gaps.push(times[i] - times[i - 1]);
    const usual = gaps.length ? [...gaps].sort((a, b) => a - b)[gaps.length >> 1] : 1;
    const runs = [];
    for (let i = 0; i < times.length; i += 1) {
      if (i === 0 || times[i] - times[i - 1] > Math.max(3, GAP * usual)) runs.push([]);
      runs[runs.length - 1].push(i);
    }
    const point = (i, values) => `${this.x(times[i]).toFixed(1)},${y(values[i]).toFixed(1)}`;
    const path = (run) => "M" + run.map((i) => point(i, means)).join("L") + (run.length === 1 ? "h1" : "");
    const area = (run) =>
      `M${run.map((i) => point(i, most)).join("L")}L${[...run].reverse().map((i) => point(i, least)).join("L")}Z`;
    this.line.setAttribute("d", runs.map(path).join(""));
    this.band.setAttribute("d", runs.map(area).join(""));
  }

  hover(event) {
    const times = this.columns[0];
    if (!times.length || this.dragging) return;
    const at = this.at(event.offsetX);
    let near = 0;
    for (let i = 0; i < times.length; i += 1) if (Math.abs(times[i] - at) < Math.abs(times[near] - at)) near = i;
    const x = this.x(times[near]);
    this.cross.setAttribute("x1", x);
    this.cross.setAttribute("x2", x);
    this.cross.setAttribute("visibility", "visible");
    say(this.value, `${clock(times[near])}  ${this.format(this.columns[1][near])}`);
  }

  leave() {
    this.cross.setAttribute("visibility", "hidden");
    this.render();
  }

  press(event) {
    if (event.button !== 0) return;
    const first = event.offsetX;
    this.dragging = true;
    this.leave();
    this.picture.setPointerCapture(event.pointerId);
    const edges = (now) => [first, now.offsetX].sort((a, b) => a - b).map((x) => Math.max(LEFT, Math.min(this.width - RIGHT, x)));
    const drag = (now) => {
      const [a, b] = edges(now);
      this.brush.setAttribute("x", a);
      this.brush.setAttribute("width", b - a);
    };
    const done = (now) => {
      this.picture.removeEventListener("pointermove", drag);
      this.dragging = false;
      this.brush.setAttribute("width", 0);
      const [a, b] = edges(now);
      if (now.type === "pointerup" && b - a > 6) this.select(this.at(a), this.at(b));
    };
    this.picture.addEventListener("pointermove", drag);
    this.picture.addEventListener("pointerup", done, { once: true });
    this.picture.addEventListener("pointercancel", done, { once: true });
  }

  key(event) {
    const moves = { ArrowLeft: [-0.25, 1], ArrowRight: [0.25, 1], "+": [0, 0.5], "=": [0, 0.5], "-": [0, 2] };
    if (event.key === "Escape") this.move(null, null);
    else if (event.key in moves) this.move(...moves[event.key]);
    else return;
    event.preventDefault();
  }
}

// Up to four round values that span low to high, and the top of the axis.
function levels(low, high) {
  const rough = (high - low) / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= rough) ?? 10 * power;
  const ticks = [];
  for (let value = Math.floor(low / step) * step; ticks.length < 6; value += step) {
    ticks.push(Math.abs(value) < step / 1e6 ? 0 : value);
    if (value >= high) break;
  }
  return [ticks, ticks[ticks.length - 1]];
}
