"""An object store for Miles: its seam of three calls, on bundles.

objects = BundleObjects(arrow_tq.connect("grpc://head:8815"), run="qwen3-grpo")
ref = objects.put(train_dict)          # a short text instead of a Ray reference
with objects.get(ref) as value:        # the same dict, rows as read-only views
...
objects.remove(ref)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from arrow_tq.interface import Store

NOT_PER_SAMPLE = ("partition", "num_microbatches", "micro_batch_indices", "global_batch_sizes")
"""Fields of a train dict that are about the batch, whatever their length."""
_ALONE = "__value__"
"""The key of a value that is no dict."""


class BundleObjects:
    """Put, get and remove of whole values. Thread-safe, as its store is.

    Args:
        store: where bundles go.
        run: whose quota they count in.
        schema: layouts by field, see ``docs/bundles.md``; fields that a dict lacks are passed over.
    """

    def __init__(self, store: Store, run: str | None = None, schema: Mapping[str, str] | None = None) -> None:
        self._store = store
        self._run = run
        self._schema = {**dict.fromkeys(NOT_PER_SAMPLE, "whole"), **(schema or {})}

    def put(self, value: Any, value_spec: object = None) -> str:
        """Store a value whole; gives its reference, text of under 256 bytes.

        Args:
            value: a dict of per-sample values, or any one value that a bundle can hold.
            value_spec: what other stores want to be told of the layout; here it is found out, so this is
                accepted and not used.

        Raises:
            InvalidInput: a value that could not come back as it is; names its path.
            QuotaExceeded, StoreFull: no room.
        """
        whole = value if type(value) is dict else {_ALONE: value}
        schema = {name: word for name, word in self._schema.items() if name in whole}
        return self._store.put_bundle(whole, schema=schema, run=self._run)

    @contextmanager
    def get(
        self, ref: str, fields: Sequence[str] | None = None, rows: Sequence[int] | slice | None = None
    ) -> Iterator[Any]:
        """The value, its bytes kept until the context ends; views of it that are kept stay valid.

        Args:
            ref: what ``put`` gave.
            fields, rows: a part of a dict, such as the rank's ``partition``.

        Raises:
            NotFound: removed, or never there.
        """
        with self._store.open_bundle(ref) as opened:
            value = opened.get(fields, rows)
            yield value[_ALONE] if list(value) == [_ALONE] else value

    def remove(self, ref: str) -> None:
        """Take a value away. Its bytes go when its last reader is done. Again is the same as once."""
        self._store.delete_bundle(ref)
