"""The certificate of a node, in one file with its key, so that both are replaced by one rename; renewed before its end.

The node asks over a connection that the old one has authenticated, with a new key that never leaves the machine. If the
answer is lost, the old one counts, and the node asks again later.
"""

import math
import time
from pathlib import Path

from cryptography import x509

from headway.cluster.engines.scripts import replace_file
from headway.cluster.service.certificates import Clock, key_pem, new_key, renewal_time, request_for_key
from headway.cluster.service.connection import ServiceConnection
from headway.errors import EngineError

AGAIN_S = 3600.0
"""Between attempts to renew."""


class NodeCertificate:
    """What a node shows to its service; `clock` returns Unix seconds."""

    def __init__(self, file: Path, key: Path, name: str, clock: Clock = time.time) -> None:
        """`key` is that of a certificate which is alone in its file, as older versions wrote it."""
        self.file, self._name, self._clock = file, name, clock
        text = _read(file)
        if "PRIVATE KEY" not in text:
            replace_file(file, text + _read(key), private=True)
        self._tried = -math.inf
        self._read_dates(text)

    def _read_dates(self, text: str) -> None:
        try:
            certificate = x509.load_pem_x509_certificate(text.encode())
        except ValueError as error:
            raise EngineError(f"cannot read the certificate in {self.file}: {error}", hint=self._hint) from None
        self._ends, self._due = certificate.not_valid_after_utc, renewal_time(certificate)

    @property
    def _hint(self) -> str:
        return f"headway node token --replace {self._name}; rm {self.file.parent}/node.json; headway node join"

    def keep_valid(self, connection: ServiceConnection) -> bool:
        """Replace the certificate by the next one if a third of its life is left; False if it is not due, or was tried
        a moment ago. EngineError if it has ended: then the service does not know this node any more."""
        now = self._clock()
        if now > self._ends.timestamp():
            raise EngineError(f"its certificate ended on {self._ends:%Y-%m-%d}: {self._hint}")
        if now < max(self._due, self._tried + AGAIN_S):
            return False
        self._tried, key = now, new_key()
        answer = connection.post("/api/v1/renew-certificate", {"request": request_for_key(key, self._name)})
        text: str = answer["certificate"]
        if x509.load_pem_x509_certificate(text.encode()).public_key() != key.public_key():
            raise EngineError(f"the service has signed another key than that of node {self._name}")
        replace_file(self.file, text + key_pem(key), private=True)
        self._read_dates(text)
        connection.close()  # the next one shows the new certificate
        return True


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError as error:
        raise EngineError(f"cannot read {file}: {error.strerror}", hint="join again in another folder") from None
