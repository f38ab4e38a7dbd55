"""DoPut and DoGet between processes over TCP, against a bare pyarrow Flight server."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.flight as fl

import arrow_tq
from arrow_tq import fields
from arrow_tq.client import ClientOptions
from arrow_tq.runs import Run
from arrow_tq_schemas.chunks import to_array
from benchmarks import servers
from benchmarks.report import Row, against, interleaved, rate
from benchmarks.sizes import EXPERTS, LAYERS, TOPK, Sizes, routing

CHANNEL_OPTIONS = [
    ("grpc.http2.max_frame_size", 16_777_215),
    ("grpc.http2.lookahead_bytes", 2 << 20),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]
"""The best that bare Flight was seen to do; our client uses the same."""


WIRE = ClientOptions(same_host=False)


def rows(sizes: Sizes) -> list[Row]:
    """Put and get of the same pieces through both servers, in turns."""
    random = np.random.default_rng(0)
    shape = (sizes.piece_tokens, LAYERS, TOPK)
    pieces = [random.integers(0, EXPERTS, shape, dtype=np.uint8) for _ in range(2)]
    source = [pieces[index % 2] for index in range(sizes.wire_pieces)]
    with servers.ours() as url, servers.bare() as bare_url, arrow_tq.connect(url, options=WIRE) as store:
        run = store.run("bench", fields=[fields.token_ids(), routing()])
        putter = Putter(run, source)
        bare = Bare(bare_url, source)
        put, bare_put = interleaved(sizes.rounds, [putter, bare.put], sizes.pause_s)
        getter = Getter(run, source)
        get, bare_get = interleaved(sizes.rounds, [getter, bare.get])
        getter.check()
        return [
            against("DoPut over TCP, to bare Flight", put, bare_put, "GB/s", 0.90),
            against("DoGet over TCP, to bare Flight", get, bare_get, "GB/s", 0.90),
        ]


class Putter:
    """One session a round, aborted outside the timing."""

    def __init__(self, run: Run, source: list[npt.NDArray[np.uint8]]) -> None:
        self._run, self._source, self._round = run, source, 0

    def __call__(self) -> float:
        self._round += 1
        session = self._run.session(f"put-{self._round}")
        step = session.step()

        def work() -> None:
            place = 0
            for piece in self._source:
                step.put("routed_experts", piece, start=place)
                place += len(piece)
            step.commit()

        figure = rate(sum(piece.nbytes for piece in self._source) / 1e9, work)
        session.abort()
        return figure


class Getter:
    """Fetches one claimed segment into the same buffer each round."""

    def __init__(self, run: Run, source: list[npt.NDArray[np.uint8]]) -> None:
        tokens = sum(map(len, source))
        session = run.session("get")
        with session.step() as step:
            step.put("token_ids", np.zeros(tokens + 1, np.int32), start=0)
            place = 0
            for piece in source:
                step.put("routed_experts", piece, start=place)
                place += len(piece)
        session.finalize()
        self._batch = run.claim(1)
        self._source = source
        self._out = np.ones((tokens + 1, LAYERS, TOPK), np.uint8)

    def __call__(self) -> float:
        size = sum(piece.nbytes for piece in self._source) / 1e9
        return rate(size, lambda: self.fetch(self._out))

    def fetch(self, out: npt.NDArray[np.generic]) -> None:
        self._batch.fetch("routed_experts", out={"routed_experts": out})

    def check(self) -> None:
        if not np.array_equal(self._out[:-1], np.concatenate(self._source)):
            raise AssertionError("what was read is not what was written")


class Bare:
    """The same bytes in the same pieces through plain Flight, with the same channel options."""

    def __init__(self, url: str, source: list[npt.NDArray[np.uint8]]) -> None:
        self._client = fl.connect(url, generic_options=CHANNEL_OPTIONS)
        self._source = source
        self._schema = routing().arrow_schema()
        self._out = np.ones((sum(map(len, source)), LAYERS, TOPK), np.uint8)

    def put(self) -> float:
        kind = self._schema.field(0).type
        batches = [
            pa.RecordBatch.from_arrays([to_array(piece, None, kind)], schema=self._schema)
            for piece in self._source
        ]

        def work() -> None:
            descriptor = fl.FlightDescriptor.for_path("bare")
            writer, reader = self._client.do_put(descriptor, self._schema)
            for index, batch in enumerate(batches):
                writer.write_with_metadata(batch, b"ack" if index == len(batches) - 1 else b"")
            reader.read()
            writer.close()

        return rate(self._out.nbytes / 1e9, work)

    def get(self) -> float:
        def work() -> None:
            place = 0
            for chunk in self._client.do_get(fl.Ticket(b"bare")):
                values = chunk.data.column(0).to_numpy_ndarray() if chunk.data.num_rows else None
                if values is not None:
                    self._out[place : place + len(values)] = values
                    place += len(values)

        return rate(self._out.nbytes / 1e9, work)
