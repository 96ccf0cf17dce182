"""API keys: who may ask, and whose cache a request may share."""

import hashlib
import hmac
import re
from collections.abc import Sequence

_DIGEST = "sha256:"  # before a key's digest, in place of the key


def check_key(key: str) -> None:
    """Raises ValueError for what would be no key, or one that nobody can present."""
    if not key.strip():
        raise ValueError("a key is empty")
    if key != key.strip() or not key.isascii() or not key.isprintable():
        raise ValueError("a key is of printable ASCII, without spaces around it: else no header carries it")
    if key.startswith(_DIGEST) and not re.fullmatch(f"{_DIGEST}[0-9a-fA-F]{{64}}", key):
        raise ValueError(f"behind {_DIGEST} 64 hex digits are wanted")


def hidden(key: str) -> str:
    """The same key as its digest, which is no key itself: for configurations that are logged and shown."""
    if re.fullmatch(f"{_DIGEST}[0-9a-fA-F]{{64}}", key):
        return key.lower()
    return _DIGEST + hashlib.sha256(key.encode()).hexdigest()


class Unauthorized(Exception):
    """No key was presented, or none of those that are configured."""


class ApiKeys:
    """The keys that are configured; without any, everybody may ask."""

    def __init__(self, keys: Sequence[str]) -> None:
        """keys: each as it is, or as `hidden` gives it."""
        self._digests = [bytes.fromhex(hidden(key).removeprefix(_DIGEST)) for key in keys]

    def salt(self, presented: str | None) -> bytes:
        """The salt of the tenant with this key, for GenerationRequest; b"" without keys. Raises Unauthorized.

        All keys are compared, each in constant time: how long it takes tells nothing.
        """
        if not self._digests:
            return b""
        digest = hashlib.sha256((presented or "").encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if presented is None or not any(matches):
            raise Unauthorized
        return hashlib.sha256(b"salt" + digest).digest()[:16]


def bearer(header: str | None) -> str | None:
    """The key in an Authorization header's value."""
    scheme, _, key = (header or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None
