"""Importing into a real store: what arrives, what a second import does, what a failure leaves."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arrow_tq
from arrow_tq.importer.chat_tokenizer import ChatTokenizer
from arrow_tq.importer.importing import ImportPlan, ImportSummary, import_trajectories
from arrow_tq.importer.records import Record
from arrow_tq.importer.source import Source
from arrow_tq.interface import Store
from arrow_tq.producer.session import Session
from arrow_tq_schemas.errors import Conflict, InvalidInput, MalformedMessage, StoreFull

SHARED = Path(os.environ.get("ARROW_TQ_SHARED", Path(__file__).parents[3] / "shared"))
TAU_BENCH = SHARED / "data" / "tau_bench_airline.jsonl.gz"
FIELDS = ["token_ids", "logprobs", "routed_experts"]


class Listener:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.consumed_bytes = 0

    def phase(self, name: str, total_bytes: int) -> None:
        self.total_bytes = total_bytes

    def record(self, record: Record) -> None:
        self.consumed_bytes = record.consumed_bytes

    def problem(self, message: str) -> None:
        self.problems.append(message)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with arrow_tq.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def heard() -> Listener:
    return Listener()


def chat(task: int, trial: int, turns: int = 2, **more: Any) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"task {task} question {turn} \ud83d"})
        messages.append({"role": "assistant", "content": None if turn else f"answer {trial}"})
    messages.append({"role": "user", "content": "bye"})
    return {"task_id": task, "trial": trial, "reward": float(trial), "messages": messages, **more}


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in records))
    return path


def import_file(store: Store, path: Path, heard: Listener, plan: ImportPlan | None = None) -> ImportSummary:
    return import_trajectories(store, Source((path,)), plan or ImportPlan(), heard)


def test_what_is_stored(store: Store, tmp_path: Path, heard: Listener) -> None:
    path = lines(tmp_path / "in.jsonl", chat(0, 0), chat(0, 1), chat(1, 0, turns=3))
    summary = import_file(store, path, heard)
    assert (summary.sessions, summary.steps, summary.segments) == (3, 7, 3)
    assert heard.problems == []
    assert heard.consumed_bytes == heard.total_bytes == path.stat().st_size
    rows = store.sql("SELECT * FROM segments ORDER BY session_id").to_pylist()
    assert [row["session_id"] for row in rows] == ["task-0/trial-0", "task-0/trial-1", "task-1/trial-0"]
    assert [row["group_id"] for row in rows] == ["task-0", "task-0", "task-1"]
    assert [(row["reward"], row["task_id"], row["trial"]) for row in rows] == [
        (0, 0, 0),
        (1, 0, 1),
        (0, 1, 0),
    ]
    assert json.loads(rows[0]["trailing_messages"]) == [{"role": "user", "content": "bye"}]
    assert sum(row["num_tokens"] for row in rows) == summary.tokens
    steps = store.sql(
        "SELECT * FROM steps WHERE session_id = 'task-1/trial-0' ORDER BY step_index"
    ).to_pylist()
    messages = [message for step in steps for message in json.loads(step["messages"])]
    assert messages == chat(1, 0, turns=3)["messages"][:-1]
    assert all(step["sampled_end"] == step["num_tokens"] for step in steps)


def test_tokens_decode_to_the_conversation(store: Store, tmp_path: Path, heard: Listener) -> None:
    kept = tmp_path / "tokenizer.json"
    path = lines(tmp_path / "in.jsonl", chat(0, 3))
    import_file(store, path, heard, ImportPlan(save_tokenizer=kept))
    run = store.run("default")
    batch = run.claim(10)
    ids = batch.fetch(["token_ids"])["token_ids"][0]
    batch.release()
    text = ChatTokenizer.load(kept)._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    assert text == (
        "<|im_start|>user\ntask 0 question 0 \ufffd<|im_end|>\n<|im_start|>assistant\nanswer 3<|im_end|>\n"
        "<|im_start|>user\ntask 0 question 1 \ufffd<|im_end|>\n<|im_start|>assistant\n<|im_end|>"
    )


def test_bad_records_are_told_and_skipped(store: Store, tmp_path: Path, heard: Listener) -> None:
    twice = chat(0, 0, note="again")
    path = lines(tmp_path / "in.jsonl", chat(0, 0), "{oops", {"messages": []}, twice, "", chat(0, 1))
    summary = import_file(store, path, heard)
    assert (summary.sessions, summary.bad) == (2, 3)
    assert [problem.removeprefix(f"{path}:").split(":")[0] for problem in heard.problems] == ["2", "3", "4"]
    assert heard.problems[2].endswith(f"session 'task-0/trial-0' is at {path}:1 already")
    assert store.sql("SELECT count(*) AS n FROM sessions")["n"].to_pylist() == [2]


def test_fail_stores_nothing(store: Store, tmp_path: Path, heard: Listener) -> None:
    path = lines(tmp_path / "in.jsonl", chat(0, 0), "{oops", "{oops")
    with pytest.raises(MalformedMessage, match=r"in\.jsonl:2: not JSON.*1 more bad.*nothing was imported"):
        import_file(store, path, heard, ImportPlan(on_error="fail"))
    assert store.sql("SELECT run FROM runs").num_rows == 0


@pytest.mark.parametrize("content", ["", "\n\n", "{oops\n"])
def test_nothing_to_import_is_an_error(store: Store, tmp_path: Path, heard: Listener, content: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(content)
    with pytest.raises(MalformedMessage, match=r"in\.jsonl: no trajectory to import"):
        import_file(store, path, heard)


def test_a_second_import_leaves_everything_alone(store: Store, tmp_path: Path, heard: Listener) -> None:
    path = lines(tmp_path / "in.jsonl", chat(0, 0), chat(0, 1))
    import_file(store, path, heard)
    before = store.sql("SELECT * FROM segments ORDER BY segment_id").to_pylist()
    again = import_file(store, path, heard)
    assert (again.sessions, again.existing, heard.problems) == (0, 2, [])
    assert store.sql("SELECT * FROM segments ORDER BY segment_id").to_pylist() == before


def test_another_tokenizer_does_not_mix_in(store: Store, tmp_path: Path, heard: Listener) -> None:
    import_file(store, lines(tmp_path / "in.jsonl", chat(0, 0)), heard)
    other = lines(tmp_path / "other.jsonl", chat(7, 0, turns=4))
    with pytest.raises(Conflict, match="run 'default' holds token ids of tokenizer"):
        import_file(store, other, heard)
    assert import_file(store, other, heard, ImportPlan(run="other")).sessions == 1


def test_an_interrupted_import_goes_on(
    store: Store, tmp_path: Path, heard: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lines(tmp_path / "in.jsonl", chat(0, 0), chat(0, 1))
    finalize = Session.finalize

    def full(self: Session, *args: Any, **kwargs: Any) -> Any:
        if self.id.endswith("trial-1"):
            raise StoreFull("no room")
        return finalize(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Session, "finalize", full)
        with pytest.raises(StoreFull):
            import_file(store, path, heard)
    status = "SELECT status, steps FROM sessions ORDER BY session_id"
    assert store.sql(status).to_pylist() == [
        {"status": "finalized", "steps": 2},
        {"status": "open", "steps": 2},
    ]
    again = import_file(store, path, heard)
    assert (again.sessions, again.existing) == (1, 1)
    assert [row["status"] for row in store.sql(status).to_pylist()] == ["finalized", "finalized"]


def test_a_session_that_fails_for_good_is_aborted(
    store: Store, tmp_path: Path, heard: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lines(tmp_path / "in.jsonl", chat(0, 0), chat(0, 1))

    def refuse(self: Session, *args: Any, **kwargs: Any) -> Any:
        raise InvalidInput("not this one")

    with monkeypatch.context() as patched:
        patched.setattr(Session, "finalize", refuse)
        summary = import_file(store, path, heard)
    assert (summary.sessions, summary.bad) == (0, 2)
    assert heard.problems == [f"{path}:1: not this one", f"{path}:2: not this one"]
    assert {row["status"] for row in store.sql("SELECT status FROM sessions").to_pylist()} == {"aborted"}
    assert store.sql("SELECT * FROM chunks WHERE state = 'committed'").num_rows == 0
    heard.problems.clear()
    import_file(store, path, heard)
    assert "was aborted in run 'default' and its id cannot be used again" in heard.problems[0]


def test_long_trajectories_are_cut_visibly(store: Store, tmp_path: Path, heard: Listener) -> None:
    path = lines(tmp_path / "in.jsonl", chat(0, 0), chat(0, 1, turns=30))
    summary = import_file(store, path, heard, ImportPlan(max_tokens=120))
    assert (summary.sessions, summary.cut) == (2, 1)
    assert dict(summary.notes) == {"cut before the model call that passes 120 tokens": 1}
    rows = store.sql("SELECT trial, num_tokens, truncated FROM segments ORDER BY trial").to_pylist()
    assert [row["truncated"] for row in rows] == [None, True]
    assert rows[1]["num_tokens"] <= 120
    with pytest.raises(InvalidInput, match=r"in\.jsonl:1: its first model call has \d+ tokens: at most 3"):
        import_file(store, path, heard, ImportPlan(run="tiny", max_tokens=3, on_error="fail"))


def test_a_run_with_other_fields_is_refused(store: Store, tmp_path: Path, heard: Listener) -> None:
    store.run("default", fields=[arrow_tq.fields.logprobs()])
    with pytest.raises(Conflict, match="field 'token_ids': run 'default' exists and has no such field"):
        import_file(store, lines(tmp_path / "in.jsonl", chat(0, 0)), heard)


# -- ATIF ------------------------------------------------------------------------------------------


def atif(*calls: tuple[list[int], list[int]]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"step_id": 1, "source": "user", "message": "go"}]
    for index, (prompt, completion) in enumerate(calls):
        metrics = {
            "prompt_token_ids": prompt,
            "completion_token_ids": completion,
            "logprobs": [-0.5 - index] * len(completion),
        }
        steps.append({"step_id": index + 2, "source": "agent", "message": "m", "metrics": metrics})
    agent = {"name": "a", "version": "1"}
    return {
        "schema_version": "ATIF-v1.8",
        "session_id": "s",
        "agent": agent,
        "steps": steps,
        "extra": {"reward": 1},
    }


def test_atif_ids_and_logprobs_as_they_are(store: Store, tmp_path: Path, heard: Listener) -> None:
    pytest.importorskip("atif", reason="needs the extra demo")
    path = tmp_path / "t.json"
    path.write_text(json.dumps(atif(([5, 6], [7]), ([5, 6, 7, 8], [9, 10]), ([5, 99], [3])), indent=1))
    summary = import_file(store, path, heard)
    assert (summary.sessions, summary.steps, summary.segments) == (1, 3, 2)
    batch = store.run("default").claim(10)
    data = batch.fetch(["token_ids", "logprobs"])
    found = dict(
        zip(
            batch.table["segment_index"].to_pylist(),
            zip(data["token_ids"], data["logprobs"], strict=True),
            strict=True,
        )
    )
    batch.release()
    assert found[0][0].tolist() == [5, 6, 7, 8, 9, 10]
    assert found[0][1].tolist() == [0, 0, -0.5, 0, -1.5, -1.5]
    assert found[1][0].tolist() == [5, 99, 3]
    assert found[1][1].tolist() == [0, 0, -2.5]


# -- with a model ----------------------------------------------------------------------------------


def test_a_model_adds_its_routing(store: Store, tmp_path: Path, heard: Listener) -> None:
    pytest.importorskip("transformers", reason="needs the extra demo")
    from arrow_tq.demo.model import ModelShape, RecordedModel

    kept = tmp_path / "tokenizer.json"
    path = lines(tmp_path / "in.jsonl", chat(0, 0), chat(0, 1, turns=4))
    import_file(store, path, heard, ImportPlan(model=True, seed=3, save_tokenizer=kept))
    model = RecordedModel(ModelShape(vocabulary=ChatTokenizer.load(kept).vocabulary), seed=3)
    batch = store.run("default").claim(10)
    data = batch.fetch(FIELDS)
    for index, tokens in enumerate(batch.table["num_tokens"].to_pylist()):
        experts, ids = data["routed_experts"][index], data["token_ids"][index]
        assert experts.shape == (tokens - 1, 4, 4)
        (fed,) = model.start().feed(ids[:-1])
        np.testing.assert_array_equal(experts, fed.experts)
        sampled = data["logprobs"][index] != 0
        assert sampled.sum() == batch.table["loss_tokens"][index].as_py()
        expected = model.logprobs(fed.states, ids[1:])
        np.testing.assert_allclose(data["logprobs"][index][1:][sampled[1:]], expected[sampled[1:]], atol=1e-5)
    batch.release()


# -- the shared file -------------------------------------------------------------------------------


@pytest.mark.skipif(
    not TAU_BENCH.exists(), reason=f"{TAU_BENCH} is missing (ARROW_TQ_SHARED names its folder)"
)
def test_tau_bench_airline(store: Store, heard: Listener) -> None:
    summary = import_file(store, TAU_BENCH, heard)
    assert (summary.sessions, summary.steps, summary.segments, summary.bad) == (200, 2454, 200, 0)
    row = store.sql(
        "SELECT avg(reward) AS reward, count(DISTINCT group_id) AS groups, sum(num_tokens)::BIGINT AS tokens,"
        " min(num_tokens) AS least FROM segments"
    ).to_pylist()[0]
    assert row["reward"] == pytest.approx(0.42)
    assert (row["groups"], row["tokens"]) == (50, summary.tokens)
    assert store.sql("SELECT count(*) AS n FROM steps WHERE status = 'committed'")["n"].to_pylist() == [2454]
