"""SQL, tables, pressure."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from arrow_tq import errors
from arrow_tq.interface import Store
from arrow_tq.testing.scenes import fill, open_run


class PeopleConformance:
    """SQL, tables, pressure."""

    def test_sql_sees_every_acked_commit(self, store: Store) -> None:
        run = open_run(store)
        for count in range(1, 6):
            with run.session(f"s-{count}").step() as step:
                step.put("token_ids", [1, 2, 3], start=0)
            assert run.sql("SELECT count(*) AS n FROM steps").column("n").to_pylist() == [count]

    def test_a_run_sees_itself_only(self, store: Store) -> None:
        one, two = open_run(store, "one"), open_run(store, "two")
        fill(one, 2)
        fill(two, 1)
        count = "SELECT count(*) AS n FROM segments"
        assert one.sql(count).column("n").to_pylist() == [2]
        assert two.sql(count).column("n").to_pylist() == [1]
        assert store.sql(count).column("n").to_pylist() == [3]
        assert store.sql(count, run="two").column("n").to_pylist() == [1]

    def test_sql_cannot_write_or_read_files(self, store: Store) -> None:
        run = open_run(store)
        refused = (
            "DELETE FROM segments",
            "SELECT * FROM read_csv('/etc/passwd')",
            "SELEC 1",
            "",
            "SELECT 1; SELECT 2",
        )
        for query in refused:
            with pytest.raises(errors.InvalidQuery):
                run.sql(query)
        assert run.sql("SELECT 42 AS x").column("x").to_pylist() == [42]

    def test_spans_and_chunks_tell_where_the_payload_is(self, store: Store) -> None:
        run = open_run(store)
        kept = fill(run, 1)
        ((name, rollout),) = kept.items()
        rows = run.sql(
            "SELECT field, sum(rows) AS rows FROM spans WHERE segment_id = "
            f"'{name}' GROUP BY field ORDER BY field"
        ).to_pylist()
        total = len(rollout.tokens)
        sampled = sum(end - prompt_end for _, prompt_end, end in rollout.turns)
        assert [(row["field"], int(row["rows"])) for row in rows] == [
            ("logprobs", sampled),
            ("routed_experts", total - 1),
            ("token_ids", total),
        ]
        groups = run.sql("SELECT DISTINCT layer_group FROM chunks WHERE field = 'routed_experts' ORDER BY 1")
        assert groups.column(0).to_pylist() == [0, 1]

    def test_a_table_has_a_row_a_segment_and_list_columns(self, store: Store) -> None:
        run = open_run(store)
        kept = fill(run, 2)
        table = run.table(["s-0", "s-1"], fields=["logprobs", "routed_experts"])
        assert table.column("segment_id").to_pylist() == list(kept)
        for index, rollout in enumerate(kept.values()):
            values = table.column("logprobs")[index].as_py()
            np.testing.assert_array_equal(np.array(values, np.float32), rollout.logprobs)
            experts = np.array(table.column("routed_experts")[index].as_py(), np.uint8)
            np.testing.assert_array_equal(experts.reshape(rollout.experts.shape), rollout.experts)
        assert pa.types.is_large_list(table.column("logprobs").type)
        with pytest.raises(errors.NotFound, match="s-9"):
            run.table(["s-9"])

    def test_pressure_counts(self, store: Store) -> None:
        run = open_run(store)
        fill(run, 2)
        run.session("open")
        pressure = store.pressure()
        assert (pressure.open_sessions, pressure.unclaimed_segments) == (1, 2)
        assert 0 < pressure.used_bytes <= pressure.capacity_bytes
        assert pressure.oldest_unclaimed_s >= 0
