// The matrix of links: rows send, columns receive; the faster, the stronger the colour.

import { byId, make } from "./dom.js";
import * as format from "./format.js";

const MOST_BESIDE = 6; // peers whose matrix fits beside the events

function cell(link, fastest) {
  if (link === undefined) return make("td", { class: "none", text: "" });
  const heat = make("span", { class: "heat", "aria-hidden": "true" });
  heat.style.opacity = fastest > 0 ? 0.06 + 0.3 * Math.sqrt(link.rate_bps / fastest) : 0.06;
  return make("td", {}, heat,
    make("b", { text: link.rate_bps > 0 ? format.bits(link.rate_bps) : "–" }),
    make("span", { text: format.milliseconds(link.rtt_s) }),
    make("span", { text: format.counted(link.streams, "stream") }));
}

export function show(links, peers) {
  const ends = peers.filter((peer) => peer.state !== "gone").sort((a, b) => (a.name < b.name ? -1 : 1));
  const found = new Map(links.map((link) => [`${link.peer} ${link.other}`, link]));
  const fastest = Math.max(...links.map((link) => link.rate_bps), 0);
  const there = links.length > 0 && ends.length > 1;
  byId("no-links").hidden = there;
  const table = byId("links");
  table.parentElement.hidden = !there;
  table.closest(".columns").classList.toggle("wide", ends.length > MOST_BESIDE);
  if (!there) return;
  const head = make("tr", {}, make("td"), ...ends.map((peer) => make("th", { scope: "col", text: peer.name })));
  const rows = ends.map((from) =>
    make("tr", {}, make("th", { scope: "row", text: from.name }),
      ...ends.map((to) => (from === to ? make("td", { class: "self", text: "" }) : cell(found.get(`${from.peer} ${to.peer}`), fastest)))),
  );
  table.replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
}

// The links of one peer, as a list for its own page.
export function of_peer(links, peer, name_of) {
  const mine = links.filter((link) => link.peer === peer);
  if (!mine.length) return make("p", { class: "nothing", text: "No link has been measured yet." });
  const table = make("table", {},
    make("thead", {}, make("tr", {}, ...["to", "rate", "round trip", "streams", "distance"].map((text) => make("th", { scope: "col", text })))),
    make("tbody", {}, ...mine.map((link) =>
      make("tr", {}, make("th", { scope: "row", text: name_of(link.other) }),
        ...[link.rate_bps > 0 ? format.bits(link.rate_bps) : "–", format.milliseconds(link.rtt_s), format.whole(link.streams), link.distance].map((text) => make("td", { text }))))));
  return table;
}
