"""Whole dicts: handed over, read whole or in part, asked in SQL, deleted."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from arrow_tq import Field, errors, fields
from arrow_tq.bundles.selection import Rows
from arrow_tq.interface import Store
from arrow_tq.testing.bundles import same, train_dict
from arrow_tq_schemas.bundles import BundleRef


class BundleConformance:
    """Whole dicts: handed over, read whole or in part, asked in SQL, deleted."""

    @pytest.mark.parametrize("lists", [False, True])
    def test_a_train_dict_comes_back_as_it_was_put(self, store: Store, lists: bool) -> None:
        value = train_dict(300, lists=lists)
        ref = store.put_bundle(value)
        got = store.get_bundle(json.loads(json.dumps(ref)))
        same(value, got)
        if not lists:
            assert not got["tokens"][7].flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                got["tokens"][7][0] = 1
        (row,) = store.sql("SELECT * FROM bundles").to_pylist()
        assert row["ref"] == ref
        assert (row["run"], row["state"], row["rows"]) == ("default", "ready", 300)
        assert row["fields"] == list(value)
        assert row["bytes"] > 0

    def test_a_reference_has_one_size_and_carries_metadata(self, store: Store) -> None:
        sizes = {len(store.put_bundle({f"f{n}": [n] * n for n in range(count)})) for count in (0, 1, 40)}
        assert len(sizes) == 1 and sizes.pop() < 256
        ref = store.put_bundle({}, metadata={"tokens": [3, 4], "name": "ä"})
        assert len(ref) < 256
        assert BundleRef.parse(json.loads(json.dumps(ref))).metadata == {"tokens": [3, 4], "name": "ä"}
        assert store.get_bundle(ref) == {}
        with pytest.raises(errors.InvalidInput, match="4096"):
            store.put_bundle({}, metadata="x" * 5000)
        with pytest.raises(errors.InvalidInput, match="not JSON"):
            store.put_bundle({}, metadata=object())

    def test_fields_and_rows_are_read_by_themselves(self, store: Store) -> None:
        value = train_dict(100)
        ref = store.put_bundle(value)
        got = store.get_bundle(ref, fields=["tokens", "rewards", "metadata"], rows=[90, -99, 3])
        assert list(got) == ["tokens", "rewards", "metadata"]
        same(got["tokens"], [value["tokens"][index] for index in (90, 1, 3)])
        assert got["rewards"] == [value["rewards"][index] for index in (90, 1, 3)]
        assert got["metadata"] == value["metadata"]
        mask = np.arange(100) % 9 == 2
        wanted = [10, 17, 24, 31, 38]
        cases: list[tuple[Rows, list[int]]] = [
            (slice(10, 40, 7), wanted),
            (range(10, 40, 7), wanted),
            (np.array(wanted), wanted),
            (mask, np.flatnonzero(mask).tolist()),
            ([], []),
        ]
        for rows, chosen in cases:
            part = store.get_bundle(ref, fields=["prompt", "loss_masks"], rows=rows)
            same(part["prompt"], [value["prompt"][index] for index in chosen])
            same(part["loss_masks"], [value["loss_masks"][index] for index in chosen])
        # What has no row a sample comes whole.
        assert store.get_bundle(ref, ["partition"], rows=[1])["partition"] == value["partition"]
        with pytest.raises(errors.InvalidInput, match="row 100: the bundle has 100"):
            store.get_bundle(ref, rows=[100])
        with pytest.raises(errors.NotFound, match="nothing"):
            store.get_bundle(ref, fields=["nothing"])

    def test_rows_come_as_views_and_into_buffers_where_that_is_asked(self, store: Store) -> None:
        value = train_dict(20, lists=True)
        ref = store.put_bundle(value)
        got = store.get_bundle(ref, rows="numpy")
        assert isinstance(got["tokens"][3], np.ndarray)
        assert got["tokens"][3].tolist() == value["tokens"][3]
        assert got["rewards"].tolist() == value["rewards"]
        also = store.get_bundle(ref, fields=["loss_masks"], rows=[4], row_type="numpy")
        assert also["loss_masks"][0].tolist() == value["loss_masks"][4]
        with pytest.raises(errors.InvalidInput, match="arrow"):
            store.get_bundle(ref, row_type="arrow")  # type: ignore[arg-type]
        value = train_dict(50)
        ref = store.put_bundle(value)
        out = np.full(sum(map(len, value["tokens"])) + 3, -1, np.int32)
        got = store.get_bundle(ref, fields=["tokens", "rewards"], out={"tokens": out})
        same(got["tokens"], value["tokens"])
        assert got["tokens"][5].base is out or np.shares_memory(got["tokens"][5], out)
        assert out[-3:].tolist() == [-1, -1, -1]
        np.testing.assert_array_equal(out[:-3], np.concatenate(value["tokens"]))
        with pytest.raises(errors.InvalidInput, match="int32"):
            store.get_bundle(ref, out={"tokens": np.zeros(9, np.int64)})
        with pytest.raises(errors.InvalidInput, match="'nothing'"):
            store.get_bundle(ref, out={"nothing": out})

    def test_what_cannot_come_back_is_refused_with_its_path(self, store: Store) -> None:
        bad = {"tokens": [np.arange(3)], "metadata": [None, {}, {}, {"tool": object()}]}
        with pytest.raises(errors.InvalidInput, match=r"metadata\[3\]\.tool") as caught:
            store.put_bundle(bad)
        assert caught.value.details["path"] == "metadata[3].tool"
        assert store.sql("SELECT count(*) AS n FROM bundles").column("n").to_pylist() == [0]
        ref = store.put_bundle({"m": [(1, 2), [3]]}, schema={"m": "msgpack"})
        assert store.get_bundle(ref) == {"m": [[1, 2], [3]]}
        with pytest.raises(errors.InvalidInput, match="nothing"):
            store.put_bundle({"m": 1}, schema={"nothing": "auto"})

    def test_a_deleted_bundle_is_not_found_and_its_bytes_go(self, store: Store) -> None:
        ref = store.put_bundle({"x": [np.zeros(1000)] * 8})
        before = store.stats()
        assert before['bundles{run="default"}'] == 1
        assert before['bundle_bytes{run="default"}'] >= 64_000
        store.delete_bundle(ref, wait_s=10)
        with pytest.raises(errors.NotFound, match="deleted"):
            store.get_bundle(ref)
        store.delete_bundle(ref)
        after = store.stats()
        assert 'bundles{run="default"}' not in after
        assert after["chunks"] == before["chunks"] - 2
        assert store.sql("SELECT state FROM bundles").column("state").to_pylist() == ["deleted"]
        with pytest.raises(errors.NotFound):
            store.get_bundle("atq-bundle:default:0197a0b1c2d382a58015555555555555")
        with pytest.raises(errors.InvalidInput, match="reference"):
            store.get_bundle("bundle-7")

    def test_a_delete_waits_for_readers(self, store: Store) -> None:
        value = {"x": [np.arange(100), np.arange(7)]}
        ref = store.put_bundle(value)
        with store.open_bundle(ref) as reader:
            with pytest.raises(errors.DeadlineExceeded, match="1 readers"):
                store.delete_bundle(ref, wait_s=0.1)
            with pytest.raises(errors.NotFound):
                store.get_bundle(ref)
            assert store.sql("SELECT state FROM bundles").column("state").to_pylist() == ["deleting"]
            same(reader.get(), value)
        store.delete_bundle(ref, wait_s=10)
        assert store.stats()["chunks"] == 0

        # A lease that nobody ends ends by itself.
        ref = store.put_bundle({"x": [1, 2]})
        reader = store.open_bundle(ref, lease_s=0.2)
        store.delete_bundle(ref, wait_s=10)
        assert store.stats()["chunks"] == 0
        with pytest.raises(errors.ChunkReleased):
            reader.get()

    def test_ranks_read_their_partitions_of_one_bundle(self, store: Store) -> None:
        value = train_dict(64)
        ref = store.put_bundle(value)

        def rank(number: int) -> None:
            rows = list(range(number, 64, 8))
            for _ in range(3):
                got = store.get_bundle(ref, fields=["tokens", "sample_indices"], rows=rows)
                assert got["sample_indices"] == rows
                same(got["tokens"], [value["tokens"][row] for row in rows])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(rank, range(8)))

    def test_columns_of_a_bundle_are_asked_in_sql(self, store: Store) -> None:
        value = train_dict(100)
        ref = store.put_bundle(value)
        run = store.run("default")
        query = f"SELECT avg(rewards) AS mean, sum(len(tokens)) AS tokens, count(*) AS n FROM bundle('{ref}')"
        (row,) = run.sql(query).to_pylist()
        assert row["mean"] == pytest.approx(np.mean(value["rewards"]))
        assert (int(row["tokens"]), row["n"]) == (sum(map(len, value["tokens"])), 100)
        joined = f"""SELECT b.rows, max(s.sample_indices) AS last, count(s.teacher_log_probs) AS taught
            FROM bundles b, bundle('{ref.bundle_id}') s WHERE s.raw_reward->>'format' = 'true' GROUP BY 1"""
        (row,) = store.sql(joined).to_pylist()
        assert row == {"rows": 100, "last": 99, "taught": 34}
        other = store.put_bundle({"x": [1]}, run="other")
        with pytest.raises(errors.NotFound):
            run.sql(f"SELECT * FROM bundle('{other}')")
        assert store.sql(f"SELECT x FROM bundle('{other}')").column("x").to_pylist() == [1]
        assert store.sql("SELECT 'bundle(''x'')' AS t").column("t").to_pylist() == ["bundle('x')"]

    def test_a_run_that_holds_bundles_is_declared_later(self, store: Store) -> None:
        ref = store.put_bundle({"x": [1]}, run="grpo")
        run = store.run("grpo", fields=[fields.token_ids()])
        with run.session("s").step() as step:
            step.put("token_ids", [1, 2], start=0)
        assert len(run.session("s").finalize()) == 1
        assert store.get_bundle(ref) == {"x": [1]}
        with pytest.raises(errors.InvalidField, match="_bundle"):
            store.run("new", fields=[Field("_bundle", "uint8")])
        assert store.run("grpo", epoch=1).epoch == 1
        assert store.get_bundle(store.put_bundle({"x": [2]}, run="grpo")) == {"x": [2]}

    def test_what_the_first_rows_promise_may_be_broken_by_the_last(self, store: Store) -> None:
        rows = [[1, 2]] * 1000
        for last in ([True], [1.0], [1 << 40], [1 << 70], [None], [np.int32(1)], [[1]]):
            same(store.get_bundle(store.put_bundle({"x": [*rows, last]})), {"x": [*rows, last]})
        same(store.get_bundle(store.put_bundle({"x": [[0.5], [1]]})), {"x": [[0.5], [1]]})

    def test_the_twins_await(self, store: Store) -> None:
        async def all_of_it() -> None:
            ref = await store.aput_bundle({"x": [1, 2]}, metadata=3)
            assert await store.aget_bundle(ref, rows=[1]) == {"x": [2]}
            with await store.aopen_bundle(ref) as opened:
                assert (opened.rows, opened.metadata, opened.fields) == (2, 3, ["x"])
            await store.adelete_bundle(ref)

        asyncio.run(all_of_it())
        assert store.stats()["chunks"] == 0
