"""The task of the frameworks' agents: they ask a tool for the weather, and answer in a structure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

# A model as small as SmolLM2 calls a tool if it sees calls. So the instructions go on with turns of a conversation.
_TURN = """{weather}: {city}<|im_end|>
<|im_start|>assistant

<tool_call>
{{"name": "weather", "arguments": {{"city": "{city}"}}}}
</tool_call><|im_end|>
<|im_start|>tool
{sky}<|im_end|>
<|im_start|>assistant
{sky} in {city}."""
INSTRUCTIONS = "<|im_end|>\n<|im_start|>user\n".join(
    [
        "Call the tool weather for each city.",
        *(
            _TURN.format(weather="Weather", city=city, sky=sky)
            for city, sky in (("Oslo", "snow"), ("Rome", "sun"), ("Bonn", "fog"))
        ),
    ]
)
QUESTION = "Weather: Paris"
SKIES = "rain"


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Oslo", "Paris"]
    degrees: Annotated[int, Field(ge=-50, le=50)]
    skies: Annotated[list[Literal["sun", "rain", "snow"]], Field(min_length=1, max_length=2)]
