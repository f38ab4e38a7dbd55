"""Declaring runs, epochs."""

from __future__ import annotations

import pytest

from arrow_tq import Task, errors, fields
from arrow_tq.interface import Store
from arrow_tq.testing.rollouts import declared_fields
from arrow_tq.testing.scenes import open_run


class RunConformance:
    """Declaring runs, epochs."""

    def test_a_run_is_declared_once_and_opened_by_name(self, store: Store) -> None:
        run = open_run(store, tasks=(Task("actor"), Task("critic", fields=["token_ids"])))
        again = store.run("demo")
        assert again.fields == run.fields == {field.name: field for field in declared_fields()}
        assert list(again.tasks) == ["actor", "critic"]
        assert again.tasks["critic"].fields == ("token_ids",)

    def test_opening_a_run_that_does_not_exist_names_it(self, store: Store) -> None:
        with pytest.raises(errors.NotFound, match="nowhere") as caught:
            store.run("nowhere")
        assert isinstance(caught.value, KeyError)

    def test_another_declaration_is_a_conflict_that_names_the_field(self, store: Store) -> None:
        open_run(store)
        with pytest.raises(errors.Conflict, match="logprobs"):
            store.run("demo", fields=[fields.token_ids(), fields.logprobs(dtype="float16")])
        assert store.run("demo").field("logprobs").dtype == "float32"

    def test_an_epoch_fences_older_writers(self, store: Store) -> None:
        old = open_run(store)
        session = old.session("s")
        new = store.run("demo", epoch=old.epoch + 1)
        with pytest.raises(errors.StaleEpoch), session.step() as step:
            step.put("token_ids", [1, 2], start=0)
        with pytest.raises(errors.StaleEpoch):
            session.finalize()
        assert new.sql("SELECT count(*) AS n FROM steps").column("n").to_pylist() == [0]
        with pytest.raises(errors.StaleEpoch):
            store.run("demo", epoch=old.epoch)
        with new.session("s").step() as step:
            step.put("token_ids", [1, 2], start=0)
