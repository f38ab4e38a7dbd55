"""Session trees: branches, retries, abandoned steps, and both views of them."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from arrow_tq import Task, errors
from arrow_tq.interface import Store
from arrow_tq.producer.session import Session
from arrow_tq.runs import Run
from arrow_tq.testing.scenes import chunks_stored, open_run, wait_until


def write(
    session: Session, id: str, start: int, tokens: list[int], sampled: int | None = None, **place: object
) -> None:
    """A step of token ids, the last ``sampled`` of which (all by default) it sampled, with log-probs."""
    count = len(tokens) if sampled is None else sampled
    end = start + len(tokens)
    with session.step(id=id, sampled=(end - count, end), **place) as step:  # type: ignore[arg-type]
        step.put("token_ids", tokens, start=start)
        step.put("logprobs", np.full(count, -0.5), start=end - count)


def tokens_of(run: Run, view: str = "lineage") -> list[list[int]]:
    """Token ids of the segments that a claim of everything takes, in order; the claim is released."""
    batch = run.claim(1000, view=view)  # type: ignore[arg-type]
    data = batch.fetch(["token_ids", "logprobs"])
    found = [tokens.tolist() for tokens in data["token_ids"]]
    batch.release()
    return found


def status_of(run: Run) -> dict[str, str]:
    table = run.sql("SELECT step_id, status FROM steps")
    return dict(zip(*(column.to_pylist() for column in table.columns), strict=True))


class TreeConformance:
    """Session trees."""

    def test_a_branch_is_a_segment_of_its_own(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        write(session, "a", 0, [1, 2, 3, 4], sampled=2, version="1")
        write(session, "b", 4, [5, 6, 7], sampled=2, version="2")
        write(session, "c", 4, [8, 9], parent="a", version="3")
        write(session, "d", 6, [10])
        first, second = session.finalize()
        assert (first.loss_tokens, second.loss_tokens) == (4, 3)
        assert (first.finish_reason, second.finish_reason) == ("end", "end")
        rows = run.sql(
            "SELECT version_min, version_max, num_tokens, segment_count FROM segments ORDER BY segment_index"
        ).to_pylist()
        assert [tuple(row.values()) for row in rows] == [("1", "2", 7, 2), ("3", "3", 7, 2)]
        assert run.sql("SELECT parent_id FROM steps ORDER BY step_index").column(0).to_pylist() == [
            None,
            "a",
            "a",
            "c",
        ]
        assert tokens_of(run) == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 8, 9, 10]]
        wait_until(lambda: chunks_stored(store) == 0)

    def test_a_branch_is_compared_with_its_own_path(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        write(session, "a", 0, [1, 2, 3])
        write(session, "b", 3, [4, 5, 6])
        # Equal to its own path, different from the other branch: no rewrite.
        write(session, "c", 0, [1, 2, 3, 7, 8], sampled=2, parent="a")
        # Equal to the other branch, different from its own path.
        write(session, "d", 0, [1, 2, 3, 4, 5], sampled=2, parent="c")
        write(session, "e", 0, [1, 2, 3, 4, 5, 6, 9], sampled=1, parent="b")
        found = run.sql("SELECT rewrite_at, cut FROM steps ORDER BY step_index").to_pylist()
        assert [tuple(row.values()) for row in found] == [
            (None, None),
            (None, None),
            (None, None),
            (3, "rewrite"),
            (None, None),
        ]
        reasons = [segment.finish_reason for segment in session.finalize()]
        assert reasons == ["rewrite", "end", "end"]
        assert tokens_of(run) == [[1, 2, 3, 7, 8], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 9]]

    def test_a_retried_call_never_doubles_wherever_it_is_in_the_tree(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        write(session, "a", 0, [1, 2])
        write(session, "b", 2, [3])
        write(session, "c", 2, [4], parent="a")
        for _ in range(2):
            write(session, "b", 2, [3])
            write(session, "a", 0, [1, 2])
        # The retries did not move the session's last step.
        write(session, "d", 3, [5])
        with pytest.raises(errors.Conflict, match="another version, sampled range, parent"):
            write(session, "d", 3, [5], parent="b")
        assert status_of(run) == dict.fromkeys("abcd", "committed")
        session.finalize()
        assert tokens_of(run) == [[1, 2, 3], [1, 2, 4, 5]]
        wait_until(lambda: chunks_stored(store) == 0)

    def test_a_retry_supersedes_the_attempt_and_what_followed_it(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        write(session, "a", 0, [1, 2])
        write(session, "b", 2, [3])
        write(session, "c", 3, [4])
        chunks = chunks_stored(store)
        write(session, "b2", 2, [5, 6], retry_of="b")
        assert chunks == 6
        wait_until(lambda: chunks_stored(store) == 4)
        assert status_of(run) == {"a": "committed", "b": "superseded", "c": "superseded", "b2": "committed"}
        with pytest.raises(errors.Conflict, match="'c' is superseded: nothing follows it"):
            write(session, "d", 4, [7], parent="c")
        with pytest.raises(errors.Conflict, match="retries 'b', whose parent is 'a', not 'b2'"):
            write(session, "b3", 2, [7], parent="b2", retry_of="b")
        write(session, "b3", 2, [8], retry_of="b")
        assert status_of(run)["b2"] == "superseded"
        (segment,) = session.finalize()
        assert (segment.num_tokens, segment.loss_tokens) == (3, 3)
        assert tokens_of(run) == [[1, 2, 8]]
        wait_until(lambda: chunks_stored(store) == 0)

    def test_an_attempt_that_comes_after_its_retry_is_refused(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        write(session, "a", 0, [1, 2])
        write(session, "b2", 2, [4], retry_of="b1")
        with pytest.raises(errors.Conflict, match="'b1' of session 's' comes late: its retry 'b2'"):
            write(session, "b1", 2, [3], parent="a")
        assert status_of(run) == {"a": "committed", "b2": "committed"}
        wait_until(lambda: chunks_stored(store) == 4)
        session.finalize()
        assert tokens_of(run) == [[1, 2, 4]]

    def test_abandoned_steps_are_in_no_view(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        write(session, "a", 0, [1, 2])
        write(session, "b", 2, [3])
        write(session, "c", 3, [4])
        write(session, "d", 3, [5], parent="b")
        write(session, "e", 2, [6], parent="a")
        assert session.abandon("b") == 3
        assert session.abandon("b") == 0
        wait_until(lambda: chunks_stored(store) == 4)
        assert run.session("s").last_step == "e"
        assert session.abandon("e") == 1
        again = run.session("s")
        assert (again.last_step, again.ends["token_ids"]) == ("a", 2)
        with pytest.raises(errors.NotFound, match="no step 'x'"):
            session.abandon("x")
        write(session, "f", 2, [7, 8])
        # An abandoned attempt can be retried too: where it was, the retry is.
        write(session, "b2", 2, [9], retry_of="b")
        for view in ("lineage", "timeline"):
            assert [segment.num_tokens for segment in session.finalize(view)] == [4, 3]
        with pytest.raises(errors.SessionClosed, match="finalized"):
            session.abandon("f")
        assert tokens_of(run) == [[1, 2, 7, 8], [1, 2, 9]]
        wait_until(lambda: chunks_stored(store) == 0)

    def test_both_views_of_one_session(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        write(session, "a", 0, [1, 2])
        write(session, "b", 2, [3])
        write(session, "c", 2, [4], parent="a")
        write(session, "d", 3, [5], parent="b")
        write(session, "e", 1, [6, 7])
        lineage = session.finalize(reward=1.0)
        timeline = session.finalize("timeline", reward=2.0, kind="snapshot")
        assert session.finalize("timeline", reward=2.0, kind="snapshot") == timeline
        with pytest.raises(errors.SessionClosed, match="timeline"):
            session.finalize("timeline", reward=3.0)
        assert [one.finish_reason for one in lineage] == ["end", "rewrite", "end"]
        assert [one.finish_reason for one in timeline] == ["branch", "branch", "rewrite", "end"]
        assert [one.segment_id for one in timeline] == [f"s~t{index}" for index in range(4)]
        for segments in (lineage, timeline):
            assert sum(one.loss_tokens for one in segments) == 7
        stored = chunks_stored(store)
        other = run.claim(10, view="timeline")
        data = other.fetch("token_ids")["token_ids"]
        assert [one.tolist() for one in data] == [[1, 2, 3], [1, 2, 4], [1, 2, 3, 5], [1, 6, 7]]
        assert tokens_of(run) == [[1, 2, 4], [1, 2, 3, 5], [1, 6, 7]]
        # What the other view was claimed for is still there.
        assert chunks_stored(store) == stored
        other.fetch("logprobs")
        other.release()
        wait_until(lambda: chunks_stored(store) == 0)

    def test_a_view_that_nobody_claims_keeps_nothing(self, store: Store) -> None:
        run = open_run(store, tasks=(Task("actor"), Task("critic", fields=["token_ids"])))
        session = run.session("s")
        write(session, "a", 0, [1, 2])
        write(session, "b", 1, [3, 4])
        session.finalize()
        session.finalize("timeline")
        actor = run.claim(10, task="actor")
        run.claim(10, task="critic", view="timeline").release()
        assert chunks_stored(store) == 4
        actor.release()
        wait_until(lambda: chunks_stored(store) == 0)
        rows = run.sql("SELECT DISTINCT view, status FROM segments ORDER BY view").to_pylist()
        assert [tuple(row.values()) for row in rows] == [("lineage", "done"), ("timeline", "done")]
        assert not run.claim(10, task="actor", view="timeline")

    def test_a_view_comes_too_late_once_the_other_is_released(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        write(session, "a", 0, [1, 2])
        session.finalize()
        tokens_of(run)
        with pytest.raises(errors.ChunkReleased, match="before another's segments are released"):
            session.finalize("timeline")
        assert run.sql("SELECT DISTINCT view FROM segments").column(0).to_pylist() == ["lineage"]

    def test_the_other_view_is_finalized_by_the_sessions_id(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s", group="g", ttl_s=60)
        write(session, "a", 0, [1, 2])
        write(session, "b", 2, [3])
        write(session, "c", 2, [4], parent="a")
        assert session.status == "open"
        lineage = session.finalize(reward=1.0)
        again = run.session("s")
        assert (again.status, again.group, again.last_step) == ("finalized", "g", "c")
        with pytest.raises(errors.SessionClosed, match="takes no more steps"):
            again.step()
        # Whoever says more than the id means to write it, and is told.
        for more in ({"group": "g"}, {"ttl_s": 60}, {"tasks": ["train"]}, {"note": "x"}):
            with pytest.raises(errors.SessionClosed, match="is finalized"):
                run.session("s", **more)
        assert again.finalize(reward=1.0) == lineage
        timeline = again.finalize("timeline", reward=2.0)
        assert [one.segment_id for one in timeline] == ["s~t0", "s~t1"]
        assert run.session("s").finalize("timeline", reward=2.0) == timeline
        with pytest.raises(errors.SessionClosed, match="view 'timeline'"):
            run.session("s").finalize("timeline", reward=3.0)
        data = run.claim(10, view="timeline").fetch("token_ids")["token_ids"]
        assert [one.tolist() for one in data] == [[1, 2, 3], [1, 2, 4]]
        assert tokens_of(run) == [[1, 2, 3], [1, 2, 4]]
        with pytest.raises(errors.SessionClosed, match="is finalized"):
            again.abort()

    def test_tools_and_mismatches_end_segments(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        write(session, "a", 0, [1, 2], tools=[{"name": "search"}])
        write(session, "b", 2, [3])
        write(session, "c", 3, [4], tools=[{"name": "search"}])
        write(session, "d", 4, [5], tools=[])
        write(session, "e", 3, [9, 5, 6], sampled=1, extends=True)
        assert run.sql("SELECT cut FROM steps ORDER BY step_index").column(0).to_pylist() == [
            None,
            None,
            None,
            "tools",
            "mismatch",
        ]
        segments = session.finalize()
        assert [one.finish_reason for one in segments] == ["tools", "mismatch", "end"]
        assert [one.loss_tokens for one in segments] == [4, 1, 1]
        assert tokens_of(run) == [[1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 9, 5, 6]]

    def test_a_suspended_rollout_is_resumed_under_a_newer_version(self, store: Store) -> None:
        run = open_run(store)
        write(run.session("s"), "a", 0, [1, 2, 3], sampled=2, version="1")
        resumed = run.session("s")
        assert (resumed.last_step, resumed.ends["token_ids"]) == ("a", 3)
        # The engine returns the whole sequence again: what was sampled before stays so.
        write(resumed, "b", 0, [1, 2, 3, 4, 5], sampled=4, version="2")
        (segment,) = resumed.finalize()
        assert segment.loss_tokens == 4
        (row,) = run.sql("SELECT version_min, version_max FROM segments").to_pylist()
        assert row == {"version_min": "1", "version_max": "2"}
        assert tokens_of(run) == [[1, 2, 3, 4, 5]]

    def test_abort_frees_every_branch(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        write(session, "a", 0, [1, 2])
        write(session, "b", 2, [3])
        write(session, "c", 2, [4], parent="a")
        session.abort()
        wait_until(lambda: chunks_stored(store) == 0)
        with pytest.raises(errors.SessionClosed, match="aborted"):
            write(session, "d", 2, [5], parent="a")
        wait_until(lambda: chunks_stored(store) == 0)

    def test_branches_are_written_from_many_threads(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        write(session, "root", 0, [0, 0])
        barrier = threading.Barrier(8)

        def branch(number: int) -> None:
            barrier.wait()
            parent = "root"
            for turn in range(4):
                write(session, f"{number}-{turn}", 2 + turn, [10 * number + turn], parent=parent)
                parent = f"{number}-{turn}"

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(branch, range(8)))
        segments = session.finalize()
        timeline = session.finalize("timeline")
        assert len(segments) == 8
        for found in (segments, timeline):
            assert sum(one.loss_tokens for one in found) == 2 + 8 * 4
        wanted = Counter((0, 0, *(10 * number + turn for turn in range(4))) for number in range(8))
        assert Counter(tuple(tokens) for tokens in tokens_of(run)) == wanted
        wait_until(lambda: chunks_stored(store) == 0)
