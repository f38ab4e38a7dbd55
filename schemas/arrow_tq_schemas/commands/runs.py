"""Commands of runs: opening, declaring, policy versions and groups."""

from __future__ import annotations

from typing import ClassVar

from arrow_tq_schemas.chunks import Count
from arrow_tq_schemas.command_base import Mutation, Wire
from arrow_tq_schemas.commands.terms import Durability, Names


class TaskSpec(Wire):
    name: str
    fields: Names | None = None


class OpenRun(Mutation):
    """Create a run or join it. ``fields=None`` opens what exists; otherwise declarations must agree.

    ``epoch=None`` joins the current epoch; ``epoch=n`` advances it to n (compare-and-set from n - 1,
    and joining n where it is current already).
    """

    verb: ClassVar[str] = "open_run"
    run: str
    fields: list[dict[str, object]] | None = None
    tasks: list[TaskSpec] | None = None
    durability: Durability = "process"
    epoch: Count | None = None


class RunInfo(Wire):
    run: str
    fields: list[dict[str, object]]
    tasks: list[TaskSpec]
    durability: Durability
    epoch: Count
    policy_version: str | None = None


class SetPolicyVersion(Mutation):
    """The version that the trainer now serves; orders versions for staleness."""

    verb: ClassVar[str] = "set_policy_version"
    run: str
    epoch: Count
    version: str


class CloseGroup(Mutation):
    """No further session will join this group: whatever it has is whole."""

    verb: ClassVar[str] = "close_group"
    run: str
    epoch: Count
    group: str


class AddField(Mutation):
    """Declare one more field. Idempotent; sessions and segments that are there have no rows of it yet."""

    verb: ClassVar[str] = "add_field"
    run: str
    epoch: Count
    field: dict[str, object]
