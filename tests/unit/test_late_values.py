"""Late values in the catalog: who may replace them, what is refused, what a crash or a race leaves."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import arrow_tq
from arrow_tq import Field, errors, fields
from arrow_tq.interface import Store
from arrow_tq.producer.encode import encode
from arrow_tq.runs import Run
from arrow_tq.testing.conformance.late_values import open_run
from arrow_tq.testing.rollouts import declared_fields, make_rollout, write_rollout
from arrow_tq.testing.scenes import chunks_stored, fill, wait_until
from arrow_tq.trainer.batch import Batch
from arrow_tq_schemas.commands import Done, LateValue, PutValues
from arrow_tq_schemas.receipts import Receipt

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with arrow_tq.open(tmp_path / "store", capacity_bytes=1 << 30) as store:
        yield store


def stored(run: Run, name: str, rows: int, start: int = 0, value: float = 1.0) -> Receipt:
    """Rows that are in the store and attached to nothing."""
    field = run.field(name)
    values = np.full((rows, *field.shape), value)
    encoded = encode(
        field, values, start, run=run.name, epoch=run.epoch, shard=0, ids=run.ids, chunk_bytes=MIB
    )
    for chunks in encoded.chunks_by_group:
        run.backend.put(field, chunks).wait()
    return encoded.receipt


def command(run: Run, batch: Batch, receipts: list[Receipt], name: str = "values") -> PutValues:
    return PutValues(
        run=run.name,
        epoch=run.epoch,
        claim_id=batch._claim_id,
        field=name,
        values=[LateValue(segment_id=batch.segment_ids[0], receipts=receipts)],
    )


def test_values_of_an_older_epoch_are_replaced(store: Store) -> None:
    run = open_run(store)
    fill(run, 1)
    batch, reader = run.claim(1, task="actor"), run.claim(1, task="critic")
    rows = int(batch.num_tokens[0])
    batch.put("values", [np.ones(rows)])
    assert set(reader.fetch("values")["values"].packed.tolist()) == {1.0}
    before = chunks_stored(store)
    newer = store.run("late", epoch=1)
    again = newer.attach(batch.ref, rank=0, world=1)
    assert again.put("values", [np.full(rows, 2.0)]) == 1
    assert set(again.fetch("values")["values"].packed.tolist()) == {2.0}
    wait_until(lambda: chunks_stored(store) == before)
    assert set(reader.fetch("values")["values"].packed.tolist()) == {2.0}, "its manifest was of before"
    with pytest.raises(errors.StaleEpoch):
        batch.put("values", [np.full(rows, 3.0)])
    with pytest.raises(errors.Conflict, match="other values"):
        again.put("values", [np.full(rows, 4.0)])
    states = run.sql("SELECT state, count(*) AS n FROM chunks WHERE field = 'values' GROUP BY 1 ORDER BY 1")
    assert states.to_pylist() == [{"state": "committed", "n": 1}, {"state": "released", "n": 1}]
    again.release()
    reader.release()
    wait_until(lambda: chunks_stored(store) == 0)


def test_fields_put_at_the_same_time_are_all_seen(store: Store) -> None:
    names = [f"v{number}" for number in range(6)]
    run = store.run("race", fields=[*declared_fields(), *(Field(name, "float32") for name in names)])
    fill(run, 4)
    batch = run.claim(4)
    total = int(batch.num_tokens.sum())
    with ThreadPoolExecutor(len(names)) as pool:
        puts = [pool.submit(batch.put, name, np.full(total, index)) for index, name in enumerate(names)]
        assert [put.result(60) for put in puts] == [4] * len(names)
    data = batch.fetch(names)
    assert [data[name].packed[0] for name in names] == list(range(len(names)))
    complete = run.sql("SELECT complete_fields FROM segments").column(0).to_pylist()
    assert all(set(names) <= set(found) for found in complete)
    batch.release()
    wait_until(lambda: chunks_stored(store) == 0)


def test_a_value_that_is_not_whole_is_refused_and_freed(store: Store) -> None:
    run = open_run(store, tasks=("actor",))
    fill(run, 1)
    batch = run.claim(1)
    before = chunks_stored(store)
    rows = int(batch.num_tokens[0])
    with pytest.raises(errors.Hole, match=rf"values.*{rows - 2}\.\.{rows - 1}.*whole"):
        run.backend.execute(command(run, batch, [stored(run, "values", rows - 2)]))
    with pytest.raises(errors.Hole, match="values"):
        batch.fetch("values")
    assert "values" not in run.sql("SELECT complete_fields FROM segments").column(0).to_pylist()[0]
    with pytest.raises(errors.RowCountMismatch):
        batch.put("values", [np.zeros(rows - 2)])
    assert chunks_stored(store) == before + 1, "the raw put above waits for its time to live"


def test_a_retry_is_answered_and_a_second_put_of_the_chunks_too(store: Store) -> None:
    run = open_run(store, tasks=("actor",))
    fill(run, 1)
    batch = run.claim(1)
    rows = int(batch.num_tokens[0])
    halves = [stored(run, "values", 3), stored(run, "values", rows - 3, start=3)]
    first = command(run, batch, halves)
    assert run.backend.execute(first).body == Done(count=1)
    assert run.backend.execute(first).body == Done(count=1)
    assert run.backend.execute(command(run, batch, halves)).body == Done(count=0)
    with pytest.raises(errors.Conflict, match="other values"):
        run.backend.execute(command(run, batch, [stored(run, "values", rows)]))
    batch.release()
    assert run.backend.execute(first).body == Done(count=1)


def test_what_does_not_belong_is_refused(store: Store) -> None:
    run = open_run(store, tasks=("actor",))
    fill(run, 2)
    batch, other = run.claim(1), run.claim(1)
    rows = int(batch.num_tokens[0])
    good = stored(run, "values", rows)
    stranger = command(run, batch, [good]).model_copy(
        update={"values": [LateValue(segment_id=other.segment_ids[0], receipts=[])]}
    )
    with pytest.raises((errors.Conflict, errors.Hole)):
        run.backend.execute(stranger)
    with pytest.raises(errors.Conflict, match="not claimed by claim"):
        run.backend.execute(command(run, batch, [good]).model_copy(update={"claim_id": other._claim_id}))
    with pytest.raises(errors.InvalidInput, match="receipt of field"):
        run.backend.execute(command(run, batch, [stored(run, "old_logprobs", rows)]))
    with pytest.raises(errors.NotFound, match="nobody"):
        unknown = LateValue(segment_id="nobody", receipts=[])
        run.backend.execute(command(run, batch, [good]).model_copy(update={"values": [unknown]}))
    with pytest.raises(errors.NotFound, match="nothing"):
        run.backend.execute(command(run, batch, [], name="nothing"))
    lost = good.model_copy(update={"chunks": [good.chunks[0].model_copy(update={"id": run.ids.next(0).hex})]})
    with pytest.raises(errors.ChunkLost):
        run.backend.execute(command(run, batch, [lost]))
    twice = LateValue(segment_id=batch.segment_ids[0], receipts=[good])
    with pytest.raises(errors.InvalidInput, match="two values"):
        run.backend.execute(command(run, batch, [good]).model_copy(update={"values": [twice, twice]}))
    assert run.backend.execute(command(run, batch, [good])).body == Done(count=1)


def test_values_survive_a_restart(tmp_path: Path) -> None:
    with arrow_tq.open(tmp_path / "store", capacity_bytes=1 << 30) as store:
        run = open_run(store, tasks=("actor",))
        fill(run, 1)
        batch = run.claim(1)
        rows = np.arange(int(batch.num_tokens[0])) / 4
        batch.put("values", [rows])
        ref, count = batch.ref, chunks_stored(store)
    with arrow_tq.open(tmp_path / "store", capacity_bytes=1 << 30) as store:
        run = store.run("late")
        batch = run.attach(ref, rank=0, world=1)
        assert batch.fetch("values")["values"][0].tolist() == rows.tolist()
        assert chunks_stored(store) == count
        assert batch.put("values", [rows]) == 0
        batch.release()
        wait_until(lambda: chunks_stored(store) == 0)


def test_the_other_view_does_not_get_them(store: Store) -> None:
    run = open_run(store, tasks=("actor",))
    session = run.session("s")
    write_rollout(session, make_rollout(1))
    session.finalize()
    batch = run.claim(1)
    batch.put("values", [np.ones(int(batch.num_tokens[0]))])
    (segment,) = session.finalize(view="timeline")
    assert "values" not in segment.complete_fields
    batch.release()
    wait_until(lambda: chunks_stored(store) == 0)


def test_expert_ids_with_missing_rows_are_no_whole_value(store: Store) -> None:
    run = store.run("ids", fields=[fields.token_ids(), fields.routed_experts(1, 2, 8, name="again")])
    with run.session("s").step() as step:
        step.put("token_ids", [1, 2, 3], start=0)
    run.session("s").finalize()
    batch = run.claim(1)
    with pytest.raises(errors.Hole, match=r"again.*1\.\.1"):
        batch.put("again", [np.array([[[1, 2]], [[-1, -1]]])])
    assert batch.put("again", [np.array([[[1, 2]], [[3, 4]], [[5, 6]]])]) == 1
    assert batch.fetch("again")["again"][0].tolist() == [[[1, 2]], [[3, 4]]]


def test_a_late_field_is_held_by_the_tasks_of_each_session(store: Store) -> None:
    run = store.run("sets", fields=declared_fields(), tasks=("actor", "critic"))
    for name, tasks in (("both", None), ("one", ["critic"])):
        session = run.session(name, tasks=tasks)
        write_rollout(session, make_rollout(1))
        session.finalize()
    run.add_field(Field("values", "float32"))
    critic = run.claim(2, task="critic")
    assert critic.put("values", np.ones(int(critic.num_tokens.sum()))) == 2
    critic.release()
    kept = "SELECT session_id FROM chunks WHERE field = 'values' AND state = 'committed'"
    assert run.sql(kept).column(0).to_pylist() == ["both"]
    actor = run.claim(2, task="actor")
    assert set(actor.fetch("values")["values"].packed.tolist()) == {1.0}
    actor.release()
    wait_until(lambda: chunks_stored(store) == 0)
    with pytest.raises(errors.StaleEpoch):
        store.run("sets", epoch=1)
        run.add_field(Field("more", "float32"))
