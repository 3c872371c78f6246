"""A random Llama that transformers runs in no time, and sequences for it."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, LAYERS = 61, 5


def llama() -> LlamaForCausalLM:
    """Rotary positions, grouped queries, the stream returned alone."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.3,
        )
    )


def ragged() -> list[list[int]]:
    """Three sequences of different lengths."""
    return [torch.randint(VOCAB, (n,)).tolist() for n in (5, 9, 7)]
