"""Reading records of a file: streamed, bounded, each with its number."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from arrow_tq.importer import records
from arrow_tq.importer.records import check_files, read_records
from arrow_tq_schemas.errors import InvalidInput, MalformedMessage, NotFound


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_lines_have_numbers_and_problems(tmp_path: Path, name: str) -> None:
    lines = [b'\xef\xbb\xbf{"a": 1}', b"", b"{nope", b"[1]", b'{"b": "\xff"}', b"  ", b'{"c": "\\ud800"}']
    path = write(tmp_path / name, b"\n".join(lines))
    seen = list(read_records(path))
    assert [record.number for record in seen] == [1, 3, 4, 5, 7]
    assert [record.value for record in seen] == [{"a": 1}, None, None, None, {"c": "\ud800"}]
    assert seen[1].problem.startswith("not JSON: Expecting property name")
    assert seen[2].problem == "expected a JSON object, got list"
    assert seen[3].problem == "not UTF-8 at byte 7"
    assert seen[1].place == f"{path}:3"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json"])
def test_an_empty_file_has_no_records(tmp_path: Path, name: str) -> None:
    assert list(read_records(write(tmp_path / name, b""))) == []


def test_a_huge_line_is_refused_and_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RECORD_BYTES_MAX", 64)
    monkeypatch.setattr(records, "SKIP_BYTES", 16)
    long = json.dumps({"a": "x" * 500}).encode()
    fits = b'{"a":"' + b"y" * (64 - 8) + b'"}'
    assert len(fits) == 64
    path = write(tmp_path / "a.jsonl", b"\n".join([long, fits, b'{"z":1}', long]))
    seen = list(read_records(path))
    assert [record.number for record in seen] == [1, 2, 3, 4]
    assert [record.problem for record in seen] == ["longer than 64 bytes", "", "", "longer than 64 bytes"]


def test_deep_nesting_is_a_problem_and_no_crash(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b"[" * 200_000 + b"\n" + b'{"a": 1}')
    first, second = read_records(path)
    assert first.problem.startswith("not JSON")
    assert second.value == {"a": 1}


def test_huge_integers_are_a_problem_and_no_crash(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"a": ' + b"9" * 5000 + b"}")
    (only,) = read_records(path)
    assert only.value is None
    assert only.problem.startswith("not JSON")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('{\n "a": 1\n}\n', [{"a": 1}]),
        ('[{"a": 1},\n {"a": 2}]', [{"a": 1}, {"a": 2}]),
        ('{"a": 1}\n{"a": 2}\n', [{"a": 1}, {"a": 2}]),
        ('{"a": 1}\n{"a": 2', [{"a": 1}, None]),
        ("[1]", [None]),
    ],
)
def test_documents_and_lines_under_one_name(
    tmp_path: Path, text: str, values: list[dict[str, int] | None]
) -> None:
    for name in ("a.json", "a.json.gz"):
        path = write(tmp_path / name, text.encode())
        assert [record.value for record in read_records(path)] == values


def test_broken_gzip_names_the_line(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(b'{"a": %d}\n' % number for number in range(20_000)))
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(whole[: len(whole) // 2])
    seen: list[object] = []
    with pytest.raises(MalformedMessage, match=r"cut\.jsonl\.gz:\d+: cannot read on: .*ended before"):
        seen.extend(record.value for record in read_records(path))
    assert len(seen) > 100
    path.write_bytes(b"no gzip at all")
    with pytest.raises(MalformedMessage, match=r":1: cannot read on: Not a gzipped file"):
        list(read_records(path))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"none\.jsonl: no such file"):
        check_files([tmp_path / "none.jsonl"])
    with pytest.raises(InvalidInput, match="not a regular file"):
        check_files([tmp_path])
    assert check_files([write(tmp_path / "a", b"12345"), write(tmp_path / "b", b"1")]) == 6


def test_consumed_bytes_count_over_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"a":1}\n{"a":2}\n')
    assert [record.consumed_bytes for record in read_records(path, 100)][-1] == 116


@given(st.lists(st.dictionaries(st.text(), st.text() | st.integers() | st.none(), max_size=3), max_size=8))
def test_any_objects_come_back(tmp_path_factory: pytest.TempPathFactory, values: list[object]) -> None:
    path = tmp_path_factory.mktemp("any") / "a.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    assert [record.value for record in read_records(path)] == values
