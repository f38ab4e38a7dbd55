"""GetFlightInfo, GetSchema and ListFlights: what any Flight client needs to read segments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.flight as flight

from arrow_tq_schemas.access import Grant, need
from arrow_tq_schemas.cluster import ClusterMap, GetCluster
from arrow_tq_schemas.commands import ListSegments
from arrow_tq_schemas.errors import InvalidInput, MalformedMessage
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.manifests import Manifest
from arrow_tq_schemas.tickets import FlightFilter, FlightQuery, SegmentTicket, ShardTicket, parse
from arrow_tq_server.gets import check_layers, item_shape
from arrow_tq_server.guard import permit
from arrow_tq_server.segments import manifests, pieces, segment_names, segment_schema, shards_of
from arrow_tq_server.served import ServedEngine


class Listing:
    """Describes the finalized segments of a store as flights: one a field and layer group."""

    def __init__(self, engine: ServedEngine, url: str, segments_max: int) -> None:
        self._engine = engine
        self._url = url
        self._segments_max = segments_max

    def info(self, descriptor: flight.FlightDescriptor, grant: Grant) -> flight.FlightInfo:
        """Schema, size, and one endpoint a shard with its ticket.

        Raises:
            NotFound: no such run, field or segment.
            MalformedMessage: a descriptor that is neither a ``FlightQuery`` nor a path.
        """
        query = self._query(descriptor, grant)
        field = self._engine.field(query.run, query.field)
        found = self._manifests(query)
        return self._describe(descriptor, query, field, found)

    def schema(self, descriptor: flight.FlightDescriptor, grant: Grant) -> pa.Schema:
        """What the flight's batches look like; segments need not exist for it."""
        query = self._query(descriptor, grant)
        field = self._engine.field(query.run, query.field)
        return segment_schema(field, query.group, check_layers(field, query.group, query.layers))

    def flights(self, criteria: bytes, grant: Grant) -> Iterator[flight.FlightInfo]:
        """One flight a segment, field and layer group; ``criteria`` is a ``FlightFilter`` or empty.

        Where no run is named: those of the runs that the caller's token covers.
        """
        asked = parse(FlightFilter, criteria) if criteria else FlightFilter()
        by_run: dict[str, list[str]] = {}
        for asked_run in self._runs(asked, grant):
            command = ListSegments(run=asked_run, where=asked.where, view=asked.view, limit=asked.limit)
            for run, name in segment_names(self._engine.execute(command).blobs[0]):
                by_run.setdefault(run, []).append(name)
        for run, names in by_run.items():
            for manifest in manifests(self._engine, run, names, asked.view):
                yield from self._flights_of(run, manifest)

    def _runs(self, asked: FlightFilter, grant: Grant) -> list[str | None]:
        """The runs to list; None stands for all at once."""
        if asked.run is not None or grant.runs is None:
            wanted = need(["read"], *([] if asked.run is None else [asked.run]))
            permit(self._engine, grant, wanted, "listing")
            return [asked.run]
        grant.check(need(["read"], *grant.runs), "listing")
        # A token may cover runs that do not exist yet.
        return [run for run in sorted(grant.runs) if self._engine.has_run(run)]

    def _flights_of(self, run: str, manifest: Manifest) -> Iterator[flight.FlightInfo]:
        for name in manifest.spans:
            field = self._engine.field(run, name)
            for group in range(len(field.groups)):
                label = name if len(field.groups) == 1 else f"{name}:{group}"
                path = flight.FlightDescriptor.for_path(run, label, manifest.segment_id)
                query = FlightQuery(run=run, field=name, group=group)
                yield self._describe(path, query, field, [manifest])

    def _query(self, descriptor: flight.FlightDescriptor, grant: Grant) -> FlightQuery:
        if descriptor.descriptor_type == flight.DescriptorType.CMD:
            query = parse(FlightQuery, descriptor.command)
            permit(self._engine, grant, need(["read"], query.run), "flight query")
            return query
        if descriptor.descriptor_type != flight.DescriptorType.PATH:
            raise MalformedMessage("flight descriptor: expected a command or a path")
        parts = [part.decode("utf-8", "replace") for part in descriptor.path]
        if len(parts) < 2:
            raise MalformedMessage(f"flight path {parts}: expected run, field and segment ids")
        run, label, *ids = parts
        permit(self._engine, grant, need(["read"], run), "flight path")
        name, _, group = label.partition(":")
        field = self._engine.field(run, name)
        if not group and len(field.groups) > 1:
            raise InvalidInput(
                f"flight path: field {name!r} has {len(field.groups)} layer groups, each a flight of its "
                f"own: ask for one, such as '{name}:0'"
            )
        if group and not group.isdecimal():
            raise MalformedMessage(f"flight path {parts[:2]}: expected 'field' or 'field:group'")
        return FlightQuery(run=run, field=name, group=int(group or 0), segment_ids=ids or None)

    def _manifests(self, query: FlightQuery) -> list[Manifest]:
        ids: Sequence[str] | None = query.segment_ids
        if ids is not None and query.where is not None:
            raise InvalidInput("flight query: segment_ids or where, not both")
        if ids is None:
            limit = min(self._segments_max + 1, 1_000_000)
            command = ListSegments(run=query.run, where=query.where, view=query.view, limit=limit)
            ids = [name for _, name in segment_names(self._engine.execute(command).blobs[0])]
        if len(ids) > self._segments_max:
            raise InvalidInput(
                f"flight query: it names {len(ids)} segments or more, segments_max is {self._segments_max}"
            )
        return manifests(self._engine, query.run, ids, query.view) if ids else []

    def _describe(
        self,
        descriptor: flight.FlightDescriptor,
        query: FlightQuery,
        field: Field,
        found: Sequence[Manifest],
    ) -> flight.FlightInfo:
        layers = check_layers(field, query.group, query.layers)
        schema = segment_schema(field, query.group, layers)
        rows = sum(piece.rows for piece in pieces(found, field, query.start, query.end))
        ticket = SegmentTicket(
            run=query.run,
            field=query.field,
            group=query.group,
            layers=query.layers,
            segment_ids=[manifest.segment_id for manifest in found],
            start=query.start,
            end=query.end,
        )
        endpoints = self._endpoints(ticket, shards_of(found, field))
        size = rows * math.prod(item_shape(field, query.group, layers)) * field.type.numpy.itemsize
        return flight.FlightInfo(schema, descriptor, endpoints, rows, size)

    def _endpoints(self, ticket: SegmentTicket, numbers: Sequence[int]) -> list[flight.FlightEndpoint]:
        """One a shard that holds any of the rows, with what it takes to read them there."""
        if not any(numbers):
            return [flight.FlightEndpoint(ticket.model_dump_json().encode(), [self._url])]
        cluster = self._engine.execute(GetCluster()).body
        assert isinstance(cluster, ClusterMap)
        endpoints = []
        for index, number in enumerate(numbers):
            entry = cluster.shard(number)
            # A shard that is not there any more: whoever asks here for its rows is told so.
            places = [self._url] if entry is None else [server.url for server in entry.servers]
            part = ShardTicket(shard=number, fills=index == 0, segments=ticket)
            endpoints.append(flight.FlightEndpoint(part.model_dump_json().encode(), places))
        return endpoints
