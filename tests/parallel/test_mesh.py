"""Mesh sizes: what fits, and what is said when nothing does."""

import math

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxlite.config import InputError, ParallelConfig
from maxlite.parallel import describe_mesh, make_mesh
from maxlite.parallel.mesh import MESH_AXES


def config(data, fsdp, tensor):
    return ParallelConfig(ici_data_parallelism=data, ici_fsdp_parallelism=fsdp, ici_tensor_parallelism=tensor)


def devices(number):
    """So many stand-ins: a refused plan touches no device."""
    return jax.devices()[:1] * number


def test_default_is_fsdp_over_all():
    mesh = make_mesh(ParallelConfig(), devices(1))
    assert mesh.axis_names == MESH_AXES
    assert describe_mesh(mesh) == "1 cpu device: data 1 x fsdp 1 x tensor 1"


@pytest.mark.parametrize(
    ("sizes", "number", "message"),
    [
        (
            (2, 3, 1),
            8,
            "ici_data_parallelism=2 x ici_fsdp_parallelism=3 x ici_tensor_parallelism=1 needs 6 devices, but there "
            "are 8; this would fit: ici_data_parallelism=2 ici_fsdp_parallelism=4 ici_tensor_parallelism=1",
        ),
        (
            (1, -1, 16),
            8,
            "ici_data_parallelism=1 x ici_fsdp_parallelism=-1 x ici_tensor_parallelism=16 needs a multiple of 16 "
            "devices, but there are 8; this would fit: ici_data_parallelism=1 ici_fsdp_parallelism=1 "
            "ici_tensor_parallelism=8",
        ),
    ],
)
def test_mismatch_shows_the_arithmetic_and_a_fit(sizes, number, message):
    with pytest.raises(InputError) as error:
        make_mesh(config(*sizes), devices(number))
    assert error.value.problems == (message,)


@given(st.tuples(*[st.integers(1, 9)] * 3), st.integers(1, 64), st.sampled_from([None, 0, 1, 2]))
def test_every_suggestion_fits(sizes, number, fill):
    sizes = [-1 if i == fill else size for i, size in enumerate(sizes)]
    known = math.prod(size for size in sizes if size != -1)
    if number == known or (fill is not None and number % known == 0):
        return
    with pytest.raises(InputError) as error:
        make_mesh(config(*sizes), devices(number))
    plan = str(error.value).split("fit: ")[1].split()
    assert math.prod(int(item.split("=")[1]) for item in plan) == number
