"""Plain sessions: the short way gives what the long one gives."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from arrow_tq.intervals import domain_ranges
from arrow_tq.store.compose import TreeStep, _compose
from arrow_tq.store.compose_plain import CHUNKS_MAX, STEPS_MAX, plain_segment
from arrow_tq_schemas import ChunkId, Field, Receipt, StoredChunk
from arrow_tq_schemas.manifests import Manifest

FIELDS = (
    Field("token_ids", "int32"),
    Field("kept", "int32", overlay="first"),
    Field("logprobs", "float32", domain="sampled", fill=0.0),
    Field("experts", "uint8", shape=(2,), domain="forwarded", overlay="first"),
)
DECLARED = {field.name: field for field in FIELDS}


@st.composite
def sessions(draw: st.DrawFn) -> list[TreeStep]:
    """Steps that mostly go on where those before ended, with gaps and now and then a step back."""
    steps: list[TreeStep] = []
    ends = dict.fromkeys(DECLARED, 0)
    sampled_to = 0
    count = 0
    for index in range(draw(st.integers(1, 5))):
        receipts = []
        for field in draw(st.lists(st.sampled_from(FIELDS), unique=True)):
            start = position = max(ends[field.name] + draw(st.sampled_from([0, 0, 0, 1, 4, -2])), 0)
            chunks = []
            for rows in draw(st.lists(st.integers(1, 6), max_size=2)):
                count += 1
                name = ChunkId.make(count * 7919 % 1000 + 1, 0, 0, count).hex
                valid = draw(st.sampled_from([None, None, None, [(0, 1)]]))
                chunks.append(StoredChunk(id=name, start=position, rows=rows, bytes=rows, valid=valid))
                position += rows
            ends[field.name] = max(ends[field.name], position)
            receipts.append(
                Receipt(run="r", epoch=0, field=field.name, start=start, rows=position - start, chunks=chunks)
            )
        first = max(sampled_to + draw(st.sampled_from([0, 0, 2, -1])), 0)
        sampled = draw(st.sampled_from([None, (first, first + draw(st.integers(0, 9)))]))
        sampled_to = sampled_to if sampled is None else sampled[1]
        version = draw(st.sampled_from([None, "1", "2"]))
        steps.append(TreeStep(f"s{index}", index - 1, sampled, version, None, None, receipts))
    return steps


def spelled(manifest: Manifest) -> tuple[object, ...]:
    """All of a manifest, the bytes that are stored included."""
    ranges = (manifest.sampled.tolist(), manifest.loss.tolist(), list(manifest.versions))
    return (manifest.num_tokens, *ranges, *manifest.parts())


@given(sessions(), st.sampled_from(["lineage", "timeline"]))
def test_the_short_way_gives_what_the_long_one_gives(steps: list[TreeStep], view: str) -> None:
    found = plain_segment(steps, DECLARED, "s~0")
    (expected,) = _compose(steps, DECLARED, lambda index: f"s~{index}", view)
    if found is not None:
        manifest, complete = found
        assert spelled(manifest) == spelled(expected.manifest)
        assert complete == expected.complete_fields


def test_an_ordinary_session_takes_it() -> None:
    steps = []
    for index in range(STEPS_MAX + 1):
        chunks = [
            StoredChunk(id=ChunkId.make(1, 0, 0, 3 * index + place).hex, start=4 * index, rows=4, bytes=4)
            for place in range(3)
        ]
        names = ("token_ids", "logprobs", "experts")
        receipts = [
            Receipt(run="r", epoch=0, field=name, start=4 * index, rows=4, chunks=[chunk])
            for name, chunk in zip(names, chunks, strict=True)
        ]
        steps.append(
            TreeStep(f"s{index}", index - 1, (4 * index + 1, 4 * index + 4), "1", None, None, receipts)
        )
    assert 3 * STEPS_MAX <= CHUNKS_MAX
    found = plain_segment(steps[:-1], DECLARED, "s~0")
    assert found is not None
    manifest, complete = found
    assert complete == ("token_ids", "logprobs", "experts")
    assert manifest.num_tokens == 4 * STEPS_MAX
    assert len(manifest.owned) == 3 * STEPS_MAX
    shown = manifest.spans["logprobs"]
    domain = domain_ranges(DECLARED["logprobs"], manifest.num_tokens, manifest.sampled)
    assert np.array_equal(np.stack([shown["start"], shown["start"] + shown["rows"]], axis=1), domain)
    assert plain_segment(steps, DECLARED, "s~0") is None
