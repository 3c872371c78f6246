"""The SHA-256 digests that the files of a checkpoint ought to have, as their publisher lists them."""

import json
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


def read_manifest(text: str) -> dict[str, str]:
    """File name -> SHA-256 in small hex digits, from what `sha256sum` prints or from a JSON object of the same.

    Raises:
        ValueError: one sentence with the number of the line that is wrong.
    """
    entries = _json_entries(text) if text.lstrip().startswith("{") else _lines(text)
    manifest: dict[str, str] = {}
    for number, name, digest in entries:
        plain = str(PurePosixPath(name))
        if manifest.setdefault(plain, digest.lower()) != digest.lower():
            raise ValueError(f"Line {number} of the manifest gives {name} another digest than a line before it.")
    if not manifest:
        raise ValueError("Line 1 of the manifest names no file; it needs a line '<SHA-256> <file>' for each.")
    return manifest


def check_manifest(manifest: Mapping[str, str], digests: Mapping[str, str]) -> list[str]:
    """Sentences, one for each file whose digest is not the manifest's, or that the manifest does not name.

    A manifest may name files by a path; then the last part of it counts.  It may also name files that no model is
    loaded from (the tokenizer, a second copy in another format): those are not looked at.

    Args:
        manifest: As `read_manifest` gives it.
        digests: The files that were read: name without folder -> SHA-256 in hex.
    """
    problems = []
    for name, digest in sorted(digests.items()):
        wanted = {manifest[name]} if name in manifest else _by_last_part(manifest, name)
        if not wanted:
            problems.append(f"{name} is not in the manifest.")
        elif len(wanted) > 1:
            problems.append(f"The manifest names several files {name} with different digests.")
        elif digest.lower() not in wanted:
            problems.append(f"{name} has the SHA-256 {digest.lower()}, but the manifest says {wanted.pop()}.")
    return problems


def _by_last_part(manifest: Mapping[str, str], name: str) -> set[str]:
    return {digest for path, digest in manifest.items() if PurePosixPath(path).name == name}


def _lines(text: str) -> list[tuple[int, str, str]]:
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if not (match := _LINE.fullmatch(line.rstrip())):
            raise ValueError(f"Line {number} of the manifest is not of the form '<64 hex digits>  <file>'.")
        entries.append((number, match[2], match[1]))
    return entries


def _json_entries(text: str) -> list[tuple[int, str, str]]:
    def pairs(items: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        # As they stand, so that a name that comes twice is seen.
        return items

    try:
        items = json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise ValueError(f"Line {error.lineno} of the manifest is no JSON: {error.msg}.") from None
    entries, position = [], -1
    for name, digest in items:
        # A name that is written with escapes is not found; its line is then that of the one before.
        position = max(text.find(json.dumps(name, ensure_ascii=False), position + 1), position)
        number = text.count("\n", 0, max(position, 0)) + 1
        if not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
            raise ValueError(f"Line {number} of the manifest gives {name} no SHA-256 of 64 hex digits.")
        entries.append((number, name, digest))
    return entries
