"""Tiny random models and a tokenizer with a token a byte, for tests of the engine's structure."""

from __future__ import annotations

import engine  # noqa: F401, I001 - picks the BLAS before mlx is imported

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"


def tiny_llama(seed: int = 7, dtype: mx.Dtype = mx.float32, **changes: object) -> llama.Model:
    """A Llama of 4 layers, 4 heads over 2 KV heads of 16, with random weights that `seed` decides."""
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 257,
        "max_position_embeddings": 4096,
        **changes,
    }
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs(**config))
    model.update(tree_map(lambda weight: mx.random.normal(weight.shape, scale=0.2).astype(dtype), model.parameters()))
    mx.eval(model.parameters())
    return model


def byte_tokenizer() -> TokenizerWrapper:
    """257 tokens: every byte, and the end of the text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, END: 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    return TokenizerWrapper(fast, BPEStreamingDetokenizer, eos_token_ids=[256])
