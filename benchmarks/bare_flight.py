"""A bare pyarrow Flight server: what the wire can do when a store does nothing.

DoPut copies each batch once into memory whose pages exist already (a store must keep it somewhere) and
acks every batch that asks for it; DoGet gives record batches that are in memory.
"""

from __future__ import annotations

import mmap
import sys

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

KEEP_BYTES = 256 << 20


class BareServer(fl.FlightServerBase):
    """Keeps the batches of the last put."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self._area = np.frombuffer(mmap.mmap(-1, KEEP_BYTES), np.uint8)
        self._area[:] = 1
        self._place = 0
        self._batches: list[pa.RecordBatch] = []

    def do_put(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
        reader: fl.MetadataRecordBatchReader,
        writer: fl.FlightMetadataWriter,
    ) -> None:
        batches: list[pa.RecordBatch] = []
        for chunk in reader:
            batches.append(chunk.data)
            for buffer in chunk.data.column(0).storage.values.buffers():
                if buffer is None:
                    continue
                if self._place + buffer.size > KEEP_BYTES:
                    self._place = 0
                self._area[self._place : self._place + buffer.size] = np.frombuffer(buffer, np.uint8)
                self._place += buffer.size
            if chunk.app_metadata is not None and chunk.app_metadata.to_pybytes() == b"ack":
                writer.write(b"ok")
        self._batches = batches

    def do_get(self, context: fl.ServerCallContext, ticket: fl.Ticket) -> fl.RecordBatchStream:
        schema = self._batches[0].schema
        return fl.RecordBatchStream(pa.RecordBatchReader.from_batches(schema, self._batches))


def main() -> None:
    socket = sys.argv[1] if len(sys.argv) > 1 else None
    server = BareServer("grpc://127.0.0.1:0" if socket is None else f"grpc+unix://{socket}")
    url = f"grpc://127.0.0.1:{server.port}" if socket is None else f"grpc+unix://{socket}"
    print(f"bare serving {url}", flush=True)
    server.serve()


if __name__ == "__main__":
    main()
