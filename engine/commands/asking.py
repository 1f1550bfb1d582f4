"""Asking an engine in this process, one prompt at a time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.commands import Failure

if TYPE_CHECKING:
    from engine.agent_job import Answer
    from engine.generation.unbatched import Sampler
    from engine.scheduling.request import Token, TokenReceiver
    from engine.startup import Engine


def ask(
    engine: Engine,
    agent_id: str,
    tokens: Sequence[int],
    *,
    max_tokens: int,
    sampler: Sampler | None = None,
    continues: bool = False,
    on_token: TokenReceiver | None = None,
) -> Answer:
    """The answer to one prompt. Raises Failure with the engine's error."""
    answers: list[Answer] = []
    errors: list[Exception] = []
    engine.agents.submit(
        agent_id,
        tokens,
        max_tokens=max_tokens,
        sampler=sampler,
        continues=continues,
        on_token=on_token,
        on_done=answers.append,
        on_error=errors.append,
    )
    while engine.agents.step(timeout=1.0):
        pass
    if errors:
        raise Failure(str(errors[0]))
    return answers[0]


def print_text(token: Token) -> None:
    sys.stdout.write(token.text)
    sys.stdout.flush()


def account(answer: Answer) -> str:
    """One line about what was reused and how long it took."""
    reuse = answer.reuse
    where = {
        "hot": "from memory",
        "prefix": "from another's beginning in memory",
        "page": "from the page server",
        "cold": "from a file",
    }
    found = f" {where[reuse.tier]} in {1000 * reuse.restore_seconds:.0f} ms" if reuse.tier in where else ""
    why = f" ({reuse.why})" if reuse.why else ""
    return (
        f"{reuse.tokens:,} of {answer.prompt_tokens:,} tokens reused{found}{why}; "
        f"first token after {reuse.time_to_first_token:.2f} s"
    )
