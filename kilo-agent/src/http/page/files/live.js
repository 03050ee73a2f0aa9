// Keeps the report current: server-sent events, and asking now and then where there are none.

/** After an event source has failed for this long, the agent counts as gone. */
const PATIENCE = 2500;
/** The agent sends something every 3 s; after this long without, it counts as gone. */
const SILENCE = 10000;
/** Where too many listen: ask this often, and try to listen again after a minute. */
const POLL = 10000;
const LISTEN_AGAIN = 60000;

/** Calls whole(report), now(part) and lost(isLost) as it learns. */
export function follow({ whole, now, lost }) {
  let source = null;
  let watch = null;
  let polls = null;
  let isFailing = false;
  const alive = () => {
    isFailing = false;
    clearTimeout(watch);
    watch = setTimeout(() => lost(true), SILENCE);
    lost(false);
  };
  const failing = () => {
    // It fails again and again; the first time counts.
    if (isFailing) return;
    isFailing = true;
    clearTimeout(watch);
    watch = setTimeout(() => lost(true), PATIENCE);
  };
  const ask = async () => {
    try {
      const answer = await fetch("status", { cache: "no-store", signal: AbortSignal.timeout(POLL) });
      if (!answer.ok) throw new Error(answer.statusText);
      whole(await answer.json());
      clearTimeout(watch);
      watch = setTimeout(() => lost(true), POLL + SILENCE);
      lost(false);
    } catch {
      lost(true);
    }
  };
  const stopAsking = () => {
    clearInterval(polls);
    polls = null;
  };
  const listen = () => {
    source = new EventSource("events");
    source.addEventListener("status", (event) => {
      stopAsking();
      alive();
      whole(JSON.parse(event.data));
    });
    source.addEventListener("now", (event) => {
      alive();
      now(JSON.parse(event.data));
    });
    source.addEventListener("error", () => {
      // A browser comes back by itself, unless it was refused.
      if (source.readyState !== EventSource.CLOSED) {
        failing();
        return;
      }
      if (polls === null) {
        ask();
        polls = setInterval(ask, POLL);
      }
      setTimeout(listen, LISTEN_AGAIN);
    });
  };
  failing();
  listen();
}
