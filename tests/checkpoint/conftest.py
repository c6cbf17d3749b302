"""A tiny deterministic run to save, a clock that stands still, and storage that obeys the test."""

import gc
import threading
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.checkpoint import Checkpointer, orbax_io
from maxlite.config import CheckpointConfig


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """The node types that a real state has: dataclass, dict, tuple, an empty node; bf16, f32, int, scalar."""

    step: Any
    params: Any
    opt: Any


class Toy:
    """A run whose state after n steps is known without running it."""

    @staticmethod
    @jax.jit
    def init():
        params = {"w": jnp.linspace(0, 1, 24, dtype=jnp.bfloat16).reshape(4, 6), "b": jnp.linspace(-1, 1, 40_000)}
        moments = {"w": jnp.zeros((4, 6), jnp.float32), "b": jnp.zeros(40_000)}
        return State(jnp.int32(0), params, ({"mu": moments, "count": jnp.int32(7)}, ()))

    abstract = staticmethod(lambda: jax.eval_shape(Toy.init))

    @staticmethod
    @jax.jit
    def pure_step(state):
        params = jax.tree.map(lambda p: (p * 1.01 + 0.125).astype(p.dtype), state.params)
        opt = jax.tree.map(lambda x: x * 2 + 1, state.opt)
        return State(state.step + 1, params, opt)

    step = staticmethod(jax.jit(lambda state: Toy.pure_step(state), donate_argnums=0))

    @staticmethod
    def after(steps):
        state = Toy.init()
        for _ in range(steps):
            state = Toy.pure_step(state)
        return state


def assert_same(left, right):
    """Equal trees, bit for bit."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture(autouse=True)
def collect_garbage():
    """What a failure left behind is found here, in the test that caused it."""
    yield
    gc.collect()


@pytest.fixture
def toy():
    return Toy


@pytest.fixture
def same():
    return assert_same


@pytest.fixture
def make(tmp_path, clock):
    """Makes checkpointers on one directory; `make.lines` is what they reported."""

    def make(directory=None, *, metadata=None, clock=clock, **keys):
        return Checkpointer(
            directory or tmp_path / "checkpoints",
            CheckpointConfig(**{"checkpoint_timeout_seconds": 60, **keys}),
            metadata=metadata,
            clock=clock,
            report=make.lines.append,
            record=lambda kind, **fields: make.events.append((kind, fields)),
        )

    make.lines, make.events = [], []
    make.directory = tmp_path / "checkpoints"
    return make


@dataclass
class FakeStorage:
    """Takes Orbax's place: the arrays of a step are kept in memory, and writes obey the test."""

    saved: dict[str, dict[str, Any]] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)  # a write ends when this is set
    faults: list[Exception | None] = field(default_factory=list)  # what becomes of the next writes
    corruptions: list[dict[str, Any]] = field(default_factory=list)  # what the next writes get wrong, without an error
    writing: int = 0
    most_writing: int = 0

    def __post_init__(self):
        self.gate.set()

    def read_arrays(self, directory, abstract, config=None):
        return {name: self.saved[directory.parent.name][name] for name in abstract}


@pytest.fixture
def storage(monkeypatch):
    fake = FakeStorage()

    class Writer:
        def __init__(self, config, local):
            pass

        def start(self, directory, arrays):
            fake.writing += 1
            fake.most_writing = max(fake.most_writing, fake.writing)
            step = directory.parent.name.split(".")[0]
            fake.saved[step] = {**arrays, **(fake.corruptions.pop(0) if fake.corruptions else {})}

        def finish(self):
            assert fake.gate.wait(30)
            fake.writing -= 1
            if error := fake.faults.pop(0) if fake.faults else None:
                raise error

        def merge(self, directory):
            size = sum(x.nbytes for x in fake.saved[directory.parent.name.split(".")[0]].values())
            (directory / "data").write_bytes(bytes(size))

        def close(self):
            pass

    monkeypatch.setattr(orbax_io, "Writer", Writer)
    monkeypatch.setattr(orbax_io, "read_arrays", fake.read_arrays)
    return fake


class FakeStore:
    """The key-value store of jax's coordination service, for processes that are threads of one."""

    def __init__(self):
        self.texts = {}
        self._lock = threading.Lock()

    def key_value_set(self, key, value):
        with self._lock:
            if key in self.texts:
                raise ValueError(f"ALREADY_EXISTS: {key}")
            self.texts[key] = value

    def key_value_dir_get(self, prefix):
        assert prefix.endswith("/")
        with self._lock:
            return [(key, value) for key, value in self.texts.items() if key.startswith(prefix)]

    def key_value_delete(self, key):
        with self._lock:
            del self.texts[key]


@pytest.fixture
def store():
    return FakeStore()
