import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

import install_and_run
from start_llm import __version__
from start_llm.cli import _parser
from start_llm.core import openblas

HASHED = "--require-hashes --no-deps --requirement {venv}"
ROOT = Path(install_and_run.__file__).parent
PIP = f"-m pip install --disable-pip-version-check --no-input {HASHED}"


def first_installation(sandbox) -> list[str]:
    """By pip, because the uv that it was to bring is not there."""
    return [f"{PIP}/.uv.txt".format(venv=sandbox.venv), f"{PIP}/.packages.txt".format(venv=sandbox.venv)]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)


# --- refusing an environment that another Python has touched -----------------


def make_folder(place: Path) -> None:
    place.mkdir(parents=True)


def make_file(place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("")


def make_dead_link(place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to("/no/such/python3.12")


CONTAMINATIONS = [
    ("lib/python3.14", make_folder, "lib/python3.14/ belongs to another Python"),
    ("bin/python3.14", make_file, "bin/python3.14 belongs to another Python"),
    ("bin/pip3.14", make_file, "bin/pip3.14 belongs to another Python"),
    ("bin/python3", make_dead_link, "bin/python3 is a dead link to /no/such/python3.12"),
    ("lib/python3.12/site-packages/litellm_init.pth", make_file, "litellm_init.pth runs code"),
]


def tree(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


def assert_refused(sandbox, done: subprocess.CompletedProcess[str], artefact: str) -> None:
    assert done.returncode == 1
    assert artefact in done.stderr
    assert "rm -rf .venv" in done.stderr


@pytest.mark.sample(6)
@pytest.mark.parametrize(("place", "make", "artefact"), CONTAMINATIONS)
def test_an_artefact_is_named_and_nothing_deleted_or_started(sandbox, place, make, artefact):
    sandbox.add_installed_environment()
    make(sandbox.venv / place)
    before = tree(sandbox.venv)
    done = sandbox.run("--setup-only")
    assert_refused(sandbox, done, artefact)
    assert tree(sandbox.venv) == before
    assert not sandbox.was_started()


@pytest.mark.sample(3)
@pytest.mark.parametrize("line", ["version = 3.14.0", "version_info = 3.11.9", "version_info = 3.120"])
def test_an_environment_configured_for_another_python_is_refused(sandbox, line):
    sandbox.add_installed_environment()
    (sandbox.venv / "pyvenv.cfg").write_text(f"home = /usr/bin\n{line}\n")
    assert_refused(sandbox, sandbox.run(), f"pyvenv.cfg says Python {line.split()[-1]}")


def test_an_interpreter_replaced_by_another_version_is_refused(sandbox):
    sandbox.add_installed_environment()
    sandbox.add_python(sandbox.venv / "bin/python", version="3.13")
    assert_refused(sandbox, sandbox.run(), "bin/python is Python 3.13")
    assert sandbox.calls() == []


def test_all_artefacts_are_named_at_once(sandbox):
    for place, make, _ in CONTAMINATIONS:
        make(sandbox.venv / place)
    done = sandbox.run("--test")
    for _, _, artefact in CONTAMINATIONS:
        assert_refused(sandbox, done, artefact)


def test_a_file_in_the_place_of_the_environment_is_refused(sandbox):
    make_file(sandbox.venv)
    assert_refused(sandbox, sandbox.run(), ".venv is not a folder")


# --- installing --------------------------------------------------------------


def test_the_first_start_installs_what_has_its_hash_and_nothing_else(sandbox):
    sandbox.add_python(sandbox.bin / "python3.12")
    done = sandbox.run("--setup-only")
    assert done.returncode == 0
    assert sandbox.calls() == [f"-m venv {sandbox.venv}", *first_installation(sandbox)]
    assert sandbox.stamps() == [".installed-server"]
    assert sandbox.log.count("pip at work") == 2
    assert sandbox.packages == ["alpha==1", "mlx-cpu==1"]
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "Python",
        "Packages",
        "Packages",
        "Ready:",
    ]


def test_a_second_start_is_quick_and_changes_nothing(sandbox):
    sandbox.add_installed_environment()
    before = {path: path.stat().st_mtime_ns for path in sandbox.venv.rglob("*")}
    started = time.monotonic()
    assert sandbox.run("--setup-only").returncode == 0
    assert time.monotonic() - started < 3
    assert sandbox.calls() == []
    assert {path: path.stat().st_mtime_ns for path in sandbox.venv.rglob("*")} == before


@pytest.mark.thorough
def test_a_changed_requirement_installs_again_but_a_comment_does_not(sandbox):
    sandbox.add_installed_environment()
    requirements = sandbox.root / "requirements.txt"
    requirements.write_text(f"# another reason\n{requirements.read_text()}")
    sandbox.run("--setup-only")
    assert sandbox.calls() == []
    requirements.write_text(requirements.read_text().replace("alpha[x]==1", "alpha[x]==2"))
    sandbox.run("--setup-only")
    assert sandbox.calls() == first_installation(sandbox)


def test_another_interpreter_installs_again(sandbox):
    sandbox.add_installed_environment()
    (sandbox.venv / "pyvenv.cfg").write_text("home = /elsewhere\nversion = 3.12.9\n")
    sandbox.run("--setup-only")
    assert sandbox.calls() == first_installation(sandbox)


def test_other_versions_of_what_requirements_bring_are_installed_anew(sandbox):
    sandbox.add_installed_environment()
    hashes = sandbox.root / "hashes.txt"
    hashes.write_text(hashes.read_text().replace("alpha==1", "alpha==4"))
    sandbox.run("--setup-only")
    assert sandbox.calls() == first_installation(sandbox)
    assert sandbox.packages == ["alpha==4", "mlx-cpu==1"]


def test_every_requirement_has_the_version_of_the_constraints():
    root = Path(install_and_run.__file__).parent
    held = dict(line.split("==") for line in install_and_run.lines_of(root / "constraints.txt"))
    for part in install_and_run.REQUIREMENT_FILES:
        for line in install_and_run.requirement_lines(part):
            name, version = line.partition(";")[0].strip().split("==")
            assert held[name.partition("[")[0]] == version, line


def sections_of(text: str) -> dict[str, str]:
    parts = re.split(r"^# \[(\w+)\]$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_package_of_the_constraints_has_its_hashes():
    root = Path(install_and_run.__file__).parent
    hashed: dict[str, str] = {}
    for block in re.split(r"^(?=\w)", (root / "hashes.txt").read_text(), flags=re.MULTILINE)[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\n", block), block
        name, _, version = block.split()[0].partition("==")
        hashed[normal(name)] = version
    for line in install_and_run.lines_of(root / "constraints.txt"):
        name, _, version = line.partition("==")
        assert hashed[normal(name)] == version


def test_every_build_and_part_has_a_section():
    root = Path(install_and_run.__file__).parent
    sections = sections_of((root / "hashes.txt").read_text())
    assert sections.keys() == {*install_and_run.REQUIREMENT_FILES, *install_and_run.BACKENDS, "uv"}
    for part in install_and_run.REQUIREMENT_FILES:
        for line in install_and_run.requirement_lines(part):
            name = normal(re.split(r"[\[=]", line)[0])
            assert f"\n{name}==" in sections["server"] + sections[part]


@pytest.mark.thorough
def test_a_file_with_another_hash_is_not_installed(tmp_path):
    """A wheel in a folder, by the pip and the options that the installer uses."""
    wheel = tmp_path / "alpha-1-py3-none-any.whl"
    files = {"alpha.py": "", "alpha-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: alpha\nVersion: 1\n"}
    files["alpha-1.dist-info/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files["alpha-1.dist-info/RECORD"] = ""
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    for expected, succeeds in ((digest, True), ("0" * 64, False), (None, False)):
        packages = tmp_path / "packages.txt"
        packages.write_text("alpha==1" + (f" --hash=sha256:{expected}" if expected else "") + "\n")
        target = [
            "--no-index",
            "--find-links",
            str(tmp_path),
            "--target",
            str(tmp_path / "there"),
            "--upgrade",
        ]
        command = [sys.executable, "-m", "pip", "install", *target, *install_and_run.ONLY_WHAT_IS_HASHED]
        done = subprocess.run([*command, str(packages)], check=False, capture_output=True, text=True)
        assert (done.returncode == 0) is succeeds, done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", [["--setup-only", "--dev"], ["--test"]])
def test_dev_requirements_come_on_first_need_and_only_then(sandbox, arguments):
    sandbox.add_installed_environment()
    sandbox.run(*arguments)
    assert sandbox.calls()[:2] == first_installation(sandbox)
    assert sandbox.packages == ["alpha==1", "beta==2", "mlx-cpu==1"]
    assert sandbox.stamps() == [".installed-dev", ".installed-server"]
    sandbox.forget_calls()
    sandbox.run(*arguments)
    assert not [call for call in sandbox.calls() if call.startswith("-m pip")]


def test_a_failed_installation_leaves_no_stamp_and_the_next_start_goes_on(sandbox):
    sandbox.add_python(sandbox.bin / "python3.12")
    (sandbox.root / "fail-pip").touch()
    done = sandbox.run("--setup-only")
    assert done.returncode == 1
    assert "ERROR: pip says no" in done.stderr
    assert "Installing the requirements failed with status 3" in done.stderr
    assert "check the network" in done.stderr
    assert sandbox.stamps() == []

    (sandbox.root / "fail-pip").unlink()
    sandbox.forget_calls()
    assert sandbox.run("--setup-only").returncode == 0
    assert sandbox.calls() == first_installation(sandbox)
    assert sandbox.stamps() == [".installed-server"]


def test_a_failed_change_of_requirements_voids_the_old_stamp(sandbox):
    sandbox.add_installed_environment()
    requirements = sandbox.root / "requirements.txt"
    old = requirements.read_text()
    requirements.write_text("alpha==9\n")
    (sandbox.root / "fail-pip").touch()
    assert sandbox.run("--setup-only").returncode == 1
    requirements.write_text(old)
    assert sandbox.stamps() == []


def test_a_failed_venv_names_the_step_and_debians_package(sandbox):
    sandbox.add_python(sandbox.bin / "python3.12")
    (sandbox.root / "fail-venv").touch()
    done = sandbox.run()
    assert done.returncode == 1
    assert "Making the environment failed" in done.stderr
    assert "python3.12-venv" in done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("missing", ["pip", "RECORD"])
def test_an_environment_without_pip_or_with_half_of_it_gets_one(sandbox, missing):
    """The record is what a pip that is being installed gets last."""
    sandbox.add_installed_environment()
    packages = sandbox.venv / "lib/python3.12/site-packages"
    (packages / "pip-25.0.dist-info" / "RECORD").unlink()
    (packages / "pipdeptree").mkdir()
    if missing == "pip":
        shutil.rmtree(packages / "pip")
        shutil.rmtree(packages / "pip-25.0.dist-info")
    (sandbox.venv / ".installed-server").unlink()
    sandbox.run("--setup-only")
    assert sandbox.calls() == ["-m ensurepip", *first_installation(sandbox)]
    assert [path.name for path in packages.iterdir()] == ["pipdeptree"]

    (sandbox.root / "fail-ensurepip").touch()
    (sandbox.venv / ".installed-server").unlink()
    done = sandbox.run("--setup-only")
    assert_refused(sandbox, done, "Adding pip to the environment failed")


def test_a_copy_without_requirements_says_so(sandbox):
    (sandbox.root / "requirements.txt").unlink()
    sandbox.add_python(sandbox.bin / "python3.12")
    done = sandbox.run()
    assert done.returncode == 1
    assert "Cannot read" in done.stderr
    assert "requirements.txt" in done.stderr


def test_a_read_only_folder_is_refused_with_the_reason(sandbox):
    obeying_permissions: list[str] = []
    if os.geteuid() == 0:
        setpriv = shutil.which("setpriv")
        if not setpriv:
            pytest.skip("root ignores permissions, and there is no setpriv to make it obey")
        obeying_permissions = [setpriv, "--bounding-set=-dac_override"]
    sandbox.root.chmod(0o555)
    done = sandbox.run_command([*obeying_permissions, *sandbox.command("--setup-only")])
    sandbox.root.chmod(0o755)
    assert done.returncode == 1
    assert f"Cannot write to {sandbox.venv}: Permission denied" in done.stderr


def test_ctrl_c_during_the_installation_ends_quietly_with_130(sandbox):
    sandbox.add_python(sandbox.bin / "python3.12")
    (sandbox.root / "slow-pip").touch()
    process = sandbox.popen("--setup-only")
    wait_for(sandbox.root / "pip-started")
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "Stopped" in errors
    assert "Traceback" not in errors
    assert sandbox.stamps() == []


def test_two_starts_at_once_install_once_and_the_second_says_that_it_waits(sandbox):
    sandbox.add_python(sandbox.bin / "python3.12")
    (sandbox.root / "slow-pip").touch()
    first = sandbox.popen("--setup-only")
    wait_for(sandbox.root / "pip-started")
    second = sandbox.popen("--setup-only")
    assert second.stdout is not None
    assert "waiting" in second.stdout.readline()
    assert sandbox.stamps() == []
    (sandbox.root / "slow-pip").unlink()
    for process in (first, second):
        process.communicate(timeout=10)
        assert process.returncode == 0
    assert sandbox.calls() == [f"-m venv {sandbox.venv}", *first_installation(sandbox)]


# --- with uv -----------------------------------------------------------------

UV = "uv pip install --python {venv}/bin/python"


def test_uv_installs_where_there_is_one(sandbox):
    sandbox.add_python(sandbox.bin / "python3.12")
    sandbox.add_uv()
    done = sandbox.run("--setup-only")
    uv = UV.format(venv=sandbox.venv)
    assert sandbox.calls()[1:] == [
        "-m pip config list",
        f"{uv} {HASHED}/.packages.txt".format(venv=sandbox.venv),
    ]
    assert "Packages  installed with uv in " in done.stdout
    assert sandbox.stamps() == [".installed-server"]


def test_uv_installs_from_where_pip_would(sandbox):
    """It does not read pip's settings."""
    (sandbox.root / "pip-settings").write_text(
        ":env:.find-links='/wheels'\nglobal.cert='/etc/certs.pem'\nglobal.find-links='/other'\n"
        "global.index-url='file:///one/simple'\nglobal.extra-index-url='file:///two file:///three'\n"
        "install.no-index='false'\nglobal.timeout='3'\n"
    )
    sandbox.add_python(sandbox.bin / "python3.12")
    sandbox.add_uv()
    assert sandbox.run("--setup-only").returncode == 0
    (asked,) = (call for call in sandbox.calls() if call.startswith("uv"))
    options = asked.removeprefix(UV.format(venv=sandbox.venv))
    assert "--default-index file:///one/simple" in options
    assert "--index-strategy unsafe-best-match --index file:///two --index file:///three" in options
    assert "--find-links /wheels" in options
    assert "/other" not in options
    assert "--no-index" not in options
    assert "cert: /etc/certs.pem" in sandbox.log


def test_what_uv_cannot_install_pip_does(sandbox):
    sandbox.add_python(sandbox.bin / "python3.12")
    sandbox.add_uv(status=2)
    done = sandbox.run("--setup-only")
    assert done.returncode == 0
    assert "uv cannot install them; pip does it" in done.stdout
    (by_pip,) = (call for call in sandbox.calls() if call.startswith("-m pip install"))
    assert [by_pip] == first_installation(sandbox)[1:]
    assert "Packages  installed with pip in " in done.stdout


def test_the_environment_is_not_locked_where_uv_locks_it(sandbox):
    """uv waited five minutes for us, who waited for uv (lesson 114)."""
    sandbox.add_python(sandbox.bin / "python3.12")
    sandbox.add_uv()
    sandbox.run("--setup-only")
    assert not (sandbox.venv / ".lock").exists()


def test_uv_brings_a_python_where_there_is_none(sandbox):
    place = sandbox.home / ".local/share/uv/python/cpython-3.12.8-linux/bin/python3.12"
    kept = sandbox.add_python(sandbox.root.parent / "kept")
    sandbox.write_script(
        sandbox.bin / "uv",
        f'PATH=/usr/bin:/bin; case "$*" in --version) echo "uv 0.13.9" ;; "python install 3.12") '
        f"mkdir -p {place.parent}; cp {kept} {place} ;; *) exit 2 ;; esac",
    )
    done = sandbox.run("--setup-only")
    assert done.returncode == 0, done.stderr
    assert sandbox.base_python() == str(place)


# --- what is looked at first, and MLX's builds --------------------------------


def test_a_full_disk_is_reported_before_anything_is_done(sandbox, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1_200_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(install_and_run.Refusal, match=r"need 2 GB; .* 1\.2 GB are free"):
        install_and_run.refuse_full_disk(install_and_run.NEEDED_BYTES["cpu"])


@pytest.mark.sample(2)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has several builds")
@pytest.mark.parametrize(
    ("reported", "build"),
    [("CUDA Version: 13.0", "cuda13"), ("CUDA Version: 12.8", "cuda12"), ("N/A", "cpu")],
)
def test_the_build_of_mlx_is_that_for_the_driver(sandbox, reported, build):
    sandbox.write_script(sandbox.bin / "nvidia-smi", f"echo '| Driver Version: 580.1  {reported} |'")
    sandbox.add_python(sandbox.bin / "python3.12")
    sandbox.run("--setup-only")
    assert sandbox.packages == ["alpha==1", f"mlx-{build.removeprefix('cuda')}==1"]
    assert (sandbox.venv / ".backend").read_text() == build


@pytest.mark.thorough
def test_the_chosen_build_wins_and_another_one_needs_a_new_environment(sandbox):
    sandbox.write_script(sandbox.bin / "nvidia-smi", "echo 'CUDA Version: 13.0'")
    sandbox.add_python(sandbox.bin / "python3.12")
    assert sandbox.run("--setup-only", "--backend", "cpu").returncode == 0
    sandbox.forget_calls()
    for arguments in ([], ["--backend", "cpu"]):
        assert sandbox.run("--setup-only", *arguments).returncode == 0
        assert sandbox.calls() == []
    done = sandbox.run("--setup-only", "--backend", "cuda12")
    assert_refused(sandbox, done, "has MLX for cpu")
    assert sandbox.stamps() == [".installed-server"]


@pytest.mark.thorough
def test_an_environment_of_before_has_the_build_for_the_cpu(sandbox):
    sandbox.add_installed_environment()
    (sandbox.venv / ".backend").unlink()
    assert_refused(sandbox, sandbox.run("--setup-only", "--backend", "cuda12"), "has MLX for cpu")
    assert sandbox.run("--setup-only").returncode == 0
    assert sandbox.calls() == []


# --- starting the server or the tests ----------------------------------------


def started_with(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 7, done.stderr  # the fake's own status: it took the place of the script
    return re.findall("^argument: (.*)$", done.stdout, re.MULTILINE)


def test_the_server_gets_its_options_and_those_of_its_own_unchanged(sandbox):
    sandbox.add_installed_environment()
    options = ["--proxy-port", "4001", "--mlx-port=8081", "--demo", "--no-proxy", "--model", "org/name"]
    own = ["--batch", "4", "--ssd-cache-dir=a b", "-v", "--top-p", "0.5"]
    started = started_with(sandbox.run(*own[:3], *options, *own[3:]))
    ports = ["--mlx-port", "8081", "--proxy-port", "4001"]
    known = ["--no-proxy", "--demo", "--model", "org/name", *ports]
    assert started == ["-m", "start_llm", "serve", *known, *own]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("option", "hint"),
    [("--modle", " Did you mean --model?"), ("--bacth=2", " Did you mean --batch?"), ("--zzzzzzzz", "")],
)
def test_an_unknown_option_is_refused_before_anything_is_installed(sandbox, option, hint):
    sandbox.add_python(sandbox.bin / "python3.12")
    done = sandbox.run(option, "x")
    assert done.returncode == 1
    assert done.stderr == f"There is no option {option.partition('=')[0]}.{hint}\n"
    assert not sandbox.was_started()
    assert not sandbox.venv.exists()


def test_every_option_of_the_server_is_known():
    """The installer reads them from the source, as it runs before there is a Python that could."""
    (server,) = (
        commands.choices["serve"] for commands in _parser()._actions if isinstance(commands.choices, dict)
    )
    names = {name for name in server._option_string_actions if name.startswith("--")}
    shown = re.findall(r"--[a-z-]+", install_and_run.option_parser().format_help())
    assert names - {*install_and_run.server_flags(), *shown} == set()


def test_the_version_is_reported_without_installing(sandbox):
    done = sandbox.run("--version")
    assert (done.returncode, done.stdout) == (0, f"start_llm {__version__}\n")
    assert not sandbox.venv.exists()


def test_the_server_runs_in_the_root_and_gets_no_option_of_its_own_accord(sandbox):
    sandbox.add_installed_environment()
    done = sandbox.run()
    assert started_with(done) == ["-m", "start_llm", "serve"]
    assert f"folder: {sandbox.root}\n" in done.stdout


@pytest.mark.sample(3)
@pytest.mark.parametrize("given", ["model", "./model", "~/model"])
def test_a_model_folder_beside_the_caller_becomes_absolute(sandbox, given):
    sandbox.add_installed_environment()
    (sandbox.home / "model").mkdir()
    started = started_with(sandbox.run("--model", given, cwd=sandbox.home))
    assert started[-2:] == ["--model", str(sandbox.home / "model")]


def test_every_model_is_passed_on(sandbox):
    sandbox.add_installed_environment()
    started = started_with(sandbox.run("--model", "a/b", "--model", "c/d"))
    assert started[-4:] == ["--model", "a/b", "--model", "c/d"]


def test_pytest_gets_all_that_follows_test(sandbox):
    sandbox.add_installed_environment()
    done = sandbox.run("--test", "-k", "x or y", "--model", "--demo", "tests/a.py")
    assert started_with(done) == ["-m", "pytest", "-k", "x or y", "--model", "--demo", "tests/a.py"]
    assert f"folder: {sandbox.root}\n" in done.stdout


def test_all_tests_run_in_two_processes(sandbox):
    sandbox.add_installed_environment()
    done = sandbox.run("--test")
    assert started_with(done) == ["-m", "pytest", "-n", "2", "--dist", "loadfile"]
    assert "threads: 1\n" in done.stdout
    assert "bytecode: ,\n" in done.stdout


@pytest.mark.thorough
def test_tests_keep_their_bytecode_out_of_a_tree_that_shall_have_none(sandbox):
    sandbox.add_installed_environment()
    folder = sandbox.root / ".pytest_cache" / "bytecode"
    done = sandbox.run("--test", PYTHONDONTWRITEBYTECODE="1")
    assert f"bytecode: ,{folder}\n" in done.stdout
    done = sandbox.run("--test", PYTHONDONTWRITEBYTECODE="1", PYTHONPYCACHEPREFIX="/elsewhere")
    assert "bytecode: ,/elsewhere\n" in done.stdout
    done = sandbox.run(PYTHONDONTWRITEBYTECODE="1")
    assert "bytecode: 1,\n" in done.stdout, "a server writes what it is asked to write"


@pytest.mark.long
def test_tests_leave_no_temporary_folder_and_the_bytecode_of_the_tree_alone(tmp_path):
    """As in a process that ends without the clean-up of Python, and with a tree among temporary folders."""
    tree, bytecode = tmp_path / "tmp" / "tree", tmp_path / "bytecode"
    tree.mkdir(parents=True)
    (tree / "test_it.py").write_text(
        "import atexit, os, sys\n"
        "from tests.conftest import lasting_folder\n"
        "def test_one(tmp_path):\n"
        "    atexit.register(os._exit, 0)\n"
        "    (lasting_folder() / 'left').write_text('')\n"
        "    (tmp_path / 'own.py').write_text('')\n"
        "    sys.path.insert(0, str(tmp_path))\n"
        "    import own\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TMPDIR": str(tree.parent), "PYTHONPYCACHEPREFIX": str(bytecode)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    command = [sys.executable, "-m", "pytest", *options, str(tree / "test_it.py")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert "[100%]" in done.stdout, done.stdout + done.stderr
    assert {path.name.partition("-of-")[0] for path in tree.parent.iterdir()} <= {"tree", "pytest", "mlx"}
    assert not [*bytecode.rglob("own*.pyc")]
    assert [*bytecode.rglob("test_it*.pyc")]


@pytest.mark.sample(2)
@pytest.mark.skipif(sys.platform != "linux", reason="preloads on Linux only")
@pytest.mark.parametrize("arguments", [[], ["--test"]])
def test_openblas_is_preloaded_or_advised(sandbox, arguments):
    sandbox.add_installed_environment()
    done = sandbox.run(*arguments)
    library = next((place for place in openblas.PLACES if Path(place).is_file()), "")
    assert f"preload: {library}\n" in done.stdout
    assert ("libopenblas0-pthread " in done.stdout) == (not library)


def test_a_copy_without_the_file_that_preloads_is_reported(sandbox):
    sandbox.add_installed_environment()
    (sandbox.root / "start_llm" / "core" / "openblas.py").unlink()
    done = sandbox.run()
    assert done.returncode == 1
    assert "Is this a whole copy of start_llm?" in done.stderr


def test_windows_is_refused(sandbox):
    # The modules are loaded before the platform is changed, because some of theirs differ there.
    pretend = "import argparse, pathlib, shutil, subprocess, sys; sys.platform = 'win32'; "
    run = "import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"
    done = sandbox.run_command([sys.executable, "-c", pretend + run, str(sandbox.script)])
    assert done.returncode == 1
    assert "Windows is not supported" in done.stderr
    assert not sandbox.venv.exists()


# --- old Pythons, and the real requirement files ------------------------------


def python39() -> str | None:
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    candidates = [shutil.which("python3.9"), *map(str, versions.glob("3.9*/bin/python"))]
    return next((python for python in candidates if python and runs_as_39(python)), None)


def runs_as_39(python: str) -> bool:
    done = subprocess.run([python, "-V"], check=False, capture_output=True, text=True)
    return done.stdout.startswith("Python 3.9.")


@pytest.mark.thorough
def test_it_starts_under_python39(sandbox):
    python = python39()
    if python is None:
        pytest.skip("no Python 3.9 on this machine")
    shown = sandbox.run_command([python, str(sandbox.script), "--help"])
    assert shown.returncode == 0
    for option in ("--model", "--demo", "--no-proxy", "--mlx-port", "--setup-only", "--dev", "--test"):
        assert option in shown.stdout
    sandbox.add_python(sandbox.bin / "python3.12")
    started = started_with(sandbox.run_command([python, str(sandbox.script), "--demo"]))
    assert started == ["-m", "start_llm", "serve", "--demo"]


def test_every_requirement_is_exact_and_the_six_packages_are_named():
    server = install_and_run.requirement_lines("server")
    for line in [*server, *install_and_run.requirement_lines("dev")]:
        assert re.fullmatch(r'[a-z-]+(\[[a-z]+\])?==[\d.]+(; sys_platform [!=]= "linux")?', line), line
    names = {line.partition("==")[0] for line in server}
    six = {"mlx", "mlx-lm", "mlx-vlm", "litellm[proxy]", "python-dotenv", "pillow"}
    assert six | {"mlx[cpu]"} <= names
