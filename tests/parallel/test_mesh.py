"""Mesh sizes: what fits, what is said when nothing does, and which devices end up together."""

import math
import re
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxlite.config import InputError, ParallelConfig
from maxlite.parallel import make_mesh, plan_mesh
from maxlite.parallel.mesh import MESH_AXES


@dataclass(frozen=True)
class Device:
    """A stand-in: a plan touches no device."""

    id: int
    process_index: int = 0
    platform: str = "cpu"
    device_kind: str = "cpu"


@dataclass(frozen=True)
class SliceDevice(Device):
    slice_index: int = 0


def devices(number, processes=1):
    return [Device(i, i * processes // number) for i in range(number)]


def slices(*counts, platform="gpu"):
    return [
        SliceDevice(index * 1000 + i, index, platform, platform, slice_index=index)
        for index, count in enumerate(counts)
        for i in range(count)
    ]


def config(**sizes):
    """`config(ici_fsdp=2)`."""
    return ParallelConfig(**{f"{name}_parallelism": size for name, size in sizes.items()})


def test_default_is_fsdp_over_all_devices_of_a_slice_and_data_over_slices():
    mesh = make_mesh(ParallelConfig(), jax.devices()[:1])
    assert mesh.axis_names == MESH_AXES
    assert plan_mesh(ParallelConfig(), devices(1)).describe() == "1 cpu device"
    assert plan_mesh(ParallelConfig(), devices(8)).describe() == "8 cpu devices: fsdp 8"
    assert (
        plan_mesh(ParallelConfig(), slices(4, 4)).describe()
        == "8 gpu devices in 2 slices: data 2 (DCN) x fsdp 4 (ICI)"
    )


def test_an_axis_may_be_spread_both_ways():
    plan = plan_mesh(config(dcn_data=1, dcn_fsdp=-1, ici_tensor=2), slices(4, 4))
    assert plan.describe() == "8 gpu devices in 2 slices: fsdp 4 (2 DCN x 2 ICI) x tensor 2 (ICI)"


@pytest.mark.parametrize(
    ("sizes", "found", "message"),
    [
        (
            {"ici_data": 2, "ici_fsdp": 3},
            devices(8),
            "there are 8 devices in one slice: ici_data_parallelism=2 x ici_fsdp_parallelism=3 needs 6 devices, not "
            "8; this would fit: ici_fsdp_parallelism=4",
        ),
        (
            {"ici_fsdp": -1, "ici_tensor": 16},
            slices(8, 8),
            "there are 16 devices in 2 slices of 8: ici_fsdp_parallelism=-1 x ici_tensor_parallelism=16 needs a "
            "multiple of 16 devices in each slice, not 8; this would fit: ici_tensor_parallelism=8",
        ),
        (
            {"ici_fsdp": 1, "dcn_data": 3, "dcn_tensor": 2},
            slices(2, 2),
            "there are 4 devices in 2 slices of 2: ici_data_parallelism=1 needs 1 devices in each slice, not 2; "
            "dcn_data_parallelism=3 x dcn_tensor_parallelism=2 needs 6 slices, not 2; this would fit: "
            "ici_fsdp_parallelism=2 dcn_data_parallelism=1",
        ),
        (
            {"dcn_data": 2},
            slices(4, platform="tpu"),
            "there are 4 devices in one slice: dcn_data_parallelism=2 needs 2 slices, not 1; this would fit: "
            "dcn_data_parallelism=1",
        ),
        (
            {"dcn_data": 6},
            devices(8, processes=4),
            "the dcn_ keys name 6 slices, into which 8 devices of 4 processes do not split evenly; this would fit: "
            "dcn_data_parallelism=2 and every other dcn_ key 1",
        ),
        (
            {},
            slices(4, 3),
            "the slices have not all the same number of devices (slice 0: 4, slice 1: 3); is one not whole?",
        ),
    ],
)
def test_mismatch_shows_the_arithmetic_and_a_fit(sizes, found, message):
    with pytest.raises(InputError) as error:
        plan_mesh(config(**sizes), found)
    assert error.value.problems == (message,)


SIZES = st.tuples(*[st.integers(1, 6)] * 4)


@given(ici=SIZES, dcn=SIZES, fills=st.tuples(*[st.sampled_from([None, *MESH_AXES])] * 2), data=st.data())
def test_a_plan_fits_or_what_is_suggested_does(ici, dcn, fills, data):
    sizes = {
        f"{kind}_{axis}": -1 if axis == fill else size
        for kind, values, fill in (("ici", ici, fills[0]), ("dcn", dcn, fills[1]))
        for axis, size in zip(MESH_AXES, values, strict=True)
    }
    found = slices(*[data.draw(st.integers(1, 32))] * data.draw(st.integers(2, 9)))
    try:
        plan = plan_mesh(config(**sizes), found)
    except InputError as error:
        fit = re.findall(r"(\w+)_parallelism=(-?\d+)", str(error).split("fit: ")[1])
        plan = plan_mesh(config(**sizes | {name: int(size) for name, size in fit}), found)
    assert math.prod(plan.ici.values()) * len(plan.slices) == len(found)
    assert math.prod(plan.dcn.values()) == len(plan.slices)


@given(
    per_slice=st.sampled_from([(1, 1, 1, 1), (1, 4, 1, 1), (2, 2, 1, 3), (1, 2, 2, 2)]),
    across=st.sampled_from([(2, 1, 1, 1), (1, 2, 1, 1), (2, 2, 1, 1), (1, 1, 2, 2)]),
    named=st.booleans(),
)
def test_a_line_along_an_ici_axis_stays_in_a_slice(per_slice, across, named):
    """On slices that the hardware has, and on those that only the keys name."""
    size = math.prod(per_slice)
    found = slices(*[size] * math.prod(across)) if named else devices(size * math.prod(across))
    keys = {f"ici_{axis}": n for axis, n in zip(MESH_AXES, per_slice, strict=True)}
    keys |= {f"dcn_{axis}": n for axis, n in zip(MESH_AXES, across, strict=True)}
    plan = plan_mesh(config(**keys), found)
    grid = plan.mesh().devices
    assert set(grid.flat) == set(found)
    where = {device: index for index, part in enumerate(plan.slices) for device in part}
    slice_grid = np.vectorize(where.get)(grid)
    for index, (inner, outer) in enumerate(zip(per_slice, across, strict=True)):
        lines = np.moveaxis(slice_grid, index, -1).reshape(-1, outer, inner)
        assert (lines == lines[:, :, :1]).all()
        assert all(len(set(line)) == outer for line in lines[:, :, 0])


@pytest.mark.parametrize(("processes", "named"), [(1, 2), (2, 2), (4, 2), (2, 4)])
def test_named_slices_are_processes_or_parts_of_one(processes, named):
    found = devices(8, processes)
    plan = plan_mesh(config(dcn_data=named), list(reversed(found)))
    assert [device.id for part in plan.slices for device in part] == list(range(8))
    assert {len(part) for part in plan.slices} == {8 // named}
    together = [len({device.process_index for device in part}) for part in plan.slices]
    assert set(together) == {max(1, processes // named)}


def test_the_same_config_means_one_slice_where_there_is_one():
    assert plan_mesh(ParallelConfig(), devices(8, processes=2)).dcn == dict.fromkeys(MESH_AXES, 1)
