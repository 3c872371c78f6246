"""A Llama of a wanted size with random weights, for benchmarks in which only the bytes count."""

import shutil
from pathlib import Path
from typing import Annotated

import checkpoints
import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights


def main(
    out: Annotated[Path, typer.Argument(help="Folder to make; 3.6 GB with the defaults.")],
    tokenizer: Annotated[Path, typer.Option(help="Checkpoint folder whose tokenizer is copied.")] = checkpoints.MODEL,
    hidden: Annotated[int, typer.Option(min=64)] = 2048,
    layers: Annotated[int, typer.Option(min=1)] = 24,
    seed: int = 0,
) -> None:
    """Write the checkpoint; 1.8 billion parameters with the defaults."""
    checkpoints.require("random_model", tokenizer, "bfloat16")
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    with no_init_weights():
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02)
    model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, out / name)
    print(f"{out}: {sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion parameters")


if __name__ == "__main__":
    typer.run(main)
