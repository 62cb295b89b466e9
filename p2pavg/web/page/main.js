// Start reading here. What the monitor tells comes in by topic, what a person chooses stands in `view`,
// and each part of the page is shown from these two.

import * as address from "./address.js";
import { Chart } from "./chart.js";
import * as detail from "./detail.js";
import { byId, keep, make, mark, say } from "./dom.js";
import * as format from "./format.js";
import * as links from "./links.js";
import { ask, listen } from "./live.js";
import * as peers from "./peers.js";
import * as rounds from "./rounds.js";
import * as tiles from "./tiles.js";

const RANGES = [["15 min", 900], ["1 h", 3600], ["6 h", 21600], ["24 h", 86400], ["all", Infinity]];
const CHARTS = [
  ["samples_per_second", "samples / s", format.number, true],
  ["loss", "loss", format.loss, false],
  ["egress_bytes_per_hour", "egress / h", format.bytes, true],
  ["dollars_per_hour", "dollars / h", format.dollars, true],
  ["peers", "peers", format.whole, true],
  ["memory_bytes", "memory", format.bytes, true],
];
const EMPTY = { loss: "no loss was logged that is a number", dollars_per_hour: "no prices are named" };
const REFETCH_MS = 30000; // of a long range, whose newest seconds are shown one by one until then
const LEAST_S = 60; // that a chart shows, however young the watch is
const CONNECTION = { live: "live", quiet: "the monitor is silent", lost: "the monitor does not answer; trying again" };

const view = { ...address.read(), begin: 0, end: 0 };
const told = { run: null, links: [], rounds: [], events: [] };
let past = null; // the answer of /history for the range in view
let asked = 0;

const charts = CHARTS.map(([, title, words, from_zero]) => new Chart(title, words, from_zero, choose, shift));

function choose(from, to) {
  Object.assign(view, { last: null, from, to });
  address.write(view);
  refetch();
}

function follow(last) {
  Object.assign(view, { last, from: null, to: null });
  address.write(view);
  refetch();
}

function shift(by, zoom) {
  if (by === null) return follow(900);
  const span = view.end - view.begin;
  const middle = (view.begin + view.end) / 2 + by * span;
  const half = Math.max(5, (span * zoom) / 2);
  choose(middle - half, middle + half);
}

function window_now() {
  const now = told.run ? told.run.at : Date.now() / 1000;
  if (view.from !== null) [view.begin, view.end] = [view.from, view.to];
  else [view.begin, view.end] = [Math.min(now - LEAST_S, Math.max(now - view.last, past?.begin ?? -Infinity)), now];
}

async function refetch() {
  window_now();
  asked = performance.now();
  const from = view.last === Infinity ? "" : `from=${view.begin}&`;
  const answer = await ask(`history?${from}to=${view.from === null ? "" : view.end}`).catch(() => null);
  if (answer === null) return;
  past = answer;
  window_now();
  show_past();
  const peer = view.peer;
  if (peer !== null && detail.opened() === `peer ${peer}`) detail.history_of(peer, view).catch(() => {});
}

function show_past() {
  if (past === null) return;
  charts.forEach((chart, place) => {
    const name = CHARTS[place][0];
    chart.show(past.figures[name], view.begin, view.end, EMPTY[name] ?? "nothing was told in this time");
  });
  const live = view.from === null;
  for (const button of byId("ranges").children) button.setAttribute("aria-pressed", String(live && button.dataset.last === String(view.last)));
  const words = live ? `the last ${format.duration(view.end - view.begin)}` : `${format.date(view.begin)} ${format.clock(view.begin)} to ${format.clock(view.end)}`;
  say(byId("range-words"), words);
  show_rounds();
  show_events();
}

function add_points(run) {
  if (past === null || view.from !== null) return;
  const values = { ...run, peers: run.peers.filter((peer) => peer.state !== "gone" && peer.state !== "silent").length };
  for (const [name] of CHARTS) {
    const columns = past.figures[name];
    const value = values[name];
    if (typeof value !== "number" || run.at <= (columns[0].at(-1) ?? 0)) continue;
    [run.at, value, value, value].forEach((one, place) => columns[place].push(one));
    while (columns[0][0] < view.begin && columns[0][1] <= view.begin) columns.forEach((column) => column.shift());
  }
}

function show_rounds() {
  rounds.show(view.from === null ? told.rounds : past.rounds, open_round);
}

function show_events() {
  const list = view.from === null ? told.events : (past?.events ?? []);
  const build = () => make("li", {}, make("time"), make("span"));
  const update = (line, event) => {
    say(line.children[0], format.clock(event.at));
    line.children[0].setAttribute("datetime", new Date(1000 * event.at).toISOString());
    say(line.children[1], event.words);
  };
  keep(byId("events"), [...list].reverse(), (event) => event.number ?? `${event.at} ${event.words}`, build, update);
  byId("no-events").hidden = list.length > 0;
  byId("events").hidden = list.length === 0;
}

function open_peer(id) {
  Object.assign(view, { peer: id, round: null });
  address.write(view);
  show_detail();
}

function open_round(epoch) {
  Object.assign(view, { peer: null, round: epoch });
  address.write(view);
  show_detail();
}

function show_detail() {
  if (told.run === null) return;
  if (view.peer !== null) detail.show_peer(view.peer, told.run, told.links, view).catch(() => {});
  else if (view.round !== null) detail.show_round(view.round, told.run).catch(() => {});
  else detail.close();
}

function take_run(run) {
  const first = told.run === null;
  told.run = run;
  document.title = `${run.run_id} · p2pavg`;
  document.body.classList.remove("loading");
  say(byId("run"), run.run_id);
  say(byId("welcome-run"), run.run_id);
  document.body.classList.toggle("empty", run.level === "empty" && !run.epochs_ended);
  mark(byId("verdict"), "level", run.level);
  say(byId("verdict-words"), run.verdict);
  tiles.show_epoch(run);
  tiles.show(run);
  peers.show(run, open_peer);
  window_now();
  add_points(run);
  if (first) refetch();
  else if (view.from === null && performance.now() - asked > REFETCH_MS) refetch();
  else if (view.from === null) show_past();
  show_detail();
}

function take_links(list) {
  told.links = list;
  if (told.run) links.show(list, told.run.peers);
}

function connected(state) {
  mark(document.body, "connection", state);
  say(byId("connection"), CONNECTION[state]);
  if (state === "live" && told.run) refetch();
}

function start() {
  tiles.build();
  peers.build();
  rounds.build();
  detail.build(() => {
    Object.assign(view, { peer: null, round: null });
    address.write(view);
  });
  byId("charts").append(...charts.map((chart) => chart.element));
  byId("ranges").append(
    ...RANGES.map(([text, last]) => make("button", { type: "button", "data-last": String(last), "aria-pressed": "false", text, onclick: () => follow(last) })),
  );
  addEventListener("hashchange", () => {
    Object.assign(view, address.read());
    refetch();
    show_detail();
  });
  let present = "";
  listen({
    run: (run) => {
      take_run(run);
      const now = run.peers.map((peer) => `${peer.peer} ${peer.state === "gone"} ${peer.name}`).join();
      if (now !== present) take_links(told.links); // rows and columns are those that are here
      present = now;
    },
    links: take_links,
    rounds: (list) => {
      told.rounds = list;
      if (view.from === null) show_rounds();
    },
    events: (list) => {
      told.events = list;
      if (view.from === null) show_events();
    },
  }, connected);
}

start();
