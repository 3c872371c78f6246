"""The validation set: texts on which a scan measures the loss.

A narrow set hides faults, so the shipped one is diverse (knowledge, reasoning, code, twelve languages) and mixed:
any beginning of it is diverse too.  It was written for this project.
"""

from importlib.resources import files
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

SHIPPED = "data/validation.jsonl"


class ValidationItem(BaseModel):
    """One text in two halves; the answer follows the prompt without anything in between."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    prompt: str = Field(min_length=1)
    answer: str = Field(min_length=1)
    topic: str | None = None


def load_items(path: Path | None = None) -> list[ValidationItem]:
    """The items of a JSONL file, one object a line; the shipped set without a path.

    Blank lines are skipped.  Raises `ValueError` with the line number for a line that is not an item and for a
    file without items, and `OSError` when the file cannot be read.
    """
    source = files(__package__).joinpath(SHIPPED) if path is None else path
    items = []
    for number, line in enumerate(source.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            items.append(ValidationItem.model_validate_json(line))
        except ValidationError as error:
            what = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'line'}: {e['msg']}" for e in error.errors())
            raise ValueError(
                f"{source}, line {number}: {what}. "
                'Each line must be a JSON object {"prompt": "...", "answer": "..."}, optionally with "topic".'
            ) from None
    if not items:
        raise ValueError(f"{source} holds no items. Add at least one line with a prompt and an answer.")
    return items
