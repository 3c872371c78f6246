"""The validation set as token sequences of the served model, tokenised once through the server and cached."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from ..monitors.validation import ValidationItem, load_items
from .settings import ValidationSettings
from .vllm import Vllm

_log = structlog.get_logger(__name__)


class ValidationSetError(Exception):
    """The validation set cannot be used; one sentence that says what to do."""


class Sequences(NamedTuple):
    """What a scan measures on: N token sequences, and of each the first position whose loss counts."""

    tokens: list[list[int]]
    scored_from: list[int]


class _Row(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    tokens: list[int]
    answer_at: int
    """Position of the first token that the prompt alone does not have."""


class _Cache(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    rows: list[_Row]


class ValidationSet:
    """Items of the settings' file, or the shipped ones, as tokens of whichever model is served."""

    def __init__(self, settings: ValidationSettings, vllm: Vllm, cache_dir: Path) -> None:
        self._settings = settings
        self._vllm = vllm
        self._cache_dir = cache_dir
        try:
            self._items = spread(load_items(settings.file), settings.max_items)
        except (OSError, ValueError) as error:
            raise ValidationSetError(f"The setting validation.file cannot be used: {error}") from error
        if not self._items:
            raise ValidationSetError("The validation set is empty: give validation.file at least one line.")

    async def sequences(self, model: str, longest: int) -> Sequences:
        """Tokens for `model`, each cut to `longest` and to the setting; raises `VllmError`, `ValidationSetError`."""
        rows = await self._rows(model)
        cut = min(self._settings.max_tokens, longest)
        tokens, scored_from = [], []
        for row in rows:
            first = max(1, row.answer_at) if self._settings.score == "answer" else 1
            if first < len(row.tokens[:cut]):
                tokens.append(row.tokens[:cut])
                scored_from.append(first)
        if not tokens:
            remedy = (
                "raise validation.max_tokens or use longer items"
                if cut == self._settings.max_tokens
                else "scan fewer alphas, or start vLLM with a larger --max-num-batched-tokens"
            )
            raise ValidationSetError(f"No item of the validation set has a scored token within {cut} tokens: {remedy}.")
        return Sequences(tokens, scored_from)

    async def _rows(self, model: str) -> list[_Row]:
        path = self._cache_dir / f"tokens-{_digest(model, self._items)}.json"
        cached = _load(path, len(self._items))
        first = await self._row(model, self._items[0])
        # A model may get another tokenizer under its old name: one item tells.
        if cached is not None and cached[0] == first:
            return cached
        rows = [first, *[await self._row(model, item) for item in self._items[1:]]]
        _save(path, rows)
        return rows

    async def _row(self, model: str, item: ValidationItem) -> _Row:
        whole = await self._vllm.tokenize(model, item.prompt + item.answer)
        alone = await self._vllm.tokenize(model, item.prompt)
        # The last token of the prompt may melt into the answer: the answer starts where both cease to agree.
        same = next((at for at, (a, b) in enumerate(zip(whole, alone, strict=False)) if a != b), None)
        return _Row(tokens=whole, answer_at=min(len(whole), len(alone)) if same is None else same)


def spread(items: Sequence[ValidationItem], limit: int) -> list[ValidationItem]:
    """At most `limit` items, taken topic by topic in turn, so that a short set is as diverse as the long one."""
    topics: dict[str | None, list[ValidationItem]] = defaultdict(list)
    for item in items:
        topics[item.topic].append(item)
    turns = max((len(group) for group in topics.values()), default=0)
    in_turn = [group[turn] for turn in range(turns) for group in topics.values() if turn < len(group)]
    return in_turn[:limit]


def _digest(model: str, items: Iterable[ValidationItem]) -> str:
    text = json.dumps([model, *[[item.prompt, item.answer] for item in items]])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _load(path: Path, count: int) -> list[_Row] | None:
    try:
        rows = _Cache.model_validate_json(path.read_bytes()).rows
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        _log.warning("token cache cannot be read, tokenising again", path=str(path), error=type(error).__name__)
        return None
    return rows if len(rows) == count else None


def _save(path: Path, rows: list[_Row]) -> None:
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(_Cache(rows=rows).model_dump_json(), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        # A cache that cannot be written costs time at the next scan, nothing else.
        _log.warning("token cache cannot be written", path=str(path), error=str(error))
