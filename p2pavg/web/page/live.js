// The stream of what the monitor tells, and answers to questions about what was.

const QUIET_MS = 5000; // the monitor speaks each second

export function listen(topics, connected) {
  const source = new EventSource("live");
  let heard = 0;
  let state = null;
  const become = (next) => {
    if (state !== next) connected((state = next));
  };
  for (const [name, take] of Object.entries(topics)) {
    source.addEventListener(name, (event) => {
      heard = performance.now();
      become("live");
      take(JSON.parse(event.data));
    });
  }
  source.addEventListener("error", () => become("lost"));
  setInterval(() => {
    if (state === "live" && performance.now() - heard > QUIET_MS) become("quiet");
  }, 1000);
}

export async function ask(path) {
  const answer = await fetch(path, { credentials: "same-origin" });
  if (answer.status === 404) return null;
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}
