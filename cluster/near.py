"""Both ends on one machine: a unix socket, found by the address of the draft's TCP port.

Through TCP the kernel runs the whole way to the other end within `send`, between two steps and with cold caches: here that
takes a fifth to a third less (benchmarks/README.md). The name is in Linux' abstract namespace: like a port it belongs to a
network namespace and goes with its process, so who dials "host:port" finds nobody else there.
"""

import os
import socket
import struct

_PEER = struct.Struct("3i")  # of SO_PEERCRED: process, user, group
_WAITING = 128  # connections that were not accepted yet


def listen_near(address: str) -> socket.socket | None:
    """What `dial_near` connects to; None where there are no such sockets. address: "host:port", a port of this process."""
    try:
        listener = socket.socket(socket.AF_UNIX)
    except (AttributeError, OSError):
        return None
    try:
        listener.bind(_name(address))
        listener.listen(_WAITING)
    except OSError:  # no abstract names on this system, or somebody has taken this one
        listener.close()
        return None
    return listener


def dial_near(address: str, timeout_s: float) -> socket.socket | None:
    """A connection to the process of this machine and user that listens at an address; None where there is none."""
    try:
        dialled = socket.socket(socket.AF_UNIX)
    except (AttributeError, OSError):
        return None
    try:
        dialled.settimeout(timeout_s)
        dialled.connect(_name(address))
        _, user, _ = _PEER.unpack(dialled.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if user == os.geteuid():
            return dialled
    except (AttributeError, OSError):
        pass
    dialled.close()
    return None


def _name(address: str) -> str:
    return f"\0paceline-draft/{address}"
