"""Tiny models with random weights, one per architecture, made from a transformers config."""

import shutil
from pathlib import Path
from typing import Any

_VOCABULARY = 49152
_COMMON = {
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.06,
}
_GROUPED = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, **_COMMON}
_HEADS = {"num_key_value_heads": 4, "head_dim": 32}

# name: (config class, its arguments).  The name says which form of layer output the family stands for.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # (hidden, residual), added by the next layer
    "llama": ("LlamaConfig", {"intermediate_size": 512, **_HEADS, **_GROUPED}),
    "phi3": ("Phi3Config", {"intermediate_size": 512, "num_key_value_heads": 4, "pad_token_id": 0, **_GROUPED}),
    # sandwich norms; sliding window
    "gemma2": (
        "Gemma2Config",
        {"intermediate_size": 512, "sliding_window": 16, "query_pre_attn_scalar": 32, **_HEADS, **_GROUPED},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"intermediate_size": 512, "sliding_window": 16, "query_pre_attn_scalar": 32, **_HEADS, **_GROUPED},
    ),
    "glm4": ("Glm4Config", {"intermediate_size": 512, "pad_token_id": 0, **_HEADS, **_GROUPED}),
    # (hidden, residual), the residual overwritten by the next layer; parallel attention
    "cohere": ("CohereConfig", {"intermediate_size": 512, "num_key_value_heads": 4, "logit_scale": 1.0, **_GROUPED}),
    # plain hidden
    "gpt2": (
        "GPT2Config",
        {"n_embd": 256, "n_layer": 6, "n_head": 8, "n_positions": 1024, **_COMMON},
    ),
    "opt": (
        "OPTConfig",
        {
            "ffn_dim": 512,
            "word_embed_proj_dim": 256,
            "init_std": 0.06,
            **{key: value for key, value in _GROUPED.items() if key != "initializer_range"},
        },
    ),
    "granite": (
        "GraniteConfig",
        {
            "intermediate_size": 512,
            "num_key_value_heads": 4,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.17,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            **_GROUPED,
        },
    ),
    # plain hidden, parallel attention
    "falcon": (
        "FalconConfig",
        {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "bias": False, **_GROUPED},
    ),
    # (hidden, None)
    "minicpm3": (
        "MiniCPM3Config",
        {
            "intermediate_size": 512,
            "num_key_value_heads": 8,
            "q_lora_rank": 64,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "scale_emb": 2.0,
            "scale_depth": 1.4,
            "dim_model_base": 128,
            **_GROUPED,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {"intermediate_size": 512, "sliding_window": 16, **_HEADS, **_GROUPED},
    ),
    # mixture of experts
    "mixtral": ("MixtralConfig", {"intermediate_size": 128, "num_local_experts": 4, **_HEADS, **_GROUPED}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "intermediate_size": 256,
            "moe_intermediate_size": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            **_HEADS,
            **_GROUPED,
        },
    ),
    # multi-head latent attention
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            "intermediate_size": 512,
            "moe_intermediate_size": 64,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "num_key_value_heads": 8,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            **_GROUPED,
        },
    ),
    # no vLLM model of its own: Transformers backend
    "gpt_neox": ("GPTNeoXConfig", {"intermediate_size": 512, **_GROUPED}),
    "olmo2": ("Olmo2Config", {"intermediate_size": 512, "num_key_value_heads": 4, **_GROUPED}),
    # ALiBi: gates, but no scan
    "bloom": ("BloomConfig", {"hidden_size": 256, "n_layer": 6, "n_head": 8, **_COMMON}),
    # a state that is not attention: gates, but no scan
    "lfm2": (
        "Lfm2Config",
        {
            "intermediate_size": 512,
            "num_key_value_heads": 4,
            "conv_dim": 256,
            "conv_dim_out": 256,
            "block_dim": 256,
            "block_ff_dim": 512,
            "block_norm_eps": 1e-5,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "full_attention"],
            **_GROUPED,
        },
    ),
}

# vLLM's attention backend where the family needs a certain one.  On a CPU with AMX vLLM would take one for bf16 alone,
# which packs what multi-head latent attention derives, so that these tests would see other tensors there.
BACKEND = {"deepseek_v2": "CPU_MLA"}


def make(family: str, tokenizer: Path, folder: Path, **changes: Any) -> Path:
    """A random fp32 checkpoint of the family with SmolLM2's tokenizer, seeded."""
    import torch
    import transformers

    torch.manual_seed(0)
    config_class, arguments = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**arguments, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    return folder
