"""What images cost at the door: refusals, pauses of other replies, large photos."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from PIL import Image as Pillow

from benchmarks import servers
from benchmarks.harness import Part, row, table
from scripts import tiny_vision_models
from start_llm.config.prompt_variables import ImageSettings
from start_llm.images.checking import ImageChecker
from tests.images.files import data_url, empty_png, picture, saved

PACKAGES = ("mlx", "pillow")


_LARGE_BODIES = 5


def bad_images() -> Iterator[tuple[str, bytes]]:
    photo = Pillow.effect_noise((4000, 3000), 60).convert("RGB")
    yield "10,000 x 10,000 pixels", empty_png(10_000, 10_000, bytes(10**7))
    yield "1 x 100,000 pixels", empty_png(1, 100_000)
    yield "PNG, half of it, 12 megapixels", (png := saved(photo, "PNG", compress_level=1))[: len(png) // 2]
    yield "JPEG, half of it, 12 megapixels", (jpeg := saved(photo, "JPEG", quality=90))[: len(jpeg) // 2]
    yield "PNG, one byte wrong", png[: len(png) // 2] + b"x" + png[len(png) // 2 + 1 :]
    yield "PDF", b"%PDF-1.7\n" * 100
    yield "SVG", b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    yield "EPS", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    yield "no base64", b""


def body_of(url: str, **more: Any) -> bytes:
    content = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": url}}]
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1, **more}).encode()


def counting_body(url: str) -> bytes:
    content = [{"type": "input_image", "image_url": url}]
    return json.dumps({"input": [{"role": "user", "content": content}]}).encode()


def fastest(act: Callable[[], Any]) -> float:
    """Milliseconds of the fastest of three."""
    times: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return 1000 * min(times)


def sent(port: int, body: bytes, path: str = "/v1/chat/completions") -> tuple[int, float]:
    """Status of the reply, and seconds."""
    began = time.perf_counter()
    with closing(servers.send(port, path, body)) as connection:
        reply = connection.getresponse()
        reply.read()
    return reply.status, time.perf_counter() - began


def refusals(folder: Path) -> None:
    """What bad images cost: each is sent three times, in a body of its own; the fastest counts."""
    table("refused | status | ms | MiB more than before")
    with _seeing(folder) as server:
        for name, data in bad_images():
            body = body_of(data_url(data) if data else "data:image/png;base64,####")
            sent(server.port, body)
            before = server.resident_bytes()
            status, seconds = min((sent(server.port, body) for _ in range(3)), key=lambda result: result[1])
            grown = (server.resident_bytes() - before) / 2**20
            row(name, status, f"{1000 * seconds:.1f}", f"{grown:.1f}")


def pauses(folder: Path) -> None:
    """How long another reply pauses, between two events, while bodies of 40 MB come one after the other.

    Their tokens are only counted: what is measured is the way to the engine.
    """
    large = counting_body(data_url(saved(Pillow.effect_noise((3150, 3180), 90).convert("RGB"), "BMP")))
    table(f"pauses of a stream, bodies of {len(large) / 1e6:.0f} MB | median, ms | 99 % | worst")
    with _seeing(folder) as server:
        for name, body in (("alone", None), ("beside large bodies", large)):
            times = sorted(1000 * pause for pause in _pauses(server.port, body))
            row(name, *(f"{times[len(times) * share // 100]:.1f}" for share in (50, 99)), f"{times[-1]:.1f}")


def _pauses(port: int, large: bytes | None) -> list[float]:
    """Seconds between two events of a stream, while such bodies come, or for two seconds."""
    events = servers.events(port, "/v1/completions", {"prompt": "once", "max_tokens": 4000, "temperature": 0})
    pauses, last = list[float](), time.perf_counter()

    def send() -> None:
        for _ in range(_LARGE_BODIES if large else 0):
            sent(port, large or b"", "/v1/responses/input_tokens")
        time.sleep(0 if large else 2)

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        while not sending.done() and next(events, None):
            pauses.append(time.perf_counter() - last)
            last += pauses[-1]
    events.close()
    return pauses[10:]


@contextmanager
def _seeing(folder: Path) -> Generator[servers.Served]:
    """A tiny model that sees, and has seen something."""
    with servers.served("--model", tiny_vision_models.build("qwen3_vl", folder / "seeing")) as server:
        sent(server.port, body_of(data_url(picture())))
        yield server


def photos(_: Path) -> None:
    """What it takes to check photos of 12 megapixels, at first and when they are known."""
    table("12 megapixels | MiB | ms at first | ms known")
    photo = Pillow.effect_noise((4000, 3000), 60).convert("RGB")
    for kind in ("JPEG", "PNG", "WEBP", "AVIF", "BMP"):
        data, limits = saved(photo, kind), ImageSettings(max_bytes=2**27)
        checker = ImageChecker(limits)
        first = fastest(lambda data=data, limits=limits: ImageChecker(limits).check(data))
        checker.check(data)
        known = fastest(lambda data=data, checker=checker: checker.check(data))
        row(kind, f"{len(data) / 2**20:.1f}", f"{first:.0f}", f"{known:.0f}")


PARTS: Mapping[str, Part] = {"refusals": refusals, "pauses": pauses, "photos": photos}
