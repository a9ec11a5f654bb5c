"""A CA of one's own, and the certificates that it signs: elliptic curve keys (P-256), in PEM files.

FOLDER/ca.pem, FOLDER/ca.key            the CA; its key stays with whoever makes certificates
FOLDER/PROCESS.pem, FOLDER/PROCESS.key  the certificate of a process, as a server and as a client, and its key
"""

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.secret_files import check_only_ours, write_public, write_secret

_ALWAYS = ("localhost", "127.0.0.1", "::1")
_CA_DAYS, _DAYS = 3650, 825
_BACKDATED = datetime.timedelta(minutes=5)
"""Clocks of machines differ."""


class CertificateError(ValueError):
    """No certificates can be made; the text says why."""


@dataclass(frozen=True)
class Authority:
    """A certificate authority, which signs."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def new(cls) -> Self:
        """A CA that nobody knows yet."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("Headway CA")
        builder = _builder(name, issuer=name, key=key, days=_CA_DAYS)
        certificate = (
            builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate=certificate, key=key)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The one in a folder. Raises CertificateError, SecretFileError."""
        certificate, key = folder / "ca.pem", folder / "ca.key"
        check_only_ours(key)
        try:
            made = x509.load_pem_x509_certificate(certificate.read_bytes())
            secret = serialization.load_pem_private_key(key.read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise CertificateError(f"{certificate} and {key} are no CA in PEM: {error}") from error
        if not isinstance(secret, ec.EllipticCurvePrivateKey) or secret.public_key() != made.public_key():
            raise CertificateError(f"{key} is not the key of {certificate}")
        return cls(certificate=made, key=secret)

    def write(self, folder: Path) -> None:
        """Raises OSError."""
        write_secret(folder / "ca.key", _key_pem(self.key))
        write_public(folder / "ca.pem", _pem(self.certificate))

    def issue(self, folder: Path, name: str, *, hosts: Sequence[str], days: float = _DAYS) -> None:
        """Writes a certificate for `name`, at `hosts` and on this machine, and its key. Raises OSError."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(name), issuer=self.certificate.subject, key=key, days=days)
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        names = [_host(host) for host in dict.fromkeys((*_ALWAYS, *hosts))]
        certificate = (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        write_secret(folder / f"{name}.key", _key_pem(key))
        write_public(folder / f"{name}.pem", _pem(certificate))


def _builder(
    name: x509.Name, *, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    begins = datetime.datetime.now(datetime.UTC) - _BACKDATED
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode("ascii").rstrip("\n")


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    encoded = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return encoded.decode("ascii").rstrip("\n")
