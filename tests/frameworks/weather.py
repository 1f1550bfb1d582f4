"""The task of the frameworks' agents: they ask a tool for the weather, and answer in a structure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

QUESTION = "Weather: Paris"
SKY = "rain"


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Oslo", "Rome", "Bonn", "Paris"]
    degrees: Annotated[int, Field(ge=-50, le=50)]
    skies: Annotated[list[Literal["sun", "rain", "snow", "fog"]], Field(min_length=1, max_length=2)]


# A model as small as SmolLM2 calls a tool if it sees calls. So the instructions go on with turns of a conversation.
_TURN = """Weather: {city}<|im_end|>
<|im_start|>assistant
<tool_call>
{{"name": "weather", "arguments": {{"city": "{city}"}}}}
</tool_call><|im_end|>
<|im_start|>tool
{sky}<|im_end|>
<|im_start|>assistant
{answer}"""
_SKIES = {"Oslo": "snow", "Rome": "sun", "Bonn": "fog"}
_FIRST = "Call the tool weather for each city."
_TURNS = [_TURN.format(city=city, sky=sky, answer=f"{sky} in {city}.") for city, sky in _SKIES.items()]
_STRUCTURED = [
    _TURN.format(city=city, sky=sky, answer=f'{{"city": "{city}", "degrees": 9, "skies": ["{sky}"]}}')
    for city, sky in _SKIES.items()
]
INSTRUCTIONS = "<|im_end|>\n<|im_start|>user\n".join([_FIRST, *_TURNS])
STRUCTURED = "<|im_end|>\n<|im_start|>user\n".join([_FIRST, *_STRUCTURED])  # answers as JSON
