"""`flipwatch compare`: two models held against each other, checkpoints or live servers, without a sidecar."""

import math
import os
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Annotated

import typer
from pydantic import SecretStr, ValidationError

from ..compared import Comparison
from ..compared_server import ServerSide
from ..comparison import ComparisonError, Side
from ..comparison import compare as run
from ..settings import VllmSettings
from ..settings_values import fit_for_a_header
from .client import CliError
from .compare_checkpoint import CheckpointSide
from .compare_table import print_comparison
from .finding_table import EXIT
from .offline import Dtype, chosen_items
from .show import print_json, progress_bar

# For B the first that is set: servers of a pair often share a secret.
_TOKENS = {"a": ["FLIPWATCH_PROBE_TOKEN"], "b": ["FLIPWATCH_PEER_PROBE_TOKEN", "FLIPWATCH_PROBE_TOKEN"]}
_KEYS = {"a": ["FLIPWATCH_VLLM__API_KEY"], "b": ["FLIPWATCH_PEER_API_KEY", "FLIPWATCH_VLLM__API_KEY"]}


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="The reference: a checkpoint folder, or a vLLM's URL.")],
    b: Annotated[str, typer.Argument(metavar="B", help="What is judged: the same.")],
    limit: Annotated[
        float | None,
        typer.Option(help="Largest relative L2 distance of a block that is allowed; default: what noise explains."),
    ] = None,
    items: Annotated[int, typer.Option(min=1, help="Texts used.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens used from a text.")] = 64,
    validation: Annotated[
        Path | None, typer.Option(help="JSONL with prompt and answer; default: the set that ships.")
    ] = None,
    no_gain: Annotated[
        bool, typer.Option("--no-gain", help="Leave out losses and skip gains, most of the work.")
    ] = False,
    dtype_a: Annotated[
        Dtype | None, typer.Option(help="Precision that folder A is loaded in; default: its own.")
    ] = None,
    dtype_b: Annotated[Dtype | None, typer.Option(help="The same for folder B.")] = None,
    token_file_a: Annotated[
        Path | None, typer.Option(help="File with the probe token of server A; default: FLIPWATCH_PROBE_TOKEN.")
    ] = None,
    token_file_b: Annotated[
        Path | None,
        typer.Option(help="The same for B; default: FLIPWATCH_PEER_PROBE_TOKEN, or FLIPWATCH_PROBE_TOKEN."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the distances into this .png or .svg file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Hold model B against model A, block by block: checkpoint folders, vLLM servers with the probe, or one of each.

    Each block of B is fed what the same block of A was fed.  A measurement that a sidecar has under way on such a
    server is broken off.  Exit code 0: no block departs, 1: one does, 2: cannot tell.
    """
    if limit is not None and not (math.isfinite(limit) and limit > 0):
        raise CliError(f"--limit {limit:g} is no distance: give a number above 0, or none for what noise explains.")
    texts = [item.prompt + item.answer for item in chosen_items(validation, items)]
    if plot is not None:
        _check_plot(plot)
    with ExitStack() as stack, progress_bar(quiet=as_json) as progress:
        one = stack.enter_context(_side("a", a, dtype_a, token_file_a))
        other = stack.enter_context(_side("b", b, dtype_b, token_file_b))
        task = progress.add_task("looking", total=None)

        def note(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        try:
            comparison = run(one, other, texts, max_tokens=max_tokens, limit=limit, gains=not no_gain, note=note)
        except ComparisonError as error:
            raise CliError(str(error)) from None
    if as_json:
        print_json(comparison.model_dump(mode="json"))
    else:
        print_comparison(comparison)
    if plot is not None:
        _draw(comparison, plot)
    raise typer.Exit(EXIT.get(comparison.finding.health, 2))


def _side(name: str, where: str, dtype: Dtype | None, token_file: Path | None) -> AbstractContextManager[Side]:
    if not where.startswith(("http://", "https://")):
        if token_file is not None:
            raise CliError(f"--token-file-{name} goes with a server, and {where} is none.")
        return nullcontext(CheckpointSide(Path(where), dtype or "auto"))
    if dtype is not None:
        raise CliError(f"--dtype-{name} goes with a folder only: a server has its precision.")
    token, token_from = _token(name, token_file)
    key = _first(_KEYS[name])
    try:
        server = VllmSettings.model_validate({"url": where, "api_key": None if key is None else key[0]})
    except ValidationError:
        raise CliError(
            f"The URL {name.upper()}, or the key in {_KEYS[name][0]}, cannot be used in a request: correct it."
        ) from None
    return ServerSide(
        server.base_url,
        token,
        token_from=token_from,
        api_key=None if server.api_key is None else server.api_key.get_secret_value(),
        key_from=_KEYS[name][0],
    )


def _token(name: str, file: Path | None) -> tuple[str, str]:
    """The probe's token, and where it is from."""
    if file is not None:
        try:
            found = file.read_text(encoding="utf-8"), str(file)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise CliError(f"The token file {file} cannot be read: {why}.") from None
    elif (known := _first(_TOKENS[name])) is not None:
        found = known
    else:
        raise CliError(
            f"There is no probe token for server {name.upper()}: set {_TOKENS[name][0]}, or give --token-file-{name}."
        )
    try:
        token = fit_for_a_header(SecretStr(found[0])).get_secret_value()
    except ValueError as error:
        raise CliError(f"The token from {found[1]} is wrong: {error}.") from None
    if not token:
        raise CliError(f"The token from {found[1]} is empty: put that of the vLLM process into it.")
    return token, found[1]


def _first(variables: list[str]) -> tuple[str, str] | None:
    """Value and name of the first variable that is set to something."""
    return next(((value, name) for name in variables if (value := os.environ.get(name))), None)


def _check_plot(file: Path) -> None:
    """Before minutes of measuring: whether a plot can be made at all."""
    if file.suffix not in (".png", ".svg"):
        raise CliError(f"--plot {file} must end in .png or .svg.")
    if not file.parent.is_dir():
        raise CliError(f"There is no folder {file.parent} for the plot.")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise CliError("A plot needs matplotlib, which is not installed: pip install 'flipwatch[bench]'.") from None


def _draw(comparison: Comparison, file: Path) -> None:
    from ..comparison_plot import draw

    try:
        draw(comparison, file)
    except OSError as error:
        raise CliError(f"The plot {file} cannot be written: {error.strerror}.") from None
