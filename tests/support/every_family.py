"""Every family of models that the installed mlx-lm has, found by looking, each as a tiny random model.

A family is a module of `mlx_lm.models` with a `Model` and its `ModelArgs`. Their configurations call the same things by
many names: TINY has a small value for each, of which a family takes the names that it knows, and OWN has further values
of a family.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from engine_models import FAMILIES, random_weight

# isort: split
import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_map

VOCABULARY, LAYERS, WINDOW, CONTEXT = 97, 4, 64, 4096
LINEAR_AND_FULL = ["linear_attention", "full_attention"] * 2
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
YARN = {
    "rope_theta": 10000.0,
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": CONTEXT,
}


def _named(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


TINY: dict[str, Any] = {
    **_named(VOCABULARY, "vocab_size num_vocab vocab_size_per_layer_input"),
    **_named(LAYERS, "num_hidden_layers num_layers n_layer n_layers num_transformer_layers"),
    **_named(64, "hidden_size hidden_dim n_embd d_model model_dim dim_model_base mamba_d_ssm shared_intermediate_size"),
    **_named(128, "intermediate_size n_inner ffn_hidden_size ff_intermediate_size dense_intermediate_size"),
    **_named(32, "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size moe_hidden_size"),
    **_named(32, "moe_shared_expert_intermediate_size share_expert_dim q_lora_rank o_lora_rank"),
    **_named(4, "num_attention_heads num_heads n_head n_heads num_query_heads swa_num_attention_heads"),
    **_named(2, "num_key_value_heads num_kv_heads n_kv_heads num_attention_groups swa_num_key_value_heads"),
    **_named(16, "head_dim hidden_size_per_head kv_channels global_head_dim swa_head_dim swa_v_head_dim v_head_dim"),
    **_named(16, "qk_nope_head_dim index_head_dim hidden_size_per_layer_input laurel_rank"),
    **_named(8, "qk_rope_head_dim rotary_dim"),
    **_named(24, "kv_lora_rank"),
    **_named(4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    **_named(2, "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts zero_expert_num"),
    **_named(1, "n_shared_experts num_shared_experts num_shared_expert first_k_dense_replace num_dense_layers"),
    **_named(1, "moe_layer_freq decoder_sparse_step n_group topk_group"),
    **_named(4, "conv_kernel conv1d_width short_conv_kernel_size linear_conv_kernel_dim mamba_d_conv"),
    **_named(3, "conv_L_cache"),
    **_named(16, "state_size ssm_state_size mamba_d_state mamba_d_head mamba_head_dim"),
    **_named(16, "linear_key_head_dim linear_value_head_dim"),
    **_named(8, "mamba_n_heads mamba_num_heads"),
    **_named(8, "a_low_rank_dim decay_low_rank_dim gate_low_rank_dim v_low_rank_dim"),
    **_named(4, "linear_num_value_heads"),
    **_named(2, "linear_num_key_heads mamba_expand index_n_heads"),
    **_named(1, "n_groups mamba_n_groups group_norm_size"),
    **_named(2, "sliding_window_pattern full_attention_interval layer_group_size cla_share_factor"),
    **_named(2, "dense_attention_every_n_layers num_kv_shared_layers n_shared_head"),
    **_named(WINDOW, "sliding_window sliding_window_size window_size attention_window_size index_topk"),
    **_named(CONTEXT, "max_position_embeddings n_positions n_ctx model_max_length block_size"),
    **_named(1e-5, "rms_norm_eps norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_epsilon"),
    **_named(1e-5, "post_norm_eps"),
    **_named(1e4, "rope_theta rotary_emb_base rope_local_base_freq swa_rope_theta"),
    **_named(0.5, "partial_rotary_factor rotary_pct"),
    **_named(0.25, "attention_multiplier"),
    **_named(1.0, "routed_scaling_factor logits_scaling embedding_multiplier residual_multiplier scale_emb"),
    **_named(1.0, "scale_depth output_multiplier"),
    **_named(30.0, "final_logit_softcapping logits_soft_cap gegelu_limit"),
    **_named(False, "attention_bias mlp_bias use_bias use_qkv_bias conv_bias mamba_proj_bias tie_word_embeddings"),
    **_named(False, "post_norm block_auto_adjust_ff_dim use_mixed_mlp_moe use_cla"),
    **_named(False, "add_full_attention_sink_bias"),
    **_named(True, "norm_topk_prob use_qk_norm qk_norm use_conv_bias mamba_conv_bias use_expert_bias"),
    **_named(True, "linear_allow_neg_eigval add_swa_attention_sink_bias mla_scale_q_lora mla_scale_kv_lora"),
    **_named("sigmoid", "scoring_func score_function"),
    **_named(["sliding_attention", "full_attention"] * 2, "layer_types"),
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "mlp_only_layers": [],
    "time_step_limit": (0.0, 10.0),
    "time_step_rank": "auto",
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "rope_parameters": None,
    "rope_scaling": None,
}
_MAMBA = {"layer_types": ["mamba", "attention"] * 2}
_LFM = {
    **FAMILIES["lfm2"],
    "layer_types": ["conv", "full_attention"] * 2,
}
_GEMMA3N = {
    "activation_sparsity_pattern": [0.0] * LAYERS,
    "altup_num_inputs": 2,
    "altup_coef_clip": 30.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
}
_LINEAR = {
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
    }
}
OWN: dict[str, dict[str, Any]] = {
    **{name: own for name, own in FAMILIES.items() if name != "llama4"},
    "afm7": {"num_kv_reuse_layers": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": [False, True] * 2},
    "gemma3n": {"text_config": _GEMMA3N},
    "glm_moe_dsa": {"rope_parameters": ROPE},
    "granitemoehybrid": _MAMBA,
    "hunyuan": {"use_cla": True, "rope_scaling": {**ROPE, "alpha": 1.0, "factor": 1.0, "type": "dynamic"}},
    "kimi_k3": {"text_config": {**_LINEAR, "hidden_act": "situ"}},
    "kimi_linear": _LINEAR,
    "lfm2-vl": {"text_config": _LFM},
    "lfm2_moe": _LFM,
    "llama4": {"text_config": FAMILIES["llama4"]["text_config"]},
    "longcat_flash_ngram": {"ngram_vocab_size_ratio": 4, "emb_neighbor_num": 3, "emb_split_num": 2},
    "mellum": {"rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}},
    "mimo_v2_flash": {"hybrid_layer_pattern": [1, 0] * 2, "moe_layer_freq": [0, 1] * 2},
    "minicpm3": {"rope_scaling": YARN},
    "minimax_m3_vl": {
        "text_config": {
            "moe_layer_freq": [0, 1, 1, 1],
            "sparse_attention_freq": [0, 1, 1, 1],
            "index_block_size": 16,
            "index_topk_blocks": 2,
            "layer_types": None,
        }
    },
    "ministral3": {"rope_parameters": YARN},
    "mistral4": {"rope_parameters": YARN},
    "muse_spark": {
        "text_config": {"rope_parameters": ROPE, "layer_rope_theta": [1e4, 0.0] * 2, "num_shared_experts": 0}
    },
    "nemotron-nas": {
        "block_configs": [
            {
                "attention": {"no_op": i == 1, "n_heads_in_group": 2, "replace_with_linear": False},
                "ffn": {"no_op": i == 2, "ffn_mult": 1.0, "replace_with_linear": False},
            }
            for i in range(LAYERS)
        ]
    },
    "nemotron_h": {
        "layer_types": None,
        "hybrid_override_pattern": ["M", "*", "M", "-"],
        "num_hidden_layers": 4,
    },
    "olmo_hybrid": {"layer_types": LINEAR_AND_FULL},
    "openelm": {
        "num_query_heads": [4] * LAYERS,
        "num_kv_heads": [2] * LAYERS,
        "ffn_multipliers": [2.0] * LAYERS,
        "ffn_dim_divisor": 16,
    },
    "phi3small": {"vocab_size": 100352},  # it has tokens of its own at the end of it, which it masks
    "qwen": {"kv_channels": 16},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "spark2_5": {"hidden_act": "gelu", "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}},
    "step3p5": {"moe_layers_enum": "1,3"},
}


def modules() -> list[str]:
    """Return the modules that define a family, found in their source, because some cannot be imported."""
    sources = Path(mlx_lm.models.__path__[0]).glob("*.py")
    return sorted(source.stem for source in sources if "class ModelArgs" in source.read_text(encoding="utf-8"))


def random_model(name: str, **changes: Any) -> Any:
    """A tiny model of the family in `mlx_lm.models.{name}`. Raises whatever it cannot be built for."""
    module = import_module(f"mlx_lm.models.{name}")
    own = {**OWN.get(name, {}), **changes}
    text = {**TINY, "model_type": name, **OWN.get(name, {}).get("text_config", {}), **own.get("text_config", {})}
    mx.random.seed(7)
    args = module.ModelArgs.from_dict({**TINY, "model_type": name, **own, "text_config": text})
    model = module.Model(args)
    model.update(tree_map(random_weight, model.parameters()))
    mx.eval(model.parameters())
    return model
