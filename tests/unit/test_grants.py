"""Files that clients write: what is believed of them, what is refused, and when their memory comes back."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from arrow_tq import errors, fields
from arrow_tq.layout.appender import Appender
from arrow_tq.layout.columns import ColumnLayout
from arrow_tq.store import Engine, EngineConfig
from arrow_tq.store.adopting import WINDOW_BYTES
from arrow_tq.store.extent_key import ExtentKey
from arrow_tq_schemas.chunks import ChunkHeader, checksum
from arrow_tq_schemas.commands import (
    AdoptChunks,
    AdoptedChunk,
    ChunkVerdicts,
    Done,
    EndGrants,
    ExtentGrant,
    FindHost,
    GrantExtent,
    GrantsKept,
    HostInfo,
    KeepGrants,
    OpenRun,
    Reply,
    TaskSpec,
)
from arrow_tq_schemas.errors import from_wire
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId, IdFactory

EXPERTS = fields.routed_experts(4, 2, 200)
TOKENS = fields.token_ids()
IDS = IdFactory()
MIB = 1 << 20


def opened(folder: Path, capacity_bytes: int = 64 * MIB) -> Engine:
    engine = Engine(
        EngineConfig(data_dir=folder / "data", memory_dir=folder / "memory", capacity_bytes=capacity_bytes)
    )
    engine.execute(OpenRun(run="r", fields=[EXPERTS.to_json(), TOKENS.to_json()], tasks=[TaskSpec(name="t")]))
    return engine


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = opened(tmp_path)
    yield engine
    engine.close()


def body(reply: Reply, kind: type) -> object:
    assert isinstance(reply.body, kind)
    return reply.body


class Client:
    """Writes into one granted file, right or wrong."""

    def __init__(self, engine: Engine, field: Field = EXPERTS, size_bytes: int = MIB) -> None:
        info = body(engine.execute(FindHost()), HostInfo)
        self.engine, self.field = engine, field
        self.proof = Path(info.proof_path).read_text()
        asked = GrantExtent(run="r", field=field.name, proof=self.proof, size_bytes=size_bytes)
        self.told = body(engine.execute(asked), ExtentGrant)
        self.descriptor = os.open(self.told.path, os.O_RDWR)
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)
        self.memory = np.frombuffer(mmap.mmap(self.descriptor, self.told.size_bytes), np.uint8)
        self.layout = ColumnLayout(field.arrow_schema(0))
        self.appender = Appender(self.memory, self.layout, self.told.used_bytes)

    def write(
        self, values: npt.NDArray[np.generic], chunk_id: ChunkId | None = None, **changes: object
    ) -> AdoptedChunk:
        """A chunk that is complete in the file; ``changes`` are of its header, after its checksum."""
        chunk_id = chunk_id or IDS.next(0)
        digest = checksum(chunk_id, "r", 0, self.field.name, 5, values, None)
        header = ChunkHeader(
            id=chunk_id.hex,
            run="r",
            epoch=0,
            field=self.field.name,
            start=5,
            rows=len(values),
            checksum=digest,
        ).model_copy(update=changes)
        raw = header.to_bytes()
        reserved = self.appender.reserve(len(values), len(raw))
        reserved.values[...] = values
        self.appender.complete(reserved, raw)
        return AdoptedChunk(offset=reserved.offset, header=raw.decode())

    def adopt(self, *chunks: AdoptedChunk) -> list[errors.ArrowTQError | None]:
        command = AdoptChunks(
            run="r", field=self.field.name, proof=self.proof, grant=self.told.grant, chunks=list(chunks)
        )
        verdicts = body(self.engine.execute(command), ChunkVerdicts).errors
        return [None if one is None else from_wire(one) for one in verdicts]

    def end(self) -> None:
        body(self.engine.execute(EndGrants(proof=self.proof, grants=[self.told.grant])), Done)

    def leave(self) -> None:
        """As when its process ends."""
        del self.memory, self.appender
        os.close(self.descriptor)


def experts(rows: int = 100, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 200, (rows, 4, 2)).astype(np.uint8)


def stored(engine: Engine, chunk: AdoptedChunk) -> npt.NDArray[np.generic] | None:
    found = engine._shard.get(ChunkHeader.from_bytes(chunk.header.encode()).chunk_id)
    return None if found is None else found.values


def moved(chunk: AdoptedChunk, offset: int) -> AdoptedChunk:
    return chunk.model_copy(update={"offset": offset})


def released(engine: Engine) -> tuple[Client, int]:
    """A client that still maps a file whose only chunk was dropped, and the file's inode."""
    client = Client(engine)
    chunk = client.write(experts())
    assert client.adopt(chunk) == [None]
    inode = os.fstat(client.descriptor).st_ino
    client.end()
    engine._shard.drop([ChunkHeader.from_bytes(chunk.header.encode()).chunk_id])
    return client, inode


def test_chunks_are_adopted(engine: Engine) -> None:
    client = Client(engine)
    data = [experts(100 + seed, seed) for seed in range(4)]
    chunks = [client.write(one) for one in data]
    assert stored(engine, chunks[0]) is None
    assert client.adopt(*chunks) == [None] * 4
    for chunk, values in zip(chunks, data, strict=True):
        assert np.array_equal(stored(engine, chunk), values)
    assert client.adopt(*chunks) == [None] * 4, "asked again it answers the same"
    assert engine.stats()["chunks_adopted_total"] == engine.stats()["chunks"] == 4


def test_nothing_new_is_believed_before_the_last_one_adopted(engine: Engine) -> None:
    client = Client(engine)
    first, second = client.write(experts()), client.write(experts(100, 1))
    assert client.adopt(second) == [None]
    (verdict,) = client.adopt(first)
    assert isinstance(verdict, errors.MalformedMessage)
    assert "expected to lie between" in str(verdict)
    assert stored(engine, first) is None


def rubbish(client: Client) -> list[tuple[str, AdoptedChunk, type[errors.ArrowTQError], str]]:
    good = experts()
    plain = client.write(good)
    flipped_value, flipped_head = client.write(good), client.write(good)
    head = client.layout.plan(100, False, len(flipped_value.header)).values_at
    client.memory[flipped_value.offset + head + 3] ^= 1
    client.memory[flipped_head.offset + 20] ^= 1
    beyond = good.copy()
    beyond[7, 1, 1] = 200
    spaced = plain.model_copy(update={"header": plain.header.replace('","run"', '", "run"')})
    return [
        ("misaligned", moved(plain, plain.offset + 4), errors.MalformedMessage, "expected to lie between"),
        ("in the schema", moved(plain, 8), errors.MalformedMessage, "expected to lie between"),
        ("beyond", moved(plain, MIB - 64), errors.MalformedMessage, "expected to lie between"),
        ("elsewhere", moved(plain, plain.offset + 64), errors.MalformedMessage, "not the one of its header"),
        ("no JSON", plain.model_copy(update={"header": "{"}), errors.MalformedMessage, "chunk header"),
        ("spaced", spaced, errors.MalformedMessage, "not in the form"),
        ("a bit of a value", flipped_value, errors.MalformedMessage, "do not have the checksum"),
        ("a bit of the message", flipped_head, errors.MalformedMessage, "not the one of its header"),
        ("another run", client.write(good, run="other"), errors.MalformedMessage, "the stream is of"),
        ("another field", client.write(good, field="x"), errors.MalformedMessage, "the stream is of"),
        (
            "another group",
            client.write(good, IDS.next(0).sibling(1)),
            errors.MalformedMessage,
            "stream is of",
        ),
        ("another epoch", client.write(good, epoch=3), errors.StaleEpoch, "epoch 3"),
        (
            "too many rows",
            client.write(good, rows=1 << 30),
            errors.MalformedMessage,
            "expected to lie between",
        ),
        ("an expert that is none", client.write(beyond), errors.ValueOutOfRange, "value 200 at position 12"),
        ("a token", client.write(good, token="t"), errors.MalformedMessage, "not in the form"),
    ]


def test_rubbish_costs_its_own_chunk_alone(engine: Engine) -> None:
    client = Client(engine)
    cases = rubbish(client)
    good = client.write(experts(50, 9))
    verdicts = client.adopt(*(chunk for _, chunk, _, _ in cases), good)
    for (name, _, kind, text), verdict in zip(cases, verdicts, strict=False):
        assert isinstance(verdict, kind), f"{name}: {verdict!r}"
        assert text in str(verdict), f"{name}: {verdict}"
    assert verdicts[-1] is None
    assert np.array_equal(stored(engine, good), experts(50, 9))
    assert engine.stats()["chunks"] == 1


def test_a_file_that_its_writer_cuts(engine: Engine) -> None:
    client = Client(engine)
    first, second = client.write(experts(3000)), client.write(experts(3000, 1))
    assert client.adopt(first) == [None]
    del client.memory, client.appender
    os.ftruncate(client.descriptor, second.offset + 100)
    (verdict,) = client.adopt(second)
    assert isinstance(verdict, errors.MalformedMessage)
    assert np.array_equal(stored(engine, first), experts(3000))
    os.ftruncate(client.descriptor, 4096)
    assert stored(engine, first) is None
    assert engine.stats()["corrupt_chunks_total"] == 1


def test_a_large_chunk_is_looked_at_to_its_last_byte(engine: Engine) -> None:
    client = Client(engine, TOKENS, 16 * MIB)
    values = np.arange(2 * WINDOW_BYTES // 4 + 11, dtype=np.int32)
    head = client.layout.plan(len(values), False, len(client.write(values).header)).values_at
    for place in (0, WINDOW_BYTES - 1, WINDOW_BYTES, 2 * WINDOW_BYTES, values.nbytes - 1):
        chunk = client.write(values)
        client.memory[chunk.offset + head + place] ^= 1
        (verdict,) = client.adopt(chunk)
        assert isinstance(verdict, errors.MalformedMessage), place
        assert "do not have the checksum" in str(verdict)
    good, cut = client.write(values), client.write(values)
    assert client.adopt(good) == [None]
    assert np.array_equal(stored(engine, good), values)
    end = cut.offset + head + values.nbytes - 8
    del client.memory, client.appender
    os.ftruncate(client.descriptor, end)
    (verdict,) = client.adopt(cut)
    assert isinstance(verdict, errors.MalformedMessage)
    assert "expected to lie between" in str(verdict) or "cut at" in str(verdict)
    assert engine.stats()["chunks"] == 1


def test_a_cut_costs_what_lies_behind_it_alone(engine: Engine) -> None:
    client = Client(engine)
    first, second, third = (client.write(experts(seed=seed)) for seed in range(3))
    os.ftruncate(client.descriptor, second.offset + 100)
    verdicts = client.adopt(first, second, third)
    assert verdicts[0] is None
    assert [type(one) for one in verdicts[1:]] == [errors.MalformedMessage] * 2
    assert stored(engine, first) is not None
    assert stored(engine, second) is None


def test_the_same_id_again(engine: Engine) -> None:
    client = Client(engine)
    chunk_id = IDS.next(0)
    first, again = client.write(experts(), chunk_id), client.write(experts(), chunk_id)
    other = client.write(experts(100, 1), chunk_id)
    assert client.adopt(first) == [None]
    same, different = client.adopt(again, other)
    assert same is None
    assert isinstance(different, errors.Conflict)
    assert engine.stats()["chunks"] == 1


def test_who_may_ask(engine: Engine) -> None:
    client, tokens = Client(engine), Client(engine, TOKENS)
    chunk = client.write(experts())
    right = {"run": "r", "field": EXPERTS.name, "proof": client.proof, "grant": client.told.grant}
    for wrong in ({"proof": "0" * 32}, {"proof": "é"}, {"grant": "0" * 32}, {"grant": tokens.told.grant}):
        with pytest.raises(errors.NotFound):
            engine.execute(AdoptChunks(**{**right, **wrong}, chunks=[chunk]))
    with pytest.raises(errors.NotFound):
        engine.execute(GrantExtent(run="r", field=EXPERTS.name, proof="0" * 32, size_bytes=MIB))
    with pytest.raises(errors.InvalidInput):
        engine.execute(GrantExtent(run="r", field=EXPERTS.name, group=1, proof=client.proof, size_bytes=MIB))
    engine.execute(
        OpenRun(run="disk", fields=[EXPERTS.to_json()], tasks=[TaskSpec(name="t")], durability="disk")
    )
    with pytest.raises(errors.Unsupported):
        engine.execute(GrantExtent(run="disk", field=EXPERTS.name, proof=client.proof, size_bytes=MIB))
    client.end()
    with pytest.raises(errors.NotFound):
        client.adopt(chunk)
    assert engine.stats()["chunks"] == 0


def test_room_is_accounted_for_and_bounded(tmp_path: Path) -> None:
    engine = opened(tmp_path, 8 * MIB)
    client = Client(engine, size_bytes=4 * MIB)
    assert engine.stats()["used_bytes"] == 4 * MIB
    with pytest.raises(errors.StoreFull):
        Client(engine, size_bytes=2 * MIB)
    assert engine.stats()["used_bytes"] == 4 * MIB
    client.end()
    client.leave()
    engine._shard.maintain()
    assert (
        engine.stats()["used_bytes"] == engine.stats()["recycled_bytes"] or not engine.stats()["used_bytes"]
    )
    engine.close()


def test_a_grant_that_nobody_keeps_expires(engine: Engine) -> None:
    client, other = Client(engine), Client(engine)
    chunk = client.write(experts())
    assert client.adopt(chunk) == [None]
    shard = engine._shard
    for grant in shard.grants._grants.values():
        grant.expires_at = 0.0
    kept = body(engine.execute(KeepGrants(proof=client.proof, grants=[other.told.grant, "x"])), GrantsKept)
    assert kept.grants == [other.told.grant]
    shard.maintain()
    with pytest.raises(errors.NotFound):
        client.adopt(client.write(experts()))
    assert other.adopt(other.write(experts())) == [None]
    shard.maintain()
    assert Path(client.told.path).stat().st_size == MIB, "its writer maps it still"
    client.leave()
    shard.maintain()
    assert Path(client.told.path).stat().st_size == 4096
    with pa.memory_map(client.told.path) as source, pa.ipc.open_stream(source) as reader:
        table = reader.read_all()
    assert np.array_equal(table.column(0).combine_chunks().to_numpy_ndarray(), experts())
    assert np.array_equal(stored(engine, chunk), experts())


def test_granted_memory_becomes_a_grant_again_and_nothing_else(engine: Engine) -> None:
    client, inode = released(engine)
    engine._shard.maintain()
    assert not Path(client.told.path).exists()
    assert engine.stats()["zombie_bytes"] > 0, "its writer maps it still"
    client.leave()
    engine._shard.maintain()
    assert engine.stats()["zombie_bytes"] == 0
    assert engine.stats()["recycled_bytes"] > 0
    key = ExtentKey("r", EXPERTS.name, 0, "memory")
    stream = engine._shard.locked_stream(key, EXPERTS)
    assert stream.room(10).file.path.stat().st_ino != inode
    stream.lock.release()
    again = Client(engine)
    assert os.fstat(again.descriptor).st_ino == inode
    assert again.adopt(again.write(experts(60, 4))) == [None]


def test_recovery_believes_the_log_alone(tmp_path: Path) -> None:
    engine = opened(tmp_path)
    client = Client(engine)
    adopted = [client.write(experts(100, seed)) for seed in range(3)]
    assert client.adopt(*adopted) == [None] * 3
    never = client.write(experts(100, 7))
    engine.close()
    engine = opened(tmp_path)
    assert engine.stats()["chunks"] == 3
    for seed, chunk in enumerate(adopted):
        assert np.array_equal(stored(engine, chunk), experts(100, seed))
    assert stored(engine, never) is None
    client.write(experts(100, 8))
    engine._shard.maintain()
    assert np.array_equal(stored(engine, adopted[2]), experts(100, 2))
    engine.close()
    (log,) = (tmp_path / "data").rglob("*.adopted")
    log.write_bytes(log.read_bytes()[:-5])
    engine = opened(tmp_path)
    assert engine.stats()["chunks"] == 2
    assert stored(engine, adopted[2]) is None
    engine.close()
    log.write_bytes(b"rubbish")
    engine = opened(tmp_path)
    assert engine.stats()["chunks"] == 0
    assert not list((tmp_path / "memory").rglob("*.arrows"))
    assert not log.exists()
    engine.close()
    client.leave()


def test_what_a_writer_changes_after_adoption_is_found_after_a_restart(tmp_path: Path) -> None:
    engine = opened(tmp_path)
    client = Client(engine)
    chunk = client.write(experts())
    assert client.adopt(chunk) == [None]
    client.memory[client.appender.used_bytes - 30] ^= 1
    engine.close()
    engine = opened(tmp_path)
    assert stored(engine, chunk) is None
    assert engine.stats()["corrupt_chunks_total"] == 1
    engine.close()


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    place=st.integers(0, 3000),
    byte=st.integers(1, 255),
    offset=st.integers(-3, 40),
    text=st.text(max_size=20),
)
def test_no_byte_that_differs_is_believed(
    engine: Engine, place: int, byte: int, offset: int, text: str
) -> None:
    """Whatever lies there, and whatever is said of it: what is stored is what its checksum says."""
    client = Client(engine)
    values = experts(300)
    chunk = client.write(values)
    length = client.appender.used_bytes - chunk.offset
    client.memory[chunk.offset + place % length] ^= byte
    said = moved(chunk, max(chunk.offset + 8 * offset, 0))
    broken = chunk.model_copy(update={"header": chunk.header[: place % len(chunk.header)] + text})
    for verdict in client.adopt(said, broken):
        assert verdict is not None
    assert stored(engine, chunk) is None
    client.end()
    client.leave()
    engine._shard.maintain()


def test_chunks_of_another_shard_are_not_believed(engine: Engine) -> None:
    """Their ids would lead every reader elsewhere."""
    client = Client(engine)
    (verdict,) = client.adopt(client.write(experts(), IDS.next(3)))
    assert isinstance(verdict, errors.MalformedMessage) and "shard 3" in str(verdict)
