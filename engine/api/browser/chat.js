// A conversation with an agent: every turn sends the whole conversation, and shows the reused tokens.

import { at, bar, el, say } from "./dom.js";
import { count, seconds } from "./format.js";
import { events } from "./events.js";
import { WORDS } from "./tiers.js";
import { askForToken, authHeaders } from "./token.js";

const MAX_TURNS = 100; // on the page; older ones are removed from it, and stay in the conversation

let model = null;
let messages = [];

/** Install the handlers of the form, and request the list of models until the engine replies. Resolve to the names of the
 * models; the chat is with the first one. */
export async function chat() {
  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  at("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!at("send").disabled) at("ask").requestSubmit();
    }
  });
  at("anew").addEventListener("click", () => {
    messages = [];
    at("conversation").replaceChildren();
    at("question").focus();
  });
  for (;;) {
    const reply = await fetch("/v1/models", { headers: authHeaders() }).catch(() => null);
    if (reply?.ok) {
      const names = (await reply.json()).data.map((each) => each.id);
      model = names[0];
      return names;
    }
    if (reply?.status === 401) await askForToken();
    else await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

/** Send the conversation with the message of the form, and show the answer. After an error, the message is in the form
 * again. */
async function ask() {
  const question = at("question").value.trim();
  if (!question) return;
  const agent = at("agent").value.trim();
  at("question").value = "";
  at("send").disabled = true;
  messages.push({ role: "user", content: question });
  if (messages.length === 1) at("conversation").replaceChildren();
  turn("user", question);
  const shown = turn("assistant", "…");
  try {
    const reply = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { ...authHeaders(), "Content-Type": "application/json" },
      body: JSON.stringify({
        model,
        messages,
        stream: true,
        stream_options: { include_usage: true },
        temperature: Number(at("temperature").value),
        ...(agent ? { agent_id: agent } : {}),
      }),
    });
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    messages.push({ role: "assistant", content: await showAnswer(reply, shown) });
  } catch (error) {
    messages.pop();
    at("question").value ||= question;
    shown.text.classList.add("bad");
    say(shown.text, `No answer: ${error.message}`);
  } finally {
    at("send").disabled = false;
    at("question").focus();
  }
}

/** Show an answer while it arrives, and its reused tokens at the end. `shown` has the elements of the turn. Resolve to the
 * text of the answer. Throws Error if the stream has an error, or ends early. */
async function showAnswer(reply, shown) {
  let text = "";
  let reuse = null;
  let usage = null;
  for await (const [, chunk] of events(reply)) {
    if (chunk.error) throw new Error(chunk.error.message);
    text += chunk.choices?.[0]?.delta?.content ?? "";
    reuse = chunk.kvpage ?? reuse;
    usage = chunk.usage ?? usage;
    shown.text.textContent = text || "…";
    at("conversation").scrollTop = at("conversation").scrollHeight;
  }
  if (!reuse || !usage) throw new Error("the connection has ended before the answer did");
  const prompt = usage.prompt_tokens;
  const from = reuse.tokens_reused ? ` from ${reuse.tier === "page" ? "the page server" : `its ${WORDS[reuse.tier]}`}` : "";
  const why = reuse.why ? ` (${reuse.why})` : "";
  shown.reuse.append(
    bar([[reuse.tier, reuse.tokens_reused], ["none", prompt - reuse.tokens_reused]], prompt),
    `${count(reuse.tokens_reused)} of ${count(prompt)} tokens reused${from}${why}. TTFT ${seconds(reuse.first_token_ms / 1000)}.`,
  );
  at("conversation").scrollTop = at("conversation").scrollHeight;
  return text;
}

/** Add a turn to the page. `role` is "user" or "assistant". Return the elements for its text and for its reused tokens. */
function turn(role, content) {
  const text = el("div", { class: "text" });
  text.textContent = content; // keeps line breaks
  const reuse = el("div", { class: "reuse" });
  const who = el("span", { class: "unseen" }, role === "user" ? "You: " : "Agent: ");
  const box = at("conversation");
  box.append(el("div", { class: `turn ${role}` }, who, text, reuse));
  while (box.childElementCount > MAX_TURNS) box.firstElementChild.remove();
  box.scrollTop = box.scrollHeight;
  return { text, reuse };
}
