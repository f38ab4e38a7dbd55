"""``arrow-tq capacity``: how large a batch of trajectories is, part by part."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from arrow_tq.cli.text import binary_size

if TYPE_CHECKING:
    from arrow_tq.capacity import Growth, Workload


class CapacityFormat(StrEnum):
    TABLE = "table"
    JSON = "json"


CountOption = Annotated[str, typer.Option(metavar="N[K|M]", help="Tokens of one full segment.")]


def capacity(
    layers: Annotated[int, typer.Option(min=1, help="MoE layers whose routing is recorded.")],
    topk: Annotated[int, typer.Option(min=1, help="Experts a token and layer.")],
    context: CountOption,
    batch: Annotated[int, typer.Option(min=1, help="Prompts a batch.")],
    samples: Annotated[int, typer.Option(min=1, help="Trajectories a prompt.")],
    dtype: Annotated[str, typer.Option(help="Of an expert id: uint8, uint16 or int32.")] = "int32",
    segments_per_trajectory: Annotated[
        float, typer.Option(help="Near-full segments a trajectory leaves, on average.")
    ] = 1.0,
    shards: Annotated[int, typer.Option(min=1, help="Servers that the payload is spread over.")] = 1,
    indexer_layers: Annotated[
        int | None, typer.Option(min=1, help="Layers whose indexer top-k is recorded.", show_default=False)
    ] = None,
    indexer_topk: Annotated[int, typer.Option(min=1, help="Positions that each of them chooses.")] = 2048,
    against_layers: Annotated[
        int | None, typer.Option(min=1, help="Compare with another number of layers.", show_default=False)
    ] = None,
    against_context: Annotated[
        str | None, typer.Option(metavar="N[K|M]", help="... another context.", show_default=False)
    ] = None,
    against_shards: Annotated[
        int | None, typer.Option(min=1, help="... another number of shards.", show_default=False)
    ] = None,
    format: Annotated[CapacityFormat, typer.Option(help="How it is written.")] = CapacityFormat.TABLE,
) -> None:
    """How large a batch is: context x layers x topk x bytes of an id x batch x samples x segments.

    The table shows, for each part of a token, its bytes as Python objects on the way through proxy, rollout
    manager and object store (once for each of them that holds it), its share, and what this store writes.
    One shard holds total / shards. docs/capacity.md has the formula and where its constants are from.
    """
    from arrow_tq.capacity import Growth, Indexer, Workload, parse_count

    indexer = None if indexer_layers is None else Indexer(indexer_layers, indexer_topk)
    workload = Workload(
        *(layers, topk, parse_count(context), batch, samples, dtype, segments_per_trajectory, shards, indexer)
    )
    against = replace(
        workload,
        layers=against_layers or layers,
        context=parse_count(against_context or context),
        shards=against_shards or shards,
    )
    growth = None if against == workload else Growth.between(against, workload)
    if format is CapacityFormat.JSON:
        json.dump(_facts(workload, growth), sys.stdout, indent=1)
        typer.echo()
    else:
        _print(workload, growth)


def _facts(workload: Workload, growth: Growth | None) -> Mapping[str, object]:
    from arrow_tq.capacity import HANDLE_BYTES

    facts: dict[str, object] = {
        "trajectories": workload.trajectories,
        "tokens": workload.tokens,
        "routing_token_bytes": workload.routing_token_bytes,
        "routing_bytes": workload.routing_bytes,
        "local_routing_bytes": workload.local_routing_bytes,
        "handle_bytes": HANDLE_BYTES,
        "parts": [asdict(part) for part in workload.parts()],
    }
    if workload.indexer is not None:
        facts["indexer_token_bytes"] = workload.indexer.token_bytes
    if growth is not None:
        facts["growth"] = asdict(growth)
    return facts


def _print(workload: Workload, growth: Growth | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from arrow_tq.capacity import HANDLE_BYTES

    console = Console(highlight=False, soft_wrap=True)
    segments = (
        f" x {workload.segments_per_trajectory:g} segments" if workload.segments_per_trajectory != 1 else ""
    )
    console.print(
        f"routing: {workload.context:,} tokens x {workload.layers} layers x {workload.topk} experts x "
        f"{workload.dtype} x {workload.trajectories:,} trajectories{segments} = "
        f"{binary_size(workload.routing_bytes)}"
    )
    if workload.shards > 1:
        held = binary_size(workload.local_routing_bytes)
        console.print(f"each of {workload.shards} shards holds {held} of it")
    table = Table("part", "B/token as objects", "share", "batch as objects", "B/token stored", "batch stored")
    for column in table.columns[1:]:
        column.justify = "right"
    parts = workload.parts()
    for part in parts:
        table.add_row(
            *(part.name, f"{part.object_token_bytes:,}", f"{part.share:.1%}", binary_size(part.object_bytes)),
            *(f"{part.stored_token_bytes:,}", binary_size(part.stored_bytes)),
        )
    table.add_section()
    table.add_row(
        *("all", f"{sum(part.object_token_bytes for part in parts):,}", "100.0%"),
        binary_size(sum(part.object_bytes for part in parts)),
        f"{sum(part.stored_token_bytes for part in parts):,}",
        binary_size(sum(part.stored_bytes for part in parts)),
    )
    console.print(table)
    if workload.indexer is not None:
        size = binary_size(workload.indexer.token_bytes)
        console.print(f"indexer top-k: {size} a token; a handle that stands for it: {HANDLE_BYTES} B")
    if growth is not None:
        console.print(
            f"routing against the other workload: {growth.total:.2f}x in all, {growth.local:.2f}x a shard"
        )
