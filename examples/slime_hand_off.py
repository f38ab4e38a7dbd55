"""A rollout manager hands a train dict to data-parallel ranks: what slime does with ``Box(ray.put(data))``.

The dict is put once; what travels to the ranks is a reference of under 100 bytes; each rank, a process of its
own, reads its rows of the fields that it needs.

    python examples/slime_hand_off.py [--store grpc://host:8815] [--samples 512] [--ranks 4]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import arrow_tq
from arrow_tq.adapters.miles import NOT_PER_SAMPLE
from arrow_tq.testing.bundles import train_dict

RANK_FIELDS = ["tokens", "loss_masks", "rollout_log_probs", "rewards", "sample_indices", "total_lengths"]


def manager(url: str, samples: int, ranks: int) -> None:
    """Put the batch, send references out, check what the ranks saw, delete it."""
    data = train_dict(samples)
    partitions = [list(range(rank, samples, ranks)) for rank in range(ranks)]
    with arrow_tq.connect(url) as store:
        # A scheduler reads the metadata from the reference, without touching the bundle.
        tokens = [sum(data["total_lengths"][row] for row in rows) for rows in partitions]
        schema = dict.fromkeys(NOT_PER_SAMPLE, "whole")
        ref = store.put_bundle(data, schema=schema, run="slime", metadata={"tokens_by_rank": tokens})
        print(f"put {samples} samples as {ref.partition('#')[0]} and {json.dumps(ref.metadata)}")
        processes = [rank_process(url, ref, rows) for rows in partitions]
        for rank, process in enumerate(processes):
            answer, _ = process.communicate()
            if process.returncode:
                raise SystemExit(f"rank {rank} failed")
            seen = json.loads(answer)
            assert seen == {"tokens": tokens[rank], "rows": len(partitions[rank])}
            print(f"rank {rank} read {seen['rows']} rows, {seen['tokens']} tokens")
        query = f"SELECT count(*) AS samples, avg(rewards) AS reward FROM bundle('{ref.bundle_id}')"
        print(store.run("slime").sql(query).to_pylist()[0])
        store.delete_bundle(ref, wait_s=10)


def rank_process(url: str, ref: str, rows: list[int]) -> subprocess.Popen[str]:
    """Start a rank; what it is told fits on a command line."""
    arguments = [sys.executable, __file__, "--store", url, "--rank-of", ref, "--rows", json.dumps(rows)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def rank(url: str, ref: str, rows: list[int]) -> None:
    """One data-parallel rank: its rows, as read-only arrays, ready for torch."""
    with arrow_tq.connect(url) as store:
        data = store.get_bundle(ref, fields=RANK_FIELDS, rows=rows)
    assert data["sample_indices"] == rows
    assert all(isinstance(row, np.ndarray) for row in data["tokens"])
    print(json.dumps({"tokens": sum(map(len, data["tokens"])), "rows": len(data["tokens"])}))


@contextmanager
def server() -> Iterator[str]:
    """A store's server of our own, in a folder that goes with it."""
    with tempfile.TemporaryDirectory() as folder:
        paths = ["--data-dir", f"{folder}/data", "--memory-dir", str(Path(folder) / "memory")]
        command = [sys.executable, "-m", "arrow_tq_server", *paths, "--port", "0", "--http-port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[2]
        finally:
            process.terminate()
            process.wait(20)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", metavar="URL", help="a running store; one is started when left out")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank_of:
        rank(chosen.store, chosen.rank_of, json.loads(chosen.rows))
    elif chosen.store:
        manager(chosen.store, chosen.samples, chosen.ranks)
    else:
        with server() as url:
            manager(url, chosen.samples, chosen.ranks)


if __name__ == "__main__":
    main()
