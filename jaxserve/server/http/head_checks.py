"""HeadChecks: checks of a request's headers, origin and API key, the same for all paths."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from secrets import token_hex
from urllib.parse import urlsplit

from jaxserve.server.schema.errors import ApiError
from jaxserve.server.settings import ServerConfig

MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 << 10
MAX_HEADER_LINE = 8 << 10
MAX_REQUEST_ID = 128
# Paths without an API key: orchestrators without one check whether the process is alive and ready.
OPEN_PATHS = frozenset({"/health", "/v1/health", "/ping", "/ready"})
_UNPRINTABLE = bytes(byte for byte in range(256) if not 32 < byte < 127)
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class HeadChecks:
    """Checks of a request's headers: their sizes, Host and Origin, and the API key.

    Args:
        config: the server's settings, with its keys, hosts and origins.
        open_paths: paths that need no API key, besides the health checks in `OPEN_PATHS`.
    """

    def __init__(self, config: ServerConfig, open_paths: frozenset[str] = frozenset()) -> None:
        self._config = config
        self._open_paths = OPEN_PATHS | open_paths
        if config.open_metrics:
            self._open_paths |= {"/metrics"}
        self._keys = [hashlib.sha256(key.encode()).digest() for key in config.api_key or ()]
        self._hosts = _LOCAL_NAMES | {config.host} | set(config.allowed_hosts or ())
        self._is_local = config.is_local
        # The last Host header that was accepted. The next one is mostly the same.
        self._good_host: bytes | None = None

    def check(
        self, path: str, headers: list[tuple[bytes, bytes]], named: Mapping[bytes, bytes]
    ) -> str | None:
        """Check the headers of a request, and return the digest of its API key.

        Args:
            path: path of the request.
            headers: all headers as pairs of bytes, with names in lower case.
            named: the result of `by_name` for the same headers.

        Returns:
            The hexadecimal SHA-256 digest of the API key, or None if the path needs no key.

        Raises:
            ApiError: with status 431 for too many or too long headers, 400 for both Content-Length
                and Transfer-Encoding, 403 for a Host or Origin that is not allowed, and 401 for a
                missing or wrong API key.
        """
        self._check_sizes(headers)
        if b"content-length" in named and b"transfer-encoding" in named:
            raise ApiError(400, "both Content-Length and Transfer-Encoding", code="bad_http")
        self._check_origin(named)
        return self._check_key(path, named)

    def _check_sizes(self, headers: list[tuple[bytes, bytes]]) -> None:
        if len(headers) > MAX_HEADERS:
            raise ApiError(431, f"more than {MAX_HEADERS} headers", code="too_many_headers")
        sizes = [len(name) + len(value) for name, value in headers]
        if sum(sizes) > MAX_HEADER_BYTES:
            raise ApiError(
                431, f"headers of more than {MAX_HEADER_BYTES} bytes", code="headers_too_large"
            )
        if max(sizes, default=0) > MAX_HEADER_LINE:
            raise ApiError(
                431, f"a header is longer than {MAX_HEADER_LINE} bytes", code="header_too_long"
            )

    def _check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        # Pages of other sites may reach a loopback server through the user's browser.
        if not self._is_local:
            return
        host = headers.get(b"host", b"")
        # Browsers cannot reach a Unix socket, and its clients send any name as Host.
        if host != self._good_host and self._config.uds is None:
            if _host_of(b"//" + host) not in self._hosts:
                raise ApiError(403, "this Host is not served; see --allowed-hosts", code="bad_host")
            self._good_host = host
        origin = headers.get(b"origin")
        allowed = self._config.allowed_origins or ()
        if origin is None or "*" in allowed or origin.decode("latin-1") in allowed:
            return
        if _host_of(origin) not in self._hosts:
            raise ApiError(
                403, "this Origin may not call; see --allowed-origins", code="bad_origin"
            )

    def _check_key(self, path: str, headers: Mapping[bytes, bytes]) -> str | None:
        if not self._keys or path in self._open_paths:
            return None
        secret = headers.get(b"x-api-key", b"")
        if b"authorization" in headers:
            scheme, _, secret = headers[b"authorization"].partition(b" ")
            if scheme.lower() != b"bearer":
                secret = b""
        digest = hashlib.sha256(secret.strip()).digest()
        # Compare all keys, so that the time does not depend on the position of a match.
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        if not any(matches):
            raise ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return digest.hex()


def by_name(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return HTTP headers as a dict by name. Values of a repeated header are joined by ", "."""
    joined: dict[bytes, bytes] = {}
    for name, value in headers:
        joined[name] = joined[name] + b", " + value if name in joined else value
    return joined


def _host_of(url: bytes) -> str | None:
    try:
        return urlsplit(url.decode("ascii")).hostname
    except ValueError:
        return None


def id_of_request(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the id of a request: the printable part of its X-Request-Id header, or a random id.

    At most MAX_REQUEST_ID bytes of the header are used.
    """
    sent = headers.get(b"x-request-id", b"")[:MAX_REQUEST_ID]
    return sent.translate(None, _UNPRINTABLE) or token_hex(16).encode()


def check_media(headers: Mapping[bytes, bytes], expected: bytes = b"application/json") -> None:
    """Check the Content-Type of a request's body, and that the body is not compressed.

    Args:
        headers: headers of the request by name in lower case.
        expected: the required media type.

    Raises:
        ApiError: 415, the media type is another one, or the body has a Content-Encoding.
    """
    media = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if media != expected:
        text = f"Content-Type must be {expected.decode()}"
        raise ApiError(415, text, code="unsupported_media")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ApiError(415, "Content-Encoding is not supported", code="unsupported_encoding")
