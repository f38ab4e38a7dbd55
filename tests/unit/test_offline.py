"""Export and import: the same batch in another store, bit by bit, and files that are refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import arrow_tq
from arrow_tq import Field, Task, errors, fields
from arrow_tq.cli.main import app
from arrow_tq.interface import Store
from arrow_tq.offline import Selection, export_segments, import_export, is_export
from arrow_tq.offline.layout import MANIFEST, SEGMENTS, STEPS, payload_name
from arrow_tq.runs import Run

LAYERS = (1, 2, 4, 7)
DECLARED = [
    fields.token_ids(),
    fields.logprobs(),
    fields.routed_experts(topk=2, num_experts=300, layer_ids=LAYERS, layer_groups=[LAYERS[:1], LAYERS[1:]]),
    Field("hidden", "bfloat16", shape=(3,)),
    Field("chosen", "int16", shape=(2,), pad=-1),
    Field("flag", "bool", domain="sampled"),
]
NAMES = [field.name for field in DECLARED]
TASKS = [Task("actor"), Task("critic", fields=["token_ids", "hidden"])]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with arrow_tq.open(tmp_path / "one", capacity_bytes=1 << 30) as store:
        yield store


def write(run: Run, name: str, seed: int, rewrite: bool = False) -> None:
    """A session of three steps; the third goes on, or writes history anew."""
    random = np.random.default_rng(seed)
    session = run.session(name, group=f"g{seed % 2}", temperature=0.5, note={"a": [seed]})
    start = 0
    for index in range(3):
        count = 5 + index
        start = 0 if rewrite and index == 2 else start
        end = start + count
        messages = [{"role": "user", "content": f"{name} \ud800 {index}"}]
        with session.step(
            id=f"{index}", messages=messages, version=str(index), sampled=(start + 2, end), tools=["sh"]
        ) as step:
            step.put("token_ids", random.integers(0, 9999, count), start=start)
            step.put("logprobs", random.random(count - 2, np.float32), start=start + 2)
            step.put("routed_experts", random.integers(0, 300, (count, 4, 2)), start=start)
            bits = random.integers(0, 1 << 16, (count, 3)).astype(np.uint16)
            step.put("hidden", bits, start=start)
            rows = random.integers(-1, 99, (count, 2)).astype(np.int16).tolist()
            rows[1] = None
            step.put("chosen", pa.array(rows, pa.list_(pa.int16(), 2)), start=start)
            step.attach_blob(b"shared", "text/plain")
            step.attach_blob(name.encode() * (index + 1), "image/png")
            step.put("flag", random.integers(0, 2, count - 2).astype(bool), start=start + 2)
        start = end
    session.finalize(reward=float(seed), solved=True)
    session.finalize("timeline", reward=-1.0)


def fill(store: Store) -> Run:
    run = store.run("demo", fields=DECLARED, tasks=TASKS)
    for version in ("9", "0"):
        run.set_policy_version(version)
    for seed in range(4):
        write(run, f"s{seed}", seed, rewrite=seed == 2)
    run.update("s1", reward=7.5, judge="late", detail={"x": 1})
    return run


def assert_same(one: Run, two: Run) -> None:
    """The next batch of both is the same: table, order, payload, messages."""
    left, right = (run.claim(9, task="actor", order_by="reward DESC") for run in (one, two))
    assert left.segment_ids == right.segment_ids
    drop = ["run", "created_at", "updated_at"]
    assert left.table.drop_columns(drop).to_pylist() == right.table.drop_columns(drop).to_pylist()
    mine, theirs = left.fetch(NAMES), right.fetch(NAMES)
    for name in NAMES:
        assert mine[name].packed.dtype == theirs[name].packed.dtype
        assert mine[name].packed.tobytes() == theirs[name].packed.tobytes(), name
    shown = (
        "SELECT session_id, step_id, parent_id, messages, version, sampled_start, tools_hash, cut FROM steps"
    )
    order = " ORDER BY session_id, step_index"
    assert one.sql(shown + order).to_pylist() == two.sql(shown + order).to_pylist()
    names = "SELECT session_id, step_id, place, blob_id, media_type, state FROM step_blobs ORDER BY ALL"
    assert one.sql(names).to_pylist() == two.sql(names).to_pylist()
    for name in two.sql("SELECT blob_id FROM blobs")["blob_id"].to_pylist():
        assert one.blob(name) == two.blob(name)
    spans = "SELECT segment_id, field, start, rows FROM spans ORDER BY ALL"
    assert one.sql(spans).to_pylist() == two.sql(spans).to_pylist()


def test_a_claimed_batch_is_the_same_in_another_store(store: Store, tmp_path: Path) -> None:
    run = fill(store)
    batch = run.claim(20, task="critic")
    manifest = export_segments(run, Selection(batch.segment_ids, task="critic"), tmp_path / "out")
    assert (manifest.sessions, manifest.steps, manifest.segments) == (4, 12, 5)
    assert is_export(tmp_path / "out")
    assert is_export(tmp_path / "out" / MANIFEST)
    with arrow_tq.open(tmp_path / "two", capacity_bytes=1 << 30) as other:
        summary = import_export(other, tmp_path / "out", "again")
        assert (summary.sessions, summary.steps, summary.existing) == (4, 12, 0)
        there = other.run("again")
        assert there.tasks == run.tasks
        assert_same(run, there)
        assert there.claim(20, task="critic").segment_ids == batch.segment_ids
        twice = import_export(other, tmp_path / "out" / MANIFEST, "again")
        assert (twice.sessions, twice.existing) == (0, 4)
        timeline = there.claim(20, task="actor", view="timeline").table.column("reward").to_pylist()
        assert set(timeline) == {-1.0}
        assert there.sql("SELECT policy_version AS v FROM runs")["v"].to_pylist() == ["0"]


def test_arrow_alone_reads_it(store: Store, tmp_path: Path) -> None:
    run = fill(store)
    export_segments(run, Selection(["s0"]), tmp_path / "out")
    with pa.ipc.open_stream(tmp_path.joinpath("out", payload_name("token_ids", 0)).read_bytes()) as reader:
        tokens = reader.read_all()
    (wanted,) = run.table("s0", fields=["token_ids"]).column("token_ids").to_pylist()
    assert tokens.column("token_ids").to_pylist() == wanted
    with pa.ipc.open_stream(
        tmp_path.joinpath("out", payload_name("routed_experts", 1)).read_bytes()
    ) as reader:
        assert reader.schema.field(0).type.shape == [3, 2]
    with pa.ipc.open_stream(tmp_path.joinpath("out", payload_name("chosen", 0)).read_bytes()) as reader:
        assert reader.read_all().column(0).null_count == 3
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert (manifest["format"], manifest["version"], manifest["segments"]) == ("arrow-tq-export", 1, 1)


def test_what_is_no_export(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "other.json").write_text('{"format": "another"}')
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "other.json", tmp_path / "nothing"):
        assert not is_export(path)


def test_some_segments_of_a_session(store: Store, tmp_path: Path) -> None:
    """The rest of its session is there to compose the same segments, and is not claimed."""
    run = fill(store)
    export_segments(run, Selection(["s2~1"]), tmp_path / "out")
    with arrow_tq.open(tmp_path / "two", capacity_bytes=1 << 30) as other:
        import_export(other, tmp_path / "out", "demo")
        there = other.run("demo")
        assert there.claim(9, task="actor").segment_ids == ["s2~1"]
        rows = there.sql("SELECT segment_id, reason FROM segments WHERE status = 'discarded'").to_pylist()
        assert rows == [{"segment_id": "s2~0", "reason": "not in the export"}]


def test_some_fields(store: Store, tmp_path: Path) -> None:
    run = fill(store)
    chosen = Selection(["s0", "s1"], fields=["token_ids", "hidden"])
    export_segments(run, chosen, tmp_path / "out")
    with arrow_tq.open(tmp_path / "two", capacity_bytes=1 << 30) as other:
        import_export(other, tmp_path / "out", "demo")
        there = other.run("demo")
        assert list(there.fields) == ["token_ids", "hidden"]
        mine, theirs = (one.table(["s0", "s1"], fields=["hidden"]) for one in (run, there))
        # As text, where a NaN equals itself.
        assert repr(mine.column("hidden").to_pylist()) == repr(theirs.column("hidden").to_pylist())


def test_what_is_released_cannot_be_exported_whole(store: Store, tmp_path: Path) -> None:
    run = fill(store)
    run.claim(9, task="actor", where="session_id = 's0'").release()
    run.discard("s0", view="timeline", reason="not this view")
    with pytest.raises(errors.ChunkReleased, match=r"session 's0', step '0'.*'logprobs'.*fewer fields"):
        export_segments(run, Selection(["s0"]), tmp_path / "out")
    assert not is_export(tmp_path / "out")
    export_segments(run, Selection(["s0"], fields=["token_ids", "hidden"]), tmp_path / "fewer")
    for wrong, match in (([], "no segment"), (["nobody"], "nobody")):
        with pytest.raises((errors.InvalidInput, errors.NotFound), match=match):
            export_segments(run, Selection(wrong), tmp_path / "none")
    with pytest.raises(errors.InvalidInput, match="not empty"):
        export_segments(run, Selection(["s1"]), tmp_path / "fewer")


def test_torn_and_edited_files_are_refused_before_anything_is_stored(store: Store, tmp_path: Path) -> None:
    run = fill(store)
    whole = tmp_path / "whole"
    export_segments(run, Selection(["s0"]), whole)

    def broken(name: str, change: object) -> str:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole, copy)
        raw = bytearray((copy / name).read_bytes())
        (copy / name).write_bytes(bytes(change(raw)))  # type: ignore[operator]
        with pytest.raises(errors.MalformedMessage) as caught:
            import_export(store, copy, "refused")
        return caught.value.message

    def flip(raw: bytearray) -> bytearray:
        raw[len(raw) // 2] ^= 1
        return raw

    assert "torn" in broken(STEPS, lambda raw: raw[:-9])
    assert "changed" in broken(payload_name("hidden", 0), flip)
    assert "changed" in broken(SEGMENTS, flip)
    assert "edited" in broken(MANIFEST, lambda raw: raw.replace(b'"steps": 3', b'"steps": 4'))
    assert "manifest.json" in broken(MANIFEST, lambda raw: raw[:-20])
    (whole / payload_name("flag", 0)).unlink()
    with pytest.raises(errors.MalformedMessage, match="missing"):
        import_export(store, whole, "refused")
    newer = json.loads((whole / MANIFEST).read_text()) | {"version": 2}
    (whole / MANIFEST).write_text(json.dumps(newer))
    with pytest.raises(errors.Unsupported, match="version 2"):
        import_export(store, whole, "refused")
    with pytest.raises(errors.NotFound):
        store.run("refused")


def test_the_command_line(store: Store, tmp_path: Path) -> None:
    run = fill(store)
    batch = run.claim(2, task="actor")
    store.close()

    def say(*arguments: object) -> str:
        done = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    one, two = tmp_path / "one", tmp_path / "two"
    asked = ("export", "--store", one, "--run", "demo")
    assert "2 sessions, 6 steps, 2 segments" in say(*asked, "--ref", batch.ref, tmp_path / "claimed")
    assert "1 sessions, 3 steps, 1 segments" in say(*asked, "--where", "reward = 7.5", tmp_path / "where")
    assert "1 sessions" in say(*asked, "--id", "s3", "--field", "token_ids", tmp_path / "ids")
    assert "2 sessions, 6 steps" in say("import", "--store", two, "--run", "demo", tmp_path / "claimed")
    with arrow_tq.open(two) as other:
        assert other.run("demo").claim(9, task="actor").segment_ids == batch.segment_ids
    done = CliRunner().invoke(app, [*map(str, asked), str(tmp_path / "none")])
    assert done.exit_code == 2
    mixed = CliRunner().invoke(app, ["import", "--store", str(two), str(tmp_path / "claimed"), str(one)])
    assert mixed.exit_code == 2
