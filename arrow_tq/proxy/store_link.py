"""The proxy's connection to its store: made when it can be, made again when it is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import arrow_tq
from arrow_tq.client import ClientOptions, Tls
from arrow_tq.interface import Store
from arrow_tq.proxy.config import ProxyConfig
from arrow_tq.proxy.failures import StoreFailure, is_store_failure
from arrow_tq.runs import Run
from arrow_tq_schemas import presets
from arrow_tq_schemas.errors import ArrowTQError, InvalidInput
from arrow_tq_schemas.fields import TOKEN_FIELD, Field

RETRY_S = 1.0
"""Pause between attempts to reach a store that does not answer."""
Args = ParamSpec("Args")
Result = TypeVar("Result")


class StoreLink:
    """Opens the store and the run when first asked, and again after a failure to."""

    def __init__(self, config: ProxyConfig) -> None:
        self._config = config
        self._store: Store | None = None
        self._run: Run | None = None
        self._opening = asyncio.Lock()
        self._failed_at = 0.0
        self._failure: ArrowTQError | None = None

    @property
    def connected(self) -> bool:
        """Whether the run was opened."""
        return self._run is not None

    async def run(self) -> Run:
        """The run.

        Raises:
            StoreFailure: the store does not answer.
            ArrowTQError: there is no such run, or it has other fields.
        """
        if self._run is not None:
            return self._run
        async with self._opening:
            if self._run is None:
                await self._open()
        assert self._run is not None
        return self._run

    async def ask(self, call: Callable[Args, Result], *args: Args.args, **named: Args.kwargs) -> Result:
        """A call to the store on one of its threads.

        Raises:
            StoreFailure: it may work another time.
            ArrowTQError: it will not.
        """
        run = await self.run()
        try:
            return await run.threads.call(call, *args, **named)
        except ArrowTQError as error:
            if is_store_failure(error):
                raise StoreFailure(error) from None
            raise

    async def close(self) -> None:
        store, self._store, self._run = self._store, None, None
        if store is not None:
            await asyncio.to_thread(store.close)

    async def _open(self) -> None:
        # Calls that come while the store is away must not all wait for a connection of their own.
        if self._failure is not None and time.monotonic() - self._failed_at < RETRY_S:
            raise StoreFailure(self._failure)
        try:
            if self._store is None:
                self._store = await asyncio.to_thread(self._connect)
            self._run = await asyncio.to_thread(self._open_run, self._store)
            self._failure = None
        except ArrowTQError as error:
            if not is_store_failure(error):
                raise
            self._failure, self._failed_at = error, time.monotonic()
            raise StoreFailure(error) from None

    def _connect(self) -> Store:
        config = self._config
        if "://" not in config.store:
            return arrow_tq.open(config.store)
        options = ClientOptions(
            # Files that the server grants count as this process's memory, and it promises a bound.
            same_host=False,
            connect_s=config.connect_s,
            action_s=config.store_s,
            commit_s=config.store_s,
            put_inflight_bytes_max=config.put_inflight_bytes_max,
        )
        tls = Tls.from_environment() if config.store.startswith("grpc+tls:") else None
        return arrow_tq.connect(config.store, token=config.token, options=options, tls=tls)

    def _open_run(self, store: Store) -> Run:
        run = store.run(
            self._config.run,
            fields=self._declared(),
            tasks=[name.strip() for name in self._config.declare_tasks.split(",")],
        )
        if TOKEN_FIELD not in run.fields:
            raise InvalidInput(f"run {run.name!r}: a proxy needs its field {TOKEN_FIELD!r}")
        run.put_timeout_s = self._config.store_s
        return run

    def _declared(self) -> list[Field] | None:
        config = self._config
        if config.declare_layers is None:
            return None
        routing = presets.routed_experts(
            layers=config.declare_layers, topk=config.declare_topk, num_experts=config.declare_experts
        )
        return [presets.token_ids(), presets.logprobs(), routing]
