"""Tiny random models and a tokenizer with a token a letter, for tests of the engine's structure."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import engine  # noqa: F401 - picks the BLAS before mlx is imported

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"
ADAPTERS = [(11, 0.5), (11, 4.0), (12, 2.0)]  # the seed of an adapter's matrices, and its scale


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


def adapted_llama() -> llama.Model:
    """The same with LoRA layers, whose adapter `adapt` chooses."""
    model = tiny_llama()
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            layer.self_attn[name] = LoRALinear.from_base(layer.self_attn[name], r=4)
    adapt(model, 0)
    return model


def adapt(model: llama.Model, adapter: int) -> None:
    """Switch an adapted model to one of ADAPTERS."""
    seed, scale = ADAPTERS[adapter]
    mx.random.seed(seed)
    for layer in model.model.layers:
        for lora in (layer.self_attn.q_proj, layer.self_attn.v_proj):
            lora.lora_a = mx.random.normal(lora.lora_a.shape, scale=0.2)
            lora.lora_b = mx.random.normal(lora.lora_b.shape, scale=0.2)
            lora.scale = scale
    mx.eval(model.parameters())


def write_adapter(directory: Path, seed: int, *, scale: float = 20.0, kind: str = "lora", **changes: Any) -> Path:
    """Files of an adapter for `tiny_llama` as mlx_lm.lora writes them, with random weights."""
    model = tiny_llama(**changes)
    config = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": {"rank": 4, "dropout": 0.0, "scale": scale}}
    model.freeze()
    linear_to_lora_layers(model, 2, config["lora_parameters"], use_dora=kind == "dora")
    mx.random.seed(seed)
    weights = {name: mx.random.normal(w.shape, scale=0.1) for name, w in tree_flatten(model.trainable_parameters())}
    directory.mkdir(parents=True)
    mx.save_safetensors(str(directory / "adapters.safetensors"), weights)
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


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


def tiny(family: str, seed: int = 7, **changes: Any) -> Any:
    """A random model of one of FAMILIES, of 2 layers, or of 4 where they are of two kinds."""
    module = import_module(f"mlx_lm.models.{family}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict({"model_type": family, **COMMON, **FAMILIES[family], **changes}))
    model.update(tree_map(random_weight, model.parameters()))
    mx.eval(model.parameters())
    return model


COMMON = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 4}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHALLOW = {"num_hidden_layers": 2}  # where all layers are of a kind
LATENT = {
    **ATTENTION,
    **SHALLOW,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**ATTENTION, **SHALLOW, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    "qwen3": {
        **ATTENTION,
        **SHALLOW,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    },
    "deepseek_v2": {**LATENT, "rope_scaling": {"type": "yarn", "factor": 1.0}},
    "deepseek_v3": LATENT,
    "deepseek_v32": {
        **LATENT,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 64,
        "max_position_embeddings": 4096,
    },
    "llama4_text": {
        **ATTENTION,
        **SHALLOW,
        "intermediate_size_mlp": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "no_rope_layers": [1, 0],
        "use_qk_norm": True,
    },
    "llama4": {
        "text_config": {
            **COMMON,
            **ATTENTION,
            "model_type": "llama4_text",
            "attention_bias": False,
            "attention_chunk_size": 64,
            "head_dim": 16,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 64,
            "max_position_embeddings": 8192,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "use_qk_norm": True,
        },
    },
    "gemma3_text": {**ATTENTION, "head_dim": 16, "sliding_window": 64, "sliding_window_pattern": 2},
    "gpt_oss": {
        **ATTENTION,
        "head_dim": 16,
        "sliding_window": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_scaling": {"rope_type": "default"},
    },
    "cohere2": {**ATTENTION, "head_dim": 16, "sliding_window": 64, "sliding_window_pattern": 2},
    "lfm2": {
        **ATTENTION,
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 128,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
    },
    "qwen3_next": {
        **ATTENTION,
        **EXPERTS,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 4096,
        "head_dim": 16,
        "full_attention_interval": 2,
    },
    "falcon_h1": {
        **ATTENTION,
        **SHALLOW,
        "head_dim": 16,
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_n_heads": 4,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "baichuan_m1": {
        **ATTENTION,
        "conv_window": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": 64,
        "sliding_window_layers": [0, 2],
    },
    "jamba": {
        **ATTENTION,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "max_position_embeddings": 4096,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "rms_norm_eps": 1e-5,
    },
    "rwkv7": {
        **SHALLOW,
        "a_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "head_dim": 32,
        "intermediate_size": 128,
        "norm_eps": 1e-5,
        "v_low_rank_dim": 8,
    },
    "mamba2": {
        **SHALLOW,
        "num_heads": 8,
        "head_dim": 16,
        "intermediate_size": 128,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": (0.0, 10.0),
        "time_step_rank": "auto",
    },
}
