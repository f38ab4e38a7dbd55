"""The file of tokens: read at the start and when it changes; what a server says of one that does not fit."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

import arrow_tq
from arrow_tq import errors
from arrow_tq.calls import ask
from arrow_tq.testing.scenes import wait_until
from arrow_tq.tokens import new_token, token_line
from arrow_tq_schemas import commands as c
from arrow_tq_server.config import load
from arrow_tq_server.tokens import Tokens
from tests.flight.test_process import said, serve_fails
from tests.serving import Server


def test_the_file_is_read_again_when_it_changes_and_kept_when_it_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    old, new = new_token(), new_token()

    def write(token: str) -> None:
        key, _, rest = token_line(token, "one", [], ["read"]).partition(" = ")
        assert rest
        entry = {"name": "one", "runs": "*", "may": ["read"]}
        file.write_text(json.dumps({"tokens": {key.strip('"'): entry}}))

    def known(token: str) -> bool:
        try:
            with arrow_tq.connect(server.url, token):
                return True
        except errors.Unauthenticated:
            return False

    write(old)
    with Server(tmp_path / "data", tmp_path / "memory", "--tokens-file", str(file)) as server:
        assert known(old) and not known(new)
        write(new)
        wait_until(lambda: known(new))
        assert not known(old)
        file.write_text("{")
        wait_until(lambda: "token file refused" in server.log.read_text() or not known(new))
        assert known(new)
        stamp = file.stat().st_mtime_ns
        write(old)
        os.utime(file, ns=(stamp, stamp))
        os.kill(server.pid, signal.SIGHUP)
        wait_until(lambda: known(old))
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "tokens"),
        ("[tokens]\nx = 1", "tokens"),
        ('[tokens]\n"sha256:00" = { name = "a", runs = "*", may = ["read"] }', "tokens"),
        (f'[tokens]\n"sha256:{"0" * 64}" = {{ name = "a", runs = "*", may = ["delete"] }}', "may"),
        (f'[tokens]\n"sha256:{"0" * 64}" = {{ name = "a", runs = ["/"], may = ["read"] }}', "run '/'"),
        ("[tokens", "token file"),
    ],
)
def test_a_token_file_that_does_not_fit_names_what_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(text)
    with pytest.raises(errors.InvalidInput, match="token file") as caught:
        Tokens(file)
    assert words in str(caught.value)


def test_a_server_without_its_token_file_does_not_start(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.toml")
    code, stderr = serve_fails("--data-dir", str(tmp_path / "d"), "--tokens-file", missing)
    assert code == 1 and "token file" in said(stderr) and "No such file" in said(stderr)


def test_other_machines_are_not_served_without_tokens_unless_told(tmp_path: Path) -> None:
    common = ("--data-dir", str(tmp_path / "data"), "--port", "0", "--http-port", "0")
    for host in ("0.0.0.0", "::", "10.1.2.3", "some-host"):
        with pytest.raises(errors.InvalidInput, match=r"tokens_file, or insecure"):
            load({"data_dir": tmp_path, "host": host})
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert load({"data_dir": tmp_path, "host": host}).tokens_file is None
    code, stderr = serve_fails(*common, "--host", "0.0.0.0")
    assert code == 2 and "tokens_file" in said(stderr)
    with Server(tmp_path / "data", tmp_path / "memory", "--host", "0.0.0.0", "--insecure") as server:
        assert ask(arrow_tq.connect(server.url)._backend, c.GetPressure(), c.Pressure).used_bytes >= 0
        assert server.stop() == 0
    assert "serving other machines without tokens" in server.log.read_text()
