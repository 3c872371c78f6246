"""The validation set: tokenised through the server, cut, spread over topics, cached."""

from pathlib import Path

import pytest

from flipwatch.monitors.validation import ValidationItem
from flipwatch.service.settings import ValidationSettings
from flipwatch.service.validation_set import ValidationSet, ValidationSetError, spread
from flipwatch.service.vllm import Vllm

from .fake_server import MODEL, FakeServer

ITEMS = '{"prompt": "ab", "answer": "cde"}\n{"prompt": "a long prompt here", "answer": "x"}\n'


def _file(folder: Path, text: str = ITEMS) -> Path:
    path = folder / "items.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def _cache(folder: Path) -> Path:
    return next(folder.glob("tokens-*.json"))


async def test_all_tokens_count_but_the_first(server: FakeServer, tmp_path: Path) -> None:
    """With score `all`, each row is cut to max_tokens and scored from position 1."""
    settings = ValidationSettings(file=_file(tmp_path), max_tokens=6)
    async with Vllm(server.url) as vllm:
        found = await ValidationSet(settings, vllm, tmp_path).sequences(MODEL, 2048)
    assert [len(row) for row in found.tokens] == [6, 6]
    assert found.scored_from == [1, 1]


async def test_only_answers_count_and_rows_without_one_are_dropped(server: FakeServer, tmp_path: Path) -> None:
    """With score `answer`, scoring begins at the first token of the answer; a row cut before it goes."""
    settings = ValidationSettings(file=_file(tmp_path), max_tokens=6, score="answer")
    async with Vllm(server.url) as vllm:
        found = await ValidationSet(settings, vllm, tmp_path).sequences(MODEL, 2048)
        assert (found.tokens, found.scored_from) == ([await vllm.tokenize(MODEL, "abcde")], [3])


async def test_the_models_own_limit_counts_too(server: FakeServer, tmp_path: Path) -> None:
    """Rows are never longer than the probe can measure."""
    settings = ValidationSettings(file=_file(tmp_path), max_tokens=64)
    async with Vllm(server.url) as vllm:
        found = await ValidationSet(settings, vllm, tmp_path).sequences(MODEL, 3)
    assert [len(row) for row in found.tokens] == [3, 3]


async def test_nothing_to_score_is_said(server: FakeServer, tmp_path: Path) -> None:
    """A set whose answers all lie behind the cut is a sentence, not an empty scan."""
    settings = ValidationSettings(file=_file(tmp_path), max_tokens=2, score="answer")
    async with Vllm(server.url) as vllm:
        with pytest.raises(ValidationSetError, match=r"raise validation\.max_tokens"):
            await ValidationSet(settings, vllm, tmp_path).sequences(MODEL, 2048)


async def test_the_cache_saves_requests_and_a_new_tokenizer_empties_it(server: FakeServer, tmp_path: Path) -> None:
    """The second time only one item is asked for; when that one differs, or the cache is damaged, all are."""
    settings = ValidationSettings(file=_file(tmp_path))
    async with Vllm(server.url) as vllm:
        first = await ValidationSet(settings, vllm, tmp_path).sequences(MODEL, 2048)
        asked = server.seen.count("POST /tokenize")
        again = await ValidationSet(settings, vllm, tmp_path).sequences(MODEL, 2048)
        assert (asked, server.seen.count("POST /tokenize") - asked) == (4, 2)
        assert again == first
        cache = _cache(tmp_path)
        cache.write_text(cache.read_text(encoding="utf-8").replace('"tokens":[1,', '"tokens":[7,'), encoding="utf-8")
        assert await ValidationSet(settings, vllm, tmp_path).sequences(MODEL, 2048) == first
        cache.write_text("{", encoding="utf-8")
        assert await ValidationSet(settings, vllm, tmp_path).sequences(MODEL, 2048) == first


async def test_a_bad_file_is_refused_at_start(server: FakeServer, tmp_path: Path) -> None:
    """A missing file and a bad line are each a sentence."""
    async with Vllm(server.url) as vllm:
        for path in (tmp_path / "nothing.jsonl", _file(tmp_path, '{"prompt": "a"}\n')):
            with pytest.raises(ValidationSetError, match=r"validation\.file cannot be used"):
                ValidationSet(ValidationSettings(file=path), vllm, tmp_path)


def test_a_short_set_is_as_diverse_as_the_long_one() -> None:
    """Topics take turns, each in its own order."""
    items = [ValidationItem(prompt=f"{topic}{n}", answer="x", topic=topic) for topic in "abc" for n in range(3)]
    assert [item.prompt for item in spread(items, 5)] == ["a0", "b0", "c0", "a1", "b1"]
