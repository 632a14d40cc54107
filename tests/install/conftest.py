"""A copy of install_and_run.py in a folder of its own, with fake Pythons that record what they are asked."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# Plays a Python, and the Python of a .venv: answers the probe, "makes" an environment by copying itself,
# "installs", and says how it was started as the server. Files slow-pip, fail-<module> and says-<module> in
# the root alter it.
FAKE_PYTHON = """\
#!/bin/sh
caller_path=$PATH; PATH=/usr/bin:/bin
root='{root}'
echo "$*" >> "$root/calls"
module=$2
[ "$1" = -m ] && [ -e "$root/fail-$module" ] && {{ echo "ERROR: $module says no" >&2; exit 3; }}
[ "$1" = -m ] && [ -e "$root/says-$module" ] && cat "$root/says-$module"
case "$*" in
    "-I -S -c "*) echo "{version} arm64 $0" ;;
    "-m venv "*)
        packages=$3/lib/python3.12/site-packages
        mkdir -p "$3/bin" "$packages/pip" "$packages/pip-25.0.dist-info"
        touch "$packages/pip-25.0.dist-info/RECORD"
        cp "$0" "$3/bin/python"
        echo "home = $0" > "$3/pyvenv.cfg"; echo "version = {version}.1" >> "$3/pyvenv.cfg" ;;
    "-m pip config list") cat "$root/pip-settings" 2>/dev/null ;;
    "-m pip "*)
        echo "pip at work"
        while [ -e "$root/slow-pip" ]; do echo x >> "$root/pip-started"; sleep 0.05; done ;;
    "-m start_llm "* | "-m pytest"*)
        printf 'argument: %s\\n' "$@"; echo "folder: $PWD"; echo "preload: $LD_PRELOAD"
        echo "threads: $OPENBLAS_NUM_THREADS"
        echo "bytecode: $PYTHONDONTWRITEBYTECODE,$PYTHONPYCACHEPREFIX"; exit 7 ;;
esac
"""

# Runs the script as if another Python ran it: the real one is a 3.12 and would always be chosen.
DRIVER = """\
import runpy, sys
sys.executable, script = sys.argv[1:3]
sys.argv = sys.argv[2:]
runpy.run_path(script, run_name="__main__")
"""


class Sandbox:
    """`root` is the repository, `bin` the only folder on PATH, `home` the user's."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin, self.home = folder / "root", folder / "bin", folder / "home"
        for each in (self.root, self.bin, self.home):
            each.mkdir()
        self.script = Path(shutil.copy(REPOSITORY / "install_and_run.py", self.root))
        self.venv = self.root / ".venv"
        (self.root / "requirements.txt").write_text(
            "# why\nalpha[x]==1; sys_platform != 'x'  # more\n\nmlx-vlm==0.7\n"
        )
        sections = {"server": "alpha==1", "cpu": "mlx-cpu==1", "cuda12": "mlx-12==1", "cuda13": "mlx-13==1"}
        sections |= {"dev": "beta==2", "uv": "uv==0.13.9"}
        hashed = (f"# [{name}]\n{package} \\\n    --hash=sha256:00\n" for name, package in sections.items())
        (self.root / "hashes.txt").write_text("".join(hashed))
        for source in ("__init__.py", "commands/rank_launch.py", "config/flags.py", "core/openblas.py"):
            place = self.root / "start_llm" / source
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / "start_llm" / source, place)
        (self.root / "requirements-dev.txt").write_text("beta==2\n")
        self.environment = {"PATH": str(self.bin), "HOME": str(self.home)}
        self.running = str(self.write_script(folder / "old" / "python", "echo '3.11 arm64 old'"))

    def write_script(self, path: Path, body: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body if body.startswith("#!") else f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    def add_python(self, path: Path, version: str = "3.12") -> Path:
        return self.write_script(path, FAKE_PYTHON.format(root=self.root, version=version))

    def add_uv(self, status: int = 0) -> None:
        """A uv on PATH, whose installations end with this status."""
        body = 'case "$*" in --version) echo "uv 0.13.9" ;; "pip install "*)'
        self.write_script(
            self.bin / "uv",
            f'{body} echo "uv $*" >> "{self.root}/calls"; echo "cert: $SSL_CERT_FILE"; exit {status} ;; esac',
        )

    @property
    def packages(self) -> list[str]:
        """What was to be installed, without the hashes."""
        text = (self.venv / ".packages.txt").read_text()
        assert text.count("--hash=") == text.count("==")
        return [line.split()[0] for line in text.splitlines() if "==" in line]

    @property
    def log(self) -> str:
        """What the tools have printed."""
        return (self.root / "logs" / "install.log").read_text()

    def add_installed_environment(self) -> None:
        """A .venv as a first start leaves it; the calls that made it are forgotten."""
        self.add_python(self.bin / "python3.12")
        assert self.run("--setup-only").returncode == 0
        self.forget_calls()

    def command(self, *arguments: str, interpreter: str = sys.executable) -> list[str]:
        return [interpreter, "-c", DRIVER, self.running, str(self.script), *arguments]

    def run(
        self, *arguments: str, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return self.run_command(self.command(*arguments), cwd, **environment)

    def run_command(self, command: list[str], cwd: Path | None = None, **environment: str):
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            cwd=cwd or self.home,
            env=self.environment | environment,
            timeout=30,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def popen(self, *arguments: str) -> subprocess.Popen[str]:
        """In a process group of its own, as a terminal starts it."""
        return subprocess.Popen(
            self.command(*arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.home,
            env=self.environment,
            start_new_session=True,
        )

    def calls(self) -> list[str]:
        """Return the questions to the fake Pythons, without the probes of their version."""
        file = self.root / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if not line.startswith("-I -S -c ")]

    def was_started(self) -> bool:
        return (self.root / "calls").exists()

    def forget_calls(self) -> None:
        (self.root / "calls").unlink(missing_ok=True)

    def stamps(self) -> list[str]:
        return sorted(path.name for path in self.venv.glob(".installed-*"))

    def base_python(self) -> str:
        """The interpreter that the environment was made with."""
        return (self.venv / "pyvenv.cfg").read_text().splitlines()[0].removeprefix("home = ")


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)
