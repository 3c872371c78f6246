"""Kinds of values that several settings share: bounds, secrets, paths."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, SecretStr

MOST = 1_000_000_000
"""No counter of ours comes near."""
MOST_MINUTES = 527_040.0
"""A year."""


def fit_for_a_header(secret: SecretStr) -> SecretStr:
    """Without white space around it, which files and shells add; an HTTP header holds nothing but printable ASCII."""
    text = secret.get_secret_value().strip()
    if not (text.isascii() and text.isprintable()):
        raise ValueError("it must be one line of printable ASCII characters")
    return SecretStr(text)


HeaderSecret = Annotated[SecretStr, AfterValidator(fit_for_a_header)]
"""A secret that is sent as a bearer token."""


def from_home(path: Path) -> Path:
    """`~` is the home folder also where no shell replaces it: in YAML, in a compose file."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError(f"there is no home folder for {path.parts[0]}") from None


UserPath = Annotated[Path, AfterValidator(from_home)]
