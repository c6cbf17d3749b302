"""The peak of the device a run is on, for the share of it that training reaches."""

from __future__ import annotations

# Dense bf16 TFLOP/s of one device as jax counts devices, from the vendors' data sheets; the key starts the
# `device_kind` that jax reports. float32 products on these run at other rates, so no share is printed for them.
BF16_TFLOPS = {
    "TPU v4": 275.0,
    "TPU v5 lite": 197.0,
    "TPU v5e": 197.0,
    "TPU v5p": 459.0,
    "TPU v5": 459.0,
    "TPU v6 lite": 918.0,
    "TPU v6e": 918.0,
    "NVIDIA A100": 312.0,
    "NVIDIA H100": 989.0,
    "NVIDIA H200": 989.0,
    "NVIDIA B200": 2250.0,
}


def peak_tflops(device_kind: str, dtype: str) -> float | None:
    """Peak TFLOP/s of one device for matrix products in `dtype`; None where it is not known."""
    if dtype == "float32":
        return None
    return next((peak for prefix, peak in BF16_TFLOPS.items() if device_kind.startswith(prefix)), None)
