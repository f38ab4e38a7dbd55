"""The rules of access: each command has one, and nothing is open by being forgotten."""

from __future__ import annotations

import pytest

from arrow_tq import errors
from arrow_tq.tokens import check_rights, digest_of, new_token, token_line
from arrow_tq_schemas.access import EVERYTHING, RULES, Grant, Need, need, need_of
from arrow_tq_schemas.commands import COMMANDS, Command, CommitSteps, OpenRun
from tests.access_samples import sample

ALL = pytest.mark.parametrize("kind", COMMANDS.values(), ids=lambda kind: kind.verb)


@ALL
def test_every_command_has_a_rule(kind: type[Command]) -> None:
    assert kind in RULES, f"{kind.__name__}: say in arrow_tq_schemas/access.py who may do it"


@ALL
def test_a_rule_names_the_run_that_the_command_names(kind: type[Command]) -> None:
    wanted = need_of(sample(kind, run="beta"))
    if "run" in kind.model_fields or kind is CommitSteps:
        assert wanted.runs == {"beta"} or wanted == need(["admin"])
    assert wanted.rights or kind.verb in (
        "open_run",
        "get_run",
        "find_blob",
        "find_host",
        "pressure",
        "cluster",
    )


@ALL
def test_a_command_that_changes_something_needs_more_than_read(kind: type[Command]) -> None:
    command = sample(kind, run="beta")
    if not kind.mutates or (isinstance(command, OpenRun) and command.fields is None):
        return
    with pytest.raises(errors.PermissionDenied, match=r"beta|admin on every run"):
        Grant("reader", frozenset(["read"]), None).check(need_of(command), kind.verb)


@ALL
def test_a_token_of_another_run_opens_no_run_of_mine(kind: type[Command]) -> None:
    wanted = need_of(sample(kind, run="beta"))
    if wanted.runs == frozenset():
        return  # its answer follows the token's runs
    assert not Grant("alpha", frozenset(["read", "write", "admin"]), frozenset(["alpha"])).allows(wanted)
    assert EVERYTHING.allows(wanted)


def test_a_command_without_a_rule_is_for_the_operator_alone() -> None:
    class Forgotten(Command):
        verb = "forgotten"
        run: str

    wanted = need_of(Forgotten(run="alpha"))
    assert wanted == Need(frozenset(["admin"]), None)
    assert not Grant("a", frozenset(["read", "write", "admin"]), frozenset(["alpha"])).allows(wanted)
    assert not Grant("b", frozenset(["read", "write"]), None).allows(wanted)
    assert Grant("c", frozenset(["admin"]), None).allows(wanted)


def test_rights_do_not_imply_each_other_but_for_admin() -> None:
    writer, reader = (Grant("x", frozenset([right]), frozenset(["a"])) for right in ("write", "read"))
    assert writer.allows(need(["write"], "a")) and not writer.allows(need(["read"], "a"))
    assert reader.allows(need(["read"], "a")) and not reader.allows(need(["write"], "a"))
    assert Grant("x", frozenset(["admin"]), frozenset(["a"])).allows(need(["read", "write"], "a"))
    assert not reader.allows(need(["read"], "a", "b")) and not reader.allows(need(["read"]))


def test_tokens_are_random_and_only_their_hash_is_written() -> None:
    one, other = new_token(), new_token()
    assert one != other and len(one) > 40
    line = token_line(one, "proxy", ["alpha"], check_rights("write, read"))
    assert one not in line and digest_of(one).hex() in line
    assert line.endswith('{ name = "proxy", runs = ["alpha"], may = ["read", "write"] }')
    for text in ("", "red", "read,delete"):
        with pytest.raises(errors.InvalidInput, match="read, write, admin"):
            check_rights(text)
