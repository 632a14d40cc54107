"""One proxy for all tests with SDKs."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.sdk.doors import Doors, opened_doors


@pytest.fixture(scope="session")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Generator[Doors]:
    with opened_doors(tmp_path_factory.mktemp("proxy")) as doors:
        yield doors
