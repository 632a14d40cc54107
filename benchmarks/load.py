"""Many streams at once: is anybody starved, is anybody wrong, does the server still answer?

    python benchmarks/load.py [--streams 64] [--tokens 60] [--batch N ...]

Starts the server on a tiny random model, once for each `--batch`, and sends it all streams at the same
moment. Every reply is compared with what mlx_lm says to the same prompt alone: another token counts as wrong
unless the two were equally likely up to rounding.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import servers  # noqa: E402 - found through the line above
from scripts import tiny_models  # noqa: E402
from start_llm.core.openblas import run_with_openblas  # noqa: E402
from start_llm.models.loader import load  # noqa: E402
from tests.ties import Tally, greedy_reference  # noqa: E402

BETWEEN_LOOKS_S = 0.2
VOCABULARY = 1500
PATIENCE_S = 600


@dataclass
class Stream:
    """One client. `moments` has a time, in seconds from the start of all, for each token."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list[int])
    moments: list[float] = field(default_factory=list[float])
    problem: str | None = None

    def run(self, port: int, length: int, start: threading.Barrier) -> None:
        body = {
            "prompt": list(self.prompt),
            "max_tokens": length,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }
        start.wait()
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            for line in connection.getresponse():
                self._read(line, began)
        except (OSError, http.client.HTTPException) as error:
            self.problem = repr(error)
        finally:
            connection.close()

    def _read(self, line: bytes, began: float) -> None:
        if not line.startswith(b"data: {"):
            return
        event = json.loads(line[6:])
        if "error" in event:
            self.problem = str(event["error"])
            return
        new = event["choices"][0].get("token_ids") or [] if event.get("choices") else []
        self.tokens += new
        self.moments += [time.perf_counter() - began] * len(new)


def play(folder: Path, streams: list[Stream], length: int, batch: int) -> dict[str, Any]:
    """All streams against one server. Returns `/stats` and the times of `/health`."""
    port = servers.free_port()
    options = ["--model", str(folder), "--no-proxy", "--mlx-port", str(port), "--batch", str(batch)]
    with servers.running(servers.start_llm(*options), partial(servers.health_seconds, port)):
        start = threading.Barrier(len(streams))
        threads = [threading.Thread(target=one.run, args=(port, length, start)) for one in streams]
        for thread in threads:
            thread.start()
        health = list[float]()
        while any(thread.is_alive() for thread in threads):
            health.append(servers.health_seconds(port))
            time.sleep(BETWEEN_LOOKS_S)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/stats")
        stats = json.load(connection.getresponse())
        connection.close()
        return {"stats": stats, "health": health}


def report(streams: list[Stream], played: dict[str, Any], tally: Tally, batch: int) -> None:
    """A table of one run."""
    first = sorted(one.moments[0] for one in streams)
    whole = sorted(one.moments[-1] for one in streams)
    at_half = statistics.median(whole) / 2
    had = sorted(sum(moment <= at_half for moment in one.moments) for one in streams)
    engine = played["stats"]["engine"]
    print(f"\n{len(streams)} streams, --batch {batch}")
    print(f"  first token      {first[0]:.1f} to {first[-1]:.1f} s, median {statistics.median(first):.1f}")
    print(f"  end              {whole[0]:.1f} to {whole[-1]:.1f} s, max/min {whole[-1] / whole[0]:.2f}")
    print(f"  tokens at half   {had[0]} to {had[-1]}")
    print(f"  replies          {tally.tokens} tokens compared, {tally.ties} ties, none wrong")
    print(f"  /health          median {1000 * statistics.median(played['health']):.1f} ms")
    print(f"  preemptions    {engine['preemptions']}, decode stall {engine['decode_stall']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=60, help="of each reply")
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 64])
    options = parser.parse_args()
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as root:
        folder = tiny_models.build("qwen3", Path(root), hidden=128, layers=2)
        prompts = [
            tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(20, 400)))
            for _ in range(options.streams)
        ]
        network = load(folder).network
        references = {prompt: greedy_reference(network, prompt, options.tokens) for prompt in prompts}
        print(servers.machine("mlx", "mlx-lm"))
        for batch in options.batch:
            streams = [Stream(prompt) for prompt in prompts]
            played = play(folder, streams, options.tokens, batch)
            problems = [one.problem for one in streams if one.problem]
            if problems or any(len(one.tokens) != options.tokens for one in streams):
                raise SystemExit(f"{len(problems)} streams failed: {problems[:3]}")
            tally = Tally()
            for one in streams:
                tally.compare(one.tokens, references[one.prompt])
            report(streams, played, tally, batch)


if __name__ == "__main__":
    run_with_openblas()
    main()
