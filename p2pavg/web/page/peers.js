// The table of peers, a row each. A name opens the peer.

import { byId, keep, make, mark, say } from "./dom.js";
import * as format from "./format.js";

const COLUMNS = [
  ["peer", "peer"],
  ["state", "state"],
  ["share", "share of the samples"],
  ["speed", "samples / s"],
  ["upload", "upload"],
  ["memory", "memory"],
  ["region", "region"],
  ["reach", "reach"],
  ["version", "version"],
];
const STATES = new Set(["computing", "waiting", "averaging", "updating", "downloading", "training", "silent", "no link"]);

// The state in a word, and the kind of it that colours may depend on.
export function state_of(peer) {
  if (peer.state === "gone") return peer.left ? ["left", "left"] : ["lost", "lost"];
  return [peer.state, STATES.has(peer.state) ? peer.state.replace(" ", "-") : "other"];
}

export function memory_of(peer) {
  const device = peer.device_memory_bytes ? ` + ${format.bytes(peer.device_memory_bytes)}` : "";
  return peer.memory_bytes ? format.bytes(peer.memory_bytes) + device : "–";
}

export function build() {
  byId("peers").append(
    make("thead", {}, make("tr", {}, ...COLUMNS.map(([name, title]) => make("th", { scope: "col", class: name, text: title })))),
    make("tbody"),
  );
}

function row_of(open) {
  return (peer) => {
    const name = make("button", { type: "button", class: "name", onclick: () => open(peer.peer) });
    const bar = make("span", { class: "share-fill" });
    return make("tr", {},
      make("th", { scope: "row", class: "peer" }, name, make("span", { class: "leads" })),
      make("td", { class: "state" }, make("span", { class: "dot", "aria-hidden": "true" }), make("span")),
      make("td", { class: "share" }, make("span", { class: "share-bar", "aria-hidden": "true" }, bar), make("span")),
      ...COLUMNS.slice(3).map(([name_]) => make("td", { class: name_ })));
  };
}

function update(run) {
  return (row, peer) => {
    const [words, kind] = state_of(peer);
    const [head, state, share, ...rest] = row.children;
    const quiet = peer.last_seen_s >= 2.5 ? ` ${format.duration(peer.last_seen_s)}` : "";
    mark(row, "state", kind);
    say(head.children[0], peer.name);
    head.children[0].setAttribute("title", peer.peer);
    say(head.children[1], peer.peer === run.leader && peer.state !== "gone" ? "leads" : "");
    say(state.children[1], words + quiet);
    share.children[0].firstChild.style.transform = `scaleX(${peer.share})`;
    say(share.children[1], format.percent(peer.share));
    const texts = [
      format.number(peer.samples_per_second),
      format.bits(peer.upload_bps),
      memory_of(peer),
      peer.region || "–",
      peer.reach || "–",
      peer.version || "–",
    ];
    rest.forEach((cell, place) => say(cell, texts[place]));
  };
}

export function show(run, open) {
  const rows = [...run.peers].sort((a, b) => (a.name < b.name ? -1 : a.name > b.name ? 1 : a.peer < b.peer ? -1 : 1));
  keep(byId("peers").tBodies[0], rows, (peer) => peer.peer, row_of(open), update(run));
  byId("nobody").hidden = rows.length > 0;
  byId("peers").parentElement.hidden = rows.length === 0;
  const here = rows.filter((peer) => peer.state !== "gone").length;
  say(byId("peers-count"), rows.length ? `${here} here` : "");
}
