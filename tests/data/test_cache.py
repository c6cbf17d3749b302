import errno
import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from maxlite.config import InputError
from maxlite.data import cache as cache_module
from maxlite.data import fingerprint, locks
from maxlite.data.build import METADATA
from maxlite.data.tokenizer import ByteTokenizer

OPEN = """
    import sys
    from maxlite.config import DataConfig
    from maxlite.data.cache import open_cache
    from maxlite.data.tokenizer import ByteTokenizer
    config = DataConfig.model_validate_json(sys.argv[1])
    def open_():
        return open_cache(config, ByteTokenizer())
"""


def start(program, config, **keys):
    """A process that runs a program which may call open_()."""
    source = textwrap.dedent(OPEN) + textwrap.dedent(program)
    command = [sys.executable, "-c", source, config.model_dump_json()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **keys)


def caches(config):
    root = cache_module._root(config) / "tokens"
    return sorted(path for path in root.iterdir() if path.is_dir())


@pytest.fixture
def tokenised(monkeypatch):
    """The texts that were tokenised, as they come."""
    texts = []
    encode = ByteTokenizer.encode_batch
    monkeypatch.setattr(ByteTokenizer, "encode_batch", lambda self, batch: texts.extend(batch) or encode(self, batch))
    return texts


def test_text_is_tokenised_once(make_config, open_text, tokenised, capfd):
    config = make_config()
    first = open_text(config)
    assert len(tokenised) == 20
    lines = capfd.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["tokenising", "tokenised"]  # no bar where there is no terminal
    again = open_text(config)
    assert len(tokenised) == 20
    assert capfd.readouterr().err == ""
    assert first.fingerprint == again.fingerprint
    assert len(caches(config)) == 1


def test_documents_begin_and_end_with_the_tokenizers_marks(make_config, open_text, write_jsonl):
    dataset = open_text(make_config(text_files=[str(write_jsonl(["one", "two, longer" * 9]))], eval_fraction=0))
    tokens, ends = dataset._cache.train.tokens, dataset._cache.train.ends
    assert tokens.dtype == np.uint16
    assert tokens[: ends[0]].tolist() == [256, *b"one", 257]
    assert tokens[ends[0] :].tolist() == [256, *b"two, longer" * 9, 257]


def test_large_vocabularies_take_four_bytes(make_config, open_text, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "vocab_size", 70_000)
    assert open_text(make_config(), vocab_size=70_000)._cache.train.tokens.dtype == np.uint32


def test_an_edit_that_keeps_size_and_times_is_seen(make_config, open_text, write_jsonl, paragraphs):
    path = write_jsonl([paragraphs(seed) for seed in range(8)])
    config = make_config(text_files=[str(path)])
    before = open_text(config)
    times = path.stat()
    path.write_text(path.read_text().replace("Chapter", "Section"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_size == times.st_size
    after = open_text(config)
    assert before.fingerprint != after.fingerprint
    assert "Section" in after.tokenizer.decode(after._cache.train.tokens)
    assert "Chapter" in before.tokenizer.decode(before._cache.train.tokens)  # open data sets keep theirs


def test_a_file_may_move_but_not_change_its_kind(make_config, open_text, write_jsonl, tokenised, paragraphs):
    path = write_jsonl([paragraphs(seed) for seed in range(8)])
    open_text(make_config(text_files=[str(path)]))
    count = len(tokenised)
    moved = path.rename(path.with_name("moved.jsonl"))
    open_text(make_config(text_files=[str(moved)]))
    assert len(tokenised) == count
    as_text = moved.rename(path.with_name("moved.txt"))
    open_text(make_config(text_files=[str(as_text)]))
    assert len(tokenised) > count


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def without_ends(path):
    metadata = json.loads(path.read_text())
    del metadata["files"]["train.ends"]
    path.write_text(json.dumps(metadata))


DAMAGE = [
    ("train.tokens", cut),
    ("train.tokens", flip),
    ("held_out.tokens", flip),
    ("train.ends", flip),
    ("held_out.ends", cut),
    ("train.tokens", os.unlink),
    (METADATA, os.unlink),
    (METADATA, cut),
    (METADATA, without_ends),
    (METADATA, lambda path: path.write_text("[]")),
    (METADATA, lambda path: path.write_bytes(b"\xff\0")),
    (METADATA, lambda path: path.write_bytes(b"")),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGE)
def test_a_damaged_cache_is_made_again(make_config, open_text, tokenised, capfd, name, damage):
    config = make_config()
    before = open_text(config)
    (directory,) = caches(config)
    damage(directory / name)
    capfd.readouterr()
    after = open_text(config)
    assert before.fingerprint == after.fingerprint
    assert len(tokenised) == 40
    assert "is damaged" in capfd.readouterr().err.splitlines()[0]
    assert caches(config) == [directory]


def test_processes_that_start_together_tokenise_once(make_config):
    config = make_config()
    program = """
        import time
        encode = ByteTokenizer.encode_batch
        ByteTokenizer.encode_batch = lambda self, batch: time.sleep(0.2) or encode(self, batch)
        print("ready", flush=True)
        sys.stdin.read()
        cache = open_()
        print(cache.digest, cache.train.tokens[::50])
    """
    processes = [start(program, config, stdin=subprocess.PIPE) for _ in range(3)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 3
    for process in processes:
        process.stdin.close()
    outputs = []
    for process in processes:
        process.stdin = None
        outputs.append(process.communicate(timeout=60))
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    assert sum("tokenised" in err for _, err in outputs) == 1
    assert all("tokenised" in err or "waiting for another process" in err for _, err in outputs)
    assert [path.suffix for path in caches(config)] == [""]


def test_a_builder_killed_midway_leaves_no_cache(make_config, open_text):
    config = make_config()
    program = """
        import os, signal
        ByteTokenizer.encode_batch = lambda self, batch: os.kill(os.getpid(), signal.SIGKILL)
        open_()
    """
    process = start(program, config)
    process.communicate(timeout=60)
    assert process.returncode == -9
    assert [path.suffix for path in caches(config)] == [".tmp"]
    other = config.model_copy(update={"eval_fraction": 0.5})
    open_text(other)  # builders of other data sets sweep up too
    assert [path.suffix for path in caches(config)] == [""]
    assert open_text(config).fingerprint != open_text(other).fingerprint


def test_a_builder_at_work_is_left_alone(make_config, open_text, tmp_path):
    root = tmp_path / "cache" / "tokens"
    root.mkdir(parents=True)
    with locks.exclusive(root / "other.lock"), locks.published_directory(root / "other") as at_work:
        (root / "other.some-machine.x.tmp").mkdir()
        old = root / "other.old-machine.x.tmp"
        old.mkdir()
        os.utime(old, (0, 0))
        open_text(make_config())
        assert at_work.is_dir()
        assert (root / "other.some-machine.x.tmp").is_dir()
        assert not old.exists()
    assert (root / "other").is_dir()


def test_an_error_midway_leaves_nothing(make_config, open_text, monkeypatch, tmp_path):
    def fail(self, batch):
        raise KeyboardInterrupt

    monkeypatch.setattr(ByteTokenizer, "encode_batch", fail)
    with pytest.raises(KeyboardInterrupt):
        open_text(make_config())
    assert not [path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir()]


def test_a_target_made_meanwhile_stays(tmp_path):
    with locks.published_directory(tmp_path / "a") as directory:
        (directory / "mine").touch()
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "theirs").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "theirs"]


def test_input_that_changes_while_it_is_read(make_config, open_text, write_jsonl, monkeypatch, paragraphs):
    path = write_jsonl([paragraphs(seed) for seed in range(8)])
    encode = ByteTokenizer.encode_batch

    def append(self, batch):
        path.write_text(path.read_text() + json.dumps({"text": "more"}) + "\n")
        return encode(self, batch)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", append)
    config = make_config(text_files=[str(path)])
    with pytest.raises(InputError, match=r"^text_files: .*docs\.jsonl: changed while it was read"):
        open_text(config)
    assert caches(config) == []


def test_cache_directories_that_cannot_be_used(make_config, open_text, tmp_path):
    (tmp_path / "file").touch()
    for directory, message in (
        (f"{tmp_path}/file", "Not a directory"),
        (f"{tmp_path}/file/below", "Not a directory"),
        ("/proc/maxlite", "No such file"),
        ("gs://bucket/cache", "is a URL"),
    ):
        with pytest.raises(InputError, match=f"^data_cache_directory: .*{message}") as error:
            open_text(make_config(data_cache_directory=directory))
        assert len(error.value.problems) == 1


def test_a_full_disk(make_config):
    # A limit on the size of files makes a write fail midway, as a full disk does.
    program = """
        import resource
        from maxlite.config import InputError
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            open_()
        except InputError as error:
            print(error)
    """
    config = make_config()
    out, err = start(program, config).communicate(timeout=60)
    assert out.startswith("data_cache_directory: cannot keep tokenised text in "), err
    assert "File too large; make room there" in out
    assert caches(config) == []


def test_a_finished_cache_is_only_read(make_config, open_text, monkeypatch):
    config = make_config()
    open_text(config)

    def refuse(*_, **__):
        raise PermissionError("read-only")

    monkeypatch.setattr(cache_module, "exclusive", refuse)
    open_text(config)
    with pytest.raises(InputError, match=r"^data_cache_directory: .*read-only"):
        open_text(config.model_copy(update={"eval_fraction": 0.5}))


def test_hashes_of_large_files_are_remembered_until_they_change(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "ALWAYS_HASHED_BYTES", 3)
    hashed = []
    real = fingerprint._hash
    monkeypatch.setattr(fingerprint, "_hash", lambda path: hashed.append(path) or real(path))
    path = tmp_path / "large"
    path.write_bytes(b"1234")

    def content_hash():
        return fingerprint.content_hash(path, tmp_path / "memory")

    first = content_hash()
    assert content_hash() == first
    assert len(hashed) == 2  # just written: it may change again within a tick of the clock
    monkeypatch.setattr(fingerprint, "SETTLED_SECONDS", -1.0)
    assert [content_hash(), content_hash()] == [first, first]
    assert len(hashed) == 3
    times = path.stat()
    path.write_bytes(b"1235")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert content_hash() != first
    (note,) = (tmp_path / "memory").iterdir()
    note.write_text("{")
    assert content_hash() == real(path)
    path.write_bytes(b"12")
    assert content_hash() == real(path)
    assert len(hashed) == 6


def test_sampled_hash(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "ALWAYS_HASHED_BYTES", 64)
    monkeypatch.setattr(fingerprint, "_BLOCK", 16)

    def sampled(data):
        (tmp_path / "file").write_bytes(data)
        return fingerprint.sampled_hash(tmp_path / "file")

    small, large = bytes(60), bytes(1000)
    assert len({sampled(small), *(sampled(small[:i] + b"x" + small[i + 1 :]) for i in range(60))}) == 61
    assert len({sampled(large), sampled(large[:-1]), sampled(b"x" + large[1:]), sampled(large[:-1] + b"x")}) == 4
    assert sampled(large) == sampled(large)


def test_a_read_that_fails_midway_is_said_with_its_file(make_config, open_text, monkeypatch):
    def digest(file, name):
        raise OSError(errno.EIO, "Input/output error")  # as a failing disk does it: no file named

    monkeypatch.setattr("hashlib.file_digest", digest)
    with pytest.raises(InputError, match=r"^text_files: .*docs\.jsonl: cannot be read: Input/output error"):
        open_text(make_config())
