"""Every model type of mlx_lm: a part of `truth.py`."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from benchmarks.harness import ROOT, machine
from scripts.model_types import SET_ASIDE, build, model_types
from start_llm.cache.layers import Layers
from tests.cache.type_trial import ALONE, TOGETHER, Finding, Trial
from tests.ties import Tally


def types(
    _: Path,
    *,
    types: Annotated[Sequence[str], list(model_types())] = (),
    write: Path | None = None,
    jobs: int = os.cpu_count() or 1,
) -> Iterator[str]:
    """Every model type of mlx_lm answers rightly from its caches and in batches: `tests/cache/type_trial.py`.

    Each type has a process of its own, so that one that breaks takes no other with it.

    Args:
        types: these alone
        write: a file for the table
    """
    with ThreadPoolExecutor(jobs) as pool:
        findings = sorted(
            pool.map(in_a_process, types or model_types()), key=lambda finding: finding.model_type.lower()
        )
    text = page(findings)
    print(text)
    if write:
        write.write_text(text, encoding="utf-8")
    yield from (
        f"`{finding.model_type}`, {step}: {what}"
        for finding in findings
        for step, what in finding.wrong.items()
    )
    tally = Tally(sum(finding.tokens for finding in findings), sum(finding.ties for finding in findings))
    if not tally.has_rare_ties:
        yield f"{tally.ties} near-ties in {tally.tokens} tokens"


def in_a_process(model_type: str) -> Finding:
    """Everything about one type; if its process breaks, that is what is found."""
    code = f"from benchmarks.truth_types import tell; tell({model_type!r})"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    print(f"{model_type}: status {run.returncode}", file=sys.stderr, flush=True)
    if run.returncode or not run.stdout:
        reason = (run.stderr.splitlines() or [f"status {run.returncode}"])[-1]
        return Finding(model_type, wrong=dict.fromkeys((*ALONE, TOGETHER), reason))
    return Finding(**json.loads(run.stdout.splitlines()[-1]))


def tell(model_type: str) -> None:
    """Try a type in this process, and print the finding as JSON."""
    network = build(model_type)
    print(json.dumps(asdict(Trial(model_type, network, Layers(network)).run())))


def page(findings: Sequence[Finding]) -> str:
    columns = ("model type", "caches", "prompt cache", "batching", *ALONE, TOGETHER, "logits")
    lines = [
        "# Model types",
        "",
        "Written by `.venv/bin/python -m benchmarks truth --only types --write docs/model-types.md`;",
        "`tests/cache/type_trial.py` says what is asked.",
        "Tiny random networks in float32. *Logits* is the largest difference between those after a restored",
        "prompt and those of a fresh computation.",
        "",
        f"{machine('mlx', 'mlx-lm')}.",
        "",
        summary(findings),
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(cells(finding))} |" for finding in findings),
        "",
        "Not run:",
        "",
        *(f"- `{name}`: {reason}." for name, reason in SET_ASIDE.items()),
    ]
    return "\n".join(lines) + "\n"


def cells(finding: Finding) -> Sequence[str]:
    batching = f"{finding.widest} rows" if finding.widest > 1 else "turns"
    marks = ("wrong" if step in finding.wrong else "right" for step in (*ALONE, TOGETHER))
    return finding.model_type, finding.caches, finding.reuse, batching, *marks, f"{finding.difference:.0e}"


def summary(findings: Sequence[Finding]) -> str:
    """One line with counts."""
    right = sum(not finding.wrong for finding in findings)
    reuse = {
        kind: sum(finding.reuse == kind for finding in findings)
        for kind in ("to the token", "at checkpoints", "none")
    }
    reused = ", ".join(f"{count} {kind}" for kind, count in reuse.items())
    turns = sum(finding.widest <= 1 for finding in findings)
    compared = sum(finding.tokens for finding in findings)
    ties = sum(finding.ties for finding in findings)
    return (
        f"{len(findings)} types, {right} right, {len(findings) - right} wrong. Prompt cache: {reused}. "
        f"{turns} take turns. {compared:,} tokens compared, {ties} near-ties."
    )
