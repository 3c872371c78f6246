"""What happens at vLLM's start must never stop it: switches, plugin, loader."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flipwatch.probe import armed, plugin, switches
from flipwatch.probe.view import LiveView


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLIPWATCH_PROBE_TOKEN", "FLIPWATCH_PROBE_TOKEN_FILE", "FLIPWATCH_DISABLE"):
        monkeypatch.delenv(name, raising=False)


def test_off_without_a_token() -> None:
    """An installed package without a token does nothing."""
    assert not switches.enabled()
    plugin.register()


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None])
def test_unreadable_token_file_only_switches_off(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A token file that is binary or missing leaves vLLM alone and says so in the log."""
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("FLIPWATCH_PROBE_TOKEN_FILE", str(file))
    plugin.register()
    assert not switches.enabled()
    assert "FLIPWATCH_PROBE_TOKEN_FILE cannot be read" in caplog.text


def test_off_switch_beats_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLIPWATCH_DISABLE wins."""
    monkeypatch.setenv("FLIPWATCH_PROBE_TOKEN", "something")
    assert switches.enabled()
    monkeypatch.setenv("FLIPWATCH_DISABLE", "1")
    assert not switches.enabled()


# Importing vLLM's models warns of what torch will drop.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parallel_settings_are_refused() -> None:
    """Engines that compute as one are refused in one sentence, and arming never raises."""
    config = _Namespace(parallel_config=_Namespace(data_parallel_size=2), device_config=_Namespace(device="cpu"))
    refused = armed.arm(torch.nn.Linear(2, 2), config)
    assert (
        refused.refusal
        == "Data parallel size 2 of a mixture-of-experts model is not supported: its engines compute as one."
    )
    assert refused.gates is None
    assert armed.arm(torch.nn.Module(), config).refusal is not None


def test_tokens_are_moved_to_the_model() -> None:
    """A measurement's token ids go to the model's device before the model sees them."""
    seen: list[torch.Tensor] = []

    class Spy(LiveView):
        def __init__(self) -> None:
            self._device = torch.device("meta")

        def _calls(self, tokens: torch.Tensor, copies: int) -> Any:
            seen.append(tokens)
            return _Namespace(first=torch.zeros(6, 4))

    assert Spy().embed(torch.ones(2, 3, dtype=torch.int64)).shape == (2, 3, 4)
    assert seen[0].device.type == "meta"


class _Namespace:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)
