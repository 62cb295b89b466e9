// The last rounds, a column each, stacked by phase. A column opens the round.

import { byId, keep, make, say } from "./dom.js";
import * as format from "./format.js";

export const PHASES = ["calculation", "waiting", "matchmaking", "transfer", "commit", "update"];
const MOST = 24;

export function build() {
  byId("legend").append(
    ...PHASES.map((name) => make("li", {}, make("span", { class: `swatch ${name}`, "aria-hidden": "true" }), make("span", { text: name }))),
  );
}

// One bar of phases. `spent` are seconds by phase, `whole` what the full length stands for.
export function bar(spent) {
  return make("span", { class: "stack", "aria-hidden": "true" }, ...PHASES.map((name) => make("span", { class: name })));
}

export function fill(stack, spent, whole) {
  PHASES.forEach((_, place) => {
    stack.children[place].style.flexGrow = whole > 0 ? Math.max(0, spent[place]) / whole : 0;
  });
}

const in_words = (one) =>
  `epoch ${one.epoch}, ${format.duration(one.seconds)}: ` +
  PHASES.map((name, place) => `${name} ${format.duration(one.phases[place])}`).join(", ");

export function show(rounds, open) {
  const last = rounds.slice(-MOST);
  const longest = Math.max(...last.map((one) => sum(one.phases)), 0);
  const build_one = (one) =>
    make("button", { type: "button", class: "round", onclick: () => open(String(one.epoch)) },
      make("span", { class: "seconds" }), make("span", { class: "well" }, bar()), make("span", { class: "number" }));
  const update = (column, one) => {
    const [seconds, well, number] = column.children;
    const total = sum(one.phases);
    well.firstChild.style.height = longest > 0 ? `${(100 * total) / longest}%` : "0";
    fill(well.firstChild, one.phases, total);
    say(seconds, format.duration(one.seconds));
    say(number, String(one.epoch));
    const failed = one.attempts > 1 ? `, ${one.attempts} attempts` : "";
    column.dataset.failed = one.attempts > 1 ? "yes" : "no";
    column.setAttribute("aria-label", in_words(one) + failed);
    column.setAttribute("title", in_words(one) + failed);
  };
  keep(byId("rounds"), last, (one) => one.epoch, build_one, update);
  if (!last.length) byId("rounds").replaceChildren(make("p", { class: "nothing", "data-key": "nothing", text: "The first round has not ended yet." }));
}

export const sum = (values) => values.reduce((a, b) => a + b, 0);
