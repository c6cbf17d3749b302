"""No input gives anything but a valid config or an InputError."""

import tempfile
from pathlib import Path

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxlite.config import Config, InputError, resolve
from maxlite.config.resolve import keys_of
from maxlite.config.show import config_yaml

KEYS = sorted(keys_of(Config))
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["null", "none", "~", "1e3", "1_000", "true", "[", "{a", "tiny", "gs://x", "\0", "-1", "0"]),
    st.integers(4000, 6000).map(lambda n: "9" * n),
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars, inner, max_size=3))
keys = st.one_of(st.sampled_from(KEYS), st.text(max_size=15))


def answered(file, arguments=(), environ=None):
    """The config, or None where it was refused with short lines."""
    try:
        resolved = resolve(Config, file, arguments, environ or {})
    except InputError as error:
        assert error.problems
        for problem in error.problems:
            assert problem.strip()
            assert "\n" not in problem
            assert len(problem) < 500
        return None
    return resolved.config


def in_file(data):
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / "f.yml"
    path.write_bytes(data)
    return folder, str(path)


@FUZZ
@given(st.binary(max_size=200))
def test_any_bytes_as_a_file(data):
    folder, path = in_file(data)
    with folder:
        answered(path)


@FUZZ
@given(st.text(alphabet="abs:-[]{}&*!|>'\"%@`#?,\n \t0123~<", max_size=80))
def test_any_yaml_like_text(text):
    folder, path = in_file(text.encode())
    with folder:
        answered(path)


@FUZZ
@given(st.dictionaries(keys, values, max_size=6))
def test_any_yaml_map_and_what_resolves_reads_back(tree):
    folder, path = in_file(yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass"))
    with folder:
        config = answered(path)
        if config is not None:
            Path(path).write_text(config_yaml(config), encoding="utf-8")
            assert answered(path) == config


@FUZZ
@given(
    st.lists(st.one_of(st.text(max_size=30), st.tuples(keys, scalars).map(lambda p: f"{p[0]}={p[1]}")), max_size=5),
    st.dictionaries(keys.map(lambda k: f"M_{k.upper()}"), st.text(max_size=20), max_size=3),
)
def test_any_arguments_and_environment(arguments, environ):
    folder, path = in_file(b"steps: 1\n")
    with folder:
        answered(path, arguments, environ)
        answered(None, arguments, environ)


def test_deep_nesting_and_alias_bombs():
    bomb = "a: &a [x, x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(20)
    )
    for text in ("text_files: " + "[" * 5000, "steps: " + "[" * 900 + "]" * 900, bomb + "text_files: *u\nsteps: *u\n"):
        folder, path = in_file(text.encode())
        with folder:
            assert answered(path) is None
