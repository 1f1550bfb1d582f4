"""Four agents with one system prompt, at two engines that share a store (pip install openai).

Start a store (`make run`), an engine (`make serve`) and another (`kvpage-engine serve --port 8001 --store
redis://127.0.0.1:9221`), then: python examples/four_agents.py. The agents speak in turn, each time at the other engine.
The first agent computes their common rules, once.
"""

from __future__ import annotations

import sys

import openai

RULES = " ".join(
    f"Rule {i}: whoever speaks says one short sentence about the ship, and no two say the same." for i in range(1, 16)
)
AGENTS = {
    "captain": "You are the captain and decide.",
    "pilot": "You are the pilot and know the coast.",
    "engineer": "You are the engineer and doubt the engine.",
    "cook": "You are the cook and are hungry.",
}
ROUNDS = 2


def main(*urls: str) -> None:
    """Let them talk."""
    clients = [openai.OpenAI(base_url=f"{url}/v1", api_key="none") for url in urls]
    model = clients[0].models.list().data[0].id
    heard = {name: [{"role": "system", "content": f"{RULES}\n{role}"}] for name, role in AGENTS.items()}
    said = "Good morning. What do we do today?"
    turn = 0
    for _ in range(ROUNDS):
        for name in AGENTS:
            engine = turn % len(clients)
            heard[name].append({"role": "user", "content": said})
            answer = clients[engine].chat.completions.create(
                model=model, messages=heard[name], temperature=0, max_tokens=16, extra_body={"agent_id": name}
            )
            said = answer.choices[0].message.content
            heard[name].append({"role": "assistant", "content": said})
            kvpage = answer.kvpage
            print(
                f"{name:9} at engine {engine}: {' '.join(said.split())}\n"
                f"          [{kvpage['tokens_reused']} of {answer.usage.prompt_tokens} tokens reused: {kvpage['tier']}]"
            )
            turn += 1 if name != "cook" else 2  # so that each meets the other engine in the next round


if __name__ == "__main__":
    main(*sys.argv[1:] or ("http://127.0.0.1:8000", "http://127.0.0.1:8001"))
