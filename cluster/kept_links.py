"""Links to draft services by address, kept: made when a service is there, and again when it is back."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from cluster.link import Link
from engine.types import Down, Up

logger = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 2.0
_LOOK_EVERY_S = 0.5

L = TypeVar("L", bound=Link[Down, Up])


class KeptLinks(Generic[L]):
    """One link to each service that is followed. Its methods are for one thread, but `live`."""

    def __init__(self, connect: Callable[[str], L], joined: Callable[[L], object]) -> None:
        """connect: makes a link to an address, "host:port", or raises. joined: gets each new one."""
        self._connect, self._joined = connect, joined
        self._links: dict[str, L] = {}  # by address
        self._missing: set[str] = set()  # addresses that are followed and were told to be missing

    def follow(self, addresses: Sequence[str] | None, closing: threading.Event | None = None) -> None:
        """From now on one link to each of these, tried again with every call; blocks while it connects.

        Links to others stay as long as those live, whose sessions turn to others then. None: all links end.
        closing: once it is set, no further link is made.
        """
        for address, link in list(self._links.items()):
            if addresses is None:
                link.close()
            if not link.alive:
                del self._links[address]
        self._missing &= set(addresses or ())
        for address in addresses or ():
            if closing is not None and closing.is_set():
                break
            if address in self._links:
                continue
            try:
                link = self._connect(address)
            except Exception as error:  # noqa: BLE001 - not there yet, or not any more; whatever it is, it is tried again
                if address not in self._missing:
                    logger.warning("no drafts from %s until it is there: %s", address, error)
                self._missing.add(address)
                continue
            self._missing.discard(address)
            self._links[address] = link
            self._joined(link)
            logger.info("drafts come from %s", address)

    def keep(self, addresses: Callable[[], Sequence[str] | None], closing: threading.Event) -> None:
        """Follows what `addresses` says, again and again until `closing`; then all links end."""
        while not closing.is_set():
            self.follow(addresses(), closing)
            closing.wait(_LOOK_EVERY_S)
        self.follow(None)

    def live(self) -> list[L]:
        """The links that stand. From any thread."""
        return [link for link in list(self._links.values()) if link.alive]
