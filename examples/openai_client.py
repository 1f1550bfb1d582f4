"""A conversation with an engine that remembers, by OpenAI's own client (pip install openai).

Start a store (`make run`) and an engine (`make serve`), then: python examples/openai_client.py. Run it again, restart
the engine, run it again: computed tokens are not computed again.
"""

from __future__ import annotations

import sys

import openai

QUESTIONS = ("What is the capital of France?", "And of Italy?", "Which of the two is larger?")


def main(url: str = "http://127.0.0.1:8000") -> None:
    """Ask, stream, and print the reused tokens."""
    messages = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            print(f"> {question}")
            text = ""
            stream = client.chat.completions.create(
                model=model,
                messages=messages,
                temperature=0,
                max_tokens=40,
                stream=True,
                extra_body={"agent_id": "traveller"},
            )
            for chunk in stream:
                said = chunk.choices[0].delta.content or ""
                text += said
                print(said, end="", flush=True)
            kvpage = chunk.kvpage  # of the last chunk
            print(f"\n  [{kvpage['tokens_reused']} tokens reused, {kvpage['first_token_ms']:.0f} ms to the first]")
            messages.append({"role": "assistant", "content": text})


if __name__ == "__main__":
    main(*sys.argv[1:])
