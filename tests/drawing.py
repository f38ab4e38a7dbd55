"""How many examples the dearest property tests draw: a share of them by default, which other runs add to."""

from __future__ import annotations

import os

THOROUGH = "ARROW_TQ_THOROUGH"
SHARE = 4


def drawn(count: int) -> int:
    """A quarter of ``count``; all of it where ``ARROW_TQ_THOROUGH`` is set, as ``make slow`` does."""
    return count if os.environ.get(THOROUGH) else count // SHARE
