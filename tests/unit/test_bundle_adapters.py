"""Drop-in object stores on bundles: Miles's three calls, and the slime example as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arrow_tq
from arrow_tq import errors
from arrow_tq.adapters.miles import BundleObjects
from arrow_tq.interface import Store
from arrow_tq.testing.bundles import same, train_dict


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with arrow_tq.open(tmp_path / "store", capacity_bytes=1 << 30) as store:
        yield store


@pytest.mark.parametrize("lists", [False, True])
def test_miles_puts_gets_and_removes_a_train_dict(store: Store, lists: bool) -> None:
    objects = BundleObjects(store, run="miles")
    value = train_dict(64, lists=lists)
    ref = objects.put(value, value_spec={"tokens": "whatever another store wants"})
    assert len(json.dumps(ref)) < 256
    with objects.get(json.loads(json.dumps(ref))) as got:
        same(value, got)
        kept = got["tokens"][3]
    with objects.get(ref, fields=["rewards", "num_microbatches"], rows=value["partition"]) as part:
        assert part["rewards"] == [value["rewards"][row] for row in value["partition"]]
        assert part["num_microbatches"] == value["num_microbatches"]
    objects.remove(ref)
    objects.remove(ref)
    with pytest.raises(errors.NotFound), objects.get(ref):
        pass
    assert list(kept) == list(value["tokens"][3])
    assert store.sql("SELECT run FROM bundles").column("run").to_pylist() == ["miles"]


@pytest.mark.parametrize("samples", [1, 2, 4])
def test_fields_about_the_batch_are_never_split(store: Store, samples: int) -> None:
    objects = BundleObjects(store)
    value = train_dict(samples)
    with objects.get(objects.put(value), rows=[0]) as got:
        for name in ("partition", "num_microbatches", "micro_batch_indices", "global_batch_sizes"):
            assert got[name] == value[name]
        same(got["tokens"], value["tokens"][:1])


@pytest.mark.parametrize("value", [np.arange(5), [1, None, "x"], "text", None, (1, 2), [{"a": np.zeros(2)}]])
def test_a_value_that_is_no_dict_comes_back_too(store: Store, value: Any) -> None:
    objects = BundleObjects(store)
    with objects.get(objects.put(value)) as got:
        same(value, got)


def test_the_slime_example_runs() -> None:
    example = Path(__file__).parents[2] / "examples" / "slime_hand_off.py"
    done = subprocess.run(
        [sys.executable, str(example), "--samples", "64", "--ranks", "2"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1 read 32 rows" in done.stdout
    assert "'samples': 64" in done.stdout
