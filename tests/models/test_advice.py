"""What a Mac's user reads before the default model is downloaded."""

import pytest

from start_llm.core.model_listing import Machine
from start_llm.library.advice import advice, is_first_start, suggestions
from start_llm.library.fit import AGENT_CONTEXT, report
from start_llm.library.hub import Hub
from start_llm.library.well_known import DEFAULT_APPLE_MODEL
from start_llm.models.machines import MACHINES, machine_named


@pytest.fixture
def hub(tmp_path) -> Hub:
    return Hub(tmp_path, free_bytes=lambda _: 123_400_000_000)


def test_the_default_is_judged_with_memory_and_disk(hub):
    lines = advice(machine_named("M4 Pro 48 GB"), hub)
    assert lines[0] == f"The first start downloads {DEFAULT_APPLE_MODEL}: 16.8 GB."
    assert lines[1] == "  memory   17.8 GiB with 32,768 tokens; M4 Pro 48 GB lets models use 34.2 GiB"
    assert lines[2] == f"  disk     123.4 GB are free in {hub.cache}"
    assert lines[3].startswith("  verdict  fits, with all of its 202,752 tokens, about ")


def test_where_the_default_does_not_fit_that_is_said_and_smaller_ones_are_named(hub):
    lines = advice(machine_named("M2 16 GB"), hub)
    assert lines[3].startswith("  verdict  does not fit: weights and computing need 16.1 GiB of 10.1 GiB")
    assert sum("mlx-community/" in line for line in lines[5:]) == 3
    assert "Qwen3-4B" in "\n".join(lines[5:])


@pytest.mark.parametrize("its_machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.sample(7)
def test_every_suggestion_fits_with_what_an_agent_needs(its_machine):
    advised = suggestions(its_machine)
    assert DEFAULT_APPLE_MODEL not in [machine.repository for machine in advised]
    assert len(advised) == 3 or its_machine.ram_gb < 16
    for machine in advised:
        assert report(machine.shape, its_machine, AGENT_CONTEXT).context_tokens >= AGENT_CONTEXT


def test_the_largest_that_is_quick_enough_comes_first():
    (first, *_) = suggestions(machine_named("M3 Ultra 512 GB"))
    assert "DeepSeek" in first.repository
    slow_first = suggestions(machine_named("M4 Pro 48 GB"))[0]
    assert "Qwen3-32B" not in slow_first.repository, "it fits, at 7 tokens a second"


def test_a_machine_of_unknown_speed_gets_figures_of_memory_alone(hub):
    known = machine_named("M4 Pro 48 GB")
    machine = Machine("M9 48 GB", "M9", known.ram_bytes, known.usable_bytes)
    lines = advice(machine, hub)
    assert "tokens a second" not in "\n".join(lines)
    assert len(lines) == 8


def test_a_tiny_machine_is_offered_what_there_is(hub):
    machine = Machine("Toy", "Toy", 2**30, 2**30)
    assert suggestions(machine) == []
    assert len(advice(machine, hub)) == 5


def test_the_first_start_is_one_without_a_choice_and_without_the_model(hub):
    assert is_first_start(None, hub)
    assert not is_first_start("mlx-community/other", hub)
    snapshot = hub.folder_of(DEFAULT_APPLE_MODEL) / "snapshots" / "c"
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("c")
    (snapshot / "config.json").write_text("{}")
    assert is_first_start(None, hub), "the weights are missing"
    (snapshot / "model.safetensors").write_bytes(b"")
    assert not is_first_start(None, hub)
