"""Compares the arrays of two steps, a few arrays of each in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from maxlite.checkpoint import layout
from maxlite.checkpoint.arrays import read_checked
from maxlite.checkpoint.cli_text import json_number
from maxlite.checkpoint.errors import Damage, RestoreError
from maxlite.checkpoint.faults import patiently, why
from maxlite.checkpoint.tree import ArrayInfo
from maxlite.config import CheckpointConfig, InputError

CHUNK = 1 << 20  # elements compared at once, so that float64 copies take no memory to speak of


class Comparison(NamedTuple):
    """How one array differs between two steps."""

    name: str
    a: ArrayInfo | None  # None: the step has no such array
    b: ArrayInfo | None
    equal: bool  # bit for bit, of the same shape and dtype
    max_abs: float | None  # max |a - b|; None: not comparable
    relative: float | None  # |a - b| / |a|, Euclidean norms

    def to_json(self) -> dict[str, Any]:
        """For `diff --json`; what is not finite is null."""
        return {
            "name": self.name,
            "equal": self.equal,
            "a": self.a and {"shape": list(self.a.shape), "dtype": self.a.dtype},
            "b": self.b and {"shape": list(self.b.shape), "dtype": self.b.dtype},
            "max_abs": json_number(self.max_abs),
            "relative": json_number(self.relative),
        }


class Step:
    """A committed step whose arrays are read by name, each proved to be what was saved.

    Raises RestoreError if it is damaged or cannot be read now, InputError if a newer maxlite wrote it.
    """

    def __init__(self, path: epath.Path, report: Callable[[str], None]) -> None:
        self.path = path
        self._report = report
        self.metadata: layout.StepMetadata = self._checked(self._open)

    def read(self, names: Sequence[str]) -> Iterator[jax.Array]:
        """The arrays in turn, on the first device. Raises RestoreError."""
        wanted = {name: jax.ShapeDtypeStruct(*self.metadata.arrays[name]) for name in names}
        found = read_checked(self.path, self.metadata, wanted, True, CheckpointConfig(), self._checked)
        return (array for _, array in found)

    def _open(self) -> layout.StepMetadata:
        if not layout.is_committed(self.path):
            raise Damage("it has no commit marker")
        return layout.read_metadata(self.path)

    def _checked(self, read: Callable[[], Any]) -> Any:
        try:
            return patiently(f"checkpoint {self.path}", read, self._report)
        except (InputError, RestoreError):
            raise
        except Exception as error:  # damage, of all kinds
            raise RestoreError(f"checkpoint {self.path} is damaged: {why(error)}") from error


def compare(a: Step, b: Step) -> Iterator[Comparison]:
    """One comparison per array of either step, in the order of `a`. Raises RestoreError."""
    in_a, in_b = a.metadata.arrays, b.metadata.arrays
    both = [name for name, info in in_a.items() if name in in_b and in_b[name].shape == info.shape]
    pairs = zip(a.read(both), b.read(both), strict=True)
    for name in dict.fromkeys([*in_a, *in_b]):
        kinds = in_a.get(name), in_b.get(name)
        if name not in both:
            yield Comparison(name, *kinds, equal=False, max_abs=None, relative=None)
        else:
            left, right = map(np.asarray, next(pairs))
            same = left.dtype == right.dtype and same_bits(left, right)
            yield Comparison(name, *kinds, same, *((0.0, 0.0) if same else distances(left, right)))


def distances(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """max |a - b|, and |a - b| / |a| in Euclidean norms; arrays of the same shape, computed in float64 (complex128).

    Elements that are equal, and NaNs on both sides, are no distance; a NaN or infinity on one side makes it not
    finite. The second is infinite if a is 0 and b is not.
    """
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    largest = square = square_a = 0.0
    a, b = a.reshape(-1), b.reshape(-1)
    for start in range(0, a.size, CHUNK):
        x, y = (side[start : start + CHUNK].astype(wide) for side in (a, b))
        with np.errstate(invalid="ignore", over="ignore"):
            same = (x == y) | (np.isnan(x) & np.isnan(y))
            distance = np.where(same, 0.0, np.abs(x - y))
            largest = float(np.maximum(largest, distance.max()))  # NaN stays NaN
            square += float(np.sum(distance**2))
            square_a += float(np.sum(np.abs(x) ** 2))
    if square == 0:
        return largest, 0.0
    return largest, math.sqrt(square) / math.sqrt(square_a) if square_a else math.inf


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of the same shape and dtype are equal bit for bit; a NaN may equal a NaN, 0.0 is not -0.0."""
    x, y = (np.ascontiguousarray(side).reshape(-1).view(np.dtype(np.uint8)) for side in (a, b))
    starts = range(0, x.size, CHUNK)
    return all(np.array_equal(x[start : start + CHUNK], y[start : start + CHUNK]) for start in starts)
