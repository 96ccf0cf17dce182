"""Addresses as people write them. Imports nothing slow."""


def parse_address(text: str, option: str = "", listens: bool = False) -> tuple[str, int]:
    """(host, port) of "host:port". Raises ValueError, which names the option if there is one.

    listens: port 0 is allowed, and takes any.
    """
    host, separator, port = text.rpartition(":")
    known = (
        bool(separator and host)
        and "/" not in host
        and port.isascii()
        and port.isdigit()
        and (not listens) <= int(port) <= 65535
    )
    if not known:
        message = f"{text!r} is not HOST:PORT"
        raise ValueError(f"{option}: {message}" if option else message)
    return host.removeprefix("[").removesuffix("]"), int(port)
