"""Tokens at every door of a real server: what one run's token must not reach of another's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

import arrow_tq
from arrow_tq import errors
from arrow_tq.interface import Store
from arrow_tq.tokens import check_rights, new_token, token_line
from arrow_tq_schemas import commands as c, tickets as t
from arrow_tq_schemas.access import need_of
from arrow_tq_schemas.ids import IdFactory
from arrow_tq_schemas.manifests import Manifest
from arrow_tq_schemas.spans import Span
from tests.access_samples import sample
from tests.flight import wire
from tests.serving import Server

TOKENS = arrow_tq.fields.token_ids()
SECRET = np.arange(77, 77 + 40, dtype=np.int32)


@dataclass
class Doors:
    """A server of two runs, each written, and tokens for them."""

    server: Server
    file: Path
    tokens: dict[str, str]
    spans: dict[str, list[Span]]
    segments: dict[str, str]

    def connect(self, name: str) -> Store:
        return arrow_tq.connect(self.server.url, self.tokens[name])

    def call(self, name: str) -> flight.FlightCallOptions:
        header = (b"authorization", f"Bearer {self.tokens[name]}".encode())
        return flight.FlightCallOptions(timeout=20, headers=[header])

    def get(self, client: flight.FlightClient, name: str, ticket: t.Ticket) -> pa.Table:
        try:
            return client.do_get(flight.Ticket(ticket.model_dump_json().encode()), self.call(name)).read_all()
        except (pa.ArrowException, flight.FlightError) as error:
            raise wire.told(error) from None

    def act(self, client: flight.FlightClient, name: str, command: c.Command) -> c.Reply:
        action = flight.Action(command.verb, command.model_dump_json().encode())
        try:
            (result,) = client.do_action(action, self.call(name))
        except (pa.ArrowException, flight.FlightError) as error:
            raise wire.told(error) from None
        return c.unpack_reply(command, result.body.to_pybytes())


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    folder = tmp_path_factory.mktemp("doors")
    kinds = {
        "alpha": (["alpha"], "read,write"),
        "alpha-reader": (["alpha"], "read"),
        "alpha-writer": (["alpha"], "write"),
        "alpha-admin": (["alpha"], "admin"),
        "beta": (["beta"], "read,write"),
        "nobody": (["gamma"], "read,write"),
        "all-reader": ([], "read"),
        "operator": ([], "admin"),
    }
    tokens = {name: new_token() for name in kinds}
    lines = [token_line(tokens[name], name, runs, check_rights(may)) for name, (runs, may) in kinds.items()]
    file = folder / "tokens.toml"
    file.write_text("[tokens]\n" + "\n".join(lines) + "\n")
    with Server(folder / "data", folder / "memory", "--tokens-file", str(file)) as server:
        doors = Doors(server, file, tokens, {}, {})
        for run_name in ("alpha", "beta"):
            with doors.connect(run_name) as store:
                run = store.run(run_name, fields=[TOKENS])
                session = run.session(f"s-{run_name}")
                with session.step(id="1", messages=[{"content": run_name}], sampled=(0, 40)) as step:
                    receipt = step.put("token_ids", SECRET, start=0)
                (segment,) = session.finalize()
                doors.spans[run_name] = receipt.spans()
                doors.segments[run_name] = segment.segment_id
        yield doors
        assert server.stop() == 0
        assert "handler failed" not in server.log.read_text()


@pytest.fixture
def client(doors: Doors) -> Iterator[flight.FlightClient]:
    with flight.FlightClient(doors.server.url) as opened:
        yield opened


# -- without a token -----------------------------------------------------------------------------


def test_nothing_is_answered_without_a_token(doors: Doors, client: flight.FlightClient) -> None:
    ticket = t.SqlTicket(query="SELECT 1").model_dump_json().encode()
    query = flight.FlightDescriptor.for_command(
        t.FlightQuery(run="alpha", field="token_ids").model_dump_json().encode()
    )
    tries = [
        lambda: list(client.list_actions(wire.CALL)),
        lambda: list(client.do_action(flight.Action("pressure", b"{}"), wire.CALL)),
        lambda: client.do_get(flight.Ticket(ticket), wire.CALL).read_all(),
        lambda: client.get_flight_info(query, wire.CALL),
        lambda: client.get_schema(query, wire.CALL),
        lambda: list(client.list_flights(b"", wire.CALL)),
        lambda: wire.end(*wire.open_put(client, t.PutStream(run="alpha", field="token_ids"), pa.schema([]))),
    ]
    for attempt in tries:
        with pytest.raises((errors.Unauthenticated, pa.ArrowException)) as caught:
            attempt()
        error = caught.value
        assert isinstance(
            error if isinstance(error, errors.ArrowTQError) else wire.told(error), errors.Unauthenticated
        )


@pytest.mark.parametrize("token", [None, "wrong", "atq_" + "x" * 43, "x" * 5000])
def test_connect_says_that_the_token_is_not_known(doors: Doors, token: str | None) -> None:
    with pytest.raises(errors.Unauthenticated):
        arrow_tq.connect(doors.server.url, token)


@pytest.mark.parametrize("token", ["", "two words", "ümlaut", "new\nline"])
def test_what_is_no_token_does_not_travel(doors: Doors, token: str) -> None:
    with pytest.raises(errors.InvalidInput, match="token: expected printable"):
        arrow_tq.connect(doors.server.url, token)


# -- every command ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", c.COMMANDS.values(), ids=lambda kind: kind.verb)
def test_no_command_of_another_run_passes(
    doors: Doors, client: flight.FlightClient, kind: type[c.Command]
) -> None:
    command = sample(kind, run="beta")
    wanted = need_of(command)
    if wanted.runs == frozenset():
        return
    for name in ("alpha", "alpha-admin", "nobody"):
        with pytest.raises(errors.PermissionDenied) as caught:
            doors.act(client, name, command)
        assert "s-beta" not in str(caught.value)


@pytest.mark.parametrize("kind", c.COMMANDS.values(), ids=lambda kind: kind.verb)
def test_no_command_passes_with_too_few_rights(
    doors: Doors, client: flight.FlightClient, kind: type[c.Command]
) -> None:
    command = sample(kind, run="alpha")
    for name, right in (("alpha-reader", "read"), ("alpha-writer", "write")):
        if not need_of(command).rights <= {right}:
            with pytest.raises(errors.PermissionDenied):
                doors.act(client, name, command)


# -- payload ---------------------------------------------------------------------------------------


def test_chunk_ids_of_another_run_are_ids_of_nobody(doors: Doors, client: flight.FlightClient) -> None:
    """By spans in a ticket, in a receipt, in drop and keep: nothing tells them from ids that never were."""
    theirs = doors.spans["beta"]
    made_up = IdFactory().next(0)
    nowhere = [Span(0, made_up, 0, 40)]
    said_of = []
    for spans, chunk_id in ((theirs, theirs[0].chunk_id), (nowhere, made_up)):
        with pytest.raises(errors.ChunkLost) as caught:
            doors.get(client, "alpha", wire.span_ticket(TOKENS, "alpha", spans))
        said_of.append(str(caught.value).replace(chunk_id.hex, "ID"))
    assert said_of[0] == said_of[1]
    for kind in (c.DropChunks, c.KeepChunks):
        reply = doors.act(client, "alpha", kind(run="alpha", chunk_ids=[theirs[0].chunk_id.hex]))
        assert reply.body == c.Done(count=0)
    with pytest.raises(errors.PermissionDenied):
        doors.get(client, "alpha", wire.span_ticket(TOKENS, "beta", theirs))
    mine = doors.get(client, "alpha", wire.span_ticket(TOKENS, "alpha", doors.spans["alpha"]))
    np.testing.assert_array_equal(mine.column(0).to_numpy(), SECRET)


def test_a_step_cannot_attach_chunks_of_another_run(doors: Doors) -> None:
    with doors.connect("beta") as store:
        session = store.run("beta").session("s-open")
        step = session.step(id="1")
        receipt = step.put("token_ids", SECRET, start=0)
        step.flush()
        stolen = receipt.model_copy(update={"run": "alpha"})
        with doors.connect("alpha") as thief:
            own = thief.run("alpha").session("s-thief")
            with pytest.raises(errors.ChunkLost) as caught, own.step(id="1", sampled=(0, 40)) as mine:
                mine.attach(stolen)
        assert "beta" not in str(caught.value)
        step.commit()


def test_an_id_of_another_run_cannot_be_taken(doors: Doors, client: flight.FlightClient) -> None:
    """A put under it is refused without a word about what is stored there."""
    chunk = wire.make_chunk(TOKENS, "alpha", SECRET)
    theirs = doors.spans["beta"][0].chunk_id
    header = chunk.header.model_copy(
        update={
            "id": theirs.hex,
            "checksum": wire.checksum(theirs, "alpha", 0, "token_ids", 0, SECRET, None),
        }
    )
    descriptor = flight.FlightDescriptor.for_command(
        t.PutStream(run="alpha", field="token_ids").model_dump_json().encode()
    )
    writer, reader = client.do_put(descriptor, TOKENS.arrow_schema(0), doors.call("alpha"))
    writer.write_with_metadata(chunk.to_batch(TOKENS), pa.py_buffer(wire.message_of(header)))
    (ack,) = [t.PutAck.model_validate_json(raw) for raw in wire.end(writer, reader)]
    (error,) = wire.refusals([ack]).values()
    assert isinstance(error, errors.Conflict)
    assert str(error) == f"chunk {theirs.hex}: this id cannot be used"


def test_put_streams_and_commits_of_another_run_are_refused(
    doors: Doors, client: flight.FlightClient
) -> None:
    descriptor = flight.FlightDescriptor.for_command(
        t.PutStream(run="beta", field="token_ids").model_dump_json().encode()
    )
    for name in ("alpha", "alpha-reader"):
        with pytest.raises(errors.PermissionDenied):
            wire.end(*client.do_put(descriptor, TOKENS.arrow_schema(0), doors.call(name)))
    steps = [
        c.StepCommit(run=run, epoch=0, session_id=f"s-{run}", step_id="late") for run in ("beta", "alpha")
    ]
    command = flight.FlightDescriptor.for_command(t.CommitStream().model_dump_json().encode())
    writer, reader = client.do_put(command, pa.schema([]), doors.call("alpha"))
    writer.write_metadata(pa.py_buffer(c.CommitSteps(steps=steps).model_dump_json().encode()))
    (raw,) = wire.end(writer, reader)
    theirs, mine = c.StepResults.model_validate_json(raw).results
    assert theirs.error is not None and theirs.error["code"] == "permission-denied"
    # Its own step got as far as its session, which is over.
    assert mine.error is not None and mine.error["code"] == "session-closed"


def test_segments_of_another_run_are_out_of_reach(doors: Doors, client: flight.FlightClient) -> None:
    theirs = doors.segments["beta"]
    with pytest.raises(errors.PermissionDenied):
        doors.get(client, "alpha", wire.segment_ticket(TOKENS, "beta", [theirs]))
    with pytest.raises(errors.NotFound):
        doors.get(client, "alpha", wire.segment_ticket(TOKENS, "alpha", [theirs]))
    with doors.connect("alpha") as store, pytest.raises(errors.NotFound):
        store.run("alpha").table([theirs], fields=["token_ids"])
    reply = doors.act(client, "alpha", c.GetSegments(run="alpha", ids=[doors.segments["alpha"]]))
    assert Manifest.decode(reply.blobs[1]).num_tokens == 40


def test_flights_of_another_run_are_neither_listed_nor_described(
    doors: Doors, client: flight.FlightClient
) -> None:
    listed = {
        name: {info.descriptor.path[0] for info in client.list_flights(b"", doors.call(name))}
        for name in ("alpha-reader", "beta", "nobody", "all-reader")
    }
    assert listed == {
        "alpha-reader": {b"alpha"}, "beta": {b"beta"}, "nobody": set(), "all-reader": {b"alpha", b"beta"},
    }  # fmt: skip
    asked = t.FlightFilter(run="beta").model_dump_json().encode()
    descriptors = [
        flight.FlightDescriptor.for_command(
            t.FlightQuery(run="beta", field="token_ids").model_dump_json().encode()
        ),
        flight.FlightDescriptor.for_path("beta", "token_ids"),
        flight.FlightDescriptor.for_path("beta", "no such field"),
    ]
    tries = [lambda: list(client.list_flights(asked, doors.call("alpha")))]
    for one in descriptors:
        tries += [
            lambda one=one: client.get_flight_info(one, doors.call("alpha")),
            lambda one=one: client.get_schema(one, doors.call("alpha")),
        ]
    for attempt in tries:
        with pytest.raises((flight.FlightError, pa.ArrowException)) as caught:
            attempt()
        assert isinstance(wire.told(caught.value), errors.PermissionDenied)


# -- questions -------------------------------------------------------------------------------------


def test_sql_of_one_run_sees_it_alone_and_all_runs_need_a_token_for_all(doors: Doors) -> None:
    everything = "SELECT DISTINCT run FROM steps ORDER BY run"
    with doors.connect("alpha-reader") as store:
        assert store.sql(everything, run="alpha").to_pylist() == [{"run": "alpha"}]
        assert store.run("alpha").sql(everything).to_pylist() == [{"run": "alpha"}]
        for run in ("beta", None):
            with pytest.raises(errors.PermissionDenied):
                store.sql(everything, run=run)
            with pytest.raises(errors.PermissionDenied):
                # As an action; the client asks by ticket.
                store._backend._ask(c.RunQuery(query=everything, run=run))  # type: ignore[attr-defined]
        # Nothing of the other run is in the process that answers, under any name.
        tables = store.sql("SELECT table_name, estimated_size FROM duckdb_tables()", run="alpha").to_pylist()
        assert {row["table_name"] for row in tables} and "s-beta" not in json.dumps(tables)
    with doors.connect("all-reader") as store:
        assert [row["run"] for row in store.sql(everything).to_pylist()] == ["alpha", "beta"]


def test_names_of_other_runs_are_not_told(doors: Doors) -> None:
    with doors.connect("nobody") as store:
        for ask_for in (lambda: store.run("gamma"), lambda: store.sql("SELECT 1", run="gamma")):
            with pytest.raises(errors.NotFound) as caught:
                ask_for()
            assert str(caught.value) == "run 'gamma' does not exist"
        with pytest.raises(errors.PermissionDenied):
            store.run("alpha")


def test_statistics_and_pressure_show_a_token_its_own_runs(doors: Doors) -> None:
    with doors.connect("alpha") as store:
        shown = store.stats()
        assert any(name.startswith('bytes{run="alpha"') for name in shown)
        assert not [name for name in shown if "beta" in name]
        assert "chunks" not in shown and "capacity_bytes" in shown
        session = store.run("alpha").session("s-unclaimed")
        assert store.pressure().open_sessions >= 1
    with doors.connect("nobody") as store:
        pressure = store.pressure()
        assert (pressure.open_sessions, pressure.unclaimed_segments, pressure.oldest_unclaimed_s) == (0, 0, 0)
        assert pressure.capacity_bytes > 0
    with doors.connect("all-reader") as store:
        assert any("beta" in name for name in store.stats())
    with doors.connect("alpha") as store:
        store.run("alpha").session(session.id).abort()


def test_metrics_need_a_token_for_every_run(doors: Doors) -> None:
    url = f"{doors.server.http_url}/metrics"

    def status(name: str | None) -> int:
        headers = {} if name is None else {"authorization": f"Bearer {doors.tokens[name]}"}
        return httpx.get(url, headers=headers).status_code

    found = {name: status(name) for name in (None, "alpha", "alpha-admin", "all-reader", "operator")}
    assert found == {None: 401, "alpha": 403, "alpha-admin": 403, "all-reader": 200, "operator": 200}
    for page in ("livez", "readyz"):
        assert httpx.get(f"{doors.server.http_url}/{page}").status_code == 200


# -- claims and retries ----------------------------------------------------------------------------


def test_claims_and_stored_replies_stay_with_their_run(doors: Doors, client: flight.FlightClient) -> None:
    asked = c.Claim(run="beta", limit=10, lease_s=600)
    claimed = doors.act(client, "beta", asked)
    assert isinstance(claimed.body, c.ClaimInfo) and claimed.body.segments >= 1
    # The same request id for its own run: a request of its own, whose answer is its own run's.
    mine = doors.act(client, "alpha", asked.model_copy(update={"run": "alpha"}))
    assert isinstance(mine.body, c.ClaimInfo)
    assert mine.body.run == "alpha" and mine.body.claim_id != claimed.body.claim_id
    again = doors.act(client, "beta", asked)
    assert again.body == claimed.body
    theirs = claimed.body.claim_id
    tries = [
        c.AttachClaim(run="alpha", claim_id=theirs, rank=0, world=1),
        c.RenewClaim(run="alpha", claim_id=theirs),
        c.ReleaseClaim(run="alpha", claim_id=theirs),
        c.Claim(run="alpha", limit=10, like=theirs),
    ]
    for command in tries:
        with pytest.raises(errors.ClaimGone, match="has no claim"):
            doors.act(client, "alpha", command)
    for run, claim in (("alpha", mine.body), ("beta", claimed.body)):
        doors.act(client, run, c.ReleaseClaim(run=run, claim_id=claim.claim_id))
