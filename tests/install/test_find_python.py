"""Which Python 3.12 the environment is made with."""

import pytest

import install_and_run

REFUSING_SHIM = "echo 'pyenv: python3.12: command not found' >&2; exit 127"


def test_the_running_python_is_taken_first(sandbox):
    sandbox.running = str(sandbox.add_python(sandbox.root.parent / "running" / "python"))
    sandbox.add_python(sandbox.bin / "python3.12")
    assert sandbox.run("--setup-only").returncode == 0
    assert sandbox.base_python() == sandbox.running


def test_a_python_on_path_that_refuses_to_run_is_passed_over(sandbox):
    sandbox.write_script(sandbox.bin / "python3.12", REFUSING_SHIM)
    good = sandbox.add_python(sandbox.root.parent / "later" / "python3.12")
    sandbox.run("--setup-only", PATH=f"{sandbox.bin}:{good.parent}")
    assert sandbox.base_python() == str(good)


def test_a_python312_that_is_really_311_is_passed_over(sandbox):
    sandbox.add_python(sandbox.bin / "python3.12", version="3.11")
    good = sandbox.add_python(sandbox.home / ".pyenv/versions/3.12.1/bin/python")
    sandbox.run("--setup-only")
    assert sandbox.base_python() == str(good)


def test_the_newest_python_of_pyenv_is_taken(sandbox):
    pyenv = sandbox.root.parent / "pyenv"
    for version in ("3.12.9", "3.12.10", "3.12-dev"):
        sandbox.add_python(pyenv / "versions" / version / "bin/python")
    sandbox.run("--setup-only", PYENV_ROOT=str(pyenv))
    assert sandbox.base_python() == str(pyenv / "versions/3.12.10/bin/python")


def test_uv_is_asked(sandbox):
    good = sandbox.add_python(sandbox.home / "somewhere/python")
    sandbox.write_script(sandbox.bin / "uv", f'[ "$*" = "python find 3.12" ] && echo {good}')
    sandbox.run("--setup-only")
    assert sandbox.base_python() == str(good)


@pytest.mark.sample(2)
@pytest.mark.parametrize("uv", ["echo no >&2; exit 2", "#!/no/such/interpreter\n"])
def test_pythons_of_uv_are_found_without_its_help(sandbox, uv):
    sandbox.write_script(sandbox.bin / "uv", uv)
    good = sandbox.add_python(sandbox.home / ".local/share/uv/python/cpython-3.12.8-linux/bin/python3.12")
    sandbox.run("--setup-only")
    assert sandbox.base_python() == str(good)


def test_a_python_of_the_broken_environment_itself_is_not_taken(sandbox):
    inside = sandbox.add_python(sandbox.venv / "bin/python3.12")
    done = sandbox.run("--setup-only", PATH=str(inside.parent))
    assert done.returncode == 1
    assert "none was found" in done.stderr


def test_without_any_python312_the_ways_to_get_one_and_the_candidates_are_named(sandbox):
    sandbox.write_script(sandbox.bin / "python3.12", REFUSING_SHIM)
    sandbox.add_python(sandbox.home / ".pyenv/versions/3.12.1/bin/python", version="3.11")
    done = sandbox.run("--setup-only")
    assert done.returncode == 1
    for way in ("uv python install", "pyenv install", "brew install", "apt install"):
        assert way in done.stderr
    assert f"{sandbox.bin}/python3.12 does not run (pyenv: python3.12: command not found)" in done.stderr
    assert "3.12.1/bin/python is Python 3.11" in done.stderr


def test_a_python_for_intel_is_refused_on_a_mac():
    assert "needs arm64" in install_and_run.complaint_about("3.12", "x86_64", "darwin")
    assert not install_and_run.complaint_about("3.12", "arm64", "darwin")
    assert not install_and_run.complaint_about("3.12", "x86_64", "linux")
