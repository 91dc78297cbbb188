"""One small task and one preloaded process for the whole folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.commands import Preloaded
from tests.small_task import SmallTask, make_small_task


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> SmallTask:
    return make_small_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preloaded]:
    preloaded = Preloaded(tmp_path_factory.mktemp("streams"))
    yield preloaded
    preloaded.close()
