"""The one switch that every framework's adapter has."""

from __future__ import annotations

from enum import Enum

from arrow_tq_schemas.errors import InvalidInput


class Switch(Enum):
    """What the store carries in the framework's place. ``OFF`` leaves the framework as it was."""

    OFF = "off"
    """Nothing: no object is touched, no hook set, no call made."""
    LOGPROBS = "logprobs"
    """The log-probs of the rollout engine."""
    ROUTING = "logprobs+routing"
    """Those, and the experts that its routers chose, to be replayed."""

    @classmethod
    def parse(cls, value: str | Switch) -> Switch:
        """From a configuration's text; raises ``InvalidInput`` naming what there is."""
        try:
            return cls(value)
        except ValueError:
            known = ", ".join(repr(one.value) for one in cls)
            raise InvalidInput(f"switch {value!r}: expected one of {known}") from None

    @property
    def has_logprobs(self) -> bool:
        return self is not Switch.OFF

    @property
    def has_routing(self) -> bool:
        return self is Switch.ROUTING
