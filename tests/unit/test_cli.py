"""The command line as a person meets it: real processes, their output and exit codes."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

import arrow_tq
from arrow_tq.cli.main import app
from arrow_tq.cli.text import clip, printable, quote, size
from arrow_tq.testing.scenes import fill, open_run
from arrow_tq_schemas.errors import InvalidInput
from tests.warm import WarmProcess, finished

CLI = ("arrow_tq.cli.main",)
"""What every command imports."""

CHAT = {
    "session_id": "s-1",
    "group": "g",
    "reward": 0.5,
    "messages": [
        {"role": "user", "content": "list files \x1b[31m\ud800"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "ls"}}]},
        {"role": "tool", "content": "x" * 1000, "tool_call_id": "1"},
        {"role": "assistant", "content": "done"},
    ],
}


def run(*arguments: object, text: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ARROW_TQ_")}
    command = ("-m", "arrow_tq.cli", *map(str, arguments))
    return finished(*command, text=text, env={**clean, "COLUMNS": "100", **environment}, imports=CLI)


def failed(done: subprocess.CompletedProcess[str], code: str) -> str:
    """The message of the one line that a failed command writes."""
    assert done.returncode == 1, done
    assert done.stderr.startswith(f"error [{code}]: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one imported session."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "in.jsonl").write_text(json.dumps(CHAT) + "\n")
    done = run("import", "--store", folder / "store", "--run", "r", folder / "in.jsonl")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("imported into run r: 1 sessions, 2 steps, 1 segments, ")
    assert done.stderr == ""
    return folder / "store"


# -- usage and errors ------------------------------------------------------------------------------


def test_version_and_help() -> None:
    assert run("--version").stdout == f"arrow-tq {arrow_tq.__version__}\n"
    done = run("--help")
    assert done.returncode == 0
    listed = done.stdout.split("Commands:")[1]
    names = [line.split()[0] for line in listed.splitlines() if line.startswith("  ") and line[2] != " "]
    expected = [
        "serve",
        "proxy",
        "demo",
        "import",
        "ls",
        "show",
        "sql",
        "export",
        "capacity",
        "stats",
        "bench",
        "token",
    ]
    assert names == expected


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['arrow-tq', '--help']\n"
        "from arrow_tq.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'duckdb', 'transformers', 'tokenizers', 'apsw'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls"], "Missing option '--store'"),
        (["sql", "--store", "x"], "Missing argument 'QUERY'"),
        (["nonsense"], "No such command 'nonsense'"),
        (["ls", "--store", "x", "--segments"], "--segments needs a run"),
        (["sql", "--store", "x", "--format", "xml", "SELECT 1"], "'xml' is not one of"),
        (["import", "--store", "x"], "Missing argument 'FILE"),
    ],
)
def test_wrong_usage_is_2(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


@pytest.mark.parametrize("command", [["ls"], ["sql", "SELECT 1"], ["show", "x"], ["stats"]])
def test_reading_never_makes_a_store(tmp_path: Path, command: list[str]) -> None:
    where = tmp_path / "typo"
    assert "no store here" in failed(run(*command, "--store", where), "not-found")
    assert not where.exists()


def test_a_server_that_is_not_there() -> None:
    assert "127.0.0.1:9" in failed(run("ls", ARROW_TQ_STORE="grpc://127.0.0.1:9"), "unreachable")


def test_errors_of_the_store_are_one_line(place: Path) -> None:
    assert "nope" in failed(run("sql", "--store", place, "SELECT * FROM nope\n\n"), "invalid-query")
    assert "no session or segment" in failed(run("show", "--store", place, "it's"), "not-found")


def test_errors_of_import(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": 3}\n' + json.dumps(CHAT) + "\n")
    where = tmp_path / "store"
    assert "no such file" in failed(run("import", "--store", where, tmp_path / "none"), "not-found")
    fatal = failed(run("import", "--store", where, "--on-error", "fail", bad), "malformed-message")
    assert f"{bad}:1: messages: expected a list of messages, got int" in fatal
    done = run("import", "--store", where, bad)
    assert done.returncode == 0
    assert done.stderr == f"skipped: {bad}:1: messages: expected a list of messages, got int\n"
    assert "1 bad records skipped" in done.stdout
    assert "1 sessions were there already" in run("import", "--store", where, bad).stdout


def test_a_fault_of_ours_is_one_line_too(place: Path) -> None:
    code = (
        "import sys, arrow_tq; sys.argv = ['arrow-tq', 'ls', '--store', sys.argv[1]]\n"
        "def broken(*_a, **_k): raise RuntimeError('a\\nb')\n"
        "arrow_tq.open = broken\n"
        "from arrow_tq.cli.main import main\nmain()"
    )
    done = finished("-c", code, str(place), imports=CLI)
    assert failed(done, "internal") == "error [internal]: RuntimeError: a b (ARROW_TQ_DEBUG=1 shows where)\n"
    shown = finished("-c", code, str(place), env={**os.environ, "ARROW_TQ_DEBUG": "1"}, imports=CLI)
    assert "Traceback" in shown.stderr


def wait_until_idle(pid: int, idle_s: float = 1.0) -> None:
    """Return once the process has used no processor time for so long: it waits for something."""
    process, spent = psutil.Process(pid), -1.0
    while (now := sum(process.cpu_times()[:2])) != spent or now == 0.0:
        spent = now
        time.sleep(idle_s)


def test_ctrl_c_is_130_and_quiet(place: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "arrow_tq.cli", "sql", "--store", str(place), "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        # It reads its query from stdin, which never ends.
        wait_until_idle(process.pid)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert "error" not in err.lower()


# -- what is shown (in this process, which is quicker) ---------------------------------------------


def shown(*arguments: object, text: str = "", store: Path | None = None) -> str:
    """What the command writes to stdout."""
    environment = {"ARROW_TQ_STORE": None if store is None else str(store)}
    done = CliRunner().invoke(app, list(map(str, arguments)), input=text, env=environment)
    assert done.exit_code == 0, done.output
    return done.stdout


def rows(text: str) -> list[dict[str, Any]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_ls(place: Path) -> None:
    (only,) = rows(shown("ls", "--store", place, "--format", "csv"))
    assert (only["run"], only["sessions"], only["segments"]) == ("r", "1", "1")
    (session,) = rows(shown("ls", "--store", place, "r", "--format", "csv"))
    assert (session["session_id"], session["group_id"], session["steps"]) == ("s-1", "g", "2")
    (segment,) = rows(shown("ls", "--store", place, "r", "--segments", "--format", "csv"))
    assert (segment["segment_id"], segment["num_tokens"]) == ("s-1~0", session["tokens"])


def test_sql_formats(place: Path) -> None:
    query = "SELECT avg(reward) AS reward FROM segments"
    assert "0.5" in shown("sql", "--store", place, query)
    assert rows(shown("sql", "--run", "r", "--format", "csv", "-", text=query, store=place)) == [
        {"reward": "0.5"}
    ]
    assert json.loads(shown("sql", "--format", "json", query, store=place)) == [{"reward": 0.5}]


@pytest.mark.parametrize("id", ["s-1", "s-1~0"])
def test_show(place: Path, id: str) -> None:
    text = shown("show", "--store", place, id)
    for expected in ("session s-1", "segment s-1~0", "reward: 0.5", "step call-0, ", "[user] list files"):
        assert expected in text
    assert "\x1b" not in text
    assert r"list files \x1b[31m\xd800" in text
    assert "[tool] " + "x" * 400 + "... (+600 characters)" in text
    assert "token_ids" in text.split("2 spans")[1]
    assert "x" * 1000 in shown("show", "--store", place, "--full", id)


def test_stats(place: Path) -> None:
    table = rows(shown("stats", "--store", place, "--format", "csv"))
    values = {row["name"]: row["value"] for row in table}
    assert int(values["capacity_bytes"]) > 0
    assert values["unclaimed_segments"] == "1"
    (only,) = json.loads(shown("stats", "--store", place, "--format", "json"))
    assert only["unclaimed_segments"] == 1


def test_a_folder_that_a_server_holds_is_reached_through_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    where = ["--data-dir", str(data), "--memory-dir", str(tmp_path / "memory")]
    command = ["-m", "arrow_tq.cli", "serve", *where, "--port", "0", "--http-port", "0"]
    with WarmProcess(*command, imports=CLI) as server:
        try:
            until = time.monotonic() + 30
            while not (data / "server.json").exists():
                assert server.poll() is None
                assert time.monotonic() < until
                time.sleep(0.05)
            (tmp_path / "in.jsonl").write_text(json.dumps(CHAT) + "\n")
            assert "1 sessions" in shown("import", "--store", data, tmp_path / "in.jsonl")
            url = json.loads((data / "server.json").read_text())["url"]
            answers = [shown("sql", "--store", at, "SELECT session_id FROM sessions") for at in (data, url)]
            assert "s-1" in answers[0]
            assert answers[0] == answers[1]
        finally:
            server.terminate()
        assert server.wait(30) == 0


# -- text ------------------------------------------------------------------------------------------


def test_text_for_terminals() -> None:
    assert printable("a\tb\n\x1b[1m\x00\ud800é") == "a\tb\n\\x1b[1m\\x00\\xd800é"
    assert clip("abcdef", 4) == "abcd... (+2 characters)"
    assert clip("abcdef", None) == clip("abcdef", 6) == "abcdef"
    assert [size(count) for count in (0, 999, 1500, 2.5e9, 3e15)] == [
        "0 B",
        "999 B",
        "1.5 KB",
        "2.5 GB",
        "3000.0 TB",
    ]
    assert quote("it's") == "'it''s'"
    with pytest.raises(InvalidInput, match="not a text that SQL can hold"):
        quote("\ud800")


def test_claims_and_marks(tmp_path: Path) -> None:
    with arrow_tq.open(tmp_path / "store", capacity_bytes=256 << 20) as store:
        run = open_run(store, "r")
        fill(run, 3)
        run.mark("step-1")
        run.claim(1).release()
        run.claim(2, lease_s=600)
    where = ("--store", tmp_path / "store")
    claims = rows(shown("ls", *where, "r", "--claims", "--format", "csv"))
    assert [(row["state"], row["segments"]) for row in claims] == [("active", "2"), ("done", "1")]
    assert claims[0]["lease_ends"]
    assert not claims[1]["lease_ends"]
    (mark,) = rows(shown("ls", *where, "r", "--marks", "--format", "csv"))
    assert (mark["mark"], mark["status"], mark["kept_segments"]) == ("step-1", "live", "1")
    values = {row["name"]: row["value"] for row in rows(shown("stats", *where, "--format", "csv"))}
    assert (values["claims_active"], values["claimed_segments"], values["kept_segments"]) == ("1", "2", "1")
    assert float(values["lease_ends_s"]) > 0
    assert {"fill", "soft_mark", "oldest_unclaimed_s", "waiters"} <= values.keys()
    assert CliRunner().invoke(app, ["ls", "--store", "x", "r", "--claims", "--marks"]).exit_code == 2
