"""`start_llm upgrade` of a checkout (real git, a real clone) and of a package."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from start_llm import __version__
from start_llm.commands.upgrade import lines_for
from start_llm.storage.running_servers import RunningServer, ServerFile
from tests.commands.conftest import ROOT, Shell

pytestmark = pytest.mark.thorough

# Plays the installer: changes the environment as pip would, then does what a file of the checkout says.
INSTALLER = """\
import os, subprocess, sys
environment = ".venv/"
open(environment + ".installed-server", "w").write("half")
os.unlink(environment + "lib/package.py")
open(environment + "lib/package.py", "w").write("new")
open(environment + "lib/added.py", "w").write("new")
behaviour = open("behaviour").read().strip()
if behaviour == "fail":
    sys.exit("no such version of alpha")
if behaviour == "wait":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open("waiting.part", "w") as file:
        file.write(str(child.pid))
    os.rename("waiting.part", "waiting")
    child.wait()
open(environment + ".installed-server", "w").write("new " + " ".join(sys.argv[1:]))
"""
GIT = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
GIT |= {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


class Clone:
    """A repository with the program and a fake installer, and a clone with an environment."""

    def __init__(self, shell: Shell, folder: Path) -> None:
        self._shell = shell
        self.origin, self.root = folder / "origin", folder / "clone"
        shutil.copytree(
            ROOT / "start_llm", self.origin / "start_llm", ignore=shutil.ignore_patterns("__pycache__")
        )
        (self.origin / "install_and_run.py").write_text(INSTALLER)
        (self.origin / "requirements.txt").write_text("alpha==1\n")
        (self.origin / "behaviour").write_text("succeed")
        (self.origin / ".gitignore").write_text(".venv*\n__pycache__\nwaiting*\n")
        self.git("init", "--quiet", "--initial-branch=main")
        self.commit()
        subprocess.run(["git", "clone", "--quiet", self.origin, self.root], check=True, env=os.environ | GIT)
        self.environment = self.root / ".venv"
        for name, content in (("lib/package.py", "old"), (".installed-server", "old"), ("pyvenv.cfg", "old")):
            path = self.environment / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        python = self.environment / "bin" / "python"
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)

    def git(self, *words: str, folder: Path | None = None) -> str:
        command = ["git", "-C", str(folder or self.origin), *words]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | GIT)
        return done.stdout.strip()

    def commit(self) -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "more")
        return self.git("rev-parse", "HEAD")

    def publish(self, behaviour: str = "succeed", version: str = "10.9.9") -> str:
        """Add a commit with a new version and new requirements to the origin."""
        package = self.origin / "start_llm" / "__init__.py"
        package.write_text(package.read_text().replace(__version__, version))
        (self.origin / "requirements.txt").write_text("alpha==2\n")
        (self.origin / "behaviour").write_text(behaviour)
        return self.commit()

    @property
    def head(self) -> str:
        return self.git("rev-parse", "HEAD", folder=self.root)

    def installed(self) -> dict[str, str]:
        """The environment's files, and copies of it."""
        paths = [path for path in self.root.rglob("*") if path.is_file()]
        files = {str(path.relative_to(self.root)): path for path in paths}
        return {name: path.read_text() for name, path in files.items() if name.startswith(".venv")}

    def command(self) -> list[str]:
        return [sys.executable, "-m", "start_llm", "upgrade"]

    def upgrade(self) -> subprocess.CompletedProcess[str]:
        return self._shell.run("upgrade", cwd=self.root, environment=GIT)

    def start_upgrade(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(),
            cwd=self.root,
            env=self._shell.environment | GIT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


@pytest.fixture
def clone(shell, tmp_path) -> Clone:
    return Clone(shell, tmp_path)


@pytest.mark.long
def test_the_newest_commit_is_taken_and_what_it_requires_is_installed(clone):
    old, new = clone.head, clone.publish()
    done = clone.upgrade()
    assert (done.returncode, done.stderr) == (0, "")
    summary, pages = done.stdout.splitlines()[-2:]
    assert summary == f"start_llm {__version__} ({old[:9]}) is now start_llm 10.9.9 ({new[:9]})."
    assert "those pages go first when there is need for room" in pages, "other libraries give other keys"
    assert clone.head == new
    installed = clone.installed()
    assert installed[".venv/.installed-server"] == "new --setup-only"
    assert installed[".venv/lib/package.py"] == installed[".venv/lib/added.py"] == "new"
    assert not [name for name in installed if name.startswith(".venv.")]
    again = clone.upgrade()
    assert (again.returncode, again.stdout) == (0, "start_llm 10.9.9 is the newest.\n")
    (clone.origin / "README.md").write_text("more")
    clone.commit()
    assert "pages" not in clone.upgrade().stdout


@pytest.mark.long
def test_tools_for_the_tests_stay_installed(clone):
    clone.publish()
    (clone.environment / ".installed-dev").touch()
    assert clone.upgrade().returncode == 0
    assert clone.installed()[".venv/.installed-server"] == "new --setup-only --dev"


@pytest.mark.long
def test_a_failed_installation_leaves_everything_as_it_was(clone):
    old, before = clone.head, clone.installed()
    clone.publish("fail")
    done = clone.upgrade()
    assert done.returncode == 2
    assert done.stderr.startswith("start_llm cannot upgrade.\n")
    assert "no such version of alpha" in done.stderr
    assert done.stderr.endswith(f"Everything is as it was before ({old[:9]}).\n")
    assert (clone.head, clone.installed()) == (old, before)
    assert clone.git("status", "--porcelain", folder=clone.root) == ""


@pytest.mark.long
def test_a_version_that_does_not_run_is_undone(clone):
    old, before = clone.head, clone.installed()
    (clone.origin / "start_llm" / "cli.py").write_text("syntax error")
    clone.publish()
    done = clone.upgrade()
    assert done.returncode == 2
    assert "SyntaxError" in done.stderr
    assert (clone.head, clone.installed()) == (old, before)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("send", "number"), [(os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM), (os.kill, signal.SIGHUP)]
)
def test_an_interrupted_upgrade_leaves_everything_as_it_was(send, number, clone):
    """As a terminal sends Ctrl-C, to all processes, and as somebody else sends it, to one."""
    old, before = clone.head, clone.installed()
    clone.publish("wait")
    with clone.start_upgrade() as process:
        deadline = time.monotonic() + 30
        while not (clone.root / "waiting").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        send(process.pid, number)
        assert process.wait(30) == 2
        assert process.stderr is not None
        assert f"Interrupted.\nEverything is as it was before ({old[:9]})." in process.stderr.read()
    assert not is_running(int((clone.root / "waiting").read_text()))
    (clone.root / "waiting").unlink()
    assert (clone.head, clone.installed()) == (old, before)


def is_running(pid: int) -> bool:
    state = subprocess.run(
        ["ps", "-o", "state=", "-p", str(pid)], check=False, capture_output=True, text=True
    )
    return state.stdout.strip() not in ("", "Z")


@pytest.mark.thorough
def test_git_is_not_interrupted_in_the_middle(clone, shell):
    """A merge that is killed leaves a lock behind, and nothing could be undone."""
    old = clone.head
    clone.publish()
    real = shutil.which("git")
    started = shell.home / "merging"
    shell.add_program(
        "git", f'case "$*" in *merge*--ff-only*) touch {started}; sleep 1 ;; esac\nexec {real} "$@"'
    )
    with clone.start_upgrade() as process:
        while not started.exists():
            assert process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(30) == 2
    assert clone.head == old
    assert clone.git("status", "--porcelain", folder=clone.root) == ""
    assert not (clone.root / ".git" / "index.lock").exists()


@pytest.mark.long
def test_a_copy_that_a_killed_upgrade_left_is_removed(clone):
    clone.publish()
    (clone.root / ".venv.before-upgrade").mkdir()
    (clone.root / ".venv.before-upgrade" / "stale").touch()
    assert clone.upgrade().returncode == 0
    assert not (clone.root / ".venv.before-upgrade").exists()


def refusal(clone: Clone) -> str:
    old, before = clone.head, clone.installed()
    done = clone.upgrade()
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert (clone.head, clone.installed()) == (old, before)
    return done.stderr


def test_changed_files_are_named_and_nothing_is_done(clone):
    clone.publish()
    (clone.root / "requirements.txt").write_text("mine\n")
    (clone.root / "notes").touch()
    text = refusal(clone)
    assert "has changed files. Commit them, or put them aside with git stash:\n  requirements.txt\n" in text
    assert "notes" not in text, "files that git does not know are in nobody's way"


@pytest.mark.thorough
def test_commits_of_ones_own_are_reported(clone):
    clone.publish()
    clone.git("commit", "--quiet", "--allow-empty", "--message", "mine", folder=clone.root)
    assert "The branch main has commits that origin/main lacks." in refusal(clone)


@pytest.mark.thorough
def test_a_branch_that_follows_none_is_reported(clone):
    clone.git("switch", "--quiet", "--create", "mine", folder=clone.root)
    assert "The branch mine follows no other one" in refusal(clone)


@pytest.mark.thorough
def test_an_origin_that_cannot_be_reached_is_reported(clone):
    shutil.rmtree(clone.origin)
    assert "fetch --quiet` failed with status 128:\n" in refusal(clone)


@pytest.mark.thorough
def test_a_folder_without_git_is_reported(clone):
    shutil.rmtree(clone.root / ".git")
    done = clone.upgrade()
    assert done.returncode == 2
    assert f"{clone.root} is no checkout of git." in done.stderr


@pytest.mark.thorough
def test_a_running_server_is_not_upgraded_under_its_feet(clone, shell):
    clone.publish()
    file = ServerFile(shell.state / "servers")
    url = "http://127.0.0.1:8080"
    file.write(RunningServer(pid=os.getpid(), url=url, proxy_url=None, version="1", started_at=1.0))
    assert f"The server at {url} runs from these files. Stop it first:" in refusal(clone)
    file.remove()


# -------------------------------------------------------------------------------------------------- packages


@pytest.fixture
def source(tmp_path) -> Path:
    folder = tmp_path / "the source"
    folder.mkdir()
    return folder


def origin_of(folder: Path) -> dict[str, object]:
    return {"url": folder.as_uri(), "dir_info": {}}


def test_each_tool_upgrades_what_it_has_installed(source, tmp_path):
    def line(receipt: str | None) -> str:
        prefix = tmp_path / (receipt or "venv")
        prefix.mkdir()
        if receipt:
            (prefix / receipt).touch()
        (command,) = lines_for(origin_of(source), prefix, "/bin/python")
        return command

    assert line("uv-receipt.toml") == f"uv tool install --force --python 3.12 '{source}'"
    assert line("pipx_metadata.json") == f"pipx install --force --python python3.12 '{source}'"
    assert line(None) == f"/bin/python -m pip install --upgrade '{source}'"


def test_a_source_under_git_is_pulled_first_and_its_versions_are_held(source, tmp_path):
    (source / ".git").mkdir()
    (source / "constraints.txt").touch()
    pull, install = lines_for(origin_of(source), tmp_path, "python")
    assert pull == f"git -C '{source}' pull --ff-only"
    assert install.endswith(f"'{source}' --constraint '{source}/constraints.txt'")


def test_other_origins(tmp_path):
    git = {"url": "https://example.org/start_llm", "vcs_info": {"vcs": "git", "commit_id": "x"}}
    assert lines_for(git, tmp_path, "python") == [
        "python -m pip install --upgrade git+https://example.org/start_llm"
    ]
    (advice,) = lines_for({"url": "file:///a.whl", "archive_info": {}}, tmp_path, "python")
    assert advice.startswith("It came from file:///a.whl: install a newer one")
    assert "It came from a package index" in lines_for({}, tmp_path, "python")[0]
