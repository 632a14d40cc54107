"""Fixtures for every test: tiny models on disk, built once a session."""

import os
import signal
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from scripts import tiny_models
from tests.slices import mark_thorough

# An example that takes long on a busy machine says nothing about the code.
hypothesis.settings.register_profile(
    "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy")

# A shell without job control ignores Ctrl-C for what it starts in the background; the programs that the tests
# start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A server that a test starts in a process of its own would write its trace into this checkout.
os.environ["ENABLE_REQUEST_LOGGING"] = "false"
# Nor is what any server of a test keeps to stand there.
_state = tempfile.TemporaryDirectory()
os.environ["STATE_ROOT"] = _state.name


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_thorough(items)  # before those with this mark are left out


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
