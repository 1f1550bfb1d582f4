// Server-sent events by fetch, which unlike EventSource can send headers and read the reason of a refusal.

/** Yield the events of a reply as [name, data]. "[DONE]" ends them. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      held += value;
      const parts = held.split("\n\n");
      held = parts.pop();
      for (const part of parts) {
        let name = "message";
        let data = "";
        for (const line of part.split("\n")) {
          if (line.startsWith("event: ")) name = line.slice(7);
          else if (line.startsWith("data: ")) data += line.slice(6);
        }
        if (data === "[DONE]") return;
        if (data) yield [name, JSON.parse(data)];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const PAUSE_MS = 1000; // before the next try

const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Read a stream while the page is visible, and connect again when it breaks.
 *
 * `heard(name, data)` is called for each event. `state` is called with "live", or with "lost" and the text of a
 * refusal. `denied` is awaited when the reply is 401. `headers` is called before each try. */
export async function listen(url, { heard, state, denied, headers = () => ({}) }) {
  for (;;) {
    if (document.hidden) await shown();
    const stop = new AbortController();
    const leave = () => document.hidden && stop.abort();
    document.addEventListener("visibilitychange", leave);
    let why = "";
    try {
      const response = await fetch(url, { headers: headers(), signal: stop.signal, cache: "no-store" });
      if (response.status === 401) await denied();
      else if (response.ok) {
        state("live");
        for await (const event of events(response)) tell(heard, event);
      } else why = (await response.text()).trim();
    } catch (error) {
      if (!(error instanceof TypeError) && error.name !== "AbortError") throw error;
    } finally {
      document.removeEventListener("visibilitychange", leave);
    }
    if (!document.hidden) {
      state("lost", why);
      await wait(PAUSE_MS);
    }
  }
}

function tell(heard, event) {
  try {
    heard(...event);
  } catch (error) {
    reportError(error); // an error of the page does not end the stream
  }
}

function shown() {
  return new Promise((resolve) => {
    document.addEventListener("visibilitychange", resolve, { once: true });
  });
}
