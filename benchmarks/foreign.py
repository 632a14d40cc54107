"""Sessions of one user that say the same words at once: does any of them read what another one says?

    python benchmarks/foreign.py [--requests 20000] [--seed 1] [--stretch 250] [--first 0] [--no-proxy]

Two, three and eight sessions interleaved at random (`tests/foreign`), on the server and through the proxy,
in three protocols: named, unnamed, with a bucket for a name, all with one name; forks, sessions that come
from elsewhere with the same replies, replies that clients write themselves; git status, inbound context,
instructions, message ids, dates, seconds and white space that change; ids that are long, and words in their
place; lines of metadata that are exchanged, carriers, thoughts that clients keep, drop or edit beside their
seals, and a template whose option acts without tools alone. The server is another one after each stretch
and remembers nothing, so a run can be made in parts (`--first`). Each prompt is read from the trace:
nothing foreign may be in it, and nothing missing. The clocks of others are counted, which a conversation
may read that has no tokens of its own: one that has, and reads another one, is wrong. Ends with 1 at the
first prompt that is wrong, and prints it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from itertools import cycle
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import servers  # noqa: E402 - found through the line above
from scripts import tiny_models  # noqa: E402
from start_llm.core.openblas import run_with_openblas  # noqa: E402
from tests.foreign.sessions import Sessions, Trace  # noqa: E402
from tests.proxy.conftest import SECRET  # noqa: E402
from tests.sdk.endpoints import PROXIED, Endpoints, opened_endpoints  # noqa: E402
from tests.serving import serving  # noqa: E402
from tests.templates.traits import trait_folder  # noqa: E402

FAMILIES = ("qwen3", "qwen3_5", "gemma3_text")
BARE = "option_without_tools"
"""A template for sessions without a system text and tools."""
AT_ONCE = (2, 3, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stretch", type=int, default=250, help="requests between two restarts")
    parser.add_argument("--first", type=int, default=0, help="stretches that an earlier run has made")
    parser.add_argument("--no-proxy", action="store_true")
    options = parser.parse_args()
    print(servers.machine("mlx", "mlx-lm", "litellm"), flush=True)
    began, asked = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as root:
        os.environ["STATE_ROOT"] = root
        with opened_endpoints(Path(root)) as endpoints:
            for number, folder in enumerate(cycle(_models(Path(root)))):
                if number * options.stretch >= options.requests:
                    break
                if number < options.first:
                    continue
                told = stretch(folder, Path(root) / str(number), options, number, endpoints)
                asked.update(told)
                print(f"{number:4} {folder.name:12} {dict(sorted(told.items()))}", flush=True)
    seconds = time.monotonic() - began
    made = options.requests - options.first * options.stretch
    print(f"\n{made} requests in {seconds:.0f} s, no prompt wrong: {dict(sorted(asked.items()))}")


def _models(root: Path) -> list[Path]:
    built = [tiny_models.build(name, root / name, hidden=64, layers=2) for name in FAMILIES]
    return [*built, trait_folder(BARE, root, hidden=64)]


def stretch(
    folder: Path, log_root: Path, options: argparse.Namespace, number: int, endpoints: Endpoints
) -> Counter[str]:
    """The requests between two starts of a server, half of them after a restart of it.

    Raises:
        AssertionError: a prompt is wrong.
    """
    random, at_once = (
        Random(f"{options.seed} {number}"),
        AT_ONCE[number // (len(FAMILIES) + 1) % len(AT_ONCE)],
    )
    sessions: Sessions | None = None
    for half in ("before", "after"):
        traces = log_root / half
        with serving(
            folder,
            thinking=False,
            traces=True,
            traces_prompts=True,
            log_root=str(traces),
            backend_secret=SECRET.text,
        ) as server:
            proxy = None if options.no_proxy else urlsplit(endpoints.of(server, PROXIED).url).port
            ports, newest = (server.port, proxy), Trace(traces).newest
            if sessions is None:
                sessions = Sessions(ports, newest, random, at_once, are_bare=folder.name == BARE)
            else:
                sessions.restarted(ports, newest)
            sessions.play(options.stretch // 2)
    return sessions.counts if sessions else Counter()


if __name__ == "__main__":
    run_with_openblas()
    main()
