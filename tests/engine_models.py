"""Tiny random models and a tokenizer with a token a letter, for tests of the engine's structure."""

from __future__ import annotations

import engine  # noqa: F401 - picks the BLAS before mlx is imported

# isort: split
import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"


def tiny_llama(seed: int = 7, dtype: mx.Dtype = mx.float32, **changes: object) -> llama.Model:
    """A Llama of 4 layers, 4 heads over 2 KV heads of 16, with random weights that `seed` decides.

    They are large enough that every token of the context counts, and untied so that it doesn't repeat one letter.
    """
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 97,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        **changes,
    }
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs(**config))
    model.update(tree_map(lambda weight: random_weight(weight).astype(dtype), model.parameters()))
    mx.eval(model.parameters())
    return model


def random_weight(like: mx.array) -> mx.array:
    """Ones for a norm, else normal with a deviation of 0.2."""
    return mx.ones_like(like) if like.ndim == 1 else mx.random.normal(like.shape, scale=0.2)


def letter_tokenizer() -> TokenizerWrapper:
    """97 tokens: newline, space, the 94 visible letters of ASCII, and the end of the text."""
    letters = ["Ċ", "Ġ", *map(chr, range(33, 127))]  # as byte-level BPE spells them
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate([*letters, END])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    return TokenizerWrapper(fast, BPEStreamingDetokenizer)
