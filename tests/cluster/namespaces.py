"""Servers in networks of their own, on one bridge: a cable can be pulled without touching a process."""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType

SUBNET = "10.213.{site}.{host}"


def why_not() -> str | None:
    """Why this machine has no network namespaces for us; None: it has."""
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    if shutil.which("ip") is None:
        return "needs the program ip (Debian: iproute2)"
    name = f"atq-try-{os.getpid()}"
    made = _try("netns", "add", name)
    if made:
        return f"no network namespaces here: {made}"
    made = _try("-n", name, "link", "add", "atqbr", "type", "bridge")
    _ip("netns", "del", name)
    return f"no bridges here: {made}" if made else None


class Net:
    """A bridge with this machine on it, and as many namespaces, each with an address and a cable.

    Attributes:
        host: this machine's address on the bridge.
    """

    def __init__(self, count: int) -> None:
        number = os.getpid() % 10_000
        self._site = os.getpid() % 250 + 1
        self._bridge = f"atqb{number}"
        self._names = [f"atq{number}-{index}" for index in range(count)]
        self._cables = [f"atqv{number}x{index}" for index in range(count)]
        self.host = SUBNET.format(site=self._site, host=1)
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def address(self, index: int) -> str:
        """Of a namespace."""
        return SUBNET.format(site=self._site, host=index + 10)

    def command(self, index: int) -> list[str]:
        """What runs a command in a namespace."""
        return ["ip", "netns", "exec", self._names[index]]

    def pull(self, index: int) -> None:
        """Take a namespace off the network."""
        _ip("link", "set", self._cables[index], "down")

    def plug(self, index: int) -> None:
        """Put it back."""
        _ip("link", "set", self._cables[index], "up")

    def close(self) -> None:
        for name in self._names:
            _try("netns", "del", name)
        for link in [*self._cables, self._bridge]:
            _try("link", "del", link)

    def _make(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.host}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for index, (name, cable) in enumerate(zip(self._names, self._cables, strict=True)):
            _ip("netns", "add", name)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", cable, "master", self._bridge, "up")
            _ip("-n", name, "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def __enter__(self) -> Net:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _try(*arguments: str) -> str:
    """What went wrong, if anything."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    return (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else ""
