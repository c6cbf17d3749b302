"""Peak figures by the name that jax gives a device."""

import pytest

from maxlite.chips import CHIPS, chip_of, peak_tflops


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("NVIDIA H100 80GB HBM3", "H100"),
    ],
)
def test_a_chip_is_known_by_its_device_kind(device_kind, name):
    chip = chip_of(device_kind)
    assert chip is not None
    assert chip.name == name


def test_the_peak_is_of_one_device_as_jax_counts_them():
    assert peak_tflops("TPU v5p", "bfloat16") == 459
    assert peak_tflops("TPU7x", "bfloat16") == pytest.approx(2307 / 2)


def test_no_peak_is_made_up():
    assert peak_tflops("cpu", "bfloat16") is None
    assert peak_tflops("TPU v5p", "float32") is None


def test_every_figure_has_a_source_and_every_tpu_its_links():
    for chip in CHIPS:
        assert chip.source.startswith("https://")
        assert chip.ici_gb_per_second is not None or not chip.device_kinds[0].startswith("TPU")
