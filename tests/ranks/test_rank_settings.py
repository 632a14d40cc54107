"""What several ranks do without is off or refused, and followers are loaded with what rank 0 has set."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from start_llm.config.setting_types import OFF
from start_llm.core.errors import Conflict, SettingsError
from start_llm.hosting.model_switcher import ModelSwitcher
from start_llm.models.rank_group import RankGroup
from start_llm.ranks.rank_settings import followed, left_out, sent_settings, settings_together
from start_llm.ranks.wire import decoded, encoded
from start_llm.wiring.memory_plan import memory_budget
from tests.flat_settings import settings_of


def ranks(least: int, rank: int = 0) -> RankGroup:
    """Ranks of which another one has so much memory."""
    return cast("RankGroup", SimpleNamespace(least=lambda own: min(own, least), rank=rank, size=2))


def test_all_ranks_use_as_much_memory_as_the_one_that_has_least():
    assert memory_budget(settings_together(settings_of(memory=10**9), ranks(10**8))) == 10**8
    assert memory_budget(settings_together(settings_of(memory=10**9), ranks(10**10))) == 10**9


def test_idle_unloading_is_off():
    assert settings_together(settings_of(model_idle_s=60.0), ranks(10**9)).model.idle_s == 0


@pytest.mark.parametrize(
    ("rank", "chosen", "folder"),
    [
        (0, None, None),
        (1, None, "/state/prompt-cache.rank1"),
        (2, "/disk/kv", "/disk/kv.rank2"),
        (1, OFF, OFF),
    ],
)
def test_each_rank_has_a_folder_of_its_own_for_its_pages(rank: int, chosen: str | None, folder: str | None):
    settings = settings_of(folder=chosen, state_root="/state")
    together = settings_together(settings, ranks(10**9, rank))
    assert together.ssd.folder == folder


@pytest.mark.parametrize(
    ("wish", "variable"),
    [
        ({"more": ("another",)}, "MORE_MODELS"),
        ({"model_dir": "models"}, "MODEL_DIR"),
        ({"adapter_dir": "adapters"}, "ADAPTER_DIR"),
    ],
)
def test_what_would_be_missed_is_refused(wish: dict[str, Any], variable: str):
    with pytest.raises(SettingsError, match=variable):
        settings_together(settings_of(**wish), ranks(10**9))


def test_what_is_off_is_reported():
    (line,) = left_out(settings_of())
    for word in ("embeddings", "adapters"):
        assert word in line
    assert "MODEL_IDLE_SECONDS" in left_out(settings_of(model_idle_s=60.0))[1]


def test_followers_are_loaded_with_what_rank_0_has_set():
    ours = settings_of(
        model_path="/models/one",
        batch=3,
        memory=10**9,
        block_size=64,
        bits=8.0,
        speculation="off",
        server_port=1,
    )
    sent = decoded(encoded(sent_settings(ours)))
    theirs = followed(settings_of(model_path="/other", batch=9, server_port=2), cast("Any", sent))
    assert (theirs.model.path, theirs.engine, theirs.kv, theirs.cache) == (
        "/models/one",
        ours.engine,
        ours.kv,
        ours.cache,
    )
    assert theirs.server.port == 2


def test_a_secret_stays_on_rank_0():
    keys = ("sk-secret-of-a-user",)
    assert b"sk-secret" not in encoded(sent_settings(settings_of(access_keys=keys)))


def test_a_model_that_other_ranks_have_too_stays_loaded():
    switcher = ModelSwitcher.__new__(ModelSwitcher)
    switcher._shared = cast("Any", SimpleNamespace(ranks=ranks(1)))
    with pytest.raises(Conflict, match="stays loaded"):
        switcher.unload("one")
