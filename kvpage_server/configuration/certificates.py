"""The TLS context of the server, from the configured certificates."""

from __future__ import annotations

import errno
import logging
import os
import ssl
from pathlib import Path

from kvpage_server.bounded import read_regular
from kvpage_server.configuration.config import Config

PARAMETERS = ("tls-cert-file", "tls-key-file", "tls-key-file-pass", "tls-ca-cert-file", "tls-auth-clients")
_MOST_BYTES = 16 << 20  # bytes of a PEM file
_WRONG_DATES = 9, 10  # OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED

logger = logging.getLogger("kvpage")


class CertificateError(ValueError):
    """Error: configured certificates cannot be used. The message names the parameter, the file and the reason."""


def load(config: Config) -> ssl.SSLContext | None:
    """Return the TLS context for the configured certificates; None if tls-port is 0.

    Raises CertificateError if a file is missing, damaged, or does not fit the others.
    """
    return _context(config) if config.tls_port else None


def check(config: Config) -> None:
    """Check the configured certificates as `load` does, also if tls-port is 0, but nothing if no file is configured.

    Raises CertificateError.
    """
    if config.tls_cert_file or config.tls_key_file:
        _context(config)
    elif config.tls_ca_cert_file:
        _load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), config)


def _context(config: Config) -> ssl.SSLContext:
    if not config.tls_cert_file or not config.tls_key_file:
        raise CertificateError("TLS needs both tls-cert-file and tls-key-file; CONFIG SET takes both at once")
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        _load_own(made, config)
        _, refusal = dates(made, config.tls_cert_file)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = f"tls-cert-file {config.tls_cert_file}, tls-key-file {config.tls_key_file}"
        raise CertificateError(f"{files}: {_error_text(error)}") from error
    if refusal:
        logger.warning("tls-cert-file %s: %s", config.tls_cert_file, refusal)
    if config.tls_auth_clients == "no":
        return made
    if not config.tls_ca_cert_file:
        raise CertificateError(f"tls-auth-clients {config.tls_auth_clients} needs tls-ca-cert-file")
    _load_authorities(made, config)
    made.verify_mode = ssl.CERT_REQUIRED if config.tls_auth_clients == "yes" else ssl.CERT_OPTIONAL
    return made


def _load_authorities(made: ssl.SSLContext, config: Config) -> None:
    try:
        _read(config.tls_ca_cert_file, "CERTIFICATE")
        made.load_verify_locations(config.tls_ca_cert_file)
    except (OSError, ValueError) as error:
        raise CertificateError(f"tls-ca-cert-file {config.tls_ca_cert_file}: {_error_text(error)}") from error


def _load_own(made: ssl.SSLContext, config: Config) -> None:
    _read(config.tls_cert_file, "CERTIFICATE")
    key = _read(config.tls_key_file, "PRIVATE KEY")
    try:
        made.load_cert_chain(config.tls_cert_file, config.tls_key_file, lambda: config.tls_key_file_pass)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError("the key is not that of the certificate; CONFIG SET takes both at once") from error
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(config.tls_cert_file)  # raises if it is the one
        fault = "tls-key-file-pass does not open the key" if b"ENCRYPTED" in key else "the key is damaged"
        raise ValueError(fault) from error


def dates(made: ssl.SSLContext, certificate: str) -> tuple[float | None, str]:
    """Return the unix time at which the server's certificate expires, or None, and the reason why clients that verify
    its dates refuse it now, or "". `made` is the server's TLS context. Raises OSError.

    `ssl` reads these dates only when it verifies a certificate. So a handshake in memory verifies it, with this
    certificate as the trusted one.
    """
    verifier = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    verifier.check_hostname = False
    verifier.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    verifier.load_verify_locations(certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client, server = verifier.wrap_bio(to_client, to_server), made.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return None, error.verify_message if error.verify_code in _WRONG_DATES else ""
        except ssl.SSLError:  # the dates stay unknown: this client may lack an algorithm that real clients have
            break
    found = client.getpeercert() or {}
    return (ssl.cert_time_to_seconds(str(found["notAfter"])) if "notAfter" in found else None), ""


def _read(path: str, label: str) -> bytes:
    """Return the content of a PEM file that contains a `label` such as CERTIFICATE.

    Raises OSError, or ValueError for a file that is not regular, too large, or without the label. OpenSSL would block
    on some of these files, and reject others without a reason.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if not os.path.isfile(path):
        raise ValueError(f"{path} is not a file")
    content = read_regular(Path(path), _MOST_BYTES)
    if f"{label}-----".encode() not in content:
        raise ValueError(f"{path} holds no {label.lower()} in PEM")
    return content


def _error_text(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"a certificate is damaged ({error.reason})"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return str(error)
