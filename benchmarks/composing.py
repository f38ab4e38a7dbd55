"""Segments out of receipts: a million spans composed, and the manifest of a trajectory of gigabytes."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import namedtuple
from pathlib import Path

import numpy as np

from arrow_tq import fields
from arrow_tq.interface import Store
from arrow_tq.runs import Run
from arrow_tq.store import Engine, EngineConfig
from arrow_tq.store.compose import TreeStep, compose
from arrow_tq_schemas.receipts import Receipt
from benchmarks.report import Row, ceiling, floor
from benchmarks.sizes import FULL, Sizes

BOUND_S = 1.0
MANIFEST_BYTES, REFERENCE_BYTES = 8 << 10, 256
INDEXER_LAYERS, INDEXER_TOPK = 12, 2048
GROUPS = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
"""A quarter of the layers a pipeline stage."""
CHUNK_BYTES = 10_000_000
TURNS = 12

_Stored = namedtuple("_Stored", "id start rows valid")
"""A chunk of a receipt; built in millions, so no model that validates."""


def rows(sizes: Sizes) -> list[Row]:
    """Metadata's own cost."""
    return [_composing(sizes), *_manifest(sizes)]


def _composing(sizes: Sizes) -> Row:
    """One segment of that many chunks, each written by itself."""
    steps = list(_steps(sizes.spans))
    declared = [fields.token_ids()]
    times = []
    for _ in range(min(sizes.rounds, 5)):
        started = time.perf_counter()
        (segment,) = compose(steps, declared, str)
        times.append(time.perf_counter() - started)
    if len(segment.manifest.spans["token_ids"]) != sizes.spans:
        raise AssertionError("spans were lost")
    bound = sizes.spans / BOUND_S
    return floor("compose spans, to 1e6 in 1 s", sizes.spans / statistics.median(times), "spans/s", bound)


def _steps(spans: int) -> list[TreeStep]:
    """Turns of as many chunks of one row each."""
    turns = min(100, spans)
    count = spans // turns
    found = []
    for turn in range(turns):
        first = turn * count
        chunks = [
            _Stored(f"{first + index + (7 << 76):032x}", first + index, 1, None) for index in range(count)
        ]
        receipt = Receipt.model_construct(
            v=1, run="r", epoch=0, field="token_ids", start=first, rows=count, chunks=chunks
        )
        sampled = (first, first + count)
        found.append(TreeStep(str(turn), turn - 1, sampled, None, None, None, [receipt]))
    return found


def _manifest(sizes: Sizes) -> list[Row]:
    """A trajectory of sparse-attention positions, really stored; what describes it, and what travels."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        config = EngineConfig(data_dir=Path(folder) / "data", capacity_bytes=8 << 30, soft_mark=1.0)
        with Store(Engine(config)) as store:
            field = fields.indexer_topk(INDEXER_LAYERS, INDEXER_TOPK, layer_groups=GROUPS)
            run = store.run("long", fields=[fields.token_ids(), field])
            segment_id = _write(run, sizes.long_tokens, field.row_bytes)
            (manifest,) = run.claim(1).manifests()
            size = sizes.long_tokens * field.row_bytes
    if sizes.long_tokens == FULL.long_tokens and size < 3.7e9:
        raise AssertionError(f"{size} bytes are not the trajectory that is meant")
    return [
        ceiling("manifest of a long trajectory", len(manifest.encode()), "bytes", MANIFEST_BYTES),
        ceiling("what travels with the sample: its segment id", len(segment_id), "bytes", REFERENCE_BYTES),
    ]


def _write(run: Run, tokens: int, row_bytes: int) -> str:
    session = run.session("long")
    piece = CHUNK_BYTES // row_bytes + 1
    values = np.random.default_rng(0).integers(
        0, tokens, (piece, INDEXER_LAYERS, INDEXER_TOPK), dtype=np.int32
    )
    turn_tokens = tokens // TURNS
    for start in range(0, turn_tokens * TURNS, turn_tokens):
        end = start + turn_tokens
        with session.step(sampled=(start + turn_tokens // 2, end)) as step:
            step.put("token_ids", np.arange(start, end, dtype=np.int32), start=start)
            for first in range(start, end, piece):
                step.put("indexer_topk", values[: min(piece, end - first)], start=first)
    (segment,) = session.finalize()
    return segment.segment_id
