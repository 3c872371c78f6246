"""The serving benchmark's figures, from made-up segments; its servers run outside `make test`."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"
sys.path.insert(0, str(BENCH))

import serving_plain  # noqa: E402
import serving_report  # noqa: E402
from serving_engine_child import kernels  # noqa: E402


def _segment(tokens_per_second: float, gaps: list[float]) -> dict[str, Any]:
    return {
        "seconds": 2.0,
        "tokens_per_second": tokens_per_second,
        "ttft_ms": [10.0, 20.0, 30.0],
        "itl_ms": gaps,
    }


def _line(number: int, ratio: float) -> dict[str, Any]:
    watched = _segment(100.0 * ratio, [10.0] * 90 + [60.0] * 10)
    plain = _segment(100.0, [10.0] * 100)
    sides = {"plain": plain, "watched": watched}
    held = {"parts": 4.0, "held_seconds": 0.2, "seconds": 10.0}
    return {"round": number, "number": 0, "condition": "scanning", "load": "closed loop", **held, **sides}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Three pairs, and the bursts of two engines."""
    lines = [json.dumps(_line(number, ratio)) for number, ratio in enumerate((0.9, 0.97, 0.98))]
    (tmp_path / "eager.jsonl").write_text("\n".join(lines) + "\n")
    times = {"wall": [0.02, 0.03], "cpu": [0.02, 0.02]}
    engine = {
        "model": "toy",
        "batch": 8,
        "ratios": {"wall": [1.0, 1.02], "cpu": [1.01, 1.01]},
        "step_seconds": {"plain": times, "gated": times},
        "kernels": None,
    }
    (tmp_path / "engine-eager.json").write_text(json.dumps(engine))
    return tmp_path


def test_ratios_are_of_pairs_and_the_p99_is_over_all_tokens(work: Path) -> None:
    """The median of the ratios with an interval that holds it; milliseconds above plain; what was held."""
    found = serving_report.figures_of(work, ["eager", "compiled"])
    [one] = found["serving"]["eager"]["scanning"].values()
    assert one["pairs"] == 3
    assert one["throughput"] == pytest.approx([0.97, 0.9, 0.98])
    assert one["itl_p99_above_ms"] == pytest.approx([50.0] * 3)
    assert (one["held_share"], one["part_ms"]) == pytest.approx((0.02, 50.0))
    assert "compiled" not in found["serving"]
    assert found["engine"]["eager"]["wall_ratio"][0] == pytest.approx(1.01)


def test_tables_say_what_was_measured(work: Path) -> None:
    """One row per condition and load, as many cells as columns."""
    tables = serving_report.tables_of(serving_report.figures_of(work, ["eager"]))
    assert [table.title for table in tables] == ["Gates", "Serving, eager"]
    for table in tables:
        assert all(len(row) == len(table.columns) for row in table.rows)
    assert tables[1].rows[0][:4] == ["scanning", "closed loop", "3", "0.970 (0.900 to 0.980)"]


def test_the_interval_of_one_pair_is_that_pair() -> None:
    """A single pair gives no spread, and no error."""
    assert serving_report.interval([0.5], lambda values: values[0]) == [0.5, 0.5, 0.5]


def test_both_sides_compute_with_the_same_weights(tmp_path: Path) -> None:
    """Plain weights with Flipwatch and without, and the plugin of the side without can be loaded by its name."""
    serving_plain.install(tmp_path)
    plain, watched = (serving_plain.environment(tmp_path, token) for token in (None, "t"))
    assert serving_plain.PLUGIN in (tmp_path / "plain_weights_plugin-0.dist-info" / "entry_points.txt").read_text()
    assert plain["VLLM_PLUGINS"] == serving_plain.PLUGIN
    assert watched["FLIPWATCH_CPU_PLAIN_WEIGHTS"] == "1"
    same = set(plain) & set(watched) - {"VLLM_PLUGINS"}
    assert all(plain[name] == watched[name] for name in same)
    assert "FLIPWATCH_PROBE_TOKEN" not in plain


def test_calls_of_kernels_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused kernels, library calls and operators in the largest graph of inductor; lines of work in its kernels."""
    wrapper = (
        "source = '''auto tmp0 = in_ptr0[0];\nauto tmp1 = tmp0 + tmp0;'''\n"
        "def call(args):\n    cpp_fused_add_0(buf0)\n    extern_kernels.mm(a, b, out=buf1)\n"
        "    buf2 = torch.ops.flipwatch.snapshot.default(buf1)\n    return buf2\n"
    )
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "wrapper.py").write_text(wrapper)
    (tmp_path / "x" / "small.py").write_text("def call(args):\n    cpp_fused_add_0(buf0)\n")
    (tmp_path / "x" / "other.py").write_text("cpp_fused_add_0()\n")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert kernels() == {"kernels": 3, "operations": 2}
