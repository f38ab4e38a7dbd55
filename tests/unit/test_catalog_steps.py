"""Sessions and steps: what is accepted, what is refused, and that nothing is left half done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given, strategies as st

from arrow_tq.store.catalog.columns import columns_text, kind_of, parse_columns, widen
from arrow_tq.store.catalog.receipt_blobs import decode_receipts, encode_receipts
from arrow_tq_schemas import errors
from arrow_tq_schemas.commands import AbortSession, Done, OpenSession, StepResult, TaskSpec
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.receipts import Receipt, StoredChunk, chunk_ids, joined
from arrow_tq_schemas.spans import Span, from_spans
from tests.catalog_scenes import Scene


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path / "catalog.sqlite")
    scene.run(tasks=[TaskSpec(name="actor"), TaskSpec(name="critic")])
    yield scene
    scene.catalog.close()


class TestSessions:
    def test_an_open_session_is_opened_again(self, scene: Scene) -> None:
        first = scene.session("s", group="g", tasks=["actor"], lr=1, name="x")
        assert (first.status, first.last_step, first.ends) == ("open", None, {})
        scene.commit(scene.step("s", "one", scene.receipt(rows=4), scene.receipt("routed_experts", 0, 3)))
        again = scene.session("s", lr=0.5, more=[1])
        assert (again.group, again.last_step) == ("g", "one")
        assert again.ends == {"token_ids": 4, "routed_experts": 3}
        (row,) = scene.rows("sessions")
        assert json.loads(str(row["columns"])) == {"lr": 0.5, "name": "x", "more": [1]}
        assert (row["tasks"], row["steps"], row["group_id"]) == (["actor"], 1, "g")
        assert scene.catalog.user_columns("sessions", "demo") == {
            "lr": "float",
            "more": "json",
            "name": "text",
        }
        assert scene.catalog.session_goes_on("demo", "s")
        assert not scene.catalog.session_goes_on("demo", "t")

    def test_a_finalized_session_is_no_new_one(self, scene: Scene) -> None:
        scene.session("s")
        scene.session("t")
        scene.finalize("s")
        assert scene.session("s").status == "finalized"
        scene.catalog.execute(AbortSession(run="demo", epoch=0, session_id="t"))
        # A full store takes no new session; what is left to do of this one needs no room.
        assert scene.catalog.session_goes_on("demo", "s")
        assert not scene.catalog.session_goes_on("demo", "t")

    def test_what_does_not_agree_is_a_conflict(self, scene: Scene) -> None:
        scene.session("s", group="g", tasks=["actor"])
        with pytest.raises(errors.Conflict, match="group 'g', not 'h'"):
            scene.session("s", group="h")
        with pytest.raises(errors.Conflict, match=r"tasks \[\"actor\"\]"):
            scene.session("s", tasks=["critic"])
        with pytest.raises(errors.InvalidInput, match="'nobody': the run declares actor, critic"):
            scene.session("t", tasks=["nobody"])

    def test_an_ended_session_stays_ended(self, scene: Scene) -> None:
        scene.session("s")
        abort = AbortSession(run="demo", epoch=0, session_id="s", reason="user left")
        assert scene.catalog.execute(abort).body == Done(count=1)
        assert scene.catalog.execute(AbortSession(run="demo", epoch=0, session_id="s")).body == Done(count=0)
        with pytest.raises(errors.SessionClosed, match=r"'s' is aborted \(user left\)"):
            scene.session("s")
        with pytest.raises(errors.SessionClosed, match="aborted"):
            scene.commit(scene.step("s", "one"))
        scene.session("t")
        scene.finalize("t")
        with pytest.raises(errors.SessionClosed, match="'t' is finalized"):
            scene.catalog.execute(AbortSession(run="demo", epoch=0, session_id="t"))

    @pytest.mark.parametrize("name", ["s~0", "s~t3", "", "a\x00b", "x" * 257])
    def test_ids_that_are_refused(self, scene: Scene, name: str) -> None:
        with pytest.raises(errors.InvalidInput, match="session id"):
            scene.session(name)
        assert scene.rows("sessions") == []

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('{"a\\ud800": 1}', "column name"),
            ('{"a": "x\\ud800"}', "column 'a': a lone surrogate at 1"),
            ('{"a": {"b": ["\\udfff"]}}', "column 'a': a lone surrogate"),
            ('{"reward": 1}', "'reward': the name is taken"),
            ('{"Status": 1}', "'Status': the name is taken"),
            ('{"a-b": 1}', "column name 'a-b'"),
            ('{"a": NaN}', "NaN is not JSON"),
            ('{"a": 1e999}', "column 'a': inf is not finite"),
            ("[1]", "got list"),
            ("{", "expected a JSON object"),
            ("[" * 100_000, "expected a JSON object"),
        ],
    )
    def test_columns_that_are_refused(self, scene: Scene, text: str, message: str) -> None:
        with pytest.raises(errors.InvalidInput, match=message):
            scene.catalog.execute(OpenSession(run="demo", epoch=0, session_id="s", columns=text))
        assert scene.rows("sessions") == []


class TestSteps:
    def test_a_step_and_its_chunks_are_stored(self, scene: Scene) -> None:
        scene.session("s")
        receipts = [scene.receipt("token_ids", 0, 4), scene.receipt("routed_experts", 0, 3)]
        step = scene.step("s", "one", *receipts, version="7", sampled=(1, 4), messages='[{"a": "\\ud800"}]')
        assert scene.commit(step) == StepResult(step_id="one", step_index=0)
        assert scene.commit(scene.step("s", "two", scene.receipt("token_ids", 4, 2))).step_index == 1
        first, second = scene.rows("steps")
        assert (first["version"], first["sampled_start"], first["sampled_end"]) == ("7", 1, 4)
        assert (first["num_tokens"], first["parent_id"], first["messages"]) == (4, None, step.messages)
        assert (second["parent_id"], second["num_tokens"], second["rewrite_at"]) == ("one", 6, None)
        assert set(chunk_ids(receipts)) < scene.pins.pinned
        rows = [row for row in scene.rows("chunks") if row["field"] == "routed_experts"]
        assert [(row["layer_group"], row["bytes"], row["rows"]) for row in rows] == [(0, 12, 3), (1, 12, 3)]
        assert [row["chunk_id"] for row in rows] == [one.hex for one in chunk_ids(receipts[1:])]
        assert len({row["key"] for row in scene.rows("chunks")}) == 4
        assert scene.states(chunk_ids(receipts)) == {"committed"}
        assert scene.catalog.chunk_states([ChunkId.make(0, 0, 0, 1)]) == [None]

    def test_a_retry_gets_the_same_index(self, scene: Scene) -> None:
        scene.session("s")
        receipt = scene.receipt()
        step = scene.step("s", "one", receipt, sampled=(0, 4))
        assert scene.commit(step).step_index == 0
        assert scene.commit(scene.step("s", "two")).step_index == 1
        pinned = set(scene.pins.pinned)
        assert scene.commit(step).step_index == 0
        assert len(scene.rows("steps")) == 2
        assert scene.pins.pinned == pinned

    def test_a_retry_is_answered_after_its_chunks_were_released(self, scene: Scene) -> None:
        scene.session("s")
        step = scene.step("s", "one", scene.receipt())
        scene.commit(step)
        scene.catalog.execute(AbortSession(run="demo", epoch=0, session_id="s"))
        scene.pins.headers.clear()
        assert scene.commit(step).step_index == 0

    def test_rows_stored_again_by_a_retry_stay_unattached(self, scene: Scene) -> None:
        scene.session("s")
        first, second = scene.receipt(), scene.receipt()
        scene.commit(scene.step("s", "one", first))
        assert scene.commit(scene.step("s", "one", second)).step_index == 0
        assert scene.pins.pinned == set(chunk_ids([first]))
        assert scene.catalog.chunk_states(chunk_ids([second])) == [None]
        assert scene.released == []

    def test_a_retry_may_put_the_same_rows_in_other_pieces(self, scene: Scene) -> None:
        scene.session("s")
        pieces = [scene.receipt(rows=2), scene.receipt(start=2, rows=2)]
        scene.commit(scene.step("s", "one", *pieces))
        assert scene.commit(scene.step("s", "one", *joined(pieces))).step_index == 0
        assert scene.commit(scene.step("s", "one", scene.receipt(rows=4))).step_index == 0
        assert scene.pins.pinned == set(chunk_ids(pieces))

    def test_the_same_null_rows_elsewhere_are_a_conflict(self, scene: Scene) -> None:
        def holes(first: bool) -> Receipt:
            """Eight rows in two chunks, one of which ends in null rows."""
            (whole,) = joined([scene.receipt(), scene.receipt(start=4)])
            chunks = [
                chunk.model_copy(update={"valid": [(0, 2)] if first == (index == 0) else None})
                for index, chunk in enumerate(whole.chunks)
            ]
            return whole.model_copy(update={"chunks": chunks})

        scene.session("s")
        scene.commit(scene.step("s", "one", holes(first=True)))
        with pytest.raises(errors.Conflict, match="other rows"):
            scene.commit(scene.step("s", "one", holes(first=False)))

    def test_another_step_of_the_same_id_is_a_conflict(self, scene: Scene) -> None:
        scene.session("s")
        first, longer = scene.receipt(rows=4), scene.receipt(rows=5)
        scene.commit(scene.step("s", "one", first))
        with pytest.raises(errors.Conflict, match=r"other rows: token_ids \[0, 4\); now token_ids \[0, 5\)"):
            scene.commit(scene.step("s", "one", longer))
        with pytest.raises(errors.Conflict, match="another version"):
            scene.commit(scene.step("s", "one", scene.receipt(), version="9"))
        assert scene.pins.pinned == set(chunk_ids([first]))

    def test_parents(self, scene: Scene) -> None:
        scene.session("s")
        with pytest.raises(errors.NotFound, match="no step 'zero'"):
            scene.commit(scene.step("s", "one", parent="zero"))
        scene.commit(scene.step("s", "one"))
        scene.commit(scene.step("s", "two", parent="one"))
        scene.commit(scene.step("s", "three", parent="one"))
        scene.commit(scene.step("s", "four"))
        scene.commit(scene.step("s", "five", parent=""))
        parents = {row["step_id"]: row["parent_id"] for row in scene.rows("steps")}
        assert parents == {"one": None, "two": "one", "three": "one", "four": "three", "five": None}
        assert scene.session("s").last_step == "five"

    def test_fields_of_every_token_end_together(self, scene: Scene) -> None:
        from arrow_tq_schemas.fields import Field

        fields = [Field("token_ids", "int32"), Field("logprobs", "float32")]
        scene.run("demo2", fields=fields)
        opening = OpenSession(run="demo2", epoch=0, session_id="s")
        scene.catalog.execute(opening)
        receipts = [
            scene.receipt("token_ids", 0, 7, run="demo2"),
            scene.receipt("logprobs", 0, 5, run="demo2"),
        ]
        step = scene.step("s", "one", *receipts).model_copy(update={"run": "demo2"})
        with pytest.raises(errors.RowCountMismatch, match="'token_ids' ends at 7, field 'logprobs' at 5"):
            scene.commit(step)
        empty = Receipt(run="demo2", epoch=0, field="logprobs", start=0, rows=0, chunks=[])
        scene.commit(step.model_copy(update={"receipts": [receipts[0], empty]}))

    def test_receipts_must_be_what_is_stored(self, scene: Scene) -> None:
        scene.session("s")
        right = scene.receipt("token_ids", 0, 4)
        (chunk,) = right.chunks

        def changed(field: str = "token_ids", start: int = 0, rows: int = 4, **more: object) -> Receipt:
            other = chunk.model_copy(update={"start": start, "rows": rows, **more})
            return Receipt(run="demo", epoch=0, field=field, start=start, rows=rows, chunks=[other])

        cases = [
            (changed(rows=5), errors.RowCountMismatch, "has 4 rows, its receipt 5"),
            (changed(start=1), errors.InvalidInput, "has run, epoch, field and start"),
            (changed(field="logprobs"), errors.InvalidInput, "has run, epoch, field and start"),
            (changed(field="nothing"), errors.NotFound, "no field 'nothing'"),
            (changed(groups=2), errors.InvalidInput, "2 layer groups, expected group 0 and the 1"),
            (changed(id=ChunkId.make(1, 0, 0, 1).hex), errors.ChunkLost, "no chunk"),
            (changed(id="0" * 32), errors.MalformedMessage, "UUIDv8"),
            (right.model_copy(update={"run": "other"}), errors.InvalidInput, "receipt of run 'other'"),
        ]
        for receipt, kind, message in cases:
            with pytest.raises(kind, match=message):
                scene.commit(scene.step("s", "one", receipt))
        assert (scene.rows("steps"), scene.pins.pinned) == ([], set())
        scene.commit(scene.step("s", "one", changed(rows=3)))
        assert [row["rows"] for row in scene.rows("chunks")] == [3], "a receipt may trim its chunk"

    def test_a_missing_layer_group_is_lost(self, scene: Scene) -> None:
        scene.session("s")
        receipt = scene.receipt("routed_experts", 0, 3)
        sibling = receipt.chunks[0].chunk_id.sibling(1)
        del scene.pins.headers[sibling]
        with pytest.raises(errors.ChunkLost, match=sibling.hex):
            scene.commit(scene.step("s", "one", receipt))

    def test_a_chunk_belongs_to_one_step(self, scene: Scene) -> None:
        scene.session("s")
        scene.session("t")
        receipt, fresh = scene.receipt("token_ids", 0, 4), scene.receipt("routed_experts", 0, 3)
        scene.commit(scene.step("s", "one", receipt))
        with pytest.raises(errors.Conflict, match="attached already, to a step of session 's'"):
            scene.commit(scene.step("t", "one", fresh, receipt))
        assert scene.pins.pinned == set(chunk_ids([receipt])), "only what the failed step pinned is unpinned"
        assert len(scene.rows("steps")) == 1
        assert len(scene.rows("chunks")) == 1
        scene.commit(scene.step("t", "one", fresh))

    @pytest.mark.parametrize("sampled", [(-1, 2), (3, 2), (0, 1 << 60)])
    def test_sampled_ranges_that_are_refused(self, scene: Scene, sampled: tuple[int, int]) -> None:
        scene.session("s")
        with pytest.raises(errors.InvalidInput, match="sampled"):
            scene.commit(scene.step("s", "one").model_copy(update={"sampled": sampled}))

    @pytest.mark.parametrize("messages", ["{}", "[", "x", '["\u00e9"]', "[" * 100_000])
    def test_messages_that_are_refused(self, scene: Scene, messages: str) -> None:
        scene.session("s")
        with pytest.raises(errors.InvalidInput, match="messages"):
            scene.commit(scene.step("s", "one", messages=messages))

    def test_one_bad_step_of_many_fails_alone(self, scene: Scene) -> None:
        for name in ("a", "b", "c"):
            scene.session(name)
        shared = scene.receipt()
        steps = [
            scene.step("a", "one", shared),
            scene.step("b", "one", scene.receipt("routed_experts", 0, 3), shared),
            scene.step("nobody", "one"),
            scene.step("c", "\ud800"),
            scene.step("c", "one", scene.receipt()),
        ]
        results = scene.catalog.commit_steps(steps, {})
        codes = [None if result.error is None else result.error["code"] for result in results]
        assert codes == [None, "conflict", "not-found", "invalid-input", None]
        assert [row["session_id"] for row in scene.rows("steps")] == ["a", "c"]
        assert len(scene.rows("chunks")) == len(scene.pins.pinned) == 2
        assert len({row["rev"] for row in scene.rows("steps")}) == 1, "one transaction"

    def test_threads_share_transactions(self, scene: Scene) -> None:
        names = [f"s-{index}" for index in range(16)]
        for name in names:
            scene.session(name)
        work = {
            name: [scene.step(name, str(index), scene.receipt(start=4 * index)) for index in range(20)]
            for name in names
        }

        def write(name: str) -> None:
            for step in work[name]:
                scene.commit(step)

        before = scene.catalog.revision()
        threads = [Thread(target=write, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rows = scene.rows("steps")
        assert len(rows) == 16 * 20
        for name in names:
            mine = [row for row in rows if row["session_id"] == name]
            assert [(row["step_id"], row["step_index"]) for row in mine] == [(str(n), n) for n in range(20)]
        assert scene.catalog.revision() - before < 16 * 20
        assert scene.catalog.gauges().commits == 16 * 20

    def test_token_spans_follow_rewrites(self, scene: Scene) -> None:
        scene.session("s")
        first, second, third = (
            scene.receipt("token_ids", 0, 10),
            scene.receipt("token_ids", 6, 2),
            scene.receipt("token_ids", 4, 3),
        )
        one, two, three = (receipt.chunks[0].chunk_id for receipt in (first, second, third))

        def shown(**place: object) -> tuple[list[Span], int, int]:
            path, steps = scene.catalog.token_path(scene.step("s", "next", **place))
            return from_spans(path.spans), path.end, steps

        assert shown() == ([], 0, 0)
        scene.commit(scene.step("s", "one", first))
        scene.commit(scene.step("s", "two", second))
        assert shown() == ([Span(0, one, 0, 6), Span(6, two, 0, 2), Span(8, one, 8, 2)], 10, 2)
        scene.commit(scene.step("s", "three", third), rewrite_at=5)
        wanted = [Span(0, one, 0, 4), Span(4, three, 0, 3)], 7, 3
        assert shown() == wanted
        scene.reopen()
        assert shown() == wanted
        # A step elsewhere in the tree sees its own path.
        assert shown(parent="one") == ([Span(0, one, 0, 10)], 10, 3)
        assert shown(parent="") == ([], 0, 3)
        assert shown(retry_of="three")[:2] == shown(parent="two")[:2]
        with pytest.raises(errors.NotFound, match="no session 'x'"):
            scene.catalog.token_path(scene.step("x", "next"))
        with pytest.raises(errors.NotFound, match="no step 'four'"):
            shown(parent="four")


ROWS = st.integers(1, 50)


@st.composite
def receipts(draw: st.DrawFn) -> Receipt:
    start = draw(st.integers(0, 1 << 40))
    chunks = []
    position = start
    for number in range(draw(st.integers(0, 3))):
        rows = draw(ROWS)
        valid = None
        if draw(st.booleans()):
            edges = sorted(draw(st.sets(st.integers(0, rows), max_size=6)))
            valid = [(edges[at], edges[at + 1]) for at in range(0, len(edges) - 1, 2)]
        chunk_id = ChunkId.make(draw(st.integers(0, 1 << 40)), 3, 0, number)
        size, groups = draw(st.integers(0, 1 << 40)), draw(st.integers(1, 256))
        chunks.append(
            StoredChunk(id=chunk_id.hex, start=position, rows=rows, bytes=size, groups=groups, valid=valid)
        )
        position += rows
    field = draw(st.sampled_from(["token_ids", "x" * 64]))
    return Receipt(run="r", epoch=3, field=field, start=start, rows=position - start, chunks=chunks)


@given(st.lists(receipts(), max_size=4))
def test_receipts_come_back_from_their_bytes(values: list[Receipt]) -> None:
    assert decode_receipts(encode_receipts(values), "r", 3) == values


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.from_regex(r"[a-z]{1,3}x", fullmatch=True), JSON, max_size=5))
def test_columns_come_back_from_their_text(columns: dict[str, object]) -> None:
    assert parse_columns(json.dumps(columns)) == columns
    assert parse_columns(columns_text(columns)) == columns


@given(st.lists(JSON, min_size=1, max_size=6))
def test_kinds_widen_the_same_in_any_order(values: list[object]) -> None:
    kinds = [kind_of(value) for value in values]

    def fold(order: list[str]) -> str:
        known = "null"
        for kind in order:
            known = widen(known, kind)
        return known

    assert fold(kinds) == fold(kinds[::-1]) == fold(sorted(kinds))
