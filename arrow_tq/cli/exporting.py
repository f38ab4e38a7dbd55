"""``arrow-tq export``: segments with all that they are made of, as a folder of Arrow files."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arrow_tq.cli.stores import StoreOption, open_store
from arrow_tq.cli.text import size

if TYPE_CHECKING:
    from arrow_tq.offline import Selection
    from arrow_tq.runs import Run

SEGMENTS_MAX = 1_000_000


class ViewName(StrEnum):
    LINEAGE = "lineage"
    TIMELINE = "timeline"


def export(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to; new or empty.")],
    store: StoreOption,
    run: Annotated[str, typer.Option(help="Run to export from.")] = "default",
    ref: Annotated[
        str | None, typer.Option(metavar="REF", help="A claimed batch, by its ref.", show_default=False)
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(help="Segments by a predicate over their columns, as in a claim.", show_default=False),
    ] = None,
    id: Annotated[
        list[str] | None, typer.Option(help="A segment or session; may be repeated.", show_default=False)
    ] = None,
    view: Annotated[ViewName, typer.Option(help="Which segments of a session; a claim has its own.")] = (
        ViewName.LINEAGE
    ),
    field: Annotated[
        list[str] | None, typer.Option(help="A field to take; may be repeated. All when left out.")
    ] = None,
) -> None:
    """Export segments with steps, messages, views and every field, to train from without engines.

    arrow-tq import reads it into any store; docs/offline.md describes the files.
    """
    from arrow_tq.offline import Selection, export_segments

    if sum(choice is not None for choice in (ref, where, id)) != 1:
        raise typer.BadParameter("give one of --ref, --where and --id")
    with open_store(store) as opened:
        source = opened.run(run)
        chosen = Selection([], view.value, None, field)
        if ref is not None:
            chosen = _claimed(source, ref, field)
        else:
            ids = id or _matching(source, where or "", view.value)
            chosen = Selection(ids, view.value, None, field)
        manifest = export_segments(source, chosen, folder)
    total = sum(file.bytes for file in manifest.files)
    parts = [
        f"{manifest.sessions:,} sessions",
        f"{manifest.steps:,} steps",
        f"{manifest.segments:,} segments",
        f"{manifest.tokens:,} tokens",
        size(total),
    ]
    typer.echo(f"exported from run {run} to {folder}: {', '.join(parts)}")


def _claimed(run: Run, ref: str, fields: list[str] | None) -> Selection:
    """The segments of a claim, in its order."""
    from arrow_tq.calls import read_table
    from arrow_tq.offline import Selection
    from arrow_tq.trainer.reference import BatchRef
    from arrow_tq_schemas.commands import ClaimInfo, GetClaim
    from arrow_tq_schemas.errors import InternalError

    claim = BatchRef.parse(ref, run.name).claim
    reply = run.backend.execute(GetClaim(run=run.name, claim_id=claim))
    if not isinstance(reply.body, ClaimInfo):
        raise InternalError(f"reply to get_claim: {type(reply.body).__name__}")
    ids = read_table(reply.blobs[0]).column("segment_id").to_pylist()
    return Selection(ids, reply.body.view, reply.body.task, fields)


def _matching(run: Run, where: str, view: str) -> list[str]:
    """Segments that match and whose payload is there, in the order of finalizing."""
    from arrow_tq.calls import checked, read_table
    from arrow_tq_schemas.commands import ListSegments

    there = f"({where}) AND status IN ('ready', 'claimed')"
    with checked("export"):
        command = ListSegments.model_validate(
            {"run": run.name, "where": there, "view": view, "limit": SEGMENTS_MAX}
        )
    names: list[str] = read_table(run.backend.execute(command).blobs[0]).column("segment_id").to_pylist()
    return names
