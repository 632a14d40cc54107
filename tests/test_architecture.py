"""The import direction of start_llm, read from its sources. See docs/ARCHITECTURE.md."""

import ast
import re
from collections import Counter
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from scripts.import_graph import COMPUTED, Sources, imports, read_package

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "start_llm"

EVERYTHING = frozenset({"*"})
LAYERS: Mapping[str, frozenset[str]] = {
    "core": frozenset(),
    "access": frozenset({"core"}),
    "storage": frozenset({"core"}),
    "formats": frozenset({"core"}),
    "config": frozenset({"core", "formats"}),
    "telemetry": frozenset({"core", "storage"}),
    "images": frozenset({"core"}),
    "protocols": frozenset({"core", "access", "storage", "images"}),
    "prompt": frozenset({"core"}),
    "transcripts": frozenset({"core", "storage", "telemetry"}),
    "output": frozenset({"core", "formats"}),
    "models": frozenset({"core", "storage"}),
    "library": frozenset({"core", "models"}),
    "cache": frozenset({"core", "storage", "telemetry"}),
    "engine": frozenset({"core", "telemetry", "cache", "models"}),
    "serving": frozenset({"core", "telemetry", "prompt", "transcripts", "output"}),
    "server": frozenset({"core", "access", "storage", "telemetry", "protocols", "serving"}),
    "proxy": frozenset({"core", "access", "storage", "config", "protocols"}),
    "launch": frozenset({"core", "storage", "config"}),
    "commands": frozenset({"core", "storage", "config", "launch", "proxy", "models", "library", "wiring"}),
    "wiring": EVERYTHING,
    "audit": EVERYTHING,
    "hosting": EVERYTHING,
    "ranks": EVERYTHING,
    "app": EVERYTHING,
    "doctor": EVERYTHING,
    "cli": EVERYTHING,
    "__main__": EVERYTHING,
}
"""Layer (a module or folder of the package) to the layers that it may import, besides itself."""
IMPORTED_BY: Mapping[str, frozenset[str]] = {
    "wiring": frozenset({"app", "audit", "commands", "doctor", "hosting", "ranks"}),
    "hosting": frozenset({"app", "doctor", "ranks"}),
    "ranks": frozenset({"app", "cli"}),
    "audit": frozenset({"app", "cli", "doctor", "hosting"}),
    "app": frozenset({"cli", "doctor"}),
    "doctor": frozenset({"cli"}),
    "commands": frozenset({"cli"}),
    "cli": frozenset({"__main__"}),
    "__main__": frozenset(),
}
"""Layers at the top: the only ones that may import them."""
PROTOCOLS = frozenset({path.name for path in (ROOT / PACKAGE / "protocols").glob("[a-z]*/")})
"""Folders of `protocols`: none imports another one. What they share is beside them."""
AT_THE_ROOT = {"app", "cli", "__main__"}
"""The only modules that are in no folder."""
MLX = frozenset({"mlx", "mlx_lm", "mlx_vlm"})
MLX_PLACES = (
    "engine",
    "models",
    "doctor.network",
    "cache.arrays",
    "cache.layers",
    "cache.buffers",
    "cache.quantize",
)


def breaches(sources: Sources) -> list[str]:
    """Every sentence is one breach of the rules of this file; none is the goal."""
    problems: list[str] = []
    graph: dict[str, set[str]] = {}
    for module, text in sources.items():
        imported = list(imports(module, text, sources))
        graph[module] = {name for name in imported if name in sources and name != PACKAGE}
        problems += [f"{module} {problem}" for name in imported if (problem := _problem(module, name))]
    return problems + _cycles(graph)


def _layer(module: str) -> str:
    """`start_llm.engine.loop` is of layer engine; the package itself of none."""
    return module.partition(".")[2].partition(".")[0]


def _protocol(module: str) -> str:
    """Return the folder of a protocol's own modules; empty for those that protocols share."""
    parts = module.split(".")
    return parts[2] if len(parts) > 2 and parts[1] == "protocols" and parts[2] in PROTOCOLS else ""


def _problem(module: str, imported: str) -> str | None:
    if imported == COMPUTED:
        return "imports something by a computed name"
    top = imported.partition(".")[0]
    inside = module.partition(".")[2]
    if top in MLX and not any(inside == place or inside.startswith(f"{place}.") for place in MLX_PLACES):
        return f"imports {top}, which belongs to {', '.join(MLX_PLACES)}"
    if top in ("scripts", "tests", "benchmarks", "install_and_run"):
        return f"imports {imported}, which is no part of the program"
    if top != PACKAGE:
        return None
    if (own := _protocol(module)) and _protocol(imported) not in ("", own):
        return f"imports {imported}, and protocols know nothing of each other"
    return _layer_problem(module, imported)


def _layer_problem(module: str, imported: str) -> str | None:
    own, other = _layer(module), _layer(imported)
    if module == PACKAGE and other:
        return f"imports {imported}, and the package itself imports nothing of ours"
    if own == other or not other:
        return None
    if own not in LAYERS or other not in LAYERS:
        return f"imports {imported}, and one of the two layers has no row in the table"
    if other in IMPORTED_BY and own not in IMPORTED_BY[other]:
        return f"imports {imported}, which only {sorted(IMPORTED_BY[other]) or 'nobody'} may"
    if LAYERS[own] is not EVERYTHING and other not in LAYERS[own]:
        return f"imports {imported}, and layer {own} may import only {sorted(LAYERS[own]) or 'nothing'}"
    return None


def _cycles(graph: Mapping[str, set[str]]) -> list[str]:
    """A package and its own modules are not taken for a cycle: importing one imports the other anyway."""
    edges = {
        module: {neighbour for neighbour in others if not _nested(module, neighbour)}
        for module, others in graph.items()
    }
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return [f"imports go in a circle: {' → '.join(reversed(error.args[1]))}"]
    return []


def _nested(module: str, other: str) -> bool:
    return module.startswith(f"{other}.") or other.startswith(f"{module}.")


@pytest.fixture(scope="module")
def package() -> dict[str, str]:
    return read_package(ROOT / PACKAGE)


def test_the_package_keeps_the_table(package):
    assert breaches(package) == []


def documented_layers(text: str) -> dict[str, frozenset[str]]:
    """The table of layers in a document: each layer, and what it may import."""
    rows = [
        line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| `\w+`.*\|.*\|", line)
    ]
    imported = {"everything": EVERYTHING, "nothing of ours": frozenset[str]()}
    return {
        layer: imported.get(names, frozenset(re.findall(r"`(\w+)`", names)))
        for layers, _, names in rows
        for layer in re.findall(r"`(\w+)`", layers)
    }


def test_the_document_has_the_same_table():
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text.partition("\n## Layers\n")[2].partition("\n## ")[0]
    assert documented_layers(table) == {layer: LAYERS[layer] for layer in LAYERS.keys() - {"__main__"}}


def test_every_module_of_the_package_is_of_a_layer_in_the_table(package):
    assert {_layer(module) for module in package} - {""} <= LAYERS.keys()
    assert f"{PACKAGE}.engine.loop" in package


def test_every_module_is_in_a_folder_and_no_file_name_occurs_twice():
    files = [path for path in (ROOT / PACKAGE).rglob("*.py") if path.name != "__init__.py"]
    assert {path.stem for path in files if path.parent == ROOT / PACKAGE} == AT_THE_ROOT
    counts = Counter(path.name for path in files)
    assert [name for name, count in counts.items() if count > 1] == []


def test_no_module_has_more_than_400_lines(package):
    lengths = {name: len(text.splitlines()) for name, text in package.items()}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_scripts_import_nothing_of_the_program():
    for path in sorted((ROOT / "scripts").rglob("*.py")):
        assert PACKAGE not in {name.partition(".")[0] for name in imports(path.stem, path.read_text(), {})}


def class_names(text: str) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]


@pytest.mark.thorough
def test_no_class_name_occurs_twice(package):
    counts = Counter(name for text in package.values() for name in class_names(text))
    assert [name for name, count in counts.items() if count > 1] == []


def test_a_class_in_a_class_counts():
    assert class_names("class A:\n    class B: ...\n") == ["A", "B"]


PLANTED: Mapping[str, tuple[str, str, str]] = {
    "core imports a layer": (
        "core.chat",
        "from start_llm.telemetry import metrics",
        "may import only nothing",
    ),
    "a protocol imports the engine": ("protocols.base", "import start_llm.engine.engine", "layer protocols"),
    "a protocol imports another one": (
        "protocols.anthropic.messages",
        "from start_llm.protocols.openai import completions",
        "protocols know nothing of each other",
    ),
    "prompt imports models": ("prompt.prepare", "from start_llm.models.loader import load", "layer prompt"),
    "prompt imports output": ("prompt.adapt", "from start_llm.output import splitter", "layer prompt"),
    "output imports prompt": ("output.stream", "from start_llm.prompt import facts", "layer output"),
    "output imports protocols": ("output.calls", "import start_llm.protocols.base", "layer output"),
    "models imports prompt": ("models.loader", "from start_llm.prompt import template", "layer models"),
    "the service imports the engine": (
        "serving.service",
        "from start_llm.engine import batch",
        "layer serving",
    ),
    "the engine imports the service": (
        "engine.loop",
        "from start_llm.serving import service",
        "layer engine",
    ),
    "the engine imports a protocol": ("engine.loop", "from ..protocols import base", "layer engine"),
    "the server imports models": ("server.status", "import start_llm.models.footprint as f", "layer server"),
    "settings imports telemetry": ("config.settings", "import start_llm.telemetry.metrics", "layer config"),
    "telemetry imports settings": (
        "telemetry.metrics",
        "from ..config.settings import load",
        "layer telemetry",
    ),
    "the server imports the app": (
        "server.handler",
        "from start_llm.app import App",
        "which only ['cli', 'doctor'] may",
    ),
    "the app imports the command line": ("app", "import start_llm.cli", "which only ['__main__'] may"),
    "the package imports a part": ("", "from start_llm.app import App", "package itself imports nothing"),
    "an import inside a function": (
        "core.sampling",
        "def late():\n    from start_llm.engine.engine import Engine",
        "layer core",
    ),
    "an import for types alone": (
        "core.errors",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import start_llm.serving.service",
        "layer core",
    ),
    "an import by name": (
        "core.errors",
        "import importlib\nimportlib.import_module('start_llm.engine.loop')",
        "layer core",
    ),
    "an import by a computed name": ("core.errors", "__import__(str())", "computed name"),
    "mlx in the service": ("serving.service", "import mlx.core as mx", "imports mlx,"),
    "mlx_lm in core": ("core.events", "from mlx_lm.generate import BatchGenerator", "imports mlx_lm,"),
    "mlx_vlm in a function of the app": ("app", "def f():\n    import mlx_vlm", "imports mlx_vlm,"),
    "mlx in another part of the cache": ("cache.index", "import mlx", "imports mlx,"),
    "a test in the program": ("app", "from tests.serving import serving", "no part of the program"),
    "a script in the program": ("models.loader", "import scripts.tiny_models", "no part of the program"),
    "a layer without a row": ("magic.wand", "from start_llm.core import chat", "has no row in the table"),
    "a circle in a layer": ("core.errors", "from start_llm.core.chat import Message", "in a circle"),
    "a circle of types": (
        "models.tokenizer",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import start_llm.models.footprint",
        "in a circle",
    ),
}
"""The planted breaches: the file, its lines, and the words of the complaint."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_breach_is_found(case, package):
    place, lines, expected = PLANTED[case]
    module = f"{PACKAGE}.{place}" if place else PACKAGE
    if case == "a circle in a layer":
        package = package | {f"{PACKAGE}.core.chat": f"from {PACKAGE}.core import errors"}
    reported = breaches(package | {module: package.get(module, "") + "\n" + lines + "\n"})
    own = [breach for breach in reported if expected in breach and module in breach]
    assert len(own) == 1, reported
    # What goes up may go round in a circle too; nothing else is wrong.
    assert all("in a circle" in breach for breach in reported if breach not in own)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("cache.layers", "import mlx.core as mx"),
        ("cache.buffers", "from mlx_lm.models import cache"),
        ("engine.watchdog", "from start_llm.cache import plan\nimport mlx.core"),
        (
            "serving.service",
            "from start_llm.output import stream\nfrom start_llm.transcripts.bind import bind",
        ),
        ("proxy.launcher", "from start_llm.config import settings\nfrom ..core.errors import StartupError"),
        ("output.stream", "from . import splitter\nfrom start_llm import __version__"),
        ("cli", "from start_llm.proxy.launcher import launch"),
    ],
)
def test_what_the_table_allows_is_no_breach(place, line, package):
    parts = ("cache", "cache.plan", "output", "output.stream", "output.splitter", "transcripts")
    parts += ("transcripts.bind", "proxy", "proxy.launcher")
    stubs = {f"{PACKAGE}.{part}": "" for part in parts}
    assert breaches(package | stubs | {f"{PACKAGE}.{place}": line}) == []


def test_a_breach_in_the_files_of_a_copy_is_found(tmp_path):
    for name, text in read_package(ROOT / PACKAGE).items():
        is_package = (ROOT / name.replace(".", "/")).is_dir()
        path = tmp_path / (name.replace(".", "/") + ("/__init__.py" if is_package else ".py"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert breaches(read_package(tmp_path / PACKAGE)) == []
    with (tmp_path / PACKAGE / "core" / "engine_request.py").open("a", encoding="utf-8") as module:
        module.write("import mlx.core\n")
    (breach,) = breaches(read_package(tmp_path / PACKAGE))
    assert breach.startswith("start_llm.core.engine_request imports mlx,")
