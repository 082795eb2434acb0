"""Settings of TLS: certificates are checked before any model is loaded."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.server.settings import ServerConfig

_FIELDS = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs")


def check_certificates(config: ServerConfig) -> None:
    """Check that the server's certificate, key, authorities and ciphers can be loaded.

    Raises:
        InvalidRequest: a file is missing or malformed. The error names the setting.
    """
    if config.ssl_certfile is None:
        return
    import ssl  # takes 10 ms, and few servers need it

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    key = config.ssl_keyfile
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path = getattr(config, name)
        try:
            with open(path or config.ssl_certfile, "rb"):
                pass
        except OSError as error:
            raise InvalidRequest(f"{name}: cannot read {path}: {error.strerror}", name) from error
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(config.ssl_certfile, key, lambda: b"")
    except (ssl.SSLError, OSError) as error:
        name = "ssl_certfile" if key is None else "ssl_keyfile"
        raise InvalidRequest(
            f"{name}: {key or config.ssl_certfile} is no private key without a password, in PEM, "
            f"that belongs to {config.ssl_certfile}",
            name,
        ) from error
    try:
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except (ssl.SSLError, OSError) as error:
        raise InvalidRequest(
            f"ssl_ca_certs: {config.ssl_ca_certs} holds no certificates in PEM", "ssl_ca_certs"
        ) from error
    try:
        if config.ssl_ciphers is not None:
            context.set_ciphers(config.ssl_ciphers)
    except ssl.SSLError as error:
        raise InvalidRequest(
            f"ssl_ciphers: OpenSSL has no cipher {config.ssl_ciphers!r}", "ssl_ciphers"
        ) from error


def uvicorn_options(config: ServerConfig) -> dict[str, Any]:
    """Return uvicorn's arguments for TLS, or an empty dict without a certificate."""
    if config.ssl_certfile is None:
        return {}
    ciphers = {} if config.ssl_ciphers is None else {"ssl_ciphers": config.ssl_ciphers}
    return {name: getattr(config, name) for name in _FIELDS} | ciphers
