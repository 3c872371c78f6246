"""A small trained model that is not a Llama, for the detection benchmark: made here, in minutes, on one CPU thread.

Olmo2: the norms stand behind attention and MLP instead of before them, queries and keys are normed, the MLP is
gated by GELU instead of SiLU, the head is not tied to the embedding.  It learns the one text that every machine
with Python has and may use: the sources of the standard library.  Parts of the files are held out; from these come the
held-out loss and a validation set for scans.
"""

import hashlib
import json
import math
import platform
import random
import sys
import sysconfig
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tokenizers
import torch
import transformers
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import Olmo2Config, Olmo2ForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from flipwatch.monitors.alpha_scan import AlphaScan
from flipwatch.monitors.validation import ValidationItem, load_items
from flipwatch.probe.local import LocalView, make_plan, run_measurement

OUT = Path(__file__).resolve().parents[1] / ".cache" / "small-model"

PACKAGES = (
    "asyncio collections concurrent ctypes curses dbm email html http importlib json logging multiprocessing "
    "pydoc_data re sqlite3 tomllib unittest urllib wsgiref xml xmlrpc zoneinfo"
)
"""Packages of the standard library that are read beside its plain modules; those that some systems ship apart, and
tables of character sets, are left out."""

PART = 6000
"""Files are cut into parts of about so many characters."""

HELD_OUT_OF = 16
"""One part of so many is held out, by a checksum of its name, so that other versions hold out about the same ones."""

END = "<|end|>"
"""Stands behind each part."""

Texts = dict[str, str]
"""Text by name of the part: file relative to the library's folder, `:`, number of the part."""


@dataclass(frozen=True)
class Recipe:
    """Shape of the model and of its training."""

    blocks: int = 12
    width: int = 128
    heads: int = 4
    mlp: int = 384
    vocabulary: int = 2048
    window: int = 128
    """Tokens of one training sequence."""
    batch: int = 8
    learning_rate: float = 4e-3
    steps: int | None = 1700
    minutes: float | None = None
    """Instead of steps; then the result depends on the machine's speed."""
    seed: int = 0


def library_texts(folder: Path) -> Texts:
    """The sources of the standard library in `folder`, sorted by name, without tests."""
    paths = [*folder.glob("*.py"), *(path for name in PACKAGES.split() for path in (folder / name).rglob("*.py"))]
    texts: Texts = {}
    for name in sorted(path.relative_to(folder) for path in paths):
        # The system's own settings hold paths of the machine.
        if not name.name.startswith("_sysconfigdata") and not {"test", "tests"} & set(name.parts):
            text = (folder / name).read_text(encoding="utf-8")
            texts |= {f"{name.as_posix()}:{number}": part for number, part in enumerate(_parts(text))}
    return texts


def _parts(text: str) -> Iterator[str]:
    """The text, cut at ends of lines."""
    part = ""
    for line in text.splitlines(keepends=True):
        part += line
        if len(part) >= PART:
            yield part
            part = ""
    if part:
        yield part


def is_held_out(name: str) -> bool:
    """Whether the part is kept from training."""
    return zlib.crc32(name.encode()) % HELD_OUT_OF == 0


def train_tokenizer(texts: Texts, vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every text can be written in it."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts.values(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END)


def encode(tokenizer: PreTrainedTokenizerFast, texts: Texts) -> Tensor:
    """All texts as one row of ids, each with its end token."""
    rows = tokenizer([text + END for text in texts.values()])["input_ids"]
    return torch.tensor([token for row in rows for token in row])


def validation_items(texts: Texts, wanted: int = 480) -> list[ValidationItem]:
    """Short pieces of the texts: some lines as prompt, the next ones as answer; mixed, the same for every seed.

    Pieces are 120 to 400 characters, as many from each part as far as they go.
    """
    mixed = random.Random(0)  # noqa: S311  (no secret)
    by_part = [list(_pieces(name, text)) for name, text in texts.items()]
    for pieces in by_part:
        mixed.shuffle(pieces)
    items: list[ValidationItem] = []
    while len(items) < wanted and any(by_part):
        items += [pieces.pop() for pieces in by_part if pieces]
    mixed.shuffle(items)
    return items[:wanted]


def _pieces(name: str, text: str) -> Iterator[ValidationItem]:
    """Neighbouring pieces; topic is the module."""
    prompt, answer = "", ""
    for line in text.splitlines(keepends=True):
        if len(prompt) < 60:
            prompt += line if prompt or line.strip() else ""
            continue
        answer += line
        if len(answer.strip()) >= 60:
            if len(prompt + answer) <= 400:
                yield ValidationItem(prompt=prompt, answer=answer, topic=name.partition(".py")[0])
            prompt, answer = "", ""


def new_model(recipe: Recipe, end: int) -> Olmo2ForCausalLM:
    """Random weights by the recipe's seed."""
    torch.manual_seed(recipe.seed)
    return Olmo2ForCausalLM(
        Olmo2Config(
            vocab_size=recipe.vocabulary,
            hidden_size=recipe.width,
            intermediate_size=recipe.mlp,
            num_hidden_layers=recipe.blocks,
            num_attention_heads=recipe.heads,
            hidden_act="gelu",
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            eos_token_id=end,
            pad_token_id=None,
        )
    )


def train(model: Olmo2ForCausalLM, tokens: Tensor, recipe: Recipe, console: Console) -> list[float]:
    """AdamW on random windows of `tokens`; the rate rises for a twentieth of the way and falls to a tenth.

    Returns the loss of each step in nats per token.
    """
    draw = torch.Generator().manual_seed(recipe.seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    losses: list[float] = []
    start, done = time.perf_counter(), 0.0
    model.train()
    columns = (TextColumn("training"), BarColumn(), TextColumn("{task.fields[loss]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=1.0, loss="")
        while done < 1.0:
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * min(20 * done + 0.01, 1.0 - 0.9 * done)
            first = torch.randint(len(tokens) - recipe.window, (recipe.batch, 1), generator=draw)
            window = tokens[first + torch.arange(recipe.window)]  # (batch, window)
            loss = model(input_ids=window, labels=window, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            seconds = time.perf_counter() - start
            done = seconds / (60 * recipe.minutes) if recipe.minutes else len(losses) / (recipe.steps or 1)
            progress.update(bar, completed=done, loss=f"{losses[-1]:.3f} nats")
    return losses


@torch.inference_mode()
def mean_nats(model: torch.nn.Module, tokens: Tensor, window: int) -> float:
    """Mean loss per token over `tokens` cut into windows."""
    model.eval()
    rows = tokens[: len(tokens) // window * window].reshape(-1, window)
    total = 0.0
    for start in range(0, len(rows), 16):
        some = rows[start : start + 16]
        logits = model(input_ids=some, use_cache=False).logits[:, :-1]
        total += float(functional.cross_entropy(logits.flatten(0, 1), some[:, 1:].flatten(), reduction="sum"))
    return total / (rows.shape[0] * (window - 1))


def unigram_nats(trained: Tensor, held_out: Tensor, vocabulary: int) -> float:
    """Loss per held-out token of a model that knows only how often each token occurs (one added to each count)."""
    counts = Counter(trained.tolist())
    whole = len(trained) + vocabulary
    return -sum(math.log((counts[token] + 1) / whole) for token in held_out.tolist()) / len(held_out)


def skip_costs(folder: Path, items: int = 128) -> tuple[float, list[float]]:
    """Over the checkpoint's validation set: the loss, and per block what leaving it out adds; nats per token."""
    plan = make_plan(folder, load_items(folder / "validation.jsonl")[:items], [0.0], max_tokens=128)
    reading = run_measurement(LocalView.load(folder), AlphaScan(), plan)

    def mean(losses: list[float | None]) -> float:
        pairs = zip(losses, reading.scored_tokens, strict=True)
        return sum((math.nan if loss is None else loss) * count for loss, count in pairs) / sum(reading.scored_tokens)

    base = mean(reading.base_nats)
    return base, [mean(rows[0]) - base for rows in reading.nats]


def make_checkpoint(texts: Texts, recipe: Recipe, out: Path, console: Console) -> dict[str, Any]:
    """Train by `recipe` and write to `out`: weights in bfloat16, tokenizer, `validation.jsonl`, `training.json`.

    Returns what `training.json` holds.  The figures are those of the rounded weights on disk, but for the
    training loss.
    """
    disable_progress_bar()
    learned = {name: text for name, text in texts.items() if not is_held_out(name)}
    kept = {name: text for name, text in texts.items() if is_held_out(name)}
    with console.status("tokenizing"):
        tokenizer = train_tokenizer(learned, recipe.vocabulary)
        trained, held_out = encode(tokenizer, learned), encode(tokenizer, kept)
    model = new_model(recipe, tokenizer.convert_tokens_to_ids(END))
    start, cpu_start = time.perf_counter(), time.process_time()
    losses = train(model, trained, recipe, console)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start

    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    lines = [item.model_dump_json() + "\n" for item in validation_items(kept)]
    (out / "validation.jsonl").write_text("".join(lines), encoding="utf-8")
    with console.status("measuring"):
        last = losses[-max(1, len(losses) // 20) :]
        of_items, costs = skip_costs(out)
        figures = {
            **asdict(recipe),
            "steps": len(losses),
            "parameters": sum(p.numel() for p in model.parameters()),
            "training_tokens": len(losses) * recipe.batch * recipe.window,
            "text_bytes": sum(len(text.encode()) for text in learned.values()),
            "text_sha256": hashlib.sha256("".join(texts.values()).encode()).hexdigest(),
            "text_tokens": len(trained),
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "training_nats": sum(last) / len(last),
            "held_out_nats": mean_nats(LocalView.load(out).model, held_out, recipe.window),
            "held_out_unigram_nats": unigram_nats(trained, held_out, recipe.vocabulary),
            "held_out_tokens": len(held_out),
            "validation_items": len(lines),
            "validation_nats": of_items,
            "skip_cost_nats": costs,
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        }
    (out / "training.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return figures


def main(
    out: Annotated[Path, typer.Option(help="Folder of the checkpoint; files in it are replaced.")] = OUT,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = Recipe.steps or 1,
    minutes: Annotated[float | None, typer.Option(min=0.01, help="Train so long instead of --steps.")] = None,
    seed: Annotated[int, typer.Option(help="Of the first weights and the order of the text.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; more may change the last digits.")] = 1,
) -> None:
    """Train the benchmark's own small model."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = library_texts(library)
    if sum(len(text) for text in texts.values()) < 3_000_000:
        print(f"small_model: {library} holds too few sources; use a Python with its .py files", file=sys.stderr)
        raise typer.Exit(2)
    torch.set_num_threads(threads)
    recipe = Recipe(steps=None if minutes else steps, minutes=minutes, seed=seed)
    figures = make_checkpoint(texts, recipe, out, Console(stderr=True))
    table = Table("block", "cost of leaving it out, nats", title=f"{out.name}, {figures['parameters']} parameters")
    for block, cost in enumerate(figures["skip_cost_nats"]):
        table.add_row(str(block), f"{cost:.3f}")
    console = Console()
    console.print(table)
    console.print(
        f"loss in nats per token: training {figures['training_nats']:.3f}, held out {figures['held_out_nats']:.3f} "
        f"(unigram {figures['held_out_unigram_nats']:.3f}), validation set {figures['validation_nats']:.3f}"
    )
    console.print(f"{figures['steps']} steps in {figures['seconds']:.0f} s; checkpoint and training.json in {out}")


if __name__ == "__main__":
    typer.run(main)
