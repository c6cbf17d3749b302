"""What one accelerator chip can do, from the vendors' data sheets."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """Peak figures of one chip, as its vendor states them.

    name: as people write it.
    device_kinds: how the `device_kind` that jax reports starts.
    bf16_tflops: dense bfloat16 matrix products, TFLOP/s.
    hbm_bytes: memory that a program can have; of TPUs by what libtpu 0.0.52 says, which is near the data sheet's.
    hbm_gb_per_second: memory bandwidth, GB/s (1e9 bytes).
    ici_gb_per_second: what the chip can send to the other chips of its slice while it receives as much, GB/s: half
        of the bidirectional figure that data sheets give. None: not a TPU.
    dcn_gb_per_second: the chip's share of its host's network, GB/s one way; None: not stated.
    devices: as jax counts them, in one chip; each has an equal share of everything.
    source: where the figures are from.
    """

    name: str
    device_kinds: tuple[str, ...]
    bf16_tflops: float
    hbm_bytes: float
    hbm_gb_per_second: float
    ici_gb_per_second: float | None
    dcn_gb_per_second: float | None
    source: str
    devices: int = 1


_TPU_DOCS = "https://cloud.google.com/tpu/docs"
_NVIDIA = "https://www.nvidia.com/en-us/data-center"

CHIPS = (
    Chip("v4", ("TPU v4",), 275, 30.75 * GIB, 1200, 300, None, f"{_TPU_DOCS}/v4"),
    Chip("v5e", ("TPU v5 lite", "TPU v5e"), 197, 15.75 * GIB, 819, 200, 25 / 8, f"{_TPU_DOCS}/v5e"),
    Chip("v5p", ("TPU v5p", "TPU v5"), 459, 95.73 * GIB, 2765, 600, 50 / 8, f"{_TPU_DOCS}/v5p"),
    Chip("v6e", ("TPU v6 lite", "TPU v6e"), 918, 31.24 * GIB, 1638, 400, 100 / 8, f"{_TPU_DOCS}/v6e"),
    Chip("tpu7x", ("TPU7x", "TPU v7x"), 2307, 2 * 94.74 * GIB, 7380, 600, 100 / 8, f"{_TPU_DOCS}/tpu7x", devices=2),
    Chip("A100", ("NVIDIA A100",), 312, 80e9, 2039, None, None, f"{_NVIDIA}/a100"),
    Chip("H100", ("NVIDIA H100",), 989, 80e9, 3350, None, None, f"{_NVIDIA}/h100"),
    Chip("H200", ("NVIDIA H200",), 989, 141e9, 4800, None, None, f"{_NVIDIA}/h200"),
    Chip("B200", ("NVIDIA B200",), 2250, 180e9, 7700, None, None, f"{_NVIDIA}/dgx-b200"),
)


def chip_of(device_kind: str) -> Chip | None:
    """The chip of a device by the `device_kind` that jax reports; None where it is not known."""
    return next((chip for chip in CHIPS if device_kind.startswith(chip.device_kinds)), None)


def peak_tflops(device_kind: str, dtype: str) -> float | None:
    """Peak TFLOP/s of one device for matrix products in `dtype`; None where it is not known.

    float32 products run at other rates than bfloat16 ones, so no share of the peak is given for them.
    """
    chip = chip_of(device_kind)
    return None if dtype == "float32" or chip is None else chip.bf16_tflops / chip.devices
