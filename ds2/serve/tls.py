"""Certificates: files of the user's, or one that this server makes for itself.

Browsers let a page use a microphone only over https or at localhost, so a phone needs a certificate.
"""

import datetime
import ipaddress
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ds2.config.schema import ConfigError
from ds2.system.files import atomic_file, cache_dir
from ds2.system.machine import reachable_address

_DAYS = 365
_MIN_DAYS = 30  # a certificate that ends sooner is made again


@dataclass(frozen=True)
class Certificate:
    """PEM files of a certificate, with its chain, and of its key."""

    certificate: Path
    key: Path

    def check(self) -> None:
        """Raise ConfigError unless both files can be read and belong together."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            raise ConfigError(
                f"--tls-cert {self.certificate} and --tls-key {self.key}: {reason}; give PEM files of a certificate "
                "and of its key without a password, or --tls-self-signed"
            ) from error


def self_signed(names: Sequence[str]) -> Certificate:
    """Return a certificate for these host names and addresses: the one made before if it has them, else a new one.

    Raises:
        ConfigError: the cache folder cannot be written.
    """
    folder = cache_dir() / "tls"
    file = folder / "certificate_and_key.pem"  # one file: of servers that start together, each replaces both
    made = Certificate(file, file)
    if not _serves(made, names):
        key = ec.generate_private_key(ec.SECP256R1())
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # no other user can read the key at any moment
            with atomic_file(file) as partial:
                partial.write_bytes(
                    _certificate(key, names).public_bytes(serialization.Encoding.PEM)
                    + key.private_bytes(
                        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
                    )
                )
        except OSError as error:
            raise ConfigError(
                f"a certificate cannot be stored in {folder}: {error.strerror}; set DS2_CACHE_DIR to a folder with room"
            ) from error
    return made


def _certificate(key: ec.EllipticCurvePrivateKey, names: Sequence[str]) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ds2 serve")])
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clients' clocks may be late
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _serves(made: Certificate, names: Sequence[str]) -> bool:
    """Whether a certificate is there, has all names and is valid for some time."""
    try:
        made.check()
        certificate = x509.load_pem_x509_certificate(made.certificate.read_bytes())
        own = [
            name
            for one in certificate.extensions
            if isinstance(one.value, x509.SubjectAlternativeName)
            for name in one.value
        ]
    except (ConfigError, OSError, ValueError):
        return False
    remaining = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    return remaining.days >= _MIN_DAYS and {_general_name(name) for name in names} <= set(own)


def names_of_host(host: str, more: Sequence[str]) -> list[str]:
    """Return the names under which clients may reach a server that listens on `host`."""
    names = ["localhost", "127.0.0.1", "::1", socket.gethostname(), reachable_address(), host, *more]
    return [name for name in dict.fromkeys(names) if name and name.isascii() and name not in ("0.0.0.0", "::", "*")]
