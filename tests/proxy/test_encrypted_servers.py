"""The proxy speaks TLS with servers, and only with those whose certificate is trusted."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from start_llm.proxy.backend import Backend, WholeAnswer
from tests.proxy.conftest import ROOT, SECRET

ASK = """
import asyncio, sys
from start_llm.access.backend_secret import BackendSecret
from start_llm.proxy.backend import Backend

async def ask():
    backend = Backend(sys.argv[1], BackendSecret("backend"))
    async with backend.connected():
        print(await backend.whole("GET", "/health", within_s=10))

asyncio.run(ask())
"""


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - its name in http.server
        del format, arguments


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a certificate for 127.0.0.1 that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a test")])
    now = dt.datetime.now(dt.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = tmp_path_factory.mktemp("certificate") / "server.pem"
    path.write_bytes(signed.public_bytes(serialization.Encoding.PEM) + secret)
    return path


@pytest.fixture(scope="module")
def url(certificate: Path) -> Generator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Healthy)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"https://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_with_a_trusted_certificate_answers(url: str, certificate: Path):
    environment = {**os.environ, "SSL_CERT_FILE": str(certificate)}
    completed = subprocess.run(
        [sys.executable, "-c", ASK, url],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout.strip() == str(WholeAnswer(200, b"{}"))


def test_a_server_whose_certificate_is_not_trusted_is_not_asked(url: str):
    async def ask() -> WholeAnswer | None:
        backend = Backend(url, SECRET)
        async with backend.connected():
            return await backend.whole("GET", "/health", within_s=10)

    assert asyncio.run(ask()) is None
