"""Probe the prompt cache with a conversation about an image.

    python scripts/image_probe.py [--base-url http://127.0.0.1:4000] [--turns 3]

The first question shows an image that is new in each run, and the vision tower has to look at it. All further
questions are text. A healthy server caches at least 94 % of each prompt from the second turn on, and does not
look again. Of its counters in /stats, vlm_retreat and exact_key_rejected_by_model_lcp must not rise. The
counters include other traffic during the run. The exit status is 1 if a number falls short, and 2 if nothing
can be measured: the model sees no images, or there is no /stats.
"""

from __future__ import annotations

import argparse
import random
import secrets
import struct
import zlib
from base64 import b64encode
from collections.abc import Sequence

import pi_client
from chat_client import Message, Server, Unmeasured
from probing import (
    TURN_COLUMNS,
    TURN_LEGEND,
    Counters,
    Session,
    Table,
    add_length_options,
    parser_of,
    run,
    server_of,
    verdict,
)

HEALTHY_WITH_IMAGES = 0.94
"""The cached share of a prompt with an image that is healthy from the second turn on."""
_WIDTH, _HEIGHT = 640, 400
_BLOCK = 20
"""Pixels of a side of one colour."""


def png(name: str) -> bytes:
    """Return a file with blocks of colours that depend on `name` alone."""
    source = random.Random(name)
    rows = bytearray()
    for _ in range(_HEIGHT // _BLOCK):
        colours = [source.randbytes(3) * _BLOCK for _ in range(_WIDTH // _BLOCK)]
        rows += (b"\0" + b"".join(colours)) * _BLOCK
    head = struct.pack(">IIBBBBB", _WIDTH, _HEIGHT, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def showing(text: str, image: bytes) -> Message:
    url = f"data:image/png;base64,{b64encode(image).decode()}"
    return {
        "role": "user",
        "content": [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}],
    }


def tower_runs(server: Server) -> int:
    """Return how many images the vision tower has looked at.

    Raises:
        Unmeasured: the server does not say.
    """
    images = server.stats().get("images")
    if not isinstance(images, dict) or not isinstance(images.get("tower_runs"), int):
        raise Unmeasured(f"{server.stats_url}/stats tells of no images")
    return images["tower_runs"]


def play(session: Session, options: argparse.Namespace) -> list[int]:
    """Play all turns, and return how many images the tower looked at in each.

    Raises:
        Unmeasured: it did not look at the image of the first turn.
    """
    name, table = secrets.token_hex(6), Table((*TURN_COLUMNS, "looks"))
    messages = [
        pi_client.system(name, options.context_chars),
        showing("Describe this image in one sentence.", png(name)),
    ]
    looks: list[int] = []
    before = tower_runs(session.server)
    for number in range(1, options.turns + 1):
        reply = session.ask(pi_client.body(messages, options))
        after = tower_runs(session.server)
        looks.append(after - before)
        before = after
        table.row([*session.last.cells(), f"{looks[-1]:,}"])
        if not looks[0]:
            raise Unmeasured("the server did not look at the image: its model may be blind")
        answer = pi_client.results(reply, f"turn {number} of {name}")
        messages += [reply.sent_back(), *(answer or [pi_client.user(f"And what else? ({number})")])]
    return looks


def shortfalls(session: Session, looks: Sequence[int], healthy: float) -> list[str]:
    """Return what is wrong with the turns after the first."""
    problems: list[str] = []
    for turn, seen in list(zip(session.turns, looks, strict=True))[1:]:
        if turn.hit < healthy:
            problems.append(
                f"turn {turn.number}: {turn.hit:.1%} of its prompt was cached, {healthy:.0%} is healthy"
            )
        if seen:
            problems.append(f"turn {turn.number}: the tower looked at {seen:,} images, 0 is healthy")
    return problems


def read_options() -> argparse.Namespace:
    parser = parser_of(f"{__doc__}\n{TURN_LEGEND}\nlooks: images at which the vision tower looked.")
    parser.add_argument("--turns", type=int, default=3, help="requests, at least 2 (%(default)s)")
    help_text = "share of a prompt (%(default)s)"
    parser.add_argument("--healthy", type=float, default=HEALTHY_WITH_IMAGES, help=help_text)
    add_length_options(parser)
    options = parser.parse_args()
    if options.turns < 2:
        parser.error("--turns: at least 2, the first turn that is judged")
    return options


def main() -> int:
    options = read_options()
    server = server_of(options).reach()
    print(f"A conversation of {options.turns} turns about an image, at {server.url}\n")
    session, counters = Session(server), Counters(server)
    looks = play(session, options)
    session.print_notes()
    counters.read()
    counters.print("before", "after")
    return verdict([*shortfalls(session, looks, options.healthy), *counters.shortfalls()])


if __name__ == "__main__":
    run(main)
