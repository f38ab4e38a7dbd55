"""The public figures of routing replay, from the formula and from the command line."""

from __future__ import annotations

import json
import shlex

import pytest
from typer.testing import CliRunner

from arrow_tq.capacity import HANDLE_BYTES, Growth, Indexer, Workload, parse_count
from arrow_tq.cli.main import app
from arrow_tq_schemas.errors import InvalidInput

GLM = Workload(layers=75, topk=8, context=256 << 10, batch=512, samples=8)
LINE = shlex.split("capacity --layers 75 --topk 8 --context 256K --batch 512 --samples 8")
TIB = 1 << 40


def say(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*LINE, *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


def test_a_batch_is_2_34_tib() -> None:
    assert GLM.trajectories == 4096
    assert GLM.routing_bytes == (256 << 10) * 75 * 8 * 4 * 4096
    assert GLM.routing_bytes / TIB == pytest.approx(2.34, abs=0.005)
    assert "= 2.34 TiB" in say("--dtype", "int32")


def test_ten_segments_are_23_4_tib() -> None:
    assert "= 23.44 TiB" in say("--segments-per-trajectory", "10")


def test_uint8_is_a_quarter() -> None:
    small = json.loads(say("--dtype", "uint8", "--format", "json"))
    assert small["routing_bytes"] * 4 == GLM.routing_bytes


def test_the_published_shares() -> None:
    shares = {part.name: 100 * part.share for part in GLM.parts()}
    published = {"routed_experts": 92.4, "logprobs": 2.3, "token_ids": 2.1, "messages": 2.3, "others": 0.9}
    assert shares == pytest.approx(published, abs=0.05)
    assert "92.4%" in say()


def test_growth_from_64k_and_40_layers_on_two_shards() -> None:
    before = Workload(layers=40, topk=8, context=64 << 10, batch=512, samples=8, shards=2)
    after = Workload(layers=75, topk=8, context=256 << 10, batch=512, samples=8, shards=32)
    growth = Growth.between(before, after)
    assert (growth.total, growth.local) == (pytest.approx(7.5), pytest.approx(0.47, abs=0.005))
    against = [
        "--against-layers",
        "40",
        "--against-context",
        "64K",
        "--against-shards",
        "2",
        "--shards",
        "32",
    ]
    assert "7.50x in all, 0.47x a shard" in say(*against)
    assert "each of 32 shards holds 75.00 GiB" in say("--shards", "32")


def test_an_indexer_is_96_kib_a_token_and_a_handle_24_bytes() -> None:
    assert Indexer(12, 2048).token_bytes == 96 << 10
    assert HANDLE_BYTES == 24
    shown = say("--indexer-layers", "12", "--indexer-topk", "2048")
    assert "96.00 KiB a token; a handle that stands for it: 24 B" in shown


def test_json_has_every_part() -> None:
    facts = json.loads(say("--format", "json", "--indexer-layers", "12", "--against-layers", "40"))
    assert facts["parts"][0]["name"] == "indexer_topk"
    assert sum(part["share"] for part in facts["parts"]) == pytest.approx(1)
    assert facts["growth"] == {"total": 75 / 40, "local": 75 / 40}
    assert facts["indexer_token_bytes"] == 96 << 10


@pytest.mark.parametrize(("text", "count"), [("256K", 262144), ("1m", 1 << 20), ("512", 512)])
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "K", "0", "-1K", "1.5K", "256KB", "٣"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(InvalidInput, match="expected a count"):
        parse_count(text)


@pytest.mark.parametrize("wrong", [{"dtype": "int64"}, {"shards": 0}, {"segments_per_trajectory": -1.0}])
def test_what_cannot_be_a_workload(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        Workload(**{"layers": 1, "topk": 1, "context": 1, "batch": 1, "samples": 1, **wrong})  # type: ignore[arg-type]
