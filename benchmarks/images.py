"""What images cost at the door: refusals, large photos, and how long other replies pause beside large bodies.

    python benchmarks/images.py

Starts the server on a tiny model that sees, in a process of its own. Each bad image is sent three times, in a
body of its own; the fastest counts. Then a reply streams while bodies of 40 MB come, one after the other,
whose tokens are only counted: what is measured is the way to the engine. Pauses are those between two events.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from PIL import Image as Pillow  # noqa: E402 - found through the line above

from benchmarks import servers  # noqa: E402
from scripts import tiny_vision_models  # noqa: E402
from start_llm.config.prompt_variables import ImageSettings  # noqa: E402
from start_llm.core.openblas import run_with_openblas  # noqa: E402
from start_llm.images.checking import ImageChecker  # noqa: E402
from tests.images.files import data_url, empty_png, picture, saved  # noqa: E402

_AS_JSON = {"Content-Type": "application/json"}
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


def sent(port: int, body: bytes, path: str = "/v1/chat/completions") -> tuple[int, float]:
    """Status of the reply, and seconds."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    began = time.perf_counter()
    connection.request("POST", path, body, _AS_JSON)
    reply = connection.getresponse()
    reply.read()
    seconds = time.perf_counter() - began
    connection.close()
    return reply.status, seconds


def fastest(act: Callable[[], Any]) -> float:
    """Milliseconds of the fastest of three."""
    times: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return 1000 * min(times)


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def refusals(port: int, pid: int) -> None:
    print("\nrefused                            status    ms    MiB more than before")
    for name, data in bad_images():
        body = body_of(data_url(data) if data else "data:image/png;base64,####")
        sent(port, body)
        before = resident_mib(pid)
        status, seconds = min((sent(port, body) for _ in range(3)), key=lambda one: one[1])
        print(f"{name:<34} {status}  {1000 * seconds:7.1f}  {resident_mib(pid) - before:7.1f}")


def photos() -> None:
    print("\n12 megapixels, ms                      at first    known")
    photo = Pillow.effect_noise((4000, 3000), 60).convert("RGB")
    for kind in ("JPEG", "PNG", "WEBP", "AVIF", "BMP"):
        data = saved(photo, kind)
        checker = ImageChecker(ImageSettings(max_bytes=2**27))
        first = fastest(lambda data=data: ImageChecker(ImageSettings(max_bytes=2**27)).check(data))
        checker.check(data)
        known = fastest(lambda data=data, checker=checker: checker.check(data))
        print(f"{kind:<4} {len(data) / 2**20:5.1f} MiB {first:28.0f} {known:8.0f}")


def pauses(port: int, large: bytes | None) -> list[float]:
    """Seconds between two events of a stream, while such bodies come."""
    asked = {"prompt": "once", "max_tokens": 4000, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(asked), _AS_JSON)
    reply, found, last = connection.getresponse(), list[float](), time.perf_counter()
    is_over = threading.Event()

    def send() -> None:
        for _ in range(_LARGE_BODIES if large else 0):
            sent(port, large or b"", "/v1/responses/input_tokens")
        time.sleep(0 if large else 2)
        is_over.set()

    sending = threading.Thread(target=send)
    sending.start()
    while not is_over.is_set() and reply.readline():
        now = time.perf_counter()
        found.append(now - last)
        last = now
    sending.join()
    connection.close()
    return found[10:]


def beside_large_bodies(port: int) -> None:
    large = counting_body(data_url(saved(Pillow.effect_noise((3150, 3180), 90).convert("RGB"), "BMP")))
    print(
        f"\npauses of a stream, ms             median    99 %    worst     ({len(large) / 1e6:.0f} MB bodies)"
    )
    for name, body in (("alone", None), ("beside large bodies", large)):
        times = sorted(1000 * one for one in pauses(port, body))
        middle, most = statistics.median(times), times[len(times) * 99 // 100]
        print(f"{name:<32} {middle:8.1f} {most:7.1f} {times[-1]:8.1f}")


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        os.environ |= {"LOG_ROOT": f"{root}/logs", "STATE_ROOT": f"{root}/state"}
        folder = tiny_vision_models.build("qwen3_vl", Path(root) / "seeing")
        port = servers.free_port()
        options = ["--model", str(folder), "--no-proxy", "--mlx-port", str(port)]
        print(servers.machine("mlx", "pillow"))
        with servers.running(servers.start_llm(*options), partial(servers.health_seconds, port)) as pid:
            sent(port, body_of(data_url(picture())))
            refusals(port, pid)
            beside_large_bodies(port)
        photos()


if __name__ == "__main__":
    run_with_openblas()
    main()
