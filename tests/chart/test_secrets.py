"""Secrets stay in the Secret, and a variable has one place where it is set."""

from typing import Any

import pytest
from conftest import CHART, LEAST, Refusals, merged
from engines import Four, RefusedError, of_kind

SECRETS: list[tuple[dict[str, Any], str]] = [
    (
        {"settings": {"alerts": {"webhook_url": "https://hook.example/s3cret"}}},
        "settings.alerts.webhook_url would stand in a ConfigMap, and such a URL holds a secret: put it into "
        "existingSecret, and its key into secretKeys.webhookUrl.",
    ),
    ({"vllm": {"url": "http://user:s3cret@vllm:8000"}}, "vllm.url has a user or a password in it"),
    (
        {
            "settings": {"differential": {"peer_url": "http://user:s3cret@peer:8000"}},
            "secretKeys": {"peerToken": "peer"},
        },
        "settings.differential.peer_url has a user or a password in it",
    ),
    ({"extraEnv": [{"name": "FLIPWATCH_VLLM__API_KEY", "value": "s3cret"}]}, "secretKeys.vllmApiKey"),
    ({"extraEnv": [{"name": "FLIPWATCH_ALERTS__WEBHOOK_URL", "value": "s3cret"}]}, "secretKeys.webhookUrl"),
    ({"extraEnv": [{"name": "FLIPWATCH_DIFFERENTIAL__PEER_TOKEN", "value": "s3cret"}]}, "secretKeys.peerToken"),
    ({"extraEnv": [{"name": "FLIPWATCH_TOKENS", "value": "s3cret"}]}, "secretKeys.tokens"),
]
"""Secrets that would stand in a manifest, and the place for them."""

SET_BY_THE_CHART = {
    "FLIPWATCH_LISTEN_HOST": "listenHost",
    "FLIPWATCH_LISTEN_PORT": "service.port",
    "FLIPWATCH_DATA_DIR": "persistence",
    "FLIPWATCH_PROBE_TOKEN": "secretKeys.probeToken",
    "FLIPWATCH_PROBE_TOKEN_FILE": "secretKeys.probeToken",
    "FLIPWATCH_TOKENS_FILE": "secretKeys.tokens",
    "FLIPWATCH_VLLM__URL": "vllm.url",
    "FLIPWATCH_MITIGATION__MODE": "mode",
    "FLIPWATCH_CONFIG": "settings",
    "FLIPWATCH_AUTOMATION__POLICY_FILE": "automation.existingConfigMap",
    "FLIPWATCH_AUTOMATION__RULES": "automation.rules",
    "FLIPWATCH_DIFFERENTIAL__PEER_TOKEN_FILE": "secretKeys.peerToken",
    "FLIPWATCH_VLLM": "vllm.url and settings.vllm",
    "FLIPWATCH_MITIGATION": "mode and settings.mitigation",
    "flipwatch_listen_host": "listenHost",
}
"""Variable -> the value that sets it; Flipwatch reads capitals and small letters alike."""


@pytest.mark.parametrize(("values", "sentence"), SECRETS, ids=lambda part: part if isinstance(part, str) else None)
@pytest.mark.parametrize("form", ["standalone", "sidecar"])
def test_a_secret_in_the_values_is_refused(
    form: str, values: dict[str, Any], sentence: str, refusals: Refusals
) -> None:
    """What would stand in a manifest for all to read is refused, with the place for it and without the secret."""
    for said in refusals(merged({"form": form}, values)):
        assert sentence in said
        assert "s3cret" not in said


def test_a_secret_of_another_secret_passes(four: Four) -> None:
    """A variable with a secret may come from a Secret of another chart, unless this one names a key for it too."""
    given = {"secretKeyRef": {"name": "vllm", "key": "api-key"}}
    values = merged(LEAST, {"extraEnv": [{"name": "FLIPWATCH_VLLM__API_KEY", "valueFrom": given}]})
    [deployment] = of_kind(four.render(CHART, values), "Deployment")
    env = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    assert [v["valueFrom"] for v in env if v["name"] == "FLIPWATCH_VLLM__API_KEY"] == [given]
    with pytest.raises(RefusedError, match=r"set secretKeys\.vllmApiKey instead"):
        four.render(CHART, merged(values, {"secretKeys": {"vllmApiKey": "key"}}))


@pytest.mark.parametrize("name", SET_BY_THE_CHART)
def test_extra_env_sets_nothing_that_the_chart_sets(name: str, refusals: Refusals) -> None:
    """A variable of the chart in extraEnv is refused, and the value to set instead is named."""
    for said in refusals({"extraEnv": [{"name": "A", "value": "b"}, {"name": name, "value": "x"}]}):
        assert f"extraEnv has {name}, which the chart sets itself: set {SET_BY_THE_CHART[name]} instead." in said


def test_every_variable_of_the_chart_is_known(four: Four) -> None:
    """None of the variables that the chart can set is missing from the refusals."""
    everything = {
        "secretKeys": {"vllmApiKey": "a", "peerToken": "b", "webhookUrl": "c"},
        "settings": {"log_level": "info"},
        "automation": {"existingConfigMap": "policy"},
    }
    [deployment] = of_kind(four.render(CHART, merged(LEAST, everything)), "Deployment")
    names = [variable["name"] for variable in deployment["spec"]["template"]["spec"]["containers"][0]["env"]]
    assert len(names) == 12
    for name in names:
        with pytest.raises(RefusedError, match=f"extraEnv has {name}, which the chart sets itself: set "):
            four.render(CHART, merged(LEAST, merged(everything, {"extraEnv": [{"name": name, "value": "x"}]})))
