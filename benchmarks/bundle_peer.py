"""A producer or consumer of bundles: ``python -m benchmarks.bundle_peer URL SAMPLES LISTS``.

Reads ``put``, ``get REF`` and ``delete REF`` from its input; answers each with the seconds that it took and a
reference.
"""

from __future__ import annotations

import json
import sys
import time

import arrow_tq
from benchmarks.bundles import train_dict


def main() -> None:
    url, samples, lists = sys.argv[1], int(sys.argv[2]), bool(int(sys.argv[3]))
    value = None
    with arrow_tq.connect(url) as store:
        for line in sys.stdin:
            verb, _, ref = line.strip().partition(" ")
            if verb == "put" and value is None:
                value = train_dict(samples, lists)
            started = time.perf_counter()
            if verb == "put":
                assert value is not None
                ref = store.put_bundle(value)
            elif verb == "get":
                got = store.get_bundle(ref)
            else:
                store.delete_bundle(ref)
            seconds = time.perf_counter() - started
            if verb == "get":
                assert len(got["tokens"]) == samples
                del got
            print(json.dumps([seconds, ref]), flush=True)


if __name__ == "__main__":
    main()
