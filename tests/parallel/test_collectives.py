"""Exchanges read out of a compiled program: kind, axis, network, count and bytes; TPU forms and plain ones."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from maxlite.parallel.collectives import read_collectives
from maxlite.parallel.hlo import HloProgram

# As libtpu writes a step for two slices of 2 x 2 devices: each slice runs a program of four partitions.
TPU = (Path(__file__).parent / "hlo" / "two_slices.txt").read_text()


def mesh(shape, axes=("data", "fsdp", "tensor")):
    """A mesh of numbers for devices."""
    devices = np.arange(np.prod(shape)).reshape(shape)
    return SimpleNamespace(axis_names=axes[: len(shape)], devices=devices, size=devices.size)


def exchanges(text, shape, slice_of):
    found = read_collectives(HloProgram(text), mesh(shape), slice_of)
    return {(c.kind, c.axis, c.network, c.scalar): (c.devices, c.count, c.bytes) for c in found}


def test_the_forms_of_tpu_programs_are_named_by_what_they_do():
    found = exchanges(TPU, (2, 2, 2), {device: device // 4 for device in range(8)})
    assert found == {
        ("reduce-scatter", "fsdp,tensor", "ICI", False): (4, 1, 256 * 512 * 4),
        # 64 KB: all that is at most so large counts as scalars.
        ("all-gather", "fsdp,tensor", "ICI", True): (4, 1, 256 * 128 * 2),
        ("all-gather", "tensor", "ICI", True): (2, 1, 256 * 128 * 2),
        ("all-reduce", "fsdp,tensor", "ICI", True): (4, 1, 4096),
        ("all-reduce", "data", "DCN", False): (2, 1, 64 * 512 * 4),
        ("all-reduce", "data", "DCN", True): (2, 1, 4096),
    }


def test_parts_of_one_exchange_count_once():
    again = "  %again = bf16[256,128]{1,0} all-gather(%p0), channel_id=2, replica_groups={{0,1},{2,3}}\n"
    cut = TPU.replace("  %norm =", f"{again}  %norm =")
    slices = {device: device // 4 for device in range(8)}
    assert exchanges(cut, (2, 2, 2), slices) == exchanges(TPU, (2, 2, 2), slices)


def program(instruction, partitions):
    lines = (
        f"HloModule m, num_partitions={partitions}",
        "ENTRY %main (x: f32[65536]) -> f32[65536] {",
        "  %x = f32[65536]{0} parameter(0)",
        f"  ROOT %r = f32[65536]{{0}} {instruction}",
        "}",
    )
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("groups", "axis", "network"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", "data", "DCN"),
        ("{{0,2},{1,3},{4,6},{5,7}}", "fsdp", "ICI"),
        ("{{0,1},{2,3},{4,5},{6,7}}", "tensor", "ICI"),
        ("[2,4]<=[8]", "fsdp,tensor", "ICI"),
        ("[4,2]<=[2,4]T(1,0)", "data", "DCN"),
        ("[4,2]<=[2,2,2]T(0,2,1)", "fsdp", "ICI"),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_0'}", "fsdp,tensor", "ICI"),
        ("mesh['data'=2,'fsdp'=2,'tensor'=2] {'data','tensor'}", "data,tensor", "DCN"),
        ("mesh['data'=2,'x'=4] {'x':(2)2}", "tensor", "ICI"),
        ("mesh['data'=2,'x'=4] {'x':(1)2}", "fsdp", "ICI"),
        ("{{0,1,2,3,4,5,6,7}}", "data,fsdp,tensor", "DCN"),
        ("{}", "data,fsdp,tensor", "DCN"),
    ],
)
def test_axis_and_network_by_the_devices_of_one_group(groups, axis, network):
    text = program(f"all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%add", 8)
    found = exchanges(text, (2, 2, 2), {device: device // 4 for device in range(8)})
    assert list(found) == [("all-reduce", axis, network, False)]


def test_a_permutation_is_read_by_its_first_pair():
    text = program("collective-permute(%x), channel_id=1, source_target_pairs={{0,2},{2,0},{1,3},{3,1}}", 4)
    assert list(exchanges(text, (2, 2), dict.fromkeys(range(4), 0))) == [("collective-permute", "data", "ICI", False)]
