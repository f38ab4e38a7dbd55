"""Keeps a claim's lease alive while its batch is in use."""

from __future__ import annotations

import os
import threading
import weakref

from arrow_tq.backend import Backend
from arrow_tq.logs import logger
from arrow_tq_schemas.commands import RenewClaim
from arrow_tq_schemas.errors import ArrowTQError, ClaimGone, NotFound

RENEWALS_PER_LEASE = 3
"""A lease survives two failed renewals."""


class LeaseKeeper:
    """Renews one claim in the background until it is stopped or its owner is collected."""

    def __init__(self, owner: object, backend: Backend, run: str, claim_id: str, lease_s: float) -> None:
        self._backend = backend
        self._command = RenewClaim(run=run, claim_id=claim_id)
        self._period_s = lease_s / RENEWALS_PER_LEASE
        self._stopped = threading.Event()
        self._pid = os.getpid()
        self.lost: ArrowTQError | None = None
        """Why the claim is gone, once a renewal was refused."""
        weakref.finalize(owner, self._stopped.set)
        name = f"arrow-tq-lease-{claim_id[:8]}"
        threading.Thread(target=self._renew, name=name, daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _renew(self) -> None:
        log = logger("arrow_tq.lease")
        while not self._stopped.wait(self._period_s):
            # A renewal is idempotent by nature, but each needs an id of its own to be applied.
            command = RenewClaim(run=self._command.run, claim_id=self._command.claim_id)
            try:
                self._backend.execute(command)
            except (ClaimGone, NotFound) as error:
                self.lost = error
                log.warning("claim lost", claim=command.claim_id, error=str(error))
                return
            except ArrowTQError as error:
                log.warning("lease not renewed, trying again", claim=command.claim_id, error=str(error))
