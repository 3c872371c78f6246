"""The digest of the weights: what changes it and what does not."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from flipwatch.probe.armed import _digest_or_none
from flipwatch.probe.weights_digest import SAMPLES, combine, digest_weights


def _model(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Two matrices, one of them larger than the sample, and a parameter without values."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Module()
    model.large = nn.Parameter(torch.randn(64, 128, generator=generator).to(dtype))
    model.small = nn.Parameter(torch.randn(5, generator=generator).to(dtype))
    model.scale = nn.Parameter(torch.tensor(1.0))
    model.packed = nn.Parameter(torch.empty(0))
    return model


def test_the_same_weights_have_the_same_digest() -> None:
    """Loaded twice, and laid out in memory in another order, it is the same checkpoint."""
    digest = digest_weights(_model())
    assert digest_weights(_model()) == digest
    model = _model()
    model.large = nn.Parameter(model.large.data.t().contiguous().t())
    assert not model.large.is_contiguous()
    assert digest_weights(model) == digest


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.large.data.mul_(1.01),
        lambda model: model.small.data[4].fill_(torch.nan),
        lambda model: model.scale.data.neg_(),
        lambda model: model.register_parameter("packed", nn.Parameter(torch.empty(0, 3))),
        lambda model: model.register_parameter("more", nn.Parameter(torch.empty(0))),
        lambda model: model.register_parameter("large", nn.Parameter(model.large.data.view(128, 64))),
        lambda model: model.register_parameter("large", nn.Parameter(model.large.data.view(torch.float16))),
    ],
)
def test_another_model_has_another_digest(change: Callable[[nn.Module], object]) -> None:
    """Values, shapes, dtypes and names count, packed parameters by their name."""
    model = _model()
    change(model)
    assert digest_weights(model) != digest_weights(_model())


def test_the_sample_is_spread_over_rows_and_columns() -> None:
    """A change of one row or of one column in thirty-two is seen: the stride does not follow the row length."""
    for rows, columns in ((slice(3, None, 32), slice(None)), (slice(None), slice(3, None, 32))):
        model = _model()
        assert model.large.numel() > 8 * SAMPLES
        model.large.data[rows, columns] += 1
        assert digest_weights(model) != digest_weights(_model())


def test_ranks_count_in_their_order() -> None:
    """Two ranks that changed places are another server."""
    assert combine(["a", "b"]) not in (combine(["b", "a"]), combine(["a"]), combine(["ab"]))


def test_weights_that_cannot_be_read_have_no_digest(caplog: pytest.LogCaptureFixture) -> None:
    """A parameter that lies nowhere is no reason not to serve; the log says what cannot be had."""
    model = nn.Module()
    model.nowhere = nn.Parameter(torch.empty(4, device="meta"))
    assert _digest_or_none(model) is None
    assert "no clean profile" in caplog.text
