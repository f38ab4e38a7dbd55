"""Names, ids, receipts, manifests and handles: rules, limits, refusals."""

from __future__ import annotations

import multiprocessing
import os
import threading

import numpy as np
import pytest

from arrow_tq_schemas import handles, names
from arrow_tq_schemas.errors import InvalidInput, MalformedMessage
from arrow_tq_schemas.ids import ChunkId, IdFactory
from arrow_tq_schemas.manifests import OWNED_DTYPE, Manifest, ranges
from arrow_tq_schemas.receipts import Receipt, StoredChunk, chunk_ids, joined
from arrow_tq_schemas.spans import Span, empty_spans, to_spans

FIRST = ChunkId.make(1 << 40, 4095, 0, 7)


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["", "a\x00b", "x" * 257, "é" * 129, 5, None, b"a"])
def test_ids_that_are_no_text_are_refused(value: object) -> None:
    with pytest.raises(InvalidInput, match=r"^step id "):
        names.check_id(value, "step id")  # type: ignore[arg-type]


def test_a_lone_surrogate_is_no_id() -> None:
    with pytest.raises(InvalidInput, match=r"group .*: a lone surrogate at 2 is not an id"):
        names.check_id("ab\ud800", "group")


def test_ids_may_be_any_text() -> None:
    for value in ("s-17", "a b/é😀", "x" * 256, " "):
        assert names.check_id(value, "session id") == value
        assert names.check_session(value) == value


@pytest.mark.parametrize("value", ["s~0", "s~t12", "~0", "a\n~3"])
def test_a_session_does_not_look_like_a_segment(value: str) -> None:
    with pytest.raises(InvalidInput, match=r"is kept for segment ids"):
        names.check_session(value)


def test_segment_ids_name_their_view() -> None:
    assert names.segment_id("s-17", "lineage", 0) == "s-17~0"
    assert names.segment_id("s-17", "timeline", 3) == "s-17~t3"


@pytest.mark.parametrize("value", ["", ".hidden", "a/b", "-a", "x" * 129, None])
def test_runs_name_folders(value: object) -> None:
    with pytest.raises(InvalidInput, match=r"^run .*: expected a letter or digit and then"):
        names.check_run(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["", "..", "a/b", "a.shard-1", "-a", "x" * 129, None])
def test_stores_name_folders_and_what_belongs_to_them(value: object) -> None:
    with pytest.raises(InvalidInput, match=r"^store .*: expected a letter or digit and then"):
        names.check_store(value)  # type: ignore[arg-type]


# -- chunk ids -------------------------------------------------------------------------------------


def test_an_id_is_made_of_its_parts() -> None:
    assert (FIRST.time_ms, FIRST.shard, FIRST.group) == (1 << 40, 4095, 0)
    sibling = FIRST.sibling(255)
    assert (sibling.group, sibling.shard, sibling.time_ms) == (255, 4095, 1 << 40)
    assert sibling.sibling(0) == FIRST
    assert ChunkId.from_hex(sibling.hex) == ChunkId.from_bytes(sibling.to_bytes()) == sibling


@pytest.mark.parametrize(
    "parts", [(1 << 48, 0, 0, 0), (0, 4096, 0, 0), (0, 0, 256, 0), (0, 0, 0, 1 << 54), (-1, 0, 0, 0)]
)
def test_parts_that_do_not_fit_are_refused(parts: tuple[int, int, int, int]) -> None:
    with pytest.raises(MalformedMessage, match=r"chunk id .*"):
        ChunkId.make(*parts)


@pytest.mark.parametrize(
    "text", ["", "0" * 32, "zz" * 16, f" {FIRST.hex}", FIRST.hex[:-1], 5, "0" * 31 + "\n"]
)
def test_text_that_is_no_id_is_refused(text: object) -> None:
    with pytest.raises(MalformedMessage, match=r"^chunk id "):
        ChunkId.from_hex(text)  # type: ignore[arg-type]


def test_a_group_past_the_last_is_refused() -> None:
    with pytest.raises(MalformedMessage, match=r"layer group 256: expected 0 to 255"):
        FIRST.sibling(256)


def test_ids_of_many_threads_differ() -> None:
    factory, made = IdFactory(), []

    def work() -> None:
        made.extend([factory.next(3) for _ in range(2000)])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 16_000
    assert {chunk.shard for chunk in made} == {3}


def test_ids_after_fork_differ() -> None:
    factory = IdFactory()
    factory.next(0)
    receive, send = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        send.send([factory.next(0).value for _ in range(100)])
        os._exit(0)
    ours = {factory.next(0).value for _ in range(100)}
    theirs = set(receive.recv())
    assert os.waitpid(child, 0)[1] == 0
    assert len(theirs) == 100
    mask = (1 << 54) - 1
    assert not {value & mask for value in ours} & {value & mask for value in theirs}


# -- receipts --------------------------------------------------------------------------------------


def stored(start: int, rows: int, valid: list[tuple[int, int]] | None = None, groups: int = 1) -> StoredChunk:
    return StoredChunk(id=FIRST.hex, start=start, rows=rows, bytes=rows, valid=valid, groups=groups)


def test_null_runs_give_no_spans() -> None:
    chunk = stored(100, 10, [(0, 2), (5, 10)])
    assert chunk.spans() == [Span(100, FIRST, 0, 2), Span(105, FIRST, 5, 5)]
    assert stored(100, 10, []).spans() == []
    assert stored(100, 10).spans() == [Span(100, FIRST, 0, 10)]


@pytest.mark.parametrize("valid", [[(0, 11)], [(3, 3)], [(0, 2), (2, 4)], [(4, 6), (0, 2)], [(-1, 2)]])
def test_runs_that_do_not_ascend_are_refused(valid: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"valid runs of 10 rows must ascend and not touch"):
        stored(0, 10, valid)


@pytest.mark.parametrize(
    ("chunks", "rows", "message"),
    [
        ([stored(1, 4)], 4, r"starts at 1, expected 0"),
        ([stored(0, 4), stored(5, 1)], 6, r"starts at 5, expected 4"),
        ([stored(0, 4)], 5, r"chunks end at 4, the receipt at 5"),
        ([], 1, r"chunks end at 0, the receipt at 1"),
    ],
)
def test_chunks_cover_the_receipt(chunks: list[StoredChunk], rows: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Receipt(run="r", epoch=0, field="x", start=0, rows=rows, chunks=chunks)


def test_a_broken_receipt_names_key_and_value() -> None:
    for text, message in (
        ('{"run":"r"}', r"receipt: epoch: Field required"),
        ('{"run":"r","epoch":"1","field":"x","start":0,"rows":0,"chunks":[]}', r"receipt: epoch: .*got '1'"),
        ('{"run":"r","epoch":0,"field":"x","start":-4,"rows":0,"chunks":[]}', r"receipt: start: .*got '-4'"),
        (
            '{"run":"r","epoch":0,"field":"x","start":0,"rows":0,"chunks":[],"z":1}',
            r"receipt: z: Extra inputs",
        ),
        ('{"v":2,"run":"r","epoch":0,"field":"x","start":0,"rows":0,"chunks":[]}', r"receipt: v: .*got '2'"),
        ("[", r"receipt: \(whole\): Invalid JSON"),
    ):
        with pytest.raises(MalformedMessage, match=message):
            Receipt.from_json(text)


def test_ids_of_every_layer_group() -> None:
    receipt = Receipt(run="r", epoch=0, field="x", start=0, rows=4, chunks=[stored(0, 4, groups=3)])
    assert chunk_ids([receipt]) == [FIRST, FIRST.sibling(1), FIRST.sibling(2)]


def put(start: int, rows: int, field: str = "x", epoch: int = 0) -> Receipt:
    chunks = [stored(start, rows)] if rows else []
    return Receipt(run="r", epoch=epoch, field=field, start=start, rows=rows, chunks=chunks)


def test_receipts_that_follow_one_another_are_one() -> None:
    one, two = joined([put(0, 4), put(0, 2, "y"), put(4, 0), put(4, 3), put(2, 1, "y")])
    assert (one.field, one.start, one.rows) == ("x", 0, 7)
    assert one.chunks == [stored(0, 4), stored(4, 3)]
    assert (two.field, two.rows, len(two.chunks)) == ("y", 3, 2)
    assert Receipt.from_json(one.to_json()) == one


def test_receipts_with_another_between_them_stay_apart() -> None:
    # What covers positions again comes after what it covers, and before what covers it.
    overlay = [put(0, 4), put(2, 4), put(4, 4)]
    assert joined(overlay) == overlay
    gap = [put(0, 4), put(5, 4)]
    assert joined(gap) == gap
    epochs = [put(0, 4), put(4, 4, epoch=1)]
    assert joined(epochs) == epochs


# -- manifests -------------------------------------------------------------------------------------


def small_manifest() -> Manifest:
    spans = to_spans([Span(0, FIRST, 0, 3), Span(9, FIRST, 4, 5)])
    owned = np.array([(FIRST.value >> 64, FIRST.value & (1 << 64) - 1)], OWNED_DTYPE)
    return Manifest("s~0", 14, {"x": spans, "y": empty_spans()}, ranges([(0, 3)]), ranges([]), owned)


def test_a_manifest_cut_anywhere_is_refused() -> None:
    raw = small_manifest().encode()
    for size in range(len(raw)):
        with pytest.raises(MalformedMessage):
            Manifest.decode(raw[:size])
    with pytest.raises(MalformedMessage, match=r"expected 96 and nothing after them"):
        Manifest.decode(raw + b"\0")


def test_a_manifest_of_another_version_is_refused() -> None:
    raw = small_manifest().encode()
    with pytest.raises(MalformedMessage, match=r"magic b'ATQM' version 2, expected b'ATQM' 1"):
        Manifest.decode(raw[:4] + b"\x02" + raw[5:])


def test_a_million_consecutive_chunks_are_small() -> None:
    spans = np.zeros(1_000_000, small_manifest().spans["x"].dtype)
    spans["start"] = np.arange(1_000_000) * 64
    spans["rows"] = 64
    spans["high"] = FIRST.value >> 64
    spans["low"] = (FIRST.value & (1 << 64) - 1) + np.arange(1_000_000, dtype=np.uint64)
    owned = np.zeros(1_000_000, OWNED_DTYPE)
    owned["high"], owned["low"] = spans["high"], spans["low"]
    raw = Manifest("s~0", 64_000_000, {"x": spans}, ranges([]), ranges([]), owned).encode()
    assert len(raw) < 200_000
    assert Manifest.decode(raw).spans["x"].tobytes() == spans.tobytes()


# -- handles ---------------------------------------------------------------------------------------


def some_handles() -> np.ndarray:
    return np.concatenate(
        [
            handles.expand(to_spans([Span(0, FIRST, 5, 3), Span(3, FIRST.sibling(9), 0, 2)])),
            handles.constant(handles.Kind.FILL, 2),
            handles.constant(handles.Kind.HOLE, 1),
            np.zeros((2, 6), np.int32),
        ]
    )


def test_handles_name_chunk_and_row() -> None:
    made = some_handles()
    assert made.dtype == np.int32
    ids = [ChunkId.from_bytes(row[:4].astype(">i4").tobytes()) for row in made[:5]]
    assert ids == [FIRST] * 3 + [FIRST.sibling(9)] * 2
    assert made[:5, 4].tolist() == [5, 6, 7, 0, 1]
    assert handles.kinds(made).tolist() == [1, 1, 1, 1, 1, 2, 2, 3, 0, 0]


def test_handles_survive_promotion_and_sums_with_padding() -> None:
    made = some_handles()
    assert handles.kinds(made.astype(np.int64)).tolist() == handles.kinds(made).tolist()
    summed = made.astype(np.int64) + np.zeros_like(made)
    assert (summed == made).all()
    assert handles.kinds(summed).tolist() == handles.kinds(made).tolist()


def test_a_sum_of_two_handles_is_refused() -> None:
    made = some_handles()[:8]
    for dtype in (np.int32, np.int64):
        summed = made.astype(dtype) + np.roll(made, 1, axis=0).astype(dtype)
        for row in summed:
            with pytest.raises(MalformedMessage, match=r"handle at row 0: its check does not fit"):
                handles.kinds(row[None])


def test_a_flipped_bit_is_refused() -> None:
    made = some_handles()[:1]
    for bit in range(192):
        flipped = made.copy()
        flipped[0, bit // 32] ^= np.uint32(1 << bit % 32).astype(np.int32)
        with pytest.raises(MalformedMessage, match=r"handle at row 0"):
            handles.kinds(flipped)


@pytest.mark.parametrize("shape", [(6,), (2, 5), (1, 2, 6)])
def test_handles_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(MalformedMessage, match=r"expected \[rows, 6\]"):
        handles.kinds(np.zeros(shape, np.int32))


def test_no_handles() -> None:
    assert handles.expand(empty_spans()).shape == (0, 6)
    assert handles.kinds(np.empty((0, 6), np.int32)).tolist() == []
