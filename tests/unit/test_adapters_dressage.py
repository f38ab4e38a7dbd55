"""Dressage's layouts: spans written out, hydrated again, and no zeros for what is missing."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from arrow_tq.adapters.dressage import Fragment, Layout, hydrate, layouts
from arrow_tq.adapters.replay import Switch
from arrow_tq_schemas.errors import Conflict, Hole, InvalidInput, MalformedMessage, NotFound
from tests.frameworks import LAYER_IDS, Scene, embedded


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = embedded(tmp_path)
    with made.store:
        yield made


def routing(scene: Scene, row: int = 0) -> Layout:
    return layouts(scene.batch, Switch.ROUTING, [row])[0]["routed_experts"]


def test_layouts_hydrate_to_what_was_written(scene: Scene) -> None:
    made = layouts(scene.batch, Switch.ROUTING)
    assert [sorted(one) for one in made] == [["logprobs", "routed_experts"]] * 5
    experts = hydrate(scene.batch.run, [one["routed_experts"] for one in made])
    logprobs = hydrate(scene.batch.run, [one["logprobs"] for one in made])
    for found, values, truth in zip(experts, logprobs, scene.truth, strict=True):
        np.testing.assert_array_equal(found, truth.experts)
        np.testing.assert_array_equal(values, truth.logprobs)
    some = hydrate(scene.batch.run, [made[3]["routed_experts"]], layers=(9, 1))
    chosen = [LAYER_IDS.index(9), LAYER_IDS.index(1)]
    np.testing.assert_array_equal(some[0], scene.truth[3].experts[:, chosen])
    assert hydrate(scene.batch.run, []) == []


def test_layouts_are_small_and_say_where_rows_go(scene: Scene) -> None:
    layout = routing(scene)
    assert len(pickle.dumps(layout)) < 2048
    assert layout.num_tokens == len(scene.truth[0].tokens)
    assert sum(one.length for one in layout.fragments) == layout.num_tokens - 1
    assert [one.target_start for one in layout.fragments] == sorted(
        one.target_start for one in layout.fragments
    )


def test_the_switch(scene: Scene) -> None:
    assert layouts(scene.batch, Switch.OFF) == [{}] * 5
    assert [sorted(one) for one in layouts(scene.batch, Switch.LOGPROBS, rows=[2])] == [["logprobs"]]


def test_fragments_may_come_cut_and_in_any_order(scene: Scene) -> None:
    layout = routing(scene)
    first = layout.fragments[0]
    assert first.length > 1
    cut = (
        Fragment(first.ref, first.source_start + 1, first.target_start + 1, first.length - 1),
        *layout.fragments[1:],
        Fragment(first.ref, first.source_start, first.target_start, 1),
    )
    found = hydrate(scene.batch.run, [replace(layout, fragments=cut)])
    np.testing.assert_array_equal(found[0], scene.truth[0].experts)


def test_what_is_missing_is_an_error(scene: Scene) -> None:
    layout = routing(scene)
    with pytest.raises(Hole, match="sample 1 has no layout"):
        hydrate(scene.batch.run, [layout, None])
    last = layout.fragments[-1]
    with pytest.raises(Hole, match=f"nobody wrote {last.length} of its positions: {last.target_start}"):
        hydrate(scene.batch.run, [replace(layout, fragments=layout.fragments[:-1])])
    with pytest.raises(Hole, match="its positions: 0"):
        hydrate(scene.batch.run, [replace(layout, fragments=())])
    with pytest.raises(Conflict, match="two fragments cover position"):
        hydrate(scene.batch.run, [replace(layout, fragments=(*layout.fragments, last))])
    with pytest.raises(Conflict, match="a fragment ends at"):
        hydrate(scene.batch.run, [replace(layout, num_tokens=last.target_start)])


def test_wrong_references_are_refused(scene: Scene) -> None:
    layout = routing(scene)
    other = layouts(scene.batch, Switch.LOGPROBS, [0])[0]["logprobs"]
    with pytest.raises(InvalidInput, match="expected those of one"):
        hydrate(scene.batch.run, [layout, other])
    first = layout.fragments[0]
    unknown = replace(first, ref=first.ref[:-4] + ("0000" if first.ref[-4:] != "0000" else "1111"))
    with pytest.raises(NotFound):
        hydrate(scene.batch.run, [replace(layout, fragments=(unknown, *layout.fragments[1:]))])
    with pytest.raises(MalformedMessage):
        hydrate(scene.batch.run, [replace(layout, fragments=(replace(first, ref="no id"),))])
    with pytest.raises(MalformedMessage, match="length 0"):
        Fragment("x", 0, 0, 0)
