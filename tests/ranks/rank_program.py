"""What each rank of `test_engine_of_ranks` runs: rank 0 answers requests with each model, and prints what it
said; the others follow.

    mlx.launch -n 2 --backend ring -- python -m tests.ranks.rank_program FOLDER...
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from start_llm.core.errors import ModelError
from start_llm.engine.resources import EngineResources
from start_llm.models.loader import LoadedModel, load
from start_llm.models.rank_group import RankGroup
from start_llm.ranks.follower import Follower, LeaderMessages
from start_llm.ranks.leader import Leader
from start_llm.ranks.rank_processes import meet_followers, meet_leader
from start_llm.ranks.wire import SentEnd
from tests.ranks import play_images
from tests.ranks.play import play, resources_of, truth


def main() -> None:
    ranks = RankGroup.join()
    assert ranks is not None
    with mx.stream(generation_stream):
        if ranks.rank:
            follow(ranks)
        else:
            lead(ranks)


def lead(ranks: RankGroup) -> None:
    leader = Leader(ranks, meet_followers(ranks))
    leader.watch(lambda reason, is_final: fail(f"{reason} {is_final}"))
    heard: dict[str, object] = {}
    for folder in sys.argv[1:]:
        try:
            model = load(Path(folder), ranks=ranks)
        except ModelError as error:
            heard[folder] = {"refused": str(error)}
            continue
        resources = rank_resources(model, followers=leader, agree=ranks.agree)
        if model.vision:
            heard[folder] = asdict(play_images.play(model, resources))
            leader._send(SentEnd())
            continue
        played = asdict(play(resources))
        leader._send(SentEnd())
        heard[folder] = played | {"difference": truth(resources, ranks.agreeing(model.network))}
    print("heard", json.dumps(heard), flush=True)


def follow(ranks: RankGroup) -> None:
    incoming = LeaderMessages(meet_leader(ranks), lambda: fail("rank 0 is gone"))
    for folder in sys.argv[1:]:
        try:
            model = load(Path(folder), ranks=ranks)
        except ModelError:
            continue
        resources = rank_resources(model, agree=ranks.agree)
        Follower(resources).follow(incoming)
        if not model.vision:
            truth(resources, ranks.agreeing(model.network))


def rank_resources(model: LoadedModel, **more: Any) -> EngineResources:
    if not model.vision:
        return resources_of(model, **more)
    limit = play_images.image_bytes_for(model)
    return resources_of(model, vision=model.vision, image_bytes=limit, **more)


def fail(reason: str) -> None:
    print(reason, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main()
