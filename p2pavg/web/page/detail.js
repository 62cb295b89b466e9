// One peer or one round, opened beside the page.

import { byId, make, say } from "./dom.js";
import * as format from "./format.js";
import { Chart } from "./chart.js";
import { of_peer } from "./links.js";
import { ask } from "./live.js";
import { memory_of, state_of } from "./peers.js";
import { PHASES, bar, fill, sum } from "./rounds.js";

const CHARTS = [
  ["samples_per_second", "samples / s", format.number],
  ["upload_bps", "upload", format.bits],
  ["memory_bytes", "memory", format.bytes],
];

let shown = null; // what is open: "peer …" or "round …"
let parts = null;

export function build(closed) {
  byId("detail-close").addEventListener("click", () => byId("detail").close());
  byId("detail").addEventListener("close", () => {
    shown = null;
    closed();
  });
  byId("detail").addEventListener("click", (event) => {
    if (event.target === byId("detail")) byId("detail").close();
  });
}

function open(what, title) {
  const fresh = shown !== what;
  shown = what;
  say(byId("detail-title"), title);
  if (!byId("detail").open) byId("detail").showModal();
  return fresh;
}

function facts(rows) {
  return rows.flatMap(([name, value]) => [make("dt", { text: name }), make("dd", { text: value })]);
}

export async function show_peer(id, run, links, view) {
  const peer = run.peers.find((one) => one.peer === id);
  const name_of = (other) => run.peers.find((one) => one.peer === other)?.name ?? other.slice(0, 8);
  if (open(`peer ${id}`, peer?.name ?? `peer ${id.slice(0, 8)}`)) {
    const charts = CHARTS.map(([, title, words]) => new Chart(title, words, true, () => {}, () => {}));
    parts = { facts: make("dl"), links: make("div", { class: "scroll" }), charts };
    byId("detail-body").replaceChildren(parts.facts, ...charts.map((chart) => chart.element), make("h3", { text: "Links" }), parts.links);
    await history_of(id, view);
  }
  const rows = peer === undefined ? [["state", "not in the run any more"], ["id", id]] : [
    ["state", state_of(peer)[0]],
    ["epoch", format.whole(peer.epoch)],
    ["share of the samples", format.percent(peer.share)],
    ["samples / s", `${format.number(peer.samples_per_second)}, computing ${format.number(peer.rate)}`],
    ["upload", format.bits(peer.upload_bps)],
    ["relayed for others", format.bytes(peer.relayed_bytes)],
    ["memory", memory_of(peer)],
    ["region", peer.region || "not named"],
    ["reach", peer.reach],
    ["version", peer.version || "not told"],
    ["last heard", `${format.duration(peer.last_seen_s)} ago`],
    ["id", peer.peer],
  ];
  if (shown !== `peer ${id}`) return;
  parts.facts.replaceChildren(...facts(rows));
  parts.links.replaceChildren(of_peer(links, id, name_of));
}

export async function history_of(id, view) {
  const told = await ask(`history?peer=${id}&from=${view.begin}&to=${view.end}`);
  if (shown !== `peer ${id}` || told === null) return;
  CHARTS.forEach(([name], place) => parts.charts[place].show(told.figures[name], view.begin, view.end, "nothing was told in this time"));
}

export async function show_round(epoch, run) {
  if (!open(`round ${epoch}`, `Epoch ${epoch}`)) return;
  byId("detail-body").replaceChildren(make("p", { class: "nothing", text: "Asking …" }));
  const one = await ask(`round/${epoch}`);
  if (shown !== `round ${epoch}`) return;
  if (one === null) {
    byId("detail-body").replaceChildren(make("p", { class: "nothing", text: "This round is not, or no longer, known here." }));
    return;
  }
  const name_of = (id) => run.peers.find((peer) => peer.peer === id)?.name ?? `peer ${id.slice(0, 8)}`;
  const told = make("dl", {}, ...facts([
    ["ended", `${format.date(one.at)} ${format.clock(one.at)}`],
    ["took", format.duration(one.seconds)],
    ["samples", format.whole(one.samples)],
    ["members", format.whole(one.members)],
    ["attempts", format.whole(one.attempts)],
    ["discarded", `${format.whole(one.discarded)} samples`],
  ]));
  const phases = make("table", { class: "phases" },
    make("thead", {}, make("tr", {}, make("th", { scope: "col", text: "phase, mean" }), make("th", { scope: "col", text: "took" }), make("th", { scope: "col", text: "of the epoch" }))),
    make("tbody", {}, ...PHASES.map((name, place) =>
      make("tr", {},
        make("th", { scope: "row" }, make("span", { class: `swatch ${name}`, "aria-hidden": "true" }), make("span", { text: name })),
        make("td", { text: format.duration(one.phases[place]) }),
        make("td", { text: format.percent(one.seconds > 0 ? one.phases[place] / one.seconds : NaN) })))));
  const rows = Object.entries(one.peers ?? {});
  const longest = Math.max(...rows.map(([, values]) => sum(values.slice(3, 9))), 0);
  const list = rows.map(([id, values]) => {
    const stack = bar();
    const spent = values.slice(3, 9);
    stack.style.width = longest > 0 ? `${(100 * sum(spent)) / longest}%` : "0";
    fill(stack, spent, sum(spent));
    return make("li", {},
      make("p", {}, make("b", { text: name_of(id) }), make("span", { text: `${format.whole(values[0])} samples, ${format.duration(values[1])}, ${format.bytes(values[2])} sent` })),
      stack);
  });
  byId("detail-body").replaceChildren(told, phases, make("h3", { text: "Members" }),
    rows.length ? make("ul", { class: "members" }, ...list) : make("p", { class: "nothing", text: "What each member said is no longer kept." }));
}

export const close = () => byId("detail").open && byId("detail").close();
export const opened = () => shown;
