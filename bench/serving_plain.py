"""vLLM without Flipwatch, for the other side of a comparison.

Flipwatch on a CPU keeps plain weights, where vLLM packs them for its own kernels.  Both sides must have the same, or
the comparison is one of kernels: a plugin of one function does that for the side without Flipwatch.
"""

from pathlib import Path

PLUGIN = "plain_weights"


def install(folder: Path) -> None:
    """Make the plugin loadable from `folder`, which goes on PYTHONPATH; `PLUGIN` is its name for VLLM_PLUGINS."""
    (folder / "plain_weights_plugin.py").write_text(
        "def register():\n    from flipwatch.probe.plugin import _keep_plain_weights\n\n    _keep_plain_weights()\n",
        encoding="utf-8",
    )
    info = folder / "plain_weights_plugin-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plain_weights_plugin\nVersion: 0\n", encoding="utf-8")
    entry = f"[vllm.general_plugins]\n{PLUGIN} = plain_weights_plugin:register\n"
    (info / "entry_points.txt").write_text(entry, encoding="utf-8")


def environment(folder: Path, token: str | None) -> dict[str, str]:
    """Of a vLLM on one thread: with Flipwatch where there is a token, else with the plugin that lies in `folder`."""
    common = {
        "OMP_NUM_THREADS": "1",
        # By itself vLLM binds its threads, and two engines side by side to the same core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # The ahead-of-time artefacts of this build cannot be loaded again.
        "VLLM_USE_AOT_COMPILE": "0",
    }
    if token is None:
        return common | {"VLLM_PLUGINS": PLUGIN, "PYTHONPATH": str(folder)}
    return common | {
        "VLLM_PLUGINS": "flipwatch",
        "FLIPWATCH_PROBE_TOKEN": token,
        "FLIPWATCH_CPU_PLAIN_WEIGHTS": "1",
    }
