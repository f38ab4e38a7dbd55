"""What a caller must be allowed to do, command by command.

A token covers some runs (or all) and has rights: ``read`` looks, ``write`` changes a run, ``admin`` is
for the store itself and includes the others. A command without a rule here needs ``admin`` over all runs:
forgetting one closes a door and opens none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from arrow_tq_schemas import cluster as n, commands as c
from arrow_tq_schemas.errors import PermissionDenied

Right = Literal["read", "write", "admin"]
RIGHTS: tuple[Right, ...] = get_args(Right)


@dataclass(frozen=True, slots=True)
class Need:
    """What a call needs: all of ``rights``, over all of ``runs`` (None: over every run there is)."""

    rights: frozenset[Right]
    runs: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class Grant:
    """What a token allows.

    Attributes:
        name: whose token it is, for messages and logs.
        rights: what it may do.
        runs: the runs that it covers; None: every run.
    """

    name: str
    rights: frozenset[Right]
    runs: frozenset[str] | None

    def covers(self, run: str) -> bool:
        """Whether the token is for this run."""
        return self.runs is None or run in self.runs

    def allows(self, need: Need) -> bool:
        """Whether a call with this need may be made."""
        if not (need.rights <= self.rights or "admin" in self.rights):
            return False
        return self.runs is None or (need.runs is not None and need.runs <= self.runs)

    def check(self, need: Need, what: str) -> None:
        """Raises ``PermissionDenied`` naming what ``what`` needs and what the token allows."""
        if not self.allows(need):
            rights = ", ".join(sorted(need.rights)) or "any right"
            raise PermissionDenied(
                f"{what} needs {rights} on {_spell(need.runs)}; token {self.name!r} allows "
                f"{', '.join(sorted(self.rights))} on {_spell(self.runs)}",
                rights=sorted(need.rights),
                runs=None if need.runs is None else sorted(need.runs),
            )


EVERYTHING = Grant("anybody", frozenset(RIGHTS), None)
"""Where a server asks for no tokens."""

Rule = Callable[[c.Command], Need]


def need(rights: Iterable[Right], *runs: str) -> Need:
    """A need over these runs; over every run where none is named."""
    return Need(frozenset(rights), frozenset(runs) if runs else None)


def need_of(command: c.Command) -> Need:
    """What a command needs."""
    rule = RULES.get(type(command))
    return need(["admin"]) if rule is None else rule(command)


def _of_run(*rights: Right) -> Rule:
    """These rights on the run that the command names; on every run where it may, and does, name none."""

    def rule(command: c.Command) -> Need:
        run: str | None = command.run  # type: ignore[attr-defined]
        return Need(frozenset(rights), None if run is None else frozenset([run]))

    return rule


def _of_nobody(*rights: Right) -> Rule:
    """Rights alone: what the answer shows follows the token's runs."""
    return lambda command: Need(frozenset(rights), frozenset())


def _of_steps(command: c.Command) -> Need:
    assert isinstance(command, c.CommitSteps)
    return Need(frozenset(["write"]), frozenset(step.run for step in command.steps))


def _open_run(command: c.Command) -> Need:
    """Whoever may do anything with a run may open it; declaring it or advancing its epoch changes it."""
    assert isinstance(command, c.OpenRun)
    changes = command.fields is not None or command.epoch is not None
    return Need(frozenset(["write"] if changes else []), frozenset([command.run]))


_WITHIN = (
    n.JoinCluster,
    n.Beat,
    n.LeaveCluster,
    n.ChunkStates,
    n.ConfirmChunks,
    n.FetchChunks,
    n.DigestChunks,
    n.TendChunks,
)
RULES: dict[type[c.Command], Rule] = {
    c.OpenRun: _open_run,
    c.SetPolicyVersion: _of_run("write"),
    c.CloseGroup: _of_run("write"),
    c.OpenSession: _of_run("write"),
    c.CommitSteps: _of_steps,
    c.DropChunks: _of_run("write"),
    c.KeepChunks: _of_run("write"),
    c.AbandonStep: _of_run("write"),
    c.FinalizeSession: _of_run("write"),
    c.AbortSession: _of_run("write"),
    # A claim shows segments and, once released, frees them.
    c.Claim: _of_run("read", "write"),
    c.AttachClaim: _of_run("read", "write"),
    c.RenewClaim: _of_run("write"),
    c.ReleaseClaim: _of_run("write"),
    c.AddField: _of_run("write"),
    # Writers ask whether a blob is there already, readers where it is.
    c.FindBlob: _of_run(),
    c.PutValues: _of_run("write"),
    c.GetSegments: _of_run("read"),
    c.ListSegments: _of_run("read"),
    c.UpdateSegments: _of_run("write"),
    c.Discard: _of_run("write"),
    c.GetPressure: _of_nobody(),
    c.GetStats: _of_nobody("read"),
    c.RunQuery: _of_run("read"),
    c.GetSession: _of_run("read"),
    c.GetClaim: _of_run("read"),
    c.Mark: _of_run("write"),
    c.Rewind: _of_run("write"),
    # The server's own machine: a proof of being there comes on top, and a grant's id is a secret.
    c.FindHost: _of_nobody(),
    c.LocateChunks: _of_run("read"),
    c.GrantExtent: _of_run("write"),
    c.AdoptChunks: _of_run("write"),
    c.KeepGrants: _of_nobody("write"),
    c.EndGrants: _of_nobody("write"),
    c.OpenBundleRun: _of_run("write"),
    c.CommitBundle: _of_run("write"),
    c.OpenBundle: _of_run("read"),
    # Whoever reads ends its own lease: the lease's id is a secret.
    c.CloseBundle: _of_run("read"),
    c.DeleteBundle: _of_run("write"),
    n.GetRun: _of_run(),
    n.GetCluster: _of_nobody(),
    # Catalog and shards among themselves.
    **dict.fromkeys(_WITHIN, lambda command: need(["admin"])),
}


def _spell(runs: frozenset[str] | None) -> str:
    if runs is None:
        return "every run"
    if not runs:
        return "no run in particular"
    return f"run{'s' if len(runs) > 1 else ''} {', '.join(map(repr, sorted(runs)))}"
