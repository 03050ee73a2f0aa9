// Keeps the report current: server-sent events, and asking now and then where there are none.

/** After an event source has failed for this long, the agent counts as gone. */
const PATIENCE = 2500;
/** The agent sends something every 3 s; after this long without, it counts as gone. */
const SILENCE = 10000;
/** Where too many listen: ask this often, and try to listen again after a minute. */
const POLL = 10000;
const LISTEN_AGAIN = 60000;

/** The agent does not answer: nothing came. */
const GONE = { kind: "gone" };

/** The answer that is not the report: the page's token is refused, or something else is wrong. */
async function wrong(answer) {
  const kind = answer.status === 401 || answer.status === 403 ? "refused" : "error";
  const [text] = (await answer.text()).split("\n");
  return { kind, text: text || `status ${answer.status}` };
}

/** Calls whole(report), now(part) and lost(why) as it learns; why is null when all is well again. */
export function follow({ whole, now, lost }) {
  let source = null;
  let watch = null;
  let again = null;
  let polls = null;
  let isFailing = false;
  let isRefused = false;
  const expect = (time) => {
    clearTimeout(watch);
    watch = setTimeout(() => lost(GONE), time);
  };
  const alive = (time) => {
    isFailing = false;
    isRefused = false;
    expect(time);
    lost(null);
  };
  const failing = () => {
    // It fails again and again; the first time counts.
    if (isFailing) return;
    isFailing = true;
    expect(PATIENCE);
  };
  const ask = async () => {
    try {
      const answer = await fetch("status", { cache: "no-store", signal: AbortSignal.timeout(POLL) });
      if (answer.ok) {
        whole(await answer.json());
        const listens = isRefused;
        alive(POLL + SILENCE);
        // Somebody has signed in again, in another tab.
        if (listens) listen();
        return;
      }
      const why = await wrong(answer);
      clearTimeout(watch);
      isRefused = why.kind === "refused";
      lost(why);
    } catch {
      clearTimeout(watch);
      lost(GONE);
    }
  };
  const stopAsking = () => {
    clearInterval(polls);
    polls = null;
  };
  function listen() {
    clearTimeout(again);
    if (source) source.close();
    source = new EventSource("events");
    source.addEventListener("status", (event) => {
      stopAsking();
      alive(SILENCE);
      whole(JSON.parse(event.data));
    });
    source.addEventListener("now", (event) => {
      alive(SILENCE);
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
      clearTimeout(again);
      again = setTimeout(listen, LISTEN_AGAIN);
    });
  }
  failing();
  listen();
}
