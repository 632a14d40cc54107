"""What the server and its proxy alone know. With it the proxy signs whose request it passes on."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from start_llm.access.tenants import TENANT_HEADER
from start_llm.core.ids import random_name

OWN_HEADERS = "x-start-llm-"
"""Headers that begin so are ours. Copies of the proxy's own that a client sends change nothing."""
CLIENT_HEADER = f"{OWN_HEADERS}client"
"""Names the program that sent the request."""
ID_HEADER, SIGNATURE_HEADER = f"{OWN_HEADERS}id", f"{OWN_HEADERS}signature"
PROOF_HEADER = f"{OWN_HEADERS}proof"
"""Has `BackendSecret.proof` in the server's answer to a GET of the proxy."""
READINESS_HEADER = f"{OWN_HEADERS}readiness"
"""Has `BackendSecret.readiness` in the request with which the server finds out whether the proxy answers."""
_VERSION = "1"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request to the proxy.

    Attributes:
        tenant: digest of the API key (`tenant_of_key`); empty for none.
        program: the program's name (`client_name`); empty if unknown.
    """

    tenant: str
    program: str

    @classmethod
    def named_in(cls, headers: Mapping[str, str]) -> Caller:
        """Return the caller that these headers name, whether or not they are to be believed.

        Args:
            headers: with names in lower case.
        """
        return cls(headers.get(TENANT_HEADER, ""), headers.get(CLIENT_HEADER, ""))


class BackendSecret:
    """Signs callers, and checks signatures. Equal texts make equal secrets.

    Keys for different purposes are derived from the text, so that the one which is sent along with each
    request cannot sign.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    @classmethod
    def random(cls) -> BackendSecret:
        return cls(secrets.token_urlsafe(32))

    @property
    def api_key(self) -> str:
        """The API key that the proxy sends to the server."""
        return f"proxy-{self._derived('api key').hex()}"

    @property
    def readiness(self) -> str:
        """The value of `READINESS_HEADER`."""
        return self._derived("readiness").hex()

    def signed(self, caller: Caller, method: str, path: str) -> dict[str, str]:
        """Return the headers that tell the server a caller, for one request.

        Args:
            path: the path on the server, as it is sent, without the query.
        """
        name = random_name()
        return {
            TENANT_HEADER: caller.tenant,
            CLIENT_HEADER: caller.program,
            ID_HEADER: name,
            SIGNATURE_HEADER: self._signature(caller, method, path, name),
        }

    def caller(self, headers: Mapping[str, str], method: str, path: str) -> Caller | None:
        """Return the caller of a request; None if the headers are not signed, or for another request.

        The same headers are believed again.

        Args:
            headers: with names in lower case.
            path: of the request, without the query.
        """
        caller = Caller.named_in(headers)
        own = self._signature(caller, method, path, headers.get(ID_HEADER, ""))
        signature = headers.get(SIGNATURE_HEADER, "").encode(errors="surrogateescape")
        return caller if hmac.compare_digest(signature, own.encode()) else None

    def proof(self, signature: str) -> str:
        """Return what shows the proxy that this server can check its signatures, for one of them."""
        return hmac.new(self._derived("proof"), signature.encode(), hashlib.sha256).hexdigest()

    def is_proof(self, proof: str, signature: str) -> bool:
        """Return True if this is the proof for a signature."""
        return hmac.compare_digest(proof.encode(), self.proof(signature).encode())

    def _signature(self, caller: Caller, method: str, path: str, name: str) -> str:
        # JSON keeps the parts apart: no two lists of texts are written alike.
        signed = json.dumps([_VERSION, caller.tenant, caller.program, method, path, name]).encode()
        return hmac.new(self._derived("signature"), signed, hashlib.sha256).hexdigest()

    def _derived(self, purpose: str) -> bytes:
        return hmac.digest(self.text.encode(errors="surrogateescape"), purpose.encode(), "sha256")
