"""Images are fetched from the public internet alone, with one request and within ten seconds.

Names are resolved by a table, and connections go to a server on loopback: no test leaves this machine.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import pytest

from start_llm.config.prompt_variables import ImageSettings
from start_llm.images.addresses import is_public, parse_address
from start_llm.images.checking import ImageChecker
from start_llm.images.door import ImageDoor
from start_llm.images.fetching import ImageFetcher
from start_llm.images.problems import ImageProblem
from tests.images.files import data_url, picture

PUBLIC = "93.184.215.14"
PNG = picture()
OK_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n"


class Web:
    """A name server and a web server in little. `asked` are names, `called` addresses, `heard` requests."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = [*answers] or [[PUBLIC]]
        self.asked: list[str] = []
        self.called: list[str] = []
        self.heard: list[bytes] = []
        self.reply: Callable[[socket.socket], None] = lambda client: client.sendall(OK_HEAD % len(PNG) + PNG)

    def resolve(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        self.called.append(f"{address}:{port}")
        ours, theirs = socket.socketpair()
        ours.settimeout(timeout_s)
        threading.Thread(target=self._serve, args=(theirs,), daemon=True).start()
        return ours

    def _serve(self, client: socket.socket) -> None:
        with client:
            try:
                self.heard.append(client.recv(65536))
                self.reply(client)
            except OSError:
                return  # the other side has hung up

    def fetch(self, url: str, seconds: float = 5, max_bytes: int = 10**6) -> bytes:
        fetcher = ImageFetcher(max_bytes, resolve=self.resolve, connect=self.connect)
        return fetcher.fetch(url, time.monotonic() + seconds)

    def refused(self, url: str, **how: float) -> ImageProblem:
        with pytest.raises(ImageProblem) as refusal:
            self.fetch(url, **how)  # pyright: ignore[reportArgumentType]
        return refusal.value


# ------------------------------------------------------------------------------------------------- addresses

PRIVATE = """
127.0.0.1 127.9.9.9 0.0.0.0 0.1.2.3 10.0.0.1 172.16.0.1 172.31.255.255 192.168.1.1 169.254.169.254 100.64.0.1
192.0.0.1 192.0.2.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255
:: ::1 ::ffff:127.0.0.1 ::ffff:8.8.8.8 ::7f00:1 fe80::1 fec0::1 fc00::1 fd12::1 ff02::1 64:ff9b::7f00:1
64:ff9b::808:808 64:ff9b:1::1 2001:db8::1 2002:7f00:1:: 2001:0:1::1 100::1 3fff::1
""".split()
ODD = """
2130706433 0x7f000001 017700000001 127.1 127.0.1 0177.0.0.1 0x7f.0.0.1 0x7f.1 08.8.8.8 8.8.2056 134744072
1 0 0x 127.0.0.1. 00000177.0.0.1
""".split()
NAMES = """
localhost LOCALHOST localhost. a.localhost a.localhost. printer printer.local db.internal
metadata.google.internal x.localdomain
""".split()


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_public_is_refused_as_a_host_and_as_an_answer(address: str):
    assert not is_public(address)
    host = f"[{address}]" if ":" in address else address
    web = Web()
    assert web.refused(f"http://{host}/a.png").code == "invalid_image_url"
    assert not web.asked
    named = Web([address])
    assert "not a public address" in named.refused("https://example.com/a.png").message
    several = Web([PUBLIC, address, PUBLIC])
    assert several.refused("http://example.com/a.png").code == "invalid_image_url"
    assert not (web.called or named.called or several.called)


@pytest.mark.parametrize("host", [*ODD, *NAMES])
def test_other_spellings_of_this_machine_are_refused_before_anybody_is_asked(host: str):
    web = Web()
    for url in (f"http://{host}/", f"https://{host}:8080/a.png"):
        assert web.refused(url).code == "invalid_image_url"
    assert not (web.asked or web.called)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://example.com/a.png",
        "gopher://example.com/",
        "//example.com/a.png",
        "/etc/passwd",
        "example.com/a.png",
        "http://",
        "http:///a.png",
        "http:example.com",
        "http://user@example.com/",
        "http://user:secret@example.com/",
        "http://example.com@127.0.0.1/",
        "http://127.0.0.1\\@example.com/",
        "http://exa mple.com/",
        "http://example.com/\r\nHost: localhost",
        "http://example.com/\x00",
        "http://éxample.com/",
        "http://example.com:0/",
        "http://example.com:22/",
        "http://example.com:25/a",
        "http://example.com:99999/",
        "http://example.com:http/",
        "http://[::1/",
        "http://[fe80::1%25eth0]/",
        "http://example..com/",
        "http://-a.com/",
        "http://" + "a" * 64 + ".com/",
        "http://example.com/" + "a" * 9000,
    ],
)
def test_what_is_no_address_of_a_web_server_is_refused(url: str):
    web = Web()
    refusal = web.refused(url)
    assert refusal.code == "invalid_image_url"
    assert "secret" not in refusal.message + refusal.predicate
    assert not (web.asked or web.called)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "192.0.1.1", "172.32.0.1"])
def test_a_public_address_is_public(address: str):
    assert is_public(address)
    assert parse_address(
        f"http://[{address}]:8080/a?b=c" if ":" in address else f"http://{address}:8080/a?b=c"
    )


def test_the_connection_goes_to_the_address_that_was_checked():
    """A name server that answers otherwise the second time is not asked a second time."""
    web = Web([PUBLIC], ["127.0.0.1"])
    assert web.fetch("http://example.com/a.png") == PNG
    assert web.asked == ["example.com"]
    assert web.called == [f"{PUBLIC}:80"]
    assert web.heard[0].startswith(b"GET /a.png HTTP/1.1\r\nHost: example.com\r\n")
    assert web.refused("http://example.com/b.png").code == "invalid_image_url"
    assert web.called == [f"{PUBLIC}:80"]


def test_another_port_and_a_query_are_asked_for_as_they_are():
    web = Web()
    web.fetch("http://example.com:8080/a/b.png?c=d&e#f")
    assert web.called == [f"{PUBLIC}:8080"]
    assert web.heard[0].startswith(b"GET /a/b.png?c=d&e HTTP/1.1\r\nHost: example.com:8080\r\n")
    for secret in (b"Cookie", b"Authorization", b"Referer"):
        assert secret not in web.heard[0]


# --------------------------------------------------------------------------------------------------- replies


def answering(*pieces: bytes, pause_s: float = 0) -> Web:
    web = Web()

    def reply(client: socket.socket) -> None:
        for piece in pieces:
            client.sendall(piece)
            time.sleep(pause_s)

    web.reply = reply
    return web


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(status: int):
    web = answering(
        f"HTTP/1.1 {status} Go\r\nLocation: http://127.0.0.1/\r\nContent-Length: 0\r\n\r\n".encode()
    )
    assert "Redirects are not followed" in web.refused("http://example.com/a.png").message
    assert len(web.called) == 1


@pytest.mark.parametrize("status", [204, 206, 400, 401, 404, 500])
def test_any_other_status_is_no_image(status: int):
    web = answering(f"HTTP/1.1 {status} So\r\nContent-Length: 0\r\n\r\n".encode())
    assert web.refused("http://example.com/a.png").code == "failed_to_download_image"


def test_what_is_too_long_is_not_read_to_its_end():
    announced = answering(OK_HEAD % 10**9, b"x" * 1000)
    assert announced.refused("http://example.com/", max_bytes=1000).code == "image_file_too_large"
    unannounced = answering(b"HTTP/1.1 200 OK\r\n\r\n", *[b"x" * 1000] * 50)
    assert unannounced.refused("http://example.com/", max_bytes=1000).code == "image_file_too_large"
    chunked = answering(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *[b"3e8\r\n" + b"x" * 1000 + b"\r\n"] * 5
    )
    assert chunked.refused("http://example.com/", max_bytes=1000).code == "image_file_too_large"


def test_chunks_are_put_together():
    half = len(PNG) // 2
    pieces = (b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (PNG[:half], PNG[half:], b""))
    web = answering(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *pieces)
    assert web.fetch("http://example.com/") == PNG


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"hello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 500,
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000,
    ],
)
def test_a_broken_reply_is_a_problem_of_the_image(reply: bytes):
    assert answering(reply).refused("http://example.com/").code == "failed_to_download_image"


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", *[b"x"] * 100],
        [b"HTTP/1.1 200 OK\r\n\r\n", *[b"x"] * 100],
        [b"H", *[b"T"] * 100],
        [b"HTTP/1.1 200 OK\r\n", *[b"X: y\r\n"] * 90],
    ],
    ids=["body", "body without an end", "status", "headers"],
)
def test_a_server_that_drips_is_hung_up_on(pieces: list[bytes]):
    began = time.monotonic()
    refusal = answering(*pieces, pause_s=0.05).refused("http://example.com/", seconds=0.3)
    assert "more than 10 seconds" in refusal.message
    assert time.monotonic() - began < 2


def test_a_name_server_and_a_web_server_that_say_nothing_are_not_waited_for():
    web = Web()
    is_over = threading.Event()

    def wait(host: str, port: int) -> Sequence[str]:
        return [str(is_over.wait(5))]

    web.resolve = wait
    assert "more than" in web.refused("http://example.com/", seconds=0.2).message
    is_over.set()
    silent = answering(b"", pause_s=3)
    assert "more than" in silent.refused("http://example.com/", seconds=0.2).message
    late = Web()
    assert "more than" in late.refused("http://example.com/", seconds=-1).message


def test_an_unknown_name_and_a_closed_port_are_said():
    web = Web([])
    assert "not known" in web.refused("http://example.com/").message

    def fail(host: str, port: int) -> Sequence[str]:
        raise socket.gaierror(-2, "unknown")

    web.resolve = fail
    assert "not known" in web.refused("http://example.com/").message
    closed = Web()

    def refuse(address: str, port: int, timeout_s: float) -> socket.socket:
        raise ConnectionRefusedError

    closed.connect = refuse
    assert "no server answers" in closed.refused("http://example.com/").message


def test_another_address_of_the_name_is_tried():
    web = Web(["1.1.1.1", PUBLIC])
    connect = web.connect

    def second(address: str, port: int, timeout_s: float) -> socket.socket:
        if address != PUBLIC:
            raise ConnectionRefusedError
        return connect(address, port, timeout_s)

    web.connect = second
    assert web.fetch("http://example.com/") == PNG


def test_a_server_without_tls_is_no_https_server():
    refusal = answering(b"hello").refused("https://example.com/a.png")
    assert refusal.code == "failed_to_download_image"


# --------------------------------------------------------------------------------------------------- the door


@contextmanager
def door(web: Web | None, max_bytes: int = 10**6) -> Generator[ImageDoor]:
    fetcher = ImageFetcher(max_bytes, resolve=web.resolve, connect=web.connect) if web else None
    yield ImageDoor(ImageChecker(ImageSettings(max_bytes=max_bytes)), fetcher)


def test_the_content_of_what_was_fetched_decides_what_it_is():
    with door(Web()) as opened:
        assert opened.from_url("http://example.com/a.pdf", b"", time.monotonic() + 5).data == PNG
    with door(answering(OK_HEAD % 4 + b"%PDF")) as opened, pytest.raises(ImageProblem) as refusal:
        opened.from_url("http://example.com/a.png", b"", time.monotonic() + 5)
    assert refusal.value.code == "invalid_image_format"


@pytest.mark.parametrize("first", [b"Try again later.", PNG[:-20], b""], ids=["a page", "a part", "nothing"])
def test_an_image_that_was_not_there_at_first_is_fetched_again(first: bytes):
    web = answering(b"HTTP/1.1 200 OK\r\n\r\n" + first)
    with door(web) as opened:
        with pytest.raises(ImageProblem):
            opened.from_url("http://example.com/a.png", b"", time.monotonic() + 5)
        web.reply = lambda client: client.sendall(OK_HEAD % len(PNG) + PNG)
        for _ in range(2):
            assert opened.from_url("http://example.com/a.png", b"", time.monotonic() + 5).data == PNG
    assert len(web.called) == 2


def test_what_was_fetched_is_kept_for_the_same_client():
    """A conversation names its images in every turn, and they must not change."""
    web = Web()
    with door(web) as opened:
        for _ in range(3):
            assert opened.from_url("http://example.com/a.png", b"one", time.monotonic() + 5).data == PNG
        assert len(web.called) == 1
        opened.from_url("http://example.com/a.png", b"two", time.monotonic() + 5)
    assert len(web.called) == 2


def test_small_images_are_kept_up_to_a_limit_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("start_llm.images.door._MAX_KEPT_BYTES", 30_000)
    web, called = Web(), list[int]()
    with door(web, max_bytes=5000) as opened:
        for name in ("a", "b", "c", "c", "a"):
            opened.from_url(f"http://example.com/{name}.png", b"", time.monotonic() + 5)
            called.append(len(web.called))
    assert called == [1, 2, 3, 3, 4]


def test_nothing_is_fetched_unless_it_is_wanted():
    with door(None) as opened:
        for url in ("http://example.com/a.png", "HTTPS://example.com/"):
            with pytest.raises(ImageProblem) as refusal:
                opened.from_url(url, b"", 0)
            assert "IMAGE_URLS" in refusal.value.message
        for url in ("file:///etc/passwd", "ftp://example.com", "", "iVBORw0KGgo="):
            with pytest.raises(ImageProblem) as refusal:
                opened.from_url(url, b"", 0)
            assert refusal.value.code == "invalid_image_url"


@pytest.mark.parametrize(
    "head", ["image/png", "image/jpeg", "", "application/pdf", "image/png;charset=x", "IMAGE/PNG"]
)
def test_a_data_url_says_nothing_of_what_it_holds(head: str):
    with door(None) as opened:
        assert opened.from_url(data_url(PNG, head), b"", 0).data == PNG
        assert opened.from_url(data_url(PNG, head).replace("data:", "DATA:"), b"", 0).data == PNG


@pytest.mark.parametrize(
    "url", ["data:", "data:,", "data:image/png,AAAA", "data:image/png;base64", "data:;base64,####"]
)
def test_a_data_url_without_base64_is_refused(url: str):
    with door(None) as opened, pytest.raises(ImageProblem) as refusal:
        opened.from_url(url, b"", 0)
    assert refusal.value.code == "invalid_base64_image"
