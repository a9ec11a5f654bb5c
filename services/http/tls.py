"""TLS between the processes: which certificate one shows, whose it believes, and what to do when that fails.

`headway keys FOLDER --host HOST ...` makes the files. One that is renewed on disk counts from the next connection on.
"""

import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.secret_files import SecretFileError, check_only_ours
from services.watched_files import WatchedFiles

logger = logging.getLogger(__name__)

_REMEDY = "`headway keys FOLDER --host HOST ...` makes certificates"
_EXPIRED, _NOT_YET = 10, 9
_OTHER_NAMES = (62, 64)
_UNKNOWN_CA = (2, 18, 19, 20, 21)


class TlsFileError(ValueError):
    """A file of TLS cannot be used. The text names it, and what to do."""


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of a process: the certificate that it shows, with its key, as a server and as a client; the CA that
    signs the certificates of those that it calls; and, if callers must show one, the CA that signs theirs.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    client_ca: Path | None = None

    @property
    def given(self) -> tuple[Path, ...]:
        """The files that are named."""
        return tuple(path for path in (self.cert, self.key, self.ca, self.client_ca) if path is not None)


class TlsContext:
    """The newest context that `make` makes of `files`; it is made anew when one of them has changed.

    A change that makes the files unusable is logged, and the context before it stays in use.
    """

    def __init__(self, files: TlsFiles, make: Callable[[TlsFiles], ssl.SSLContext]) -> None:
        self.files = files
        self._watched = WatchedFiles(
            files.given,
            lambda _: make(files),
            fault=TlsFileError,
            refused="the certificates on disk cannot be used, those read before stay in force",
            changed=lambda *_: logger.info("certificates were renewed on disk, and are in use"),
        )

    def current(self) -> ssl.SSLContext:
        """For the next connection."""
        return self._watched.current()

    def renew(self) -> None:
        """Looks at the files now."""
        self._watched.renew()


def server_tls(files: TlsFiles) -> TlsContext | None:
    """The TLS context of a server; None without a certificate. Raises TlsFileError."""
    return None if files.cert is None else TlsContext(files, _server_context)


def client_tls(files: TlsFiles) -> TlsContext | None:
    """The TLS context of a client to call the processes of a run; None if no file says anything. Raises
    TlsFileError.
    """
    return None if files.ca is None and files.cert is None else TlsContext(files, _client_context)


def public_tls(files: TlsFiles) -> TlsContext | None:
    """The same for services of others, such as a judge's: the system's CAs are believed, too. Raises TlsFileError."""
    return None if files.ca is None else TlsContext(TlsFiles(ca=files.ca), _public_context)


def explained(error: BaseException, *, tls: TlsContext | None) -> str | None:
    """The fault of a TLS connection, and what to do; None for an error of another kind."""
    found = _ssl_error(error)
    if found is None:
        return None
    believed = "of this system" if tls is None or tls.files.ca is None else f"in {tls.files.ca}"
    if isinstance(found, ssl.SSLCertVerificationError):
        return _mistrust(found, believed)
    what = f"{found.reason or ''} {found}".upper()
    if "WRONG_VERSION" in what or "RECORD_LAYER" in what or "PACKET_LENGTH" in what:
        return "it does not speak TLS: begin its address with http://, or set its http.tls_cert_file and tls_key_file"
    return f"the TLS handshake failed: {found}"


def without_an_answer(tls: TlsContext | None) -> str:
    """A guess at why a TLS connection breaks: a server that does not take a certificate just leaves."""
    shown = None if tls is None else tls.files.cert
    ours = "none is set here (http.tls_cert_file)" if shown is None else f"here it is {shown}"
    return f"; it may want another client certificate, of its http.tls_client_ca_file: {ours}"


def _mistrust(error: ssl.SSLCertVerificationError, believed: str) -> str:
    if error.verify_code == _EXPIRED:
        return f"its certificate has expired: renew the file that its http.tls_cert_file names; {_REMEDY}"
    if error.verify_code == _NOT_YET:
        return "its certificate is not valid yet: set the clocks of both machines"
    if error.verify_code in _OTHER_NAMES:
        return f"its certificate is for other hosts ({error.verify_message}): make one that names this host; {_REMEDY}"
    if error.verify_code in _UNKNOWN_CA:
        return (
            f"its certificate is not signed by a CA {believed}: set http.tls_ca_file to the ca.pem of the folder that "
            "it was made in"
        )
    return f"its certificate is not believed: {error.verify_message}"


def _ssl_error(error: BaseException | None) -> ssl.SSLError | None:
    """The library wraps it."""
    for _ in range(8):
        if error is None:
            return None
        inner = getattr(error, "certificate_error", None) or getattr(error, "os_error", None)
        for candidate in (inner, error):
            if isinstance(candidate, ssl.SSLError) and (candidate.reason or not isinstance(inner, ssl.SSLError)):
                return candidate
        error = error.__cause__
    return None


def _server_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _show(context, files)
    if files.client_ca is not None:
        _believe(context, files.client_ca, "http.tls_client_ca_file")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _client_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if files.ca is None:
        context.load_default_certs()
    else:
        _believe(context, files.ca, "http.tls_ca_file")
    if files.cert is not None:
        _show(context, files)
    return context


def _public_context(files: TlsFiles) -> ssl.SSLContext:
    context = _client_context(files)
    context.load_default_certs()
    return context


def _show(context: ssl.SSLContext, files: TlsFiles) -> None:
    assert files.cert is not None, "a certificate"
    if files.key is None:
        raise TlsFileError(f"http.tls_cert_file is {files.cert}, and http.tls_key_file is not set: set both")
    _check_readable(files.cert, "http.tls_cert_file")
    try:
        check_only_ours(files.key)
        context.load_cert_chain(files.cert, files.key)
    except SecretFileError as error:
        raise TlsFileError(f"http.tls_key_file: {error}") from error
    except (ssl.SSLError, OSError) as error:
        raise TlsFileError(
            f"{files.cert} and {files.key} (http.tls_cert_file, http.tls_key_file) are no certificate with its key in "
            f"PEM: {getattr(error, 'reason', None) or error}; {_REMEDY}"
        ) from error
    _check_dates(files.cert)


def _check_dates(cert: Path) -> None:
    from cryptography import x509  # deferred: most processes have no certificate

    try:
        until = x509.load_pem_x509_certificate(cert.read_bytes()).not_valid_after_utc.timestamp()
    except (ValueError, OSError) as error:
        raise TlsFileError(f"{cert} (http.tls_cert_file) is no certificate in PEM: {error}; {_REMEDY}") from error
    if until < time.time():
        day = time.strftime("%Y-%m-%d", time.gmtime(until))
        raise TlsFileError(f"the certificate in {cert} (http.tls_cert_file) has expired on {day}: renew it; {_REMEDY}")


def _believe(context: ssl.SSLContext, ca: Path, setting: str) -> None:
    _check_readable(ca, setting)
    try:
        context.load_verify_locations(cafile=ca)
    except (ssl.SSLError, OSError) as error:
        raise TlsFileError(f"{ca} ({setting}) holds no certificates in PEM: {error}; {_REMEDY}") from error


def _check_readable(path: Path, setting: str) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise TlsFileError(f"cannot read {path} ({setting}): {error.strerror}; {_REMEDY}") from error
