"""Certificates of the service: an authority of its own, which signs the server's and, when they join, those of nodes.

<folder>/
  ca.pem ca.key           the authority, made at the first start; signed again, for the same key, before it ends
  server.pem server.key   what the service shows, signed by it; made again when it is to answer to another name

Keys have mode 0600. Users and nodes pin the SHA-256 of server.pem, so it does not end by its date. A node shows its
certificate in the TLS handshake, and the service knows it by the fingerprint that was recorded when it joined:
replacing that entry revokes it, and those that it was renewed by (renewals.py).
"""

import contextlib
import ipaddress
import os
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeAlias

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from headway.cluster.engines.scripts import replace_file
from headway.errors import EngineError, UsageError

VALID = timedelta(days=3650)
"""Of the authority and the server."""
NODE_VALID = timedelta(days=365)
"""Of a node, which renews it when a third is left."""
SKEW = timedelta(days=1)
"""How far a clock elsewhere may be behind."""
Key: TypeAlias = ec.EllipticCurvePrivateKey
Clock: TypeAlias = Callable[[], float]
"""Unix seconds."""


@dataclass(frozen=True)
class ServerTls:
    """What a server needs to speak TLS."""

    certificate: Path
    key: Path
    authority: Path
    """Nodes' certificates must be signed by it."""
    fingerprint: str

    def options(self) -> dict[str, object]:
        """Settings of uvicorn: clients may show a certificate, and must if they are nodes."""
        return {
            "ssl_certfile": str(self.certificate),
            "ssl_keyfile": str(self.key),
            "ssl_ca_certs": str(self.authority),
            "ssl_cert_reqs": int(ssl.CERT_OPTIONAL),
        }


class Authority:
    """The service's own certificate authority."""

    def __init__(self, folder: Path, clock: Clock = time.time) -> None:
        """Read it from a folder, or make it there."""
        self.file, self._clock = folder / "ca.pem", clock
        folder.mkdir(mode=0o700, exist_ok=True)
        if not self.file.exists():
            key = _write_key(folder / "ca.key")
            replace_file(self.file, _pem(self._sign_itself(key)))  # last: it proves that its key is there
        self._certificate, self._key = _read_pair(self.file, folder / "ca.key")
        if clock() >= renewal_time(self._certificate):  # what it has signed stays valid: its key is the same
            self._certificate = self._sign_itself(self._key)
            replace_file(self.file, _pem(self._certificate))

    def _sign_itself(self, key: Key) -> x509.Certificate:
        name, public = _name("headway service"), key.public_key()
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        return (
            _builder(name, name, public, self._clock(), VALID)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(key, hashes.SHA256())
        )

    def server(self, folder: Path, names: Sequence[str]) -> ServerTls:
        """The certificate of the server, for these names and addresses."""
        file, private = folder / "server.pem", folder / "server.key"
        if set(names) <= _names_of(file):
            with contextlib.suppress(UsageError):  # a kill between both files left an older key
                return server_tls(file, private, self.file)
        key = _write_key(private)
        alternatives = x509.SubjectAlternativeName([_alternative(name) for name in names])
        certificate = self._sign(names[0], key.public_key(), VALID, ExtendedKeyUsageOID.SERVER_AUTH, alternatives)
        replace_file(file, _pem(certificate))
        return server_tls(file, private, self.file)

    def sign_node(self, name: str, request: x509.CertificateSigningRequest) -> x509.Certificate:
        """The certificate of a node that has joined, or renews its own."""
        key = request.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        return self._sign(name, key, NODE_VALID, ExtendedKeyUsageOID.CLIENT_AUTH)

    def _sign(
        self,
        name: str,
        key: ec.EllipticCurvePublicKey,
        valid: timedelta,
        usage: x509.ObjectIdentifier,
        alternatives: x509.SubjectAlternativeName | None = None,
    ) -> x509.Certificate:
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = _builder(_name(name[:64]), self._certificate.subject, key, self._clock(), valid)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        builder = builder.add_extension(signer, critical=False)
        if alternatives is not None:
            builder = builder.add_extension(alternatives, critical=False)
        return builder.sign(self._key, hashes.SHA256())


def server_tls(certificate: Path, key: Path, authority: Path) -> ServerTls:
    """A certificate and key in files, of whatever origin; UsageError if they are none, or do not belong together."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        first = x509.load_pem_x509_certificates(certificate.read_bytes())[0]
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{certificate} and {key} are no certificate and its key: {cause}", hint="PEM files") from None
    return ServerTls(certificate, key, authority, fingerprint_of(first))


def fingerprint_of(certificate: x509.Certificate) -> str:
    """The SHA-256 of a certificate, in hexadecimal."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def read_request(text: str) -> x509.CertificateSigningRequest:
    """A node's signing request; UsageError if it is none, or its sender does not have the key."""
    try:
        request = x509.load_pem_x509_csr(text.encode())
        key = request.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or not request.is_signature_valid:
            raise ValueError
    except (ValueError, UnsupportedAlgorithm, InvalidSignature):
        raise UsageError("not a signing request of a node", hint="join with headway node join") from None
    return request


def key_digest(request: x509.CertificateSigningRequest) -> str:
    """A hash of the public key of a request: the same for each request of one node."""
    encoding, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    digest = hashes.Hash(hashes.SHA256())
    digest.update(request.public_key().public_bytes(encoding, form))
    return digest.finalize().hex()


def signing_request(file: Path, name: str) -> str:
    """The signing request of a node, as PEM; its key is read from a file, or made there."""
    return request_for_key(_read_key(file) if file.exists() else _write_key(file), name)


def request_for_key(key: Key, name: str) -> str:
    """The signing request of a node for its key, as PEM."""
    request = x509.CertificateSigningRequestBuilder().subject_name(_name(name[:64])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM).decode()


def new_key() -> Key:
    """A key that nobody has."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: Key) -> str:
    """A private key as PEM, not encrypted."""
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()).decode()


def certificate_pem(certificate: x509.Certificate) -> str:
    """A certificate as PEM."""
    return _pem(certificate)


def renewal_time(certificate: x509.Certificate) -> float:
    """When a certificate is to be renewed, in Unix seconds: once a third of its life is left."""
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return (ends - (ends - begins) / 3).timestamp()


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now_s: float, valid: timedelta
) -> x509.CertificateBuilder:
    now = datetime.fromtimestamp(now_s, UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + valid)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _names_of(file: Path) -> set[str]:
    """The names and addresses that a certificate is for."""
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return set()
    return {str(name.value) for name in names}


def _write_key(file: Path) -> Key:
    """Make a key, and write it to a private file."""
    key = new_key()
    partial = file.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(key_pem(key))
    partial.replace(file)
    return key


def _read_key(file: Path) -> Key:
    key = serialization.load_pem_private_key(file.read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("not a key of an elliptic curve")
    return key


def _read_pair(file: Path, private: Path) -> tuple[x509.Certificate, Key]:
    try:
        return x509.load_pem_x509_certificate(file.read_bytes()), _read_key(private)
    except (OSError, ValueError, TypeError) as error:
        raise EngineError(
            f"cannot read the service's authority in {file.parent}: {error}",
            hint="restore ca.pem and ca.key; without them every node must join again",
        ) from None


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
