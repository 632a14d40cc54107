"""One proxy for all tests with SDKs."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.sdk.doors import PROXIED, Doors, opened_doors


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """LiteLLM makes chats of text completions, which one test tells; the others ask the server itself."""
    apart = [item for item in items if _is_text_through_the_proxy(item)]
    if apart:
        config.hook.pytest_deselected(items=apart)
        items[:] = [item for item in items if item not in apart]


def _is_text_through_the_proxy(item: pytest.Item) -> bool:
    called = getattr(item, "callspec", None)
    if called is None or called.params.get("endpoint") != "completions":
        return False
    return any(isinstance(way, tuple) and way[0] == PROXIED for way in called.params.values())


@pytest.fixture(scope="session")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Generator[Doors]:
    with opened_doors(tmp_path_factory.mktemp("proxy")) as doors:
        yield doors
