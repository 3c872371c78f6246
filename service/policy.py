"""The policy: which verdict may do what without a person.  No rule, nothing automatic.

The rules of one verdict are a ladder: the first one that can do something does it, and the next one has its turn when
that did not help or cannot be done.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from ..monitors.verdict.verdict import Verdict
from .gates import scales
from .records import MitigationAction
from .settings_loading import ConfigurationError, read, read_yaml
from .settings_values import MOST_MINUTES

_REPAIR, _SKIP = MitigationAction.REPAIR, MitigationAction.SKIP
_ATTENUATE, _DRAIN = MitigationAction.ATTENUATE, MitigationAction.DRAIN

HELPS: Mapping[Verdict, tuple[MitigationAction, ...]] = {
    Verdict.WEIGHT_FAULT: (_REPAIR, _SKIP, _ATTENUATE, _DRAIN),
    # No scan flags a block.
    Verdict.LATENT_WEIGHT_FAULT: (_REPAIR, _DRAIN),
    # No byte differs from the baseline.
    Verdict.OLD_FAULT: (_SKIP, _ATTENUATE, _DRAIN),
    # Neither weights nor blocks are bad.
    Verdict.SERVING_FAULT: (_DRAIN,),
    # Nothing can be changed in an engine that does not step.
    Verdict.HUNG: (_DRAIN,),
}
"""What can help against which verdict.  The others are no reason to act."""

_CERTAIN = (Verdict.WEIGHT_FAULT, Verdict.LATENT_WEIGHT_FAULT, Verdict.HUNG)


class Rule(BaseModel):
    """One rung of the ladder of a verdict."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    verdict: Annotated[Verdict, Field(strict=False)]
    action: Annotated[MitigationAction, Field(strict=False)]
    k: int | None = Field(default=None, ge=1, le=1000)
    """So many of the last `n` verdicts must be this one; both or neither: see `needs`."""
    n: int | None = Field(default=None, ge=1, le=1000)
    alpha: float | None = Field(default=None, gt=0.0, le=2.0)
    """What `attenuate` sets the gates to."""
    dry_run: bool = False
    """Only say what would be done."""
    cool_down_minutes: float = Field(default=10.0, gt=0.0, le=MOST_MINUTES)
    """So long it rests after an act of its kind, by whatever rule; not after a repair that did help."""

    @field_validator("verdict")
    @classmethod
    def _is_a_reason(cls, verdict: Verdict) -> Verdict:
        if verdict not in HELPS:
            raise ValueError(f"{verdict.value} is no reason to act: name one of {', '.join(HELPS)}")
        return verdict

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.action not in HELPS[self.verdict]:
            may = " or ".join(HELPS[self.verdict])
            raise ValueError(f"{self.action.value} cannot help against {self.verdict.value}: take {may}")
        if (self.action is _ATTENUATE) != (self.alpha is not None):
            raise ValueError("attenuate needs an alpha, and no other action takes one")
        if self.alpha is not None and not scales(self.alpha):
            raise ValueError("alpha must be above 0, up to 2, and not 1, as float32 holds it: this one scales nothing")
        if (self.k is None) != (self.n is None):
            raise ValueError("k and n belong together: write both or neither")
        k, n = self.needs
        if n < k:
            raise ValueError("n must not be smaller than k")
        if self.verdict is Verdict.HUNG and k > 1:
            raise ValueError("the heartbeat has waited by itself, and is not heard twice: k of hung is 1")
        return self

    @property
    def needs(self) -> tuple[int, int]:
        """k and n; unless said, 1 of 1 for what rests on digests or the heartbeat, which do not err, else 2 of 3."""
        if self.k is None or self.n is None:
            return (1, 1) if self.verdict in _CERTAIN else (2, 3)
        return self.k, self.n

    @property
    def name(self) -> str:
        """What tells it from the other rules: `weight_fault: repair`."""
        return f"{self.verdict.value}: {self.action.value}" + ("" if self.alpha is None else f" to {self.alpha:g}")


def each_once(rules: Sequence[Rule]) -> Sequence[Rule]:
    """The rules; `ValueError` when two do the same about the same verdict."""
    names = [rule.name for rule in rules]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ValueError(f"rule {index + 1} repeats rule {names.index(name) + 1} ({name}): remove one of them")
    return rules


def read_policy(setting: str, path: Path) -> list[Rule]:
    """The rules in a YAML file; `ConfigurationError` with file, line and key when it is wrong."""
    entries = read_yaml(setting, path)
    if not isinstance(entries, list):
        raise ConfigurationError(f"The policy {path} ({setting}) must hold a list of rules; write [] for none.")
    root = yaml.compose(read(setting, path), yaml.SafeLoader)
    _refuse_repeated_keys(path, root)
    try:
        rules = TypeAdapter(list[Rule]).validate_python(entries)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = list(first["loc"])
        rule = f"rule {int(place[0]) + 1}" + "".join(f", {part}" for part in place[1:])
        raise ConfigurationError(f"The policy {path}, line {_line(root, place)}, {rule}: {_what(first)}.") from None
    try:
        each_once(rules)
    except ValueError as error:
        raise ConfigurationError(f"The policy {path}: {error}.") from None
    return rules


def _what(error: Any) -> str:
    """What is wrong, and what to do."""
    if error["type"] == "extra_forbidden":
        return f"a rule has no such key: it has {', '.join(Rule.model_fields)}"
    if error["type"] == "missing":
        return "this key is missing: write it"
    return str(error["msg"]).removeprefix("Value error, ").rstrip(".")


def _line(node: Any, place: Sequence[int | str]) -> int:
    """Where the deepest part of the place that is in the file stands, from 1."""
    for part in place:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
        elif isinstance(node, yaml.MappingNode):
            node = next((value for key, value in node.value if key.value == part), node)
    return int(node.start_mark.line) + 1


def _refuse_repeated_keys(path: Path, root: Any) -> None:
    """YAML readers take the last of two equal keys without a word."""
    for index, rule in enumerate(root.value):
        keys = [key for key, _ in rule.value] if isinstance(rule, yaml.MappingNode) else []
        for place, key in enumerate(keys):
            if key.value in [other.value for other in keys[:place]]:
                line = key.start_mark.line + 1
                raise ConfigurationError(
                    f"The policy {path}, line {line}, rule {index + 1}, {key.value}: the key stands there twice."
                )
