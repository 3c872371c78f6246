"""The models that benchmarks run on."""

import sys
from pathlib import Path

import torch
import typer

MODEL = Path(__file__).resolve().parents[1] / ".venv" / "model"
"""Link that `make setup` leaves."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def require(program: str, folder: Path, dtype: str) -> None:
    """End `program` with code 2 and one sentence when the folder is no checkpoint or the dtype none of ours."""
    if not (folder / "config.json").is_file():
        print(f"{program}: no checkpoint in {folder}; name one with --model or run `make setup`", file=sys.stderr)
        raise typer.Exit(2)
    if dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype is {' or '.join(DTYPES)}")
