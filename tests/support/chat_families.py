"""How chat templates of well-known families write an answer, and tokenizers of the two usual kinds.

The templates are short forms of the published ones: roles and content, without tools, images and thoughts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BYTE_LEVEL, SENTENCE_PIECE = "byte-level", "SentencePiece"
TEXT = Path(__file__).parents[2] / "engine" / "demo" / "handbook.txt"


@dataclass(frozen=True)
class Family:
    """A chat template: before each user's message, before the answer, the answer, and its end."""

    tokenizer: str
    user: str  # around "{}"
    begin: str  # the end of a prompt: after it the model answers
    answer: str  # the answer in the history, a Jinja expression of `content`
    end: str = ""  # the token that ends an answer
    after: str = ""  # text after that token

    @property
    def template(self) -> str:
        before, _, behind = self.user.partition("{}")
        answer = f"{{{{ {self.answer} }}}}" if self.answer else ""
        return (
            "{% for message in messages %}{% set content = message['content'] %}"
            f"{{% if message['role'] == 'user' %}}{{{{ {before!r} + content + {behind!r} }}}}"
            f"{{% else %}}{answer}{{{{ {self.end + self.after!r} }}}}{{% endif %}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{{{{ {self.begin!r} }}}}{{% endif %}}"
        )

    def wrapper(self) -> TokenizerWrapper:
        """A tokenizer with this template."""
        tokenizer = _byte_level() if self.tokenizer == BYTE_LEVEL else _sentence_piece()
        marks = dict.fromkeys(MARK.findall(self.template))
        tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=self.end, chat_template=self.template)
        return TokenizerWrapper(
            fast, BPEStreamingDetokenizer if self.tokenizer == BYTE_LEVEL else SPMStreamingDetokenizer
        )


IM_START, IM_END = "<|im_start|>", "<|im_end|>"
FAMILIES = {
    "Qwen2.5, SmolLM2, Yi, Hermes (ChatML)": Family(
        BYTE_LEVEL,
        f"{IM_START}user\n{{}}{IM_END}\n",
        f"{IM_START}assistant\n",
        f"'{IM_START}assistant\\n' + content",
        IM_END,
        "\n",
    ),
    "Qwen3": Family(
        BYTE_LEVEL,
        f"{IM_START}user\n{{}}{IM_END}\n",
        f"{IM_START}assistant\n",
        f"'{IM_START}assistant\\n' + content.split('</think>')[-1].lstrip('\\n')",
        IM_END,
        "\n",
    ),
    "Llama 3": Family(
        BYTE_LEVEL,
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "'<|start_header_id|>assistant<|end_header_id|>\\n\\n' + content | trim",
        "<|eot_id|>",
    ),
    "Llama 2": Family(SENTENCE_PIECE, "<s>[INST] {} [/INST]", "", "' ' + content.strip() + ' '", "</s>"),
    "Mistral 7B v0.2": Family(SENTENCE_PIECE, "[INST] {} [/INST]", "", "content", "</s>"),
    "Mistral 7B v0.3": Family(SENTENCE_PIECE, "[INST] {}[/INST]", "", "' ' + content | trim", "</s>"),
    "Mixtral 8x7B": Family(SENTENCE_PIECE, " [INST] {} [/INST]", "", "' ' + content", "</s>"),
    "Mistral Small 3": Family(BYTE_LEVEL, "[INST]{}[/INST]", "", "content", "</s>"),
    "Gemma 2, Gemma 3": Family(
        SENTENCE_PIECE,
        "<start_of_turn>user\n{}<end_of_turn>\n",
        "<start_of_turn>model\n",
        "'<start_of_turn>model\\n' + content | trim",
        "<end_of_turn>",
        "\n",
    ),
    "DeepSeek LLM, DeepSeek V2": Family(
        BYTE_LEVEL, "User: {}\n\n", "Assistant:", "'Assistant: ' + content", "<|end_of_sentence|>"
    ),
    "DeepSeek V3": Family(
        BYTE_LEVEL, "<|User|>{}", "<|Assistant|>", "'<|Assistant|>' + content", "<|end_of_sentence|>"
    ),
    "GLM 4": Family(BYTE_LEVEL, "<|user|>\n{}", "<|assistant|>\n", "'<|assistant|>\\n' + content.strip()", ""),
    "gpt-oss": Family(
        BYTE_LEVEL,
        "<|start|>user<|message|>{}<|end|>",
        "<|start|>assistant<|channel|>final<|message|>",
        "'<|start|>assistant<|channel|>final<|message|>' + content",
        "<|end|>",
    ),
    "Phi 3": Family(
        SENTENCE_PIECE, "<|user|>\n{}<|end|>\n", "<|assistant|>\n", "'<|assistant|>\\n' + content", "<|end|>", "\n"
    ),
    "Kimi K2": Family(
        BYTE_LEVEL,
        "<|im_user|>user<|im_middle|>{}<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|>",
        "'<|im_assistant|>assistant<|im_middle|>' + content",
        "<|im_end|>",
    ),
    "Command R": Family(
        BYTE_LEVEL,
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "'<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + content.strip()",
        "<|END_OF_TURN_TOKEN|>",
    ),
    "Vicuna": Family(SENTENCE_PIECE, "USER: {} ", "ASSISTANT:", "'ASSISTANT: ' + content", "</s>"),
}
MARK = re.compile("<[^<>]+>")  # of a role or an end: a token of its own


def reused(tokenizer: TokenizerWrapper, answered: str, text: str) -> tuple[int, int]:
    """Return how many tokens of the answer `answered` the next turn reuses, and their number. The client sends `text`
    in the history. The last token is the answer's end, where the template has one."""
    question: list[dict[str, Any]] = [{"role": "user", "content": "What is it?"}]
    prompt = list(tokenizer.apply_chat_template(question, add_generation_prompt=True))
    answer = tokens_of(tokenizer, answered)
    if tokenizer.eos_token_id is not None:
        answer = [*answer, tokenizer.eos_token_id]
    history = [*question, {"role": "assistant", "content": text}, {"role": "user", "content": "Why?"}]
    following = list(tokenizer.apply_chat_template(history, add_generation_prompt=True))
    return max(0, _common(following, [*prompt, *answer]) - len(prompt)), len(answer)


def tokens_of(tokenizer: TokenizerWrapper, answered: str) -> list[int]:
    """The tokens of a text that continues another."""
    tokens = tokenizer.encode("\n" + answered, add_special_tokens=False)
    before = tokenizer.encode("\n", add_special_tokens=False)
    assert tokens[: len(before)] == before
    return list(tokens[len(before) :])


def _common(a: Iterable[int], b: Iterable[int]) -> int:
    count = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        count += 1
    return count


@cache
def _text() -> list[str]:
    return TEXT.read_text(encoding="utf-8").splitlines(keepends=True)


def _byte_level() -> Tokenizer:
    """Spelled as GPT-2's: a token for each byte, and merges of frequent words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_text(), trainer)
    return tokenizer


def _sentence_piece() -> Tokenizer:
    """Spelled as Llama 2's: a space is U+2581, and bytes that the vocabulary lacks have tokens of their own."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        initial_alphabet=["▁"],
        show_progress=False,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.train_from_iterator(_text(), trainer)
    tokenizer.pre_tokenizer = None
    strip = decoders.Strip(content=" ", left=1, right=0)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer
