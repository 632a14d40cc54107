"""Nothing in the package runs text as code, starts a shell, or reads data that can run code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "start_llm"
BUILTINS = frozenset("eval exec compile __import__ breakpoint input".split())
MODULES = frozenset("pickle cPickle marshal shelve dill cloudpickle joblib yaml code codeop pty".split())
CALLS = frozenset(
    """
    os.system os.popen os.spawnl os.spawnlp os.spawnv os.spawnvp subprocess.getoutput
    subprocess.getstatusoutput asyncio.create_subprocess_shell torch.load numpy.load np.load tempfile.mktemp
    """.split()
)
BECOMES_A_CLIENT = ("launch/setup.py", "os.execve")
STARTS_ITSELF_AGAIN = ("core/openblas.py", "os.execve")
READS_YAML = ("launch/files.py", "yaml")
OF_YAML = {"yaml.safe_load", "yaml.YAMLError"}
"""What makes nothing but texts, numbers, lists and objects of a document."""


def dangers(text: str) -> Iterator[str]:
    """Return the dangerous calls of a source; this project never makes one."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.partition(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES:
                yield module
            case ast.Call(func=ast.Name(id=name)) if name in BUILTINS:
                yield name
            case ast.Call(func=ast.Attribute() as function) if _is_dangerous(ast.unparse(function)):
                yield ast.unparse(function)
            case ast.keyword(arg="shell" | "trust_remote_code" as name, value=value) if not _is_false(value):
                yield name
            case _:
                pass


def _is_dangerous(name: str) -> bool:
    return name in CALLS or name.startswith("os.exec")


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def test_the_package_does_nothing_of_the_kind():
    findings = [
        (path.relative_to(PACKAGE).as_posix(), danger)
        for path in sorted(PACKAGE.rglob("*.py"))
        for danger in dangers(path.read_text())
    ]
    assert findings == [STARTS_ITSELF_AGAIN, READS_YAML, BECOMES_A_CLIENT]


def test_of_yaml_only_what_runs_no_code_is_used():
    tree = ast.parse((PACKAGE / READS_YAML[0]).read_text())
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {name for name in used if name.startswith("yaml.")} == OF_YAML


@pytest.mark.parametrize(
    "line",
    [
        "eval(text)",
        "exec('x')",
        "import pickle",
        "from pickle import loads",
        "import yaml as y",
        "os.system('ls')",
        "os.execv(a, b)",
        "subprocess.run(x, shell=True)",
        "subprocess.run(x, shell=flag)",
        "subprocess.getoutput(x)",
        "load(x, trust_remote_code=True)",
        "torch.load(path)",
    ],
)
def test_each_of_them_would_be_found(line):
    assert list(dangers(line))


@pytest.mark.parametrize(
    "line", ["mx.eval(x)", "re.compile(x)", "run(x, shell=False)", "evaluate(x)", "json.load(f)"]
)
def test_what_only_looks_like_it_is_not(line):
    assert not list(dangers(line))
