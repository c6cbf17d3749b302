import gzip
import json
import lzma

import pytest

from maxlite.config import InputError
from maxlite.data.text import bundled_corpora, read_documents, resolve_files

LINES = b'{"text": "one"}\n\n{"text": "t\\u00e9n", "id": 2}\n'


def read(path, text_column="text"):
    return list(read_documents(path, text_column=text_column, key="text_files"))


def test_every_kind_of_file(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\r\ntwo \u00e9\n".encode())
    (tmp_path / "b.jsonl").write_bytes(LINES)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(LINES))
    (tmp_path / "D.JSONL.XZ").write_bytes(lzma.compress(LINES))
    files = resolve_files([f"{tmp_path}/*.txt", f"{tmp_path}/*.j*", f"{tmp_path}/D*", f"{tmp_path}/b.jsonl"], "key")
    assert [path.name for path in files] == ["a.txt", "b.jsonl", "c.jsonl.gz", "D.JSONL.XZ"]
    assert [read(path) for path in files] == [["one\r\ntwo \u00e9\n"], *[["one", "t\u00e9n"]] * 3]


def test_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + LINES)
    assert read(tmp_path / "a.txt") == ["one"]
    assert read(tmp_path / "b.jsonl") == ["one", "t\u00e9n"]


def test_bundled_corpora():
    sotu, shakespeare = resolve_files(["corpus:sotu", "corpus:shakespeare"], "text_files")
    assert (len(read(sotu)), len(read(shakespeare))) == (237, 38)
    assert {path.parent for path in bundled_corpora().values()} == {sotu.parent}


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("none.txt", r"none\.txt: no such file \(looked for .*none\.txt\)"),
        ("none*.txt", r"none\*\.txt matches no file"),
        ("corpus:bible", r"corpus:bible is not a bundled corpus; there are corpus:sotu, corpus:shakespeare"),
        ("gs://bucket/a.txt", r"is a URL"),
        (".", r"is a directory; name its files, for example \./\*\.txt"),
        ("a.parquet", r"a\.parquet: unknown kind of file; text is read from \.txt, \.jsonl"),
        ("a.*", r"a\.parquet: unknown kind of file"),
    ],
)
def test_names_of_no_text(tmp_path, monkeypatch, pattern, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(InputError, match=f"^text_files: .*{message}"):
        resolve_files([pattern], "text_files")


def test_all_bad_names_at_once():
    with pytest.raises(InputError) as error:
        resolve_files(["x.txt", "y*.txt"], "eval_text_files")
    assert [problem.startswith("eval_text_files: ") for problem in error.value.problems] == [True, True]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good \xff", r"a\.txt: invalid UTF-8 at byte 5"),
        ("a.jsonl", LINES + b'{"text": "\xc3("}', r"a\.jsonl:4: invalid UTF-8 at byte 57"),
        ("a.txt", b"\xef\xbb\xbfgood \xff", r"a\.txt: invalid UTF-8 at byte 8"),
        ("a.jsonl", LINES + b"{", r"a\.jsonl:4: not JSON: "),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1: not JSON: "),
        ("a.jsonl", b'{"text": ' + b"1" * 5000 + b"}", r"a\.jsonl:1: not JSON: "),
        ("a.jsonl", b"[1]", r"a\.jsonl:1: a list, not an object"),
        ("a.jsonl", b'{"body": "x", "id": 1}', r"a\.jsonl:1: no field 'text'; set text_column .*: body, id$"),
        ("a.jsonl", b"{}", r"a\.jsonl:1: no field 'text'; .*: none$"),
        ("a.jsonl", b'{"text": null}', r"a\.jsonl:1: field 'text' holds a NoneType, not text"),
        ("a.jsonl", b'{"text": "ab\\ud83d"}', r"a\.jsonl:1: .*half a surrogate pair at character 2"),
        ("a.jsonl.gz", gzip.compress(LINES * 99, mtime=0)[:-20], r"a\.jsonl\.gz: damaged or cut short"),
        ("a.jsonl.gz", LINES, r"a\.jsonl\.gz: damaged or cut short"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:10] + b"\xff" * 30, r"a\.jsonl\.gz: damaged or cut short"),
        ("a.jsonl.xz", lzma.compress(LINES * 99)[:-20], r"a\.jsonl\.xz: damaged or cut short"),
        ("a.jsonl.xz", LINES, r"a\.jsonl\.xz: damaged or cut short"),
    ],
)
def test_bad_content(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"^text_files: {tmp_path}/{message}") as error:
        read(path)
    assert "\n" not in str(error.value)


def test_file_that_went_away(tmp_path):
    with pytest.raises(InputError, match=r"^text_files: .*gone\.txt: cannot be read: No such file"):
        read(tmp_path / "gone.txt")


def test_errors_reach_the_data_set(make_config, open_text, write_jsonl, paragraphs, tmp_path):
    empty = write_jsonl(["", ""], "empty.jsonl")
    full = write_jsonl([paragraphs(1), "", paragraphs(2)], "full.jsonl")
    with pytest.raises(InputError, match=r"^text_files: no text in .*empty\.jsonl$"):
        open_text(make_config(text_files=[str(empty)]))
    with pytest.raises(InputError, match=r"^eval_text_files: no text in .*empty\.jsonl$"):
        open_text(make_config(text_files=[str(full)], eval_text_files=[str(empty)]))
    assert "left out: 1 empty document" in open_text(make_config(text_files=[str(full)])).describe()
    assert not list((tmp_path / "cache" / "tokens").glob("*.tmp"))


def test_other_text_column(tmp_path, paragraphs, make_config, open_text):
    path = tmp_path / "body.jsonl"
    path.write_text(json.dumps({"body": paragraphs(1)}))
    dataset = open_text(make_config(text_files=[str(path)], text_column="body"))
    assert "Chapter 1.0" in dataset.tokenizer.decode(
        [i for step in range(1, 9) for i in dataset.train_batch(step)["inputs"].ravel() if i]
    )
