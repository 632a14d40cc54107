"""Write hashes.txt anew, after a change to requirements.txt, requirements-dev.txt or constraints.txt.

    .venv/bin/python scripts/hash_packages.py

Each package stands in the section of what needs it, with the hashes of all files of its version, so that the
same file serves Linux and macOS. Only the default index is asked: a mirror may have some of the files alone.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import install_and_run  # noqa: E402 - it stands beside the package, not in it

HEADER = """\
# Every package that is installed, with the hashes of all files of its version: nothing else is installed.
# Each stands in the section of what needs it. Made by scripts/hash_packages.py.
"""
_PACKAGE = re.compile(
    r"^([A-Za-z0-9_.-]+)==(\S+)(?: ; (.*?))? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.M
)
_ELSEWHERE = tuple(f"sys_platform == {system!r}" for system in ("win32", "emscripten"))
_ALONE = "mlx-vlm"
"""Its own requirements are not installed: see requirements.txt."""

type Packages = Mapping[str, str]
"""Names to blocks of a requirements file."""


def main() -> None:
    lines = {part: install_and_run.requirement_lines(part) for part in install_and_run.REQUIREMENT_FILES}
    alone = [line for line in lines["server"] if line.startswith(_ALONE)]
    server = [line for line in lines["server"] if line not in alone]
    builds = {
        build: compiled([line.replace("mlx[cpu]", f"mlx[{build}]") for line in server])
        for build in install_and_run.BACKENDS
    }
    common = builds["cpu"].keys() & builds["cuda12"].keys() & builds["cuda13"].keys()
    sections = {"server": only(builds["cpu"], common) | compiled(alone, "--no-deps")}
    sections |= {build: only(packages, packages.keys() - common) for build, packages in builds.items()}
    both = compiled([*server, *lines["dev"]])
    sections["dev"] = only(both, both.keys() - builds["cpu"].keys())
    sections["uv"] = compiled(["uv"])
    parts = (
        f"\n# [{name}]\n{''.join(packages[package] for package in sorted(packages))}"
        for name, packages in sections.items()
    )
    install_and_run.HASHES.write_text(HEADER + "".join(parts))


def only(packages: Packages, names: Container[str]) -> dict[str, str]:
    return {name: block for name, block in packages.items() if name in names}


def compiled(requirements: Sequence[str], *options: str) -> dict[str, str]:
    """Return these requirements and theirs, for Linux and macOS."""
    uv = install_and_run.find_uv()
    if uv is None:
        sys.exit("This needs uv.")
    environment = install_and_run.uv_environment(install_and_run.pip_settings())
    with tempfile.NamedTemporaryFile("w", suffix=".in") as file:
        file.write("\n".join(requirements))
        file.flush()
        flags = (
            "--generate-hashes --no-header --no-annotate --universal --python-version 3.12 --quiet".split()
        )
        command = [
            uv,
            "pip",
            "compile",
            *flags,
            *options,
            "--constraint",
            str(install_and_run.CONSTRAINTS),
            file.name,
        ]
        output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return {
        package[1]: package[0]
        for package in _PACKAGE.finditer(output)
        if (package[3] or "").strip() not in _ELSEWHERE
    }


if __name__ == "__main__":
    main()
