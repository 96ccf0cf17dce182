"""API keys: who may ask, and whose cache a request may share."""

import hashlib
import hmac
from collections.abc import Sequence


class Unauthorized(Exception):
    """No key was presented, or none of those that are configured."""


class ApiKeys:
    """The keys that are configured; without any, everybody may ask."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

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
