// The figures at a glance: one tile each, always the same ones in the same places.

import { byId, make, say } from "./dom.js";
import * as format from "./format.js";

// Of what peers tell of their epochs, before one has told.
const unknown = (run) => (run.told ? "" : "not known yet");
const present = (peers) => peers.filter((peer) => peer.state !== "gone");

const TILES = [
  ["speed", "samples / s", (run) => format.number(run.samples_per_second), (run) => `over epochs of ${format.duration(run.usual_epoch_s)}`],
  ["loss", "loss", (run) => (run.loss === null ? run.loss_text || "–" : format.loss(run.loss)), (run) => (run.loss_text ? "mean over the peers" : unknown(run) || "none is logged: opt.log(loss=…)")],
  ["dollars", "dollars / h", (run) => format.dollars(run.dollars_per_hour), (run) => (run.dollars_per_hour === null ? "needs --prices" : `${format.dollars(run.dollars_per_million_samples)} per million samples`)],
  ["egress", "egress / h", (run) => format.bytes(run.egress_bytes_per_hour), (run) => [classes(run), stages(run)].filter(Boolean).join("; ") || "all that the peers send"],
  ["peers", "peers", (run) => format.whole(present(run.peers).length), (run) => company(run.peers)],
  ["pass", "pass over the data", (run) => (run.passes > 0 ? run.passes.toFixed(3) : "–"), (run) => (run.passes > 0 ? `${format.counted(run.blocks_consumed, "block")} consumed` : unknown(run) || "no sampler shares data out")],
  ["memory", "memory", (run) => format.bytes(run.memory_bytes), (run) => (run.device_memory_bytes ? `${format.bytes(run.device_memory_bytes)} on accelerators` : "of all peers' processes")],
  ["counted", "since the watch began", (run) => format.counted(run.epochs_ended, "epoch"), (run) => `${format.counted(run.samples_discarded, "sample")} discarded, ${format.counted(run.attempts_failed, "failed attempt")}`],
];

// By class of link, nearest first.
function classes(run) {
  return Object.entries(run.egress_by_distance).map(([where, sent]) => `${format.bytes(sent)} ${where}`).join(", ");
}

// What the gradients of the last round were sent as, and what their plan spared.
function stages(run) {
  const parts = Object.entries(run.bytes_by_stage).map(([stage, sent]) => `${format.bytes(sent)} ${stage}`);
  const spared = run.egress_dollars_flat - run.egress_dollars;
  if (run.egress_dollars_flat > 0) parts.push(`${format.dollars(spared)} less than flat`);
  return parts.length ? `last round, ${run.plan}: ${parts.join(", ")}` : "";
}

function company(peers) {
  const count = (state) => peers.filter((peer) => peer.state === state).length;
  const parts = [];
  if (count("downloading")) parts.push(`${count("downloading")} downloading`);
  if (count("silent")) parts.push(`${count("silent")} silent`);
  const lost = peers.filter((peer) => peer.state === "gone" && !peer.left).length;
  if (lost) parts.push(`${lost} lost`);
  return parts.join(", ") || "all at work";
}

export function build() {
  byId("tiles").append(
    ...TILES.map(([name, title]) =>
      make("div", { class: "tile", id: `tile-${name}` },
        make("p", { class: "tile-title", text: title }),
        make("p", { class: "tile-value", text: "–" }),
        make("p", { class: "tile-note", text: "\u00a0" })),
    ),
  );
}

export function show(run) {
  for (const [name, , value, note] of TILES) {
    const tile = byId(`tile-${name}`);
    say(tile.children[1], run.peers.length ? value(run) : "–");
    say(tile.children[2], run.peers.length ? note(run) : "\u00a0");
  }
}

export function show_epoch(run) {
  const share = run.target > 0 ? Math.min(1, run.samples / run.target) : 0;
  say(byId("epoch-number"), run.peers.length ? format.whole(run.epoch) : "–");
  byId("progress-fill").style.transform = `scaleX(${share})`;
  byId("progress-fill").parentElement.setAttribute("aria-valuenow", Math.round(100 * share));
  const target = run.target > 0 ? `${format.whole(run.samples)} / ${format.whole(run.target)} samples` : "a step of each peer";
  say(byId("epoch-samples"), run.peers.length ? target : "–");
  say(byId("epoch-eta"), run.eta_s === null ? "–" : `step in ${format.duration(run.eta_s)}`);
}
