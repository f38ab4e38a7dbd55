"""Runs, epochs, requests, and where the file may be."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from arrow_tq.store.catalog import Catalog, CatalogConfig
from arrow_tq.store.catalog.filesystem import refuse_network_filesystem
from arrow_tq.store.catalog.schema import MIGRATIONS
from arrow_tq_schemas import errors
from arrow_tq_schemas.commands import (
    CloseGroup,
    Done,
    OpenRun,
    OpenSession,
    RunInfo,
    SetPolicyVersion,
    TaskSpec,
)
from arrow_tq_schemas.fields import Field
from tests.catalog_scenes import FIELDS, Scene


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path / "catalog.sqlite")
    yield scene
    scene.catalog.close()


class TestDeclaring:
    def test_a_run_is_created_once_and_survives(self, scene: Scene) -> None:
        made = scene.run()
        assert [task.name for task in made.tasks] == ["train"]
        assert (made.epoch, made.durability) == (0, "process")
        scene.reopen()
        again = scene.catalog.execute(OpenRun(run="demo")).body
        assert again == made == scene.catalog.run_info("demo")
        assert [row["run"] for row in scene.rows("runs")] == ["demo"]

    def test_a_missing_run_is_named_with_those_that_exist(self, scene: Scene) -> None:
        with pytest.raises(errors.NotFound, match=r"'nowhere' does not exist; there is none"):
            scene.catalog.execute(OpenRun(run="nowhere"))
        scene.run("one")
        with pytest.raises(errors.NotFound, match=r"'nowhere' does not exist; there are one"):
            scene.catalog.run_info("nowhere")

    def test_other_declarations_name_the_first_difference(self, scene: Scene) -> None:
        scene.run(tasks=[TaskSpec(name="actor")])
        other = [FIELDS[0], Field("logprobs", "float64", domain="sampled", fill=0.0), FIELDS[2]]
        with pytest.raises(errors.Conflict, match=r"field 'logprobs'.*float32.*float64"):
            scene.run(fields=other)
        with pytest.raises(errors.Conflict, match=r"field 'routed_experts'.*now as absent"):
            scene.run(fields=FIELDS[:2])
        with pytest.raises(errors.Conflict, match=r"task 'actor'.*now as absent"):
            scene.run(tasks=[TaskSpec(name="critic")])
        with pytest.raises(errors.Conflict, match="durability 'process'"):
            declared = [field.to_json() for field in FIELDS]
            scene.catalog.execute(OpenRun(run="demo", fields=declared, durability="disk"))
        assert scene.run().tasks == [TaskSpec(name="actor")]

    def test_what_cannot_be_declared(self, scene: Scene) -> None:
        with pytest.raises(errors.InvalidField, match="'token_ids' is declared twice"):
            scene.run(fields=[FIELDS[0], FIELDS[0]])
        with pytest.raises(errors.InvalidField, match=r"task 'actor' reads nothing"):
            scene.run(tasks=[TaskSpec(name="actor", fields=["nothing"])])
        with pytest.raises(errors.InvalidInput, match="task 'a' is declared twice"):
            scene.run(tasks=[TaskSpec(name="a"), TaskSpec(name="a")])
        with pytest.raises(errors.InvalidInput, match=r"run '\.\./x'"):
            scene.run("../x")
        with pytest.raises(errors.InvalidField, match="0 fields"):
            scene.run(fields=[])
        assert scene.rows("runs") == []
        assert scene.catalog.revision() == 0, "a transaction of failures is not committed"


class TestEpochs:
    def test_the_epoch_advances_by_one_and_fences_older_writers(self, scene: Scene) -> None:
        assert scene.run().epoch == 0
        assert scene.run(epoch=1).epoch == 1
        assert scene.run(epoch=1).epoch == 1
        assert scene.run().epoch == 1
        with pytest.raises(errors.StaleEpoch, match=r"at epoch 1: epoch 3"):
            scene.run(epoch=3)
        with pytest.raises(errors.StaleEpoch, match=r"at epoch 1: epoch 0"):
            scene.run(epoch=0)
        with pytest.raises(errors.StaleEpoch, match=r"at epoch 1: a writer of epoch 0"):
            scene.session("s", epoch=0)
        scene.session("s", epoch=1)
        with pytest.raises(errors.Conflict, match="not yet at 9"):
            scene.session("t", epoch=9)
        with pytest.raises(errors.StaleEpoch, match="epoch 0"):
            scene.commit(scene.step("s", "one", epoch=0))
        assert [row["session_id"] for row in scene.rows("sessions")] == ["s"]
        assert scene.rows("steps") == []

    def test_receipts_of_an_older_epoch_are_refused(self, scene: Scene) -> None:
        scene.run(epoch=1)
        scene.session("s", epoch=1)
        stale = scene.receipt(epoch=0)
        with pytest.raises(errors.StaleEpoch, match="receipt for 'token_ids' is of epoch 0"):
            scene.commit(scene.step("s", "one", stale, epoch=1))
        assert scene.pins.pinned == set()

    def test_policy_versions_are_shown(self, scene: Scene) -> None:
        scene.run()
        scene.catalog.execute(SetPolicyVersion(run="demo", epoch=0, version="7"))
        assert scene.catalog.run_info("demo").policy_version == "7"
        assert [row["policy_version"] for row in scene.rows("runs")] == ["7"]


class TestRequests:
    def test_a_retried_request_is_answered_and_not_applied(self, scene: Scene) -> None:
        command = OpenRun(run="demo", fields=[field.to_json() for field in FIELDS], epoch=1)
        first = scene.catalog.execute(command)
        revision = scene.catalog.revision()
        scene.run(epoch=2)
        assert scene.catalog.execute(command) == first
        assert isinstance(first.body, RunInfo)
        assert first.body.epoch == 1
        assert scene.catalog.run_info("demo").epoch == 2
        close = CloseGroup(run="demo", epoch=2, group="g")
        assert scene.catalog.execute(close).body == Done(count=1)
        assert scene.catalog.execute(close).body == Done(count=1)
        assert scene.catalog.execute(CloseGroup(run="demo", epoch=2, group="g")).body == Done(count=0)
        assert scene.catalog.revision() > revision

    def test_an_id_used_for_another_command_is_a_conflict(self, scene: Scene) -> None:
        scene.run()
        done = CloseGroup(run="demo", epoch=0, group="g")
        scene.catalog.execute(done)
        other = OpenSession(run="demo", epoch=0, session_id="s", request_id=done.request_id)
        with pytest.raises(errors.Conflict, match="was used for close_group, now for open_session"):
            scene.catalog.execute(other)

    def test_a_reply_that_an_earlier_version_stored_is_found(self, scene: Scene) -> None:
        scene.run()
        command = OpenSession(run="demo", epoch=0, session_id="s", group="g")
        told = scene.catalog.execute(command).body
        scene.catalog.close()
        with apsw.Connection(str(scene.path)) as connection:
            key = hashlib.blake2b(f"{command.request_id}:demo".encode(), digest_size=16).digest()
            connection.execute("UPDATE requests SET request_id = ? WHERE verb = 'open_session'", (key,))
            connection.execute("UPDATE sessions SET group_id = 'other'")
        scene.reopen()
        assert scene.catalog.execute(command).body == told

    def test_a_refused_request_is_not_remembered(self, scene: Scene) -> None:
        command = OpenSession(run="demo", epoch=0, session_id="s")
        with pytest.raises(errors.NotFound):
            scene.catalog.execute(command)
        scene.run()
        scene.catalog.execute(command)
        assert len(scene.rows("sessions")) == 1

    def test_replies_are_pruned(self, tmp_path: Path) -> None:
        scene = Scene(tmp_path / "short.sqlite", request_ttl_s=0.01)
        scene.run()
        close = CloseGroup(run="demo", epoch=0, group="g")
        scene.catalog.execute(close)
        import time

        time.sleep(0.05)
        scene.catalog.maintain()
        assert scene.catalog.execute(close).body == Done(count=0), "forgotten, so applied anew"
        scene.catalog.close()

    def test_text_that_is_no_unicode_is_refused(self, scene: Scene) -> None:
        scene.run()
        with pytest.raises(errors.InvalidInput, match="lone surrogate"):
            scene.catalog.execute(CloseGroup(run="\ud800", epoch=0, group="g"))
        with pytest.raises(errors.InvalidInput, match="lone surrogate"):
            scene.catalog.execute(CloseGroup(run="demo", epoch=0, group="g\ud800"))


class TestFile:
    def test_a_network_filesystem_is_refused_with_its_mount(self, tmp_path: Path) -> None:
        mounts = tmp_path / "mounts"
        place = tmp_path / "with blank"
        place.mkdir()
        escaped = str(place).replace(" ", "\\040")
        for kind in ("nfs4", "cifs", "fuse.sshfs"):
            mounts.write_text(f"/dev/x / ext4 rw 0 0\nhost:/x {escaped} {kind} rw 0 0\n")
            with pytest.raises(errors.Unsupported, match=rf"{kind} filesystem mounted at .*with blank"):
                refuse_network_filesystem(place / "catalog.sqlite", mounts)
            refuse_network_filesystem(tmp_path / "catalog.sqlite", mounts)
        mounts.write_text(f"host:/x / nfs rw 0 0\n/dev/x {escaped} ext4 rw 0 0\n")
        refuse_network_filesystem(place / "catalog.sqlite", mounts)

    def test_a_file_of_a_newer_version_is_refused(self, tmp_path: Path) -> None:
        scene = Scene(tmp_path / "catalog.sqlite")
        scene.catalog.close()
        connection = apsw.Connection(str(scene.path))
        connection.pragma("user_version", 99)
        connection.close()
        with pytest.raises(errors.Unsupported, match="has version 99"):
            scene.open()

    def test_a_disk_run_makes_commits_wait_for_the_disk(self, scene: Scene) -> None:
        def level() -> object:
            return scene.catalog._writer._connection.pragma("synchronous")

        scene.run("plain")
        assert level() == 1
        declared = [field.to_json() for field in FIELDS]
        scene.catalog.execute(OpenRun(run="safe", fields=declared, durability="disk"))
        assert level() == 2
        scene.reopen()
        scene.run("later")
        assert level() == 2

    def test_a_closed_catalog_says_so(self, tmp_path: Path) -> None:
        scene = Scene(tmp_path / "catalog.sqlite")
        scene.run()
        scene.catalog.close()
        scene.catalog.close()
        with pytest.raises(errors.Unavailable, match="closed"):
            scene.session("s")
        with pytest.raises(errors.Unavailable, match="closed"):
            scene.catalog.revision() and scene.catalog.gauges()

    def test_settings_are_checked(self, tmp_path: Path) -> None:
        with pytest.raises(errors.InvalidInput, match="queue_max 0"):
            CatalogConfig(path=tmp_path / "x", queue_max=0)

    def test_readers_are_bounded(self, tmp_path: Path) -> None:
        scene = Scene(tmp_path / "catalog.sqlite", readers_max=1, reader_wait_s=0.05)
        scene.run()
        with scene.catalog._readers.snapshot(), pytest.raises(errors.Busy, match="readers_max 1"):
            scene.catalog.chunk_states([])
        assert scene.catalog.chunk_states([]) == []
        scene.catalog.close()


def test_the_catalog_is_what_the_package_exports() -> None:
    from arrow_tq.store import catalog

    assert catalog.__all__ == ["Catalog", "CatalogConfig", "CatalogGauges", "ChunkPins"]
    assert catalog.Catalog is Catalog


def test_a_file_of_an_older_version_becomes_the_current_one(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    old = apsw.Connection(str(path))
    for number, text in enumerate(MIGRATIONS[:2], 1):
        old.execute(text)
        old.execute(f"PRAGMA user_version = {number}")
    old.execute("UPDATE state SET rev = 7")
    old.execute("INSERT INTO runs VALUES (1, 'demo', 'process', 0, '[]', '[]', NULL, 1, 1)")
    old.execute(
        "INSERT INTO claims VALUES (1, 'c', 1, 'train', 'lineage', 3, 60, 9000000000000000, 'active', NULL,"
        " 1)"
    )
    old.close()
    scene = Scene(path)
    (row,) = scene.rows("claims")
    assert (row["claim_id"], row["segments"], row["state"], row["rev"]) == ("c", 3, "active", 7)
    assert scene.rows("marks") == []
    scene.catalog.close()
