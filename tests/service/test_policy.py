"""The policy: what a rule may say, and the one sentence when it says something else."""

from pathlib import Path

import pytest

from flipwatch.monitors.verdict.verdict import Verdict
from flipwatch.service.policy import HELPS, Rule, read_policy
from flipwatch.service.records import MitigationAction
from flipwatch.service.settings import ConfigurationError, load_settings

EXAMPLE = Path(__file__).parents[2] / "deploy" / "examples" / "policy.yaml"
REPAIR = "- {verdict: weight_fault, action: repair}\n"


def _read(folder: Path, text: str) -> list[Rule]:
    path = folder / "policy.yaml"
    path.write_text(text, encoding="utf-8")
    return read_policy("automation.policy_file", path)


def test_the_example_loads() -> None:
    """What ships can be used as it is, by the setting that names it; it says something about each verdict."""
    rules = load_settings(automation={"policy_file": EXAMPLE}).policy()
    assert {rule.verdict for rule in rules} == set(HELPS)
    assert {rule.action for rule in rules} == {MitigationAction.REPAIR, MitigationAction.SKIP, MitigationAction.DRAIN}
    assert [rule.name for rule in rules if rule.verdict is Verdict.WEIGHT_FAULT] == [
        "weight_fault: repair",
        "weight_fault: skip",
        "weight_fault: drain",
    ]


def test_without_a_policy_nothing_is_automatic() -> None:
    """The default has no rule."""
    assert load_settings().policy() == []


def test_what_does_not_err_needs_no_second_verdict() -> None:
    """Unless said, 1 of 1 for digests and the heartbeat, 2 of 3 for what rests on measured losses and answers."""
    needs = {verdict: Rule(verdict=verdict, action=may[-1]).needs for verdict, may in HELPS.items()}
    assert needs == {
        Verdict.WEIGHT_FAULT: (1, 1),
        Verdict.LATENT_WEIGHT_FAULT: (1, 1),
        Verdict.OLD_FAULT: (2, 3),
        Verdict.SERVING_FAULT: (2, 3),
        Verdict.HUNG: (1, 1),
    }


def test_rules_stand_in_a_file_or_inline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both give the same rules, also through the environment; both at once are refused."""
    text = "- {verdict: old_fault, action: attenuate, alpha: 0.5, k: 1, n: 1, cool_down_minutes: 5, dry_run: true}"
    [rule] = _read(tmp_path, text)
    assert (rule.name, rule.k, rule.n, rule.alpha) == ("old_fault: attenuate to 0.5", 1, 1, 0.5)
    assert (rule.dry_run, rule.cool_down_minutes) == (True, 5.0)
    inline = '[{"verdict": "old_fault", "action": "attenuate", "alpha": 0.5, "k": 1, "n": 1, "cool_down_minutes": 5'
    monkeypatch.setenv("FLIPWATCH_AUTOMATION__RULES", inline + ', "dry_run": true}]')
    assert load_settings().policy() == [rule]
    monkeypatch.setenv("FLIPWATCH_AUTOMATION__POLICY_FILE", str(tmp_path / "policy.yaml"))
    with pytest.raises(ConfigurationError, match="keep one of the two"):
        load_settings()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must hold a list of rules; write [] for none"),
        ("rules: []", "must hold a list of rules"),
        ("- repair", "line 1, rule 1: Input should be a valid dictionary"),
        (REPAIR + "- verdict: hung\n  action: reboot\n", "line 3, rule 2, action: Input should be 'skip', "),
        (REPAIR + "\n- verdict: warm\n  action: skip\n", "line 3, rule 2, verdict: Input should be 'ok', "),
        ("- action: skip", "line 1, rule 1, verdict: this key is missing"),
        (REPAIR + "- verdict: hung\n  action: drain\n  kk: 1\n", "line 4, rule 2, kk: a rule has no such key: it has"),
        ("- {verdict: hung, action: drain, k: two}", "line 1, rule 1, k: Input should be a valid integer"),
        ("- {verdict: hung, action: drain, k: true}", "rule 1, k: Input should be a valid integer"),
        ("- {verdict: hung, action: drain, k: 0}", "rule 1, k: Input should be greater than or equal to 1"),
        ("- {verdict: hung, action: drain, dry_run: 1}", "rule 1, dry_run: Input should be a valid boolean"),
        ("- {verdict: hung, action: drain, cool_down_minutes: -1}", "cool_down_minutes: Input should be greater than"),
        ("- {verdict: hung, action: drain, cool_down_minutes: .inf}", "cool_down_minutes: Input should be"),
        ("- verdict: hung\n  action: drain\n  k: 5\n", "line 1, rule 1: k and n belong together: write both"),
        ("- {verdict: old_fault, action: drain, k: 5, n: 4}", "rule 1: n must not be smaller than k"),
        ("- {verdict: hung, action: drain, k: 2, n: 2}", "and is not heard twice: k of hung is 1"),
        ("- {verdict: ok, action: drain}", "ok is no reason to act: name one of weight_fault, "),
        ("- {verdict: unknown, action: drain}", "unknown is no reason to act"),
        ("- {verdict: hung, action: skip}", "rule 1: skip cannot help against hung: take drain"),
        ("- {verdict: old_fault, action: repair}", "repair cannot help against old_fault: take skip or attenuate or"),
        ("- {verdict: old_fault, action: attenuate}", "attenuate needs an alpha"),
        ("- {verdict: old_fault, action: skip, alpha: 0.5}", "no other action takes one"),
        ("- {verdict: old_fault, action: attenuate, alpha: 1}", "this one scales nothing"),
        ("- {verdict: old_fault, action: attenuate, alpha: 1.00000001}", "as float32 holds it"),
        ("- {verdict: old_fault, action: attenuate, alpha: 1.0e-45}", "as float32 holds it"),
        (2 * REPAIR, "rule 2 repeats rule 1 (weight_fault: repair): remove one of them"),
        ("- verdict: hung\n  action: drain\n  k: 1\n  k: 2\n", "line 4, rule 1, k: the key stands there twice"),
        ("- [", "is not valid YAML near line 1"),
    ],
)
def test_a_wrong_policy_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    """It names the file, and where the reader knows them line, rule and key."""
    with pytest.raises(ConfigurationError) as caught:
        _read(tmp_path, text)
    message = str(caught.value)
    assert words in message
    assert str(tmp_path / "policy.yaml") in message
    assert message.endswith(".")
    assert "\n" not in message


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    """The setting is named."""
    with pytest.raises(ConfigurationError, match=r"automation\.policy_file names .*nowhere, which cannot be read"):
        load_settings(automation={"policy_file": tmp_path / "nowhere"}).policy()


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([{"verdict": "hung", "action": "drain", "kk": 1}], "The setting automation.rules.0.kk does not exist"),
        ([{"verdict": "hung", "action": "repair"}], "The setting automation.rules.0 is wrong: repair cannot help"),
        (2 * [{"verdict": "hung", "action": "drain"}], "The setting automation.rules is wrong: rule 2 repeats rule 1"),
    ],
)
def test_wrong_inline_rules_are_one_sentence(rules: list[dict[str, object]], words: str) -> None:
    """As any other setting that is wrong."""
    with pytest.raises(ConfigurationError) as caught:
        load_settings(automation={"rules": rules})
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["automatic", "skip_unrepaired"])
def test_what_is_gone_says_what_to_write_instead(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The switches that the policy replaces, in the file as in the environment."""
    words = rf"The setting mitigation\.{name} is gone: write .*automation\.rules"
    with pytest.raises(ConfigurationError, match=words):
        load_settings(mitigation={name: True})
    monkeypatch.setenv(f"FLIPWATCH_MITIGATION__{name.upper()}", "true")
    with pytest.raises(ConfigurationError, match=words):
        load_settings()
