"""The shipped validation set, and how a user's file is read."""

from collections import Counter
from pathlib import Path

import pytest

from flipwatch.monitors.validation import ValidationItem, load_items

LANGUAGES = {
    *("german", "french", "spanish", "portuguese", "italian", "chinese"),
    *("japanese", "russian", "hindi", "arabic", "korean", "turkish"),
}


def test_shipped_set_is_large_and_diverse() -> None:
    """At least 72 items, many of knowledge, reasoning and code, and some in each of twelve languages."""
    items = load_items(None)
    topics = Counter(item.topic for item in items)
    assert len(items) >= 72
    assert all(topics[topic] >= 12 for topic in ("knowledge", "reasoning", "code"))
    assert all(topics[language] >= 3 for language in LANGUAGES)
    assert set(topics) == {"knowledge", "reasoning", "code"} | LANGUAGES


@pytest.mark.parametrize("beginning", [8, 32, 64])
def test_any_beginning_is_diverse(beginning: int) -> None:
    """The first items hold knowledge, reasoning, code and other languages, none more than half."""
    topics = Counter(item.topic for item in load_items()[:beginning])
    groups = Counter("language" if topic in LANGUAGES else topic for topic in topics.elements())
    assert set(groups) == {"knowledge", "reasoning", "code", "language"}
    assert max(groups.values()) <= beginning / 2


def test_items_are_unique_and_short() -> None:
    """No text twice, nothing that a small scan would have to cut far."""
    items = load_items()
    assert len({item.prompt for item in items}) == len(items)
    assert len({item.answer for item in items}) == len(items)
    assert all(len(item.prompt) >= 10 for item in items if item.topic not in LANGUAGES)
    assert all(len(item.prompt + item.answer) <= 400 for item in items)


def test_halves_join_to_one_text() -> None:
    """Each answer starts with the space its prompt lacks, or the prompt ends where the answer goes on."""
    for item in load_items():
        spaced = item.topic not in {"chinese", "japanese", "code"}
        assert item.prompt[-1].isspace() != item.answer[0].isspace() or not spaced


def test_user_file_is_read(tmp_path: Path) -> None:
    """Topic is optional, blank lines do not count, text may be in any script."""
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"prompt": "a", "answer": "b"}\n\n{"prompt": "語", "answer": "c", "topic": "t"}\n', encoding="utf-8"
    )
    assert load_items(path) == [
        ValidationItem(prompt="a", answer="b"),
        ValidationItem(prompt="語", answer="c", topic="t"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[]",
        '{"prompt": "a"}',
        '{"prompt": "", "answer": "b"}',
        '{"prompt": 1, "answer": "b"}',
        '{"prompt": "a", "answer": "b", "wieght": 2}',
    ],
)
def test_bad_line_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    """The error names the file, the line and what a line must look like."""
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"prompt": "a", "answer": "b"}}\n\n{line}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 3: .*Each line must be a JSON object"):
        load_items(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    """A file in another encoding is a bad line, not a crash."""
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"prompt": "é", "answer": "b"}'.encode("latin-1"))
    with pytest.raises(ValueError, match="line 1"):
        load_items(path)


def test_empty_file_is_refused(tmp_path: Path) -> None:
    """No items is an error at once, not an unknown state later."""
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no items"):
        load_items(path)
