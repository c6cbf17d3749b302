"""The integrity record: what it holds, and that every kind of damage to it and to the files is named."""

import json

import pytest
from etils import epath

from maxlite.checkpoint import integrity, layout
from maxlite.checkpoint.errors import Damage

LARGE = integrity.SMALL_BYTES + 1
ARRAYS = {"params/w": (1, 2**32 - 1), "step": (0, 7)}


@pytest.fixture
def step(tmp_path):
    """A step directory with its record: a small file, an empty one, and a large one further down."""
    step = tmp_path / "120"
    (step / "state" / "w" / "c").mkdir(parents=True)
    (step / "state" / "w" / "c" / "0").write_bytes(bytes(LARGE))
    (step / "state" / "_METADATA").write_text("{}")
    (step / "empty").write_text("")
    integrity.write(epath.Path(step), ARRAYS)
    return step


def problem(step):
    """What the record finds wrong with the files."""
    try:
        integrity.require_files(epath.Path(step), integrity.read(epath.Path(step)))
    except Damage as error:
        return str(error)
    return ""


def test_round_trip(step):
    record = integrity.read(epath.Path(step))
    assert record.arrays == ARRAYS
    assert {name: entry.bytes for name, entry in record.files.items()} == {
        "empty": 0,
        "state/_METADATA": 2,
        "state/w/c/0": LARGE,
    }
    assert [name for name, entry in record.files.items() if entry.sha256 is None] == ["state/w/c/0"]
    assert record.bytes == LARGE + 2
    assert problem(step) == ""
    integrity.require_arrays(record, ARRAYS)


def test_files_that_came_later_do_not_matter(step):
    (step / "commit_success.txt").write_text("committed")
    assert problem(step) == ""


DAMAGE = {
    "state/_METADATA is missing": lambda step: (step / "state" / "_METADATA").unlink(),
    "empty is missing": lambda step: (step / "empty").unlink(),
    "state/_METADATA has 1 bytes instead of 2": lambda step: (step / "state" / "_METADATA").write_text("{"),
    "state/_METADATA has 0 bytes instead of 2": lambda step: (step / "state" / "_METADATA").write_text(""),
    "empty has 1 bytes instead of 0": lambda step: (step / "empty").write_text("x"),
    "state/_METADATA differs from what was saved": lambda step: (step / "state" / "_METADATA").write_text("[]"),
    f"state/w/c/0 has 5 bytes instead of {LARGE}": lambda step: (step / "state/w/c/0").write_bytes(bytes(5)),
}


@pytest.mark.parametrize("words", DAMAGE)
def test_damage_to_a_file_is_named(step, words):
    DAMAGE[words](step)
    assert problem(step) == words


def test_a_file_in_place_of_a_folder(step):
    (step / "state" / "w" / "c" / "0").unlink()
    (step / "state" / "w" / "c").rmdir()
    (step / "state" / "w" / "c").write_text("")
    assert problem(step) == "state/w/c/0 is missing"


def test_several_problems_are_counted(step):
    for number in range(5):
        (step / f"more{number}").write_text("x")
    (step / layout.RECORD_FILE).unlink()
    integrity.write(epath.Path(step), ARRAYS)
    for number in range(5):
        (step / f"more{number}").unlink()
    assert problem(step) == "more0 is missing; more1 is missing; more2 is missing; and 2 more files"


def test_bits_of_the_record_count(step):
    file = step / layout.RECORD_FILE
    data = file.read_bytes()
    read = integrity.read(epath.Path(step))
    for bit in range(0, 8 * len(data), 7):  # every place in a byte, in time
        file.write_bytes(data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :])
        try:  # white space may become other white space
            assert integrity.read(epath.Path(step)) == read
        except Damage as error:
            assert str(error) == "its integrity record integrity.json is damaged"
    for length in range(0, len(data) - 1, 5):
        file.write_bytes(data[:length])
        with pytest.raises(Damage, match=r"^its integrity record integrity\.json is damaged$"):
            integrity.read(epath.Path(step))


@pytest.mark.parametrize("text", ["[]", "null", "3", "{}", '{"sha256": 1}', '{"sha256": ""}'])
def test_other_text_in_place_of_the_record(step, text):
    (step / layout.RECORD_FILE).write_text(text)
    assert problem(step) == "its integrity record integrity.json is damaged"


def test_record_of_another_algorithm_is_not_compared(step, monkeypatch):
    monkeypatch.setattr("maxlite.checkpoint.fingerprint.ALGORITHM", "another")
    integrity.write(epath.Path(step), ARRAYS)
    monkeypatch.undo()
    assert problem(step) == "its integrity record integrity.json is damaged"


def test_missing_record(step):
    (step / layout.RECORD_FILE).unlink()
    assert problem(step) == "it has no integrity record, integrity.json"


def test_record_that_cannot_be_read_now_is_no_damage(step):
    file = step / layout.RECORD_FILE
    file.unlink()
    file.symlink_to(file.name)
    with pytest.raises(OSError, match="symbolic links"):
        integrity.read(epath.Path(step))


def test_arrays_that_differ_are_named(step):
    record = integrity.read(epath.Path(step))
    changed = {"params/w": (1, 3)}
    with pytest.raises(Damage, match=r"^params/w: not the values that were saved"):
        integrity.require_arrays(record, ARRAYS | changed)
    with pytest.raises(Damage, match=r"^params/w and 1 more arrays: not the values"):
        integrity.require_arrays(record, changed | {"unknown": (0, 0)})


def test_digest_is_of_the_content(step):
    content = json.loads((step / layout.RECORD_FILE).read_text())
    content["files"]["empty"]["bytes"] = 1
    (step / layout.RECORD_FILE).write_text(json.dumps(content))
    assert problem(step) == "its integrity record integrity.json is damaged"
