"""Blobs: files that agents saw, stored once and kept as long as any step that refers to them."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from arrow_tq import BlobRef, Field, Task, errors, fields
from arrow_tq.interface import Store
from arrow_tq.producer.session import Session
from arrow_tq.runs import Run
from arrow_tq.testing.scenes import chunks_stored, open_run, wait_until

PNG = b"\x89PNG\r\n" + bytes(range(256)) * 40


def see(session: Session, step_id: str, *contents: bytes, start: int = 0, **more: object) -> list[BlobRef]:
    """A step of one token that attaches these files."""
    with session.step(id=step_id, sampled=(start, start + 1), **more) as step:  # type: ignore[arg-type]
        step.put("token_ids", [start], start=start)
        step.put("logprobs", [-1.0], start=start)
        return [step.attach_blob(content, "image/png") for content in contents]


def stored_blobs(run: Run) -> dict[str, int]:
    """References by id, of blobs that are stored."""
    rows = run.sql("SELECT blob_id, refs FROM blobs WHERE state = 'stored'").to_pylist()
    return {row["blob_id"]: row["refs"] for row in rows}


class BlobConformance:
    """Blobs."""

    def test_the_same_bytes_are_stored_once(self, store: Store) -> None:
        run = open_run(store)
        refs = [see(run.session(f"s-{n}"), "a", PNG, PNG, b"%d" % n) for n in range(3)]
        (first, again, _), *_ = refs
        assert first == again == refs[2][0]
        assert (first.media_type, first.bytes) == ("image/png", len(PNG))
        for content, ref in ((PNG, first), (b"0", refs[0][2]), (b"2", refs[2][2])):
            assert run.blob(ref) == run.blob(ref.blob_id) == run.blob(ref.to_json()) == content
        (row,) = run.sql(f"SELECT * FROM blobs WHERE blob_id = '{first.blob_id}'").to_pylist()
        assert (row["media_type"], row["bytes"], row["refs"], row["state"]) == (
            *("image/png", len(PNG), 6, "stored"),
        )
        rows = run.sql("SELECT * FROM step_blobs ORDER BY session_id, place").to_pylist()
        assert [(row["session_id"], row["step_id"], row["place"]) for row in rows] == [
            (f"s-{n}", "a", place) for n in range(3) for place in range(3)
        ]
        assert [row["blob_id"] for row in rows] == [ref.blob_id for some in refs for ref in some]
        (size,) = run.sql("SELECT sum(bytes) FROM chunks WHERE field = '_blobs'").column(0).to_pylist()
        assert size == len(PNG) + 3
        # Two fields a step, and a chunk a file.
        assert chunks_stored(store) == 3 * 2 + 4

    def test_the_last_reference_takes_the_bytes_along(self, store: Store) -> None:
        run = open_run(store, tasks=(Task("actor"), Task("critic", fields=["token_ids"])))
        sessions = [run.session(f"s-{n}", ttl_s=60) for n in range(4)]
        (ref,) = {see(session, "a", PNG)[0] for session in sessions}
        sessions[0].abort()
        assert stored_blobs(run) == {ref.blob_id: 3}
        run.discard(["s-1"], reason="over-sampled")
        sessions[2].finalize()
        sessions[3].finalize()
        assert stored_blobs(run) == {ref.blob_id: 2}
        run.claim(1, task="actor").release()
        run.claim(2, task="critic").release()
        # One session is trained by both tasks; the other one waits for the actor.
        assert stored_blobs(run) == {ref.blob_id: 1}
        assert run.blob(ref) == PNG
        run.claim(1, task="actor").release()
        assert stored_blobs(run) == {}
        with pytest.raises(errors.ChunkReleased, match="last step"):
            run.blob(ref)
        wait_until(lambda: chunks_stored(store) == 0)
        assert run.sql("SELECT DISTINCT state FROM step_blobs").column(0).to_pylist() == ["released"]
        # The same content begins anew.
        assert see(run.session("s-9"), "a", PNG) == [ref]
        assert stored_blobs(run) == {ref.blob_id: 1}
        assert run.blob(ref) == PNG

    def test_a_step_that_fails_frees_what_nobody_else_has(self, store: Store) -> None:
        run = open_run(store)
        see(run.session("s"), "a", PNG)
        with pytest.raises(ZeroDivisionError), run.session("s").step(id="b") as step:
            step.put("token_ids", [1], start=1)
            shared, own = step.attach_blob(PNG, "image/png"), step.attach_blob(b"own", "text/plain")
            raise ZeroDivisionError
        assert stored_blobs(run) == {shared.blob_id: 1}
        wait_until(lambda: chunks_stored(store) == 3)
        with pytest.raises(errors.NotFound, match=own.blob_id):
            run.blob(own)
        # Refused when it commits, as ``all`` fields end apart.
        wide = store.run("wide", fields=[fields.token_ids(), Field("weights", "float32")])
        with pytest.raises(errors.RowCountMismatch), wide.session("s").step() as step:
            step.put("token_ids", [1, 2], start=0)
            step.put("weights", [1.0], start=0)
            step.attach_blob(b"own", "text/plain")
        assert stored_blobs(wide) == {}
        wait_until(lambda: chunks_stored(store) == 3)

    def test_a_retried_step_refers_once(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        (ref,) = see(session, "a", PNG)
        assert see(session, "a", PNG) == [ref]
        assert stored_blobs(run) == {ref.blob_id: 1}
        for others in ((), (PNG, PNG), (b"other",)):
            with pytest.raises(errors.Conflict, match="other blobs"):
                see(session, "a", *others)
        assert stored_blobs(run) == {ref.blob_id: 1}
        wait_until(lambda: run.sql("SELECT count(*) FROM chunks").column(0).to_pylist() == [3])
        session.abort()
        wait_until(lambda: chunks_stored(store) <= 2)

    def test_what_is_large_travels_in_pieces_and_has_a_bound(self, store: Store) -> None:
        run = open_run(store)
        run.chunk_bytes = 1000
        with run.session("s").step() as step:
            step.put("token_ids", [1], start=0)
            ref = step.attach_blob(memoryview(bytearray(PNG)), "image/png")  # type: ignore[arg-type]
            empty = step.attach_blob(b"", "application/x-empty; charset=none")
        assert (run.blob(ref), run.blob(empty)) == (PNG, b"")
        pieces = run.sql("SELECT start, rows FROM chunks WHERE field = '_blobs' ORDER BY start").to_pylist()
        assert len(pieces) == -(-len(PNG) // 1000)
        assert sum(piece["rows"] for piece in pieces) == len(PNG)
        before = chunks_stored(store)
        with run.session("s").step(id="large") as step:
            step.put("token_ids", [2], start=1)
            with pytest.raises(errors.InvalidInput, match="blob_bytes_max"):
                step.attach_blob(bytes((64 << 20) + 1), "video/mp4")
            for wrong in ("", "png", "image/", "image/png\n", "image/" + "x" * 300, None):
                with pytest.raises(errors.InvalidInput, match="media type"):
                    step.attach_blob(PNG, wrong)  # type: ignore[arg-type]
            with pytest.raises(errors.InvalidInput, match="expected bytes"):
                step.attach_blob("text", "text/plain")  # type: ignore[arg-type]
        assert chunks_stored(store) == before + 1
        run.session("s").abort()
        wait_until(lambda: chunks_stored(store) == 0)

    def test_writers_of_the_same_content_agree(self, store: Store) -> None:
        run = open_run(store)
        barrier = threading.Barrier(8)

        def work(number: int) -> BlobRef:
            session = run.session(f"s-{number}")
            barrier.wait()
            refs = [see(session, f"{turn}", PNG, start=turn)[0] for turn in range(4)]
            return refs[-1]

        with ThreadPoolExecutor(8) as pool:
            refs = set(pool.map(work, range(8)))
        (ref,) = refs
        assert stored_blobs(run) == {ref.blob_id: 32}
        assert run.blob(ref) == PNG
        wait_until(lambda: chunks_stored(store) == 32 * 2 + 1)
        for number in range(8):
            assert run.blob(ref) == PNG
            run.session(f"s-{number}").abort()
        wait_until(lambda: chunks_stored(store) == 0)

    def test_what_was_there_may_go_before_the_commit(self, store: Store) -> None:
        run = open_run(store)
        first = run.session("first")
        see(first, "a", PNG)
        with run.session("second").step(id="b") as step:
            step.put("token_ids", [1], start=0)
            ref = step.attach_blob(PNG, "image/png")
            first.abort()
            with pytest.raises(errors.ChunkReleased):
                run.blob(ref)
        assert run.blob(ref) == PNG
        assert stored_blobs(run) == {ref.blob_id: 1}

    def test_branches_hold_what_is_on_their_path(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        (root,) = see(session, "root", b"root")
        (left,) = see(session, "left", b"left", start=1)
        (right,) = see(session, "right", b"right", start=1, parent="root")
        (dropped,) = see(session, "dropped", b"dropped", start=1, parent="root")
        session.abandon("dropped")
        (again,) = see(session, "right-2", b"again", start=1, retry_of="right")
        assert stored_blobs(run) == {root.blob_id: 1, left.blob_id: 1, again.blob_id: 1}
        for gone in (right, dropped):
            with pytest.raises(errors.ChunkReleased):
                run.blob(gone)
        session.finalize()
        session.finalize("timeline")
        run.claim(1, unit="segment").release()
        assert stored_blobs(run) == {root.blob_id: 1, left.blob_id: 1, again.blob_id: 1}
        run.claim(1, unit="segment").release()
        # Trained in one view, and done with the other, which nobody claimed.
        assert stored_blobs(run) == {}
        wait_until(lambda: chunks_stored(store) == 0)

    def test_a_released_branch_lets_its_own_go(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        (root,) = see(session, "root", b"root")
        see(session, "left", b"left", start=1)
        (right,) = see(session, "right", b"right", start=1, parent="root")
        first, _ = session.finalize()
        batch = run.claim(1, unit="segment")
        assert batch.segment_ids == [first.segment_id]
        batch.release()
        assert stored_blobs(run) == {root.blob_id: 1, right.blob_id: 1}
        run.discard(where="status = 'ready'", reason="enough")
        assert stored_blobs(run) == {}

    def test_the_awaitable_twins(self, store: Store) -> None:
        run = open_run(store)

        async def work() -> bytes:
            session = await run.asession("s")
            async with session.step() as step:
                await step.put("token_ids", [1], start=0)
                ref = await step.attach_blob(PNG, "image/png")
            return await run.ablob(ref)

        assert asyncio.run(work()) == PNG

    def test_blobs_belong_to_their_run(self, store: Store) -> None:
        run, other = open_run(store), open_run(store, "other")
        (ref,) = see(run.session("s"), "a", PNG)
        with pytest.raises(errors.NotFound, match="no blob"):
            other.blob(ref.blob_id)
        with pytest.raises(errors.InvalidInput, match="of run 'demo'"):
            other.blob(ref)
        with pytest.raises(errors.InvalidInput, match="blob"):
            run.blob("1234")
        (theirs,) = see(other.session("s"), "a", PNG)
        assert theirs.blob_id == ref.blob_id
        run.session("s").abort()
        assert other.blob(theirs) == PNG
        with pytest.raises(errors.InvalidField, match="kept for blobs"):
            store.run("third", fields=[fields.token_ids(), Field("_blobs", "uint8")])
