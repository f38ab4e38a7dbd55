"""Every error of ours through Flight and back, and what of it a client of another make sees."""

from __future__ import annotations

import json
import subprocess
import sys

import pyarrow.flight as flight
import pytest

from arrow_tq import errors
from arrow_tq.client.failures import translate
from arrow_tq_schemas.errors import ArrowTQError, error_types, from_wire
from arrow_tq_server.errors import WIRE_BYTES_MAX, answering, to_flight
from arrow_tq_server.metrics import Metrics

TYPES = sorted(error_types().values(), key=lambda kind: kind.code)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.code)
def test_an_error_comes_back_as_it_was(kind: type[ArrowTQError]) -> None:
    error = kind("chunk 1: what, where", ids=["1", "2"], position=7)
    sent = to_flight(error)
    assert not isinstance(sent, flight.FlightCancelledError)
    assert str(sent).startswith(f"{kind.code}: chunk 1: what, where")
    back = translate(sent, "grpc://head:1", "read", 1.0)
    assert type(back) is kind
    assert (back.message, back.details) == (error.message, error.details)


@pytest.mark.parametrize("letter", ["x", "ü", "\U0001f600", "\x00", '"'])
def test_an_error_of_any_size_fits_the_trailers(letter: str) -> None:
    error = errors.ChunkLost(letter * 100_000, ids=["1" * 32] * 10_000, text=letter * 50_000)
    sent = to_flight(error)
    assert len(sent.extra_info) <= WIRE_BYTES_MAX + 2000
    assert len(str(sent)) < 400
    back = translate(sent, "grpc://head:1", "read", 1.0)
    assert isinstance(back, errors.ChunkLost) and back.message.startswith(letter * 100)


def test_a_long_list_says_how_long_it_was() -> None:
    error = errors.ChunkLost("lost", ids=[str(number) for number in range(1000)])
    back = translate(to_flight(error), "grpc://head:1", "read", 1.0)
    assert back.details == {"ids": [str(number) for number in range(16)], "ids_count": 1000}


def test_a_fault_of_ours_shows_nothing_of_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = Metrics()
    with pytest.raises(flight.FlightInternalError) as caught, answering("get", metrics):
        raise ZeroDivisionError("secret value")
    assert "secret" not in str(caught.value) and ".py" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert b'arrow_tq_errors_total{code="internal"} 1.0' in metrics.text()


def test_the_log_has_the_traceback_of_a_fault() -> None:
    code = (
        "import sys\n"
        "from arrow_tq_server.process import log_json\n"
        "from arrow_tq_server.errors import unforeseen\n"
        "log_json('info')\n"
        "sys.tracebacklimit = 0\n"
        "def broken(): secret_local = 'hidden'; return 1 / 0\n"
        "try: broken()\n"
        "except ZeroDivisionError as error: unforeseen('get', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    line = json.loads(done.stderr)
    assert (line["event"], line["verb"]) == ("handler failed", "get")
    assert line["exception"][0]["exc_type"] == "ZeroDivisionError"
    assert [frame["name"] for frame in line["exception"][0]["frames"]] == ["<module>", "broken"]
    assert "hidden" not in done.stderr.replace(code, "")


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (flight.FlightUnavailableError("failed to connect to all addresses"), errors.Unreachable),
        (flight.FlightTimedOutError("Deadline Exceeded"), errors.DeadlineExceeded),
        (flight.FlightServerError("Stream removed"), errors.Unreachable),
        (flight.FlightInternalError("Received RST_STREAM with error code 2"), errors.Unreachable),
        (OSError("Connection reset by peer"), errors.Unreachable),
        (flight.FlightServerError("who knows"), errors.InternalError),
        (flight.FlightServerError("not-found: run 'x'"), errors.NotFound),
        (flight.FlightServerError("odd: thing", extra_info=b"\xff"), errors.InternalError),
    ],
)
def test_what_pyarrow_raises_has_a_type_of_ours(failure: Exception, expected: type[ArrowTQError]) -> None:
    error = translate(failure, "grpc://head:1", "read", 2.5)
    assert type(error) is expected
    if expected is not errors.NotFound:
        assert "grpc://head:1" in str(error)
        assert from_wire(error.to_wire()).message == error.message
