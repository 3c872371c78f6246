"""What computes: kernels differ between kinds of GPUs and instruction sets, and round otherwise."""

import torch


def hardware(device: torch.device) -> str:
    """The name of a GPU, or the instruction set that torch uses on a CPU and the processor's model."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"cpu {torch.backends.cpu.get_cpu_capability()} {_processor()}".strip()


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        return ""
