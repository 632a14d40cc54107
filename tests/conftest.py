"""Fixtures for every test: tiny models on disk, built once a session."""

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Methods that belong to one thread say so when another one calls them; read when the package is imported.
# Not where a benchmark imports what tests have: it would measure these checks too.
if "PYTEST_VERSION" in os.environ:
    os.environ["START_LLM_CHECK_THREADS"] = "1"

from scripts import tiny_models
from tests import slices

# An example that takes long on a busy machine says nothing about the code.
hypothesis.settings.register_profile(
    "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("few", hypothesis.settings.get_profile("busy"), max_examples=40)
hypothesis.settings.load_profile("busy")

# A shell without job control ignores Ctrl-C for what it starts in the background; the programs that the tests
# start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A server that a test starts in a process of its own would write its trace into this checkout.
os.environ["ENABLE_REQUEST_LOGGING"] = "false"
# Expectations are float32's; a GPU's matrices otherwise have the 10 bits of TF32.
os.environ["MLX_ENABLE_TF32"] = "0"
# Nobody asks the hub: nothing listens there.
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
# Nor is what any server of a test keeps to stand there.
_state = tempfile.TemporaryDirectory()
os.environ["STATE_ROOT"] = _state.name
_lasting = tempfile.TemporaryDirectory()
# tiktoken copies each file that it reads, by the name of the file.
os.environ["DATA_GYM_CACHE_DIR"] = f"{_lasting.name}/tiktoken"
# Those that a test starts in a process of its own write no pages, unless it says so.
os.environ["SSD_CACHE_DIR"] = "off"


def lasting_folder() -> Path:
    """Return a new folder that goes when this process has run its tests."""
    return Path(tempfile.mkdtemp(dir=_lasting.name))


def pytest_configure(config: pytest.Config) -> None:
    slices.begin(config.option.markexpr)
    if not slices.is_whole():
        hypothesis.settings.load_profile("few")
    options = config.option
    if hasattr(config, "workerinput") and options.durations is None and options.xmlpath is None:
        from tests.units import only_outcomes

        (worker,) = (plugin for plugin in config.pluginmanager.get_plugins() if hasattr(plugin, "sendevent"))
        worker.sendevent = only_outcomes(worker.sendevent)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove what outlives single tests; a process of xdist ends without its own clean-up.

    Where bytecode has a folder of its own, that of what tests have written goes too.
    """
    for folder in (_state, _lasting):
        folder.cleanup()
    if sys.pycache_prefix and not hasattr(config, "workerinput"):
        for written in Path(sys.pycache_prefix + tempfile.gettempdir()).glob("pytest-of-*"):
            shutil.rmtree(written, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, and leave out of its passes what was collected: they take a
    quarter of the time of this, and 0.7 s each later, with 26,000 cases in memory."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several processes, share out the tests as `tests.units` says."""
    from tests.units import UnitScheduling

    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return UnitScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    slices.choose_cases(metafunc, slices.named_by_mutants())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        from tests.units import rank

        items.sort(key=lambda item: rank(item.nodeid))


TinyModel = Callable[..., Path]
ChainModel = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """`tiny_model("qwen3", layers=2)` gives the folder of a random model: see `tiny_models.build`."""

    @cache
    def folder_of(family: str = "qwen3", **options: Any) -> Path:
        return tiny_models.build(family, tmp_path_factory.mktemp(family), **options)

    return folder_of


@pytest.fixture(scope="session")
def tiny_vision_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """`tiny_vision_model("qwen3_vl")` gives the folder of a random model that sees images."""
    from scripts import tiny_vision_models

    @cache
    def folder_of(family: str = "qwen3_vl") -> Path:
        return tiny_vision_models.build(family, tmp_path_factory.mktemp(family))

    return folder_of


@pytest.fixture(scope="session")
def chain_model(tmp_path_factory: pytest.TempPathFactory) -> ChainModel:
    r"""`chain_model({"\n": ["Hello", " you"]})` gives the folder of a scripted model.

    See `tiny_models.build_chain`.
    """
    built: dict[str, Path] = {}

    def folder_of(chains: Mapping[str, Sequence[str | bytes]], **options: Any) -> Path:
        key = repr((chains, options))
        if key not in built:
            built[key] = tiny_models.build_chain(tmp_path_factory.mktemp("chain"), chains, **options)
        return built[key]

    return folder_of


@pytest.fixture(scope="session")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Generator[Any]:
    """Both ports of any server: see `tests.sdk.endpoints`. The proxy starts when it is first asked for."""
    from tests.sdk.endpoints import opened_endpoints

    with opened_endpoints(tmp_path_factory.mktemp("proxy")) as endpoints:
        yield endpoints
