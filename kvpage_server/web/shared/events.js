// Server-sent events, received with fetch. Unlike EventSource, it can send headers, and read the body of an error reply.

/** Yield the events in the body of a reply as [name, data], with data parsed as JSON, until the end of the body or the
 * event "[DONE]". */
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

const PAUSE_MS = 1000; // before a reconnection

const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Receive the events of a URL as long as the page is open. Disconnect while it is hidden, and reconnect after a lost
 * connection.
 *
 * `received(name, data)` is called for each event. `state` is called with "live" when the server replies with events, or
 * with "lost" and the body of an error reply, which is "" without a reply. `denied` is awaited after the status 401.
 * `headers` returns the headers of a request. */
export async function listen(url, { received, state, denied, headers = () => ({}) }) {
  for (;;) {
    if (document.hidden) await visible();
    const stop = new AbortController();
    const abortIfHidden = () => document.hidden && stop.abort();
    document.addEventListener("visibilitychange", abortIfHidden);
    let why = "";
    try {
      const response = await fetch(url, { headers: headers(), signal: stop.signal, cache: "no-store" });
      if (response.status === 401) await denied();
      else if (response.ok) {
        state("live");
        for await (const event of events(response)) deliver(received, event);
      } else why = (await response.text()).trim();
    } catch (error) {
      if (!(error instanceof TypeError) && error.name !== "AbortError") throw error;
    } finally {
      document.removeEventListener("visibilitychange", abortIfHidden);
    }
    if (!document.hidden) {
      state("lost", why);
      await wait(PAUSE_MS);
    }
  }
}

/** Call `received` with an event. An exception in it is reported, and does not end the stream. */
function deliver(received, event) {
  try {
    received(...event);
  } catch (error) {
    reportError(error);
  }
}

/** Wait until the page becomes visible. */
function visible() {
  return new Promise((resolve) => {
    document.addEventListener("visibilitychange", resolve, { once: true });
  });
}
