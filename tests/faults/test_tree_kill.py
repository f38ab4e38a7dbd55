"""SIGKILL of a process that grows a tree: another one resumes the rollout under a newer version."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import arrow_tq
from tests.warm import WarmProcess

WRITER = """
import json, sys
import numpy as np
import arrow_tq
from arrow_tq import fields

store = arrow_tq.open(sys.argv[1], capacity_bytes=256 << 20)
run = store.run("demo", fields=[fields.token_ids(), fields.logprobs()])
session = run.session("s", ttl_s=3600)
live, number = [""], 0
while True:
    # Branch from an earlier step now and then, retry one, abandon one.
    kind = ("step", "step", "branch", "step", "retry", "abandon")[number % 6]
    name, parent = f"n{number}", live[-1]
    ends = {"": 0} if number == 0 else ends
    try:
        if kind == "abandon":
            session.abandon(live[-1])
            note = {"abandoned": live.pop()}
        else:
            more = {"parent": live[len(live) // 2] if kind == "branch" else parent}
            if kind == "retry":
                more = {"retry_of": f"lost-{number}", "parent": parent}
            start = ends[more["parent"]]
            rows = np.arange(3, dtype=np.int32) + 10 * number
            with session.step(id=name, sampled=(start, start + 3), version="1", **more) as step:
                step.put("token_ids", rows, start=start)
                step.put("logprobs", -rows.astype(np.float32), start=start)
            ends[name] = start + 3
            live.append(name)
            note = {"step": name, "parent": more["parent"], "tokens": rows.tolist()}
    except Exception as error:
        note = {"error": repr(error)}
    print(json.dumps(note), flush=True)
    number += 1
"""


@pytest.mark.parametrize("acks", [5, 23])
def test_a_tree_outlives_its_writer(tmp_path: Path, acks: int) -> None:
    with WarmProcess("-c", WRITER, str(tmp_path / "store")) as writer:
        notes = [json.loads(writer.stdout.readline()) for _ in range(acks)]
        writer.kill()
        notes += [json.loads(line) for line in writer.stdout.read().splitlines() if line.endswith("}")]
    assert not [note for note in notes if "error" in note]
    steps = {note["step"]: note for note in notes if "step" in note}
    gone = {note["abandoned"] for note in notes if "abandoned" in note}
    with arrow_tq.open(tmp_path / "store", capacity_bytes=256 << 20) as store:
        run = store.run("demo")
        table = run.sql("SELECT step_id, parent_id, status FROM steps").to_pylist()
        stored = {row["step_id"]: row for row in table}
        for name, step in steps.items():
            assert stored[name]["parent_id"] == (step["parent"] or None)
            assert stored[name]["status"] == "abandoned" or name not in gone
        session = run.session("s")
        last = session.last_step
        assert last is not None and stored[last]["status"] == "committed"
        end = session.ends["token_ids"]
        with session.step(id="resumed", sampled=(end, end + 2), version="2") as step:
            step.put("token_ids", [7, 7], start=end)
            step.put("logprobs", [-7.0, -7.0], start=end)
        counted = [row["step_id"] for row in table if row["status"] == "committed"]
        for view in ("lineage", "timeline"):
            segments = session.finalize(view)
            assert sum(one.loss_tokens for one in segments) == 3 * len(counted) + 2
        (row,) = run.sql("SELECT * FROM segments WHERE version_max = '2' AND view = 'lineage'").to_pylist()
        timeline = run.claim(1000, view="timeline")
        batch = run.claim(1000)
        data = batch.fetch(["token_ids", "logprobs"])
        index = batch.segment_ids.index(row["segment_id"])
        assert data["token_ids"][index][end:].tolist() == [7, 7]
        np.testing.assert_array_equal(data["logprobs"][index], -data["token_ids"][index].astype(np.float32))
        at: str | None = last
        while at is not None:
            if at in steps:
                end_of = data["token_ids"][index][:end]
                assert end_of[-3:].tolist() == steps[at]["tokens"]
            end, at = end - 3, stored[at]["parent_id"]
        batch.release()
        timeline.fetch("logprobs")
        timeline.release()
        assert run.sql("SELECT DISTINCT state FROM chunks").column(0).to_pylist() == ["released"]
