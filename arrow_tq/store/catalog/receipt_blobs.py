"""A step's receipts as bytes: what its row keeps of them, about 40 bytes a chunk.

Little-endian. u8 version, u16 receipts; each receipt: u8 length and UTF-8 of the field, u64 start, u64
rows, u32 chunks; each chunk: 16 bytes id, u32 rows, u64 bytes, u16 layer groups, u32 runs of valid rows
(all ones: every row is), each two u32. Run and epoch are the step's own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from arrow_tq_schemas.errors import MalformedMessage
from arrow_tq_schemas.receipts import Receipt, StoredChunk, trusted_receipt
from arrow_tq_schemas.trusted import trusted

_VERSION = 1
_HEAD = struct.Struct("<BH")
_RECEIPT = struct.Struct("<QQI")
_CHUNK = struct.Struct("<16sIQHI")
_RUN = struct.Struct("<II")
_EVERY_ROW = 0xFFFFFFFF
RECEIPTS_MAX = (1 << 16) - 1


def encode_receipts(receipts: Sequence[Receipt]) -> bytes:
    """Raises ``MalformedMessage`` for more than ``RECEIPTS_MAX`` receipts."""
    if len(receipts) > RECEIPTS_MAX:
        raise MalformedMessage(f"{len(receipts)} receipts in a step: at most {RECEIPTS_MAX}")
    parts = [_HEAD.pack(_VERSION, len(receipts))]
    for receipt in receipts:
        name = receipt.field.encode()
        parts += (bytes([len(name)]), name, _RECEIPT.pack(receipt.start, receipt.rows, len(receipt.chunks)))
        for chunk in receipt.chunks:
            runs = chunk.valid
            count = _EVERY_ROW if runs is None else len(runs)
            parts.append(_CHUNK.pack(bytes.fromhex(chunk.id), chunk.rows, chunk.bytes, chunk.groups, count))
            parts += [_RUN.pack(first, end) for first, end in runs or ()]
    return b"".join(parts)


def decode_receipts(blob: bytes, run: str, epoch: int) -> list[Receipt]:
    """The receipts, without validating again what was validated when it was stored."""
    version, count = _HEAD.unpack_from(blob)
    if version != _VERSION:
        raise MalformedMessage(f"receipts of version {version}, expected {_VERSION}")
    place, receipts = _HEAD.size, []
    for _ in range(count):
        size = blob[place]
        field = blob[place + 1 : place + 1 + size].decode()
        start, rows, chunk_count = _RECEIPT.unpack_from(blob, place + 1 + size)
        place += 1 + size + _RECEIPT.size
        position, chunks = start, []
        for _ in range(chunk_count):
            raw, chunk_rows, bytes_, groups, runs = _CHUNK.unpack_from(blob, place)
            place += _CHUNK.size
            valid = None
            if runs != _EVERY_ROW:
                valid = [_RUN.unpack_from(blob, place + _RUN.size * index) for index in range(runs)]
                place += _RUN.size * runs
            chunks.append(
                trusted(
                    StoredChunk,
                    {
                        "id": raw.hex(),
                        "start": position,
                        "rows": chunk_rows,
                        "bytes": bytes_,
                        "groups": groups,
                        "valid": valid,
                    },
                )
            )
            position += chunk_rows
        receipts.append(trusted_receipt(run, epoch, field, start, rows, chunks))
    return receipts
