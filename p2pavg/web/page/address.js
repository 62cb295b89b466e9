// What is open, in the address: a link to it survives a reload and can be sent to somebody.
// #last=900 or #from=…&to=… (unix seconds), and peer=… or round=….

const DEFAULT_S = 900;

export function read() {
  const told = new URLSearchParams(location.hash.slice(1));
  const amount = (name) => {
    const value = Number(told.get(name) ?? NaN);
    return Number.isFinite(value) && value > 0 ? value : null;
  };
  const from = amount("from");
  const to = amount("to");
  const fixed = from !== null && to !== null && from < to;
  const peer = told.get("peer");
  const round = told.get("round");
  return {
    last: fixed ? null : (told.get("last") === "all" ? Infinity : (amount("last") ?? DEFAULT_S)),
    from: fixed ? from : null,
    to: fixed ? to : null,
    peer: peer !== null && /^[0-9a-f]{2,64}$/.test(peer) ? peer : null,
    round: round !== null && /^[0-9]{1,15}$/.test(round) ? round : null,
  };
}

export function write(view) {
  const told = new URLSearchParams();
  if (view.from !== null) {
    told.set("from", view.from.toFixed(1));
    told.set("to", view.to.toFixed(1));
  } else if (view.last !== DEFAULT_S) {
    told.set("last", view.last === Infinity ? "all" : String(view.last));
  }
  if (view.peer !== null) told.set("peer", view.peer);
  if (view.round !== null) told.set("round", view.round);
  const text = told.toString();
  history.replaceState(null, "", text ? `#${text}` : location.pathname);
}
