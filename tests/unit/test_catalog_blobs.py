"""Blobs in the catalog: what is believed of a step's references, and what comes back after a loss."""

from __future__ import annotations

import pytest

from arrow_tq_schemas import errors
from arrow_tq_schemas.blobs import StepBlob, blob_id
from arrow_tq_schemas.commands import AbortSession, BlobInfo, FindBlob
from arrow_tq_schemas.ids import ChunkId
from tests.catalog_scenes import Scene


def find(scene: Scene, content: bytes) -> BlobInfo:
    body = scene.catalog.execute(FindBlob(run="demo", blob_id=blob_id(content))).body
    assert isinstance(body, BlobInfo)
    return body


def ids(blob: StepBlob) -> list[ChunkId]:
    assert blob.receipt is not None
    return [chunk.chunk_id for chunk in blob.receipt.chunks]


def attach(scene: Scene, session: str, step: str, *blobs: StepBlob) -> None:
    scene.session(session)
    scene.commit(scene.step(session, step, blobs=list(blobs)))


class TestBlobs:
    def test_content_that_is_not_what_its_id_says_is_refused(self, scene: Scene) -> None:
        blob = scene.blob(b"one")
        scene.pins.contents[ids(blob)[0]] = b"two"
        with pytest.raises(errors.MalformedMessage, match="SHA-256"):
            attach(scene, "s", "a", blob)
        assert (find(scene, b"one").state, scene.pins.pinned) == ("unknown", set())

    def test_a_receipt_must_be_of_the_whole_blob(self, scene: Scene) -> None:
        blob, other = scene.blob(b"one"), scene.blob(b"longer")
        for wrong, match in (
            (blob.model_copy(update={"bytes": 2}), "expected all of its 2 bytes"),
            (blob.model_copy(update={"receipt": scene.receipt("token_ids", 0, 3)}), "expected all"),
            (blob.model_copy(update={"receipt": other.receipt}), "expected all"),
            (blob.model_copy(update={"media_type": "x"}), "media type"),
        ):
            with pytest.raises(errors.InvalidInput, match=match):
                attach(scene, "s", "a", wrong)
        del scene.pins.headers[ids(blob)[0]]
        with pytest.raises(errors.ChunkLost, match=ids(blob)[0].hex):
            attach(scene, "s", "a", blob)
        with pytest.raises(errors.StaleEpoch):
            receipt = other.receipt.model_copy(update={"epoch": 0})  # type: ignore[union-attr]
            scene.run(epoch=1)
            scene.session("t", epoch=1)
            late = other.model_copy(update={"receipt": receipt})
            scene.commit(scene.step("t", "a", epoch=1, blobs=[late]))
        assert scene.pins.pinned == set()
        assert scene.rows("blobs") == scene.rows("step_blobs") == []

    def test_what_a_receipt_names_must_be_a_blobs_chunk(self, scene: Scene) -> None:
        tokens, blob = scene.receipt("token_ids", 0, 3), scene.blob(b"one")
        assert blob.receipt is not None
        chunks = [chunk.model_copy(update={"bytes": 3}) for chunk in tokens.chunks]
        stolen = blob.model_copy(update={"receipt": blob.receipt.model_copy(update={"chunks": chunks})})
        with pytest.raises(errors.InvalidInput, match="not of this blob"):
            attach(scene, "s", "a", stolen)

    def test_a_blob_that_nobody_has_is_told_by_name(self, scene: Scene) -> None:
        missing = [scene.blob(b"one", brought=False), scene.blob(b"two", brought=False)]
        with pytest.raises(errors.ChunkReleased) as caught:
            attach(scene, "s", "a", scene.blob(b"three"), *missing, scene.blob(b"two"))
        assert caught.value.details["blobs"] == [blob_id(b"one")]
        assert scene.pins.pinned == set()
        attach(scene, "s", "a", *missing, scene.blob(b"two"), scene.blob(b"one"))
        assert [row["refs"] for row in scene.rows("blobs")] == [2, 2]

    def test_duplicates_are_freed_at_once(self, scene: Scene) -> None:
        first, second = scene.blob(b"one"), scene.blob(b"one")
        attach(scene, "s", "a", first)
        attach(scene, "t", "a", second)
        assert scene.released == ids(second)
        assert scene.pins.pinned == set(ids(first))
        third = scene.blob(b"one")
        attach(scene, "t", "a", third)
        assert scene.released == [*ids(second), *ids(third)]
        attach(scene, "s", "a", first)
        assert scene.released == [*ids(second), *ids(third)], "a retry names what is attached"

    def test_what_was_lost_comes_back_with_whoever_brings_it(self, scene: Scene) -> None:
        first = scene.blob(b"one")
        attach(scene, "s", "a", first)
        del scene.pins.headers[ids(first)[0]]
        assert (find(scene, b"one").state, find(scene, b"one").chunks) == ("lost", [])
        with pytest.raises(errors.ChunkReleased):
            attach(scene, "t", "a", scene.blob(b"one", brought=False))
        second = scene.blob(b"one")
        attach(scene, "t", "a", second)
        assert [chunk.chunk_id for chunk in find(scene, b"one").chunks] == ids(second)
        assert [row["refs"] for row in scene.rows("blobs")] == [2]
        assert scene.states(ids(first)) == {"released"}

    def test_bounds(self, scene: Scene) -> None:
        scene.reopen(blob_bytes_max=4)
        with pytest.raises(errors.InvalidInput, match="blob_bytes_max is 4"):
            scene.catalog.execute(FindBlob(run="demo", blob_id=blob_id(b"large"), bytes=5))
        with pytest.raises(errors.InvalidInput, match="blob_bytes_max is 4"):
            attach(scene, "s", "a", scene.blob(b"large"))
        many = [scene.blob(b"", brought=False)] * 5000
        with pytest.raises(errors.InvalidInput, match="4096 at most"):
            attach(scene, "s", "a", *many)

    def test_a_retry_is_answered_after_all_was_released(self, scene: Scene) -> None:
        blob = scene.blob(b"one")
        attach(scene, "s", "a", blob)
        scene.catalog.execute(AbortSession(run="demo", epoch=0, session_id="s"))
        assert scene.released == ids(blob)
        for one in ids(blob):
            del scene.pins.headers[one]
        assert scene.commit(scene.step("s", "a", blobs=[blob])).step_index == 0
        assert find(scene, b"one").state == "released"
        with pytest.raises(errors.Conflict, match="other blobs"):
            scene.commit(scene.step("s", "a", blobs=[]))

    def test_expired_sessions_let_go(self, scene: Scene) -> None:
        scene.session("s", tasks=[], ttl_s=0.0)
        scene.session("t", tasks=[], ttl_s=60.0)
        scene.commit(scene.step("s", "a", blobs=[scene.blob(b"one")]))
        scene.commit(scene.step("t", "a", blobs=[scene.blob(b"one", brought=False), scene.blob(b"two")]))
        scene.finalize("t")
        scene.catalog.maintain()
        assert {row["refs"] for row in scene.rows("blobs")} == {1}
        assert {row["state"] for row in scene.rows("step_blobs") if row["session_id"] == "s"} == {"released"}
