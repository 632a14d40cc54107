"""The table of machines, and this machine's row."""

import pytest

from start_llm.core.model_listing import Machine
from start_llm.models import memory_limits
from start_llm.models.device import Device
from start_llm.models.machines import CHIPS, GIB, MACHINES, machine_named, this_machine


def test_every_machine_has_its_own_name_and_a_faster_memory_than_its_smaller_kin():
    names = [item.name for item in MACHINES]
    assert len(set(names)) == len(names)
    for chip in CHIPS:
        slower = [item for item in CHIPS if item.name == chip.name and max(item.memory) < min(chip.memory)]
        assert all(item.bandwidth_gbs <= chip.bandwidth_gbs for item in slower)


@pytest.mark.parametrize(
    ("name", "usable"), [("M1 16 GB", 10.67), ("M3 Max 36 GB", 27), ("M2 Ultra 192 GB", 144)]
)
def test_metals_share_of_the_memory(name, usable):
    assert machine_named(name).usable_bytes / GIB == pytest.approx(usable, abs=0.01)


def test_published_figures():
    assert machine_named("M4 Max 36 GB").bandwidth_gbs == 410
    assert machine_named("M4 Max 64 GB").bandwidth_gbs == 546
    assert machine_named("M4 Max 64 GB").tflops == pytest.approx(18.4, abs=0.1)
    assert machine_named("M1 Ultra 128 GB").tflops == pytest.approx(21.3, abs=0.1)
    assert machine_named("M5 Max 128 GB").bandwidth_gbs == 614


def with_memory(monkeypatch: pytest.MonkeyPatch, gib: int) -> None:
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": gib * GIB // 4096}
    monkeypatch.setattr(memory_limits.os, "sysconf", sizes.__getitem__)


def machine_of(name: str, usable_bytes: int = 0, **info: int) -> Machine:
    return this_machine(Device(name, info, limits=()), usable_bytes)


def test_this_machine_is_found_by_the_name_of_its_chip_and_its_memory(monkeypatch):
    with_memory(monkeypatch, 64)
    machine = machine_of("Apple M4 Max", 50 * GIB)
    assert (machine.name, machine.bandwidth_gbs, machine.usable_bytes) == ("M4 Max 64 GB", 546, 50 * GIB)
    with_memory(monkeypatch, 36)
    assert machine_of("Apple M4 Max").bandwidth_gbs == 410


def test_of_other_machines_the_speed_is_not_known(monkeypatch):
    with_memory(monkeypatch, 8)
    machine = machine_of("Device(cpu, 0)", 5 * GIB)
    assert (machine.bandwidth_gbs, machine.tflops, machine.ram_gb) == (None, None, 8)


def test_metal_fuses_attention_on_chips_that_are_in_no_table_too(monkeypatch):
    with_memory(monkeypatch, 16)
    assert machine_of("Apple M9", max_recommended_working_set_size=12 * GIB).fuses_attention
    assert not machine_of("AMD EPYC").fuses_attention
    assert all(machine.fuses_attention for machine in MACHINES)


def test_a_card_has_its_own_memory():
    card = Device("A card", {"total_memory": 24 * GIB, "free_memory": GIB})
    assert this_machine(card, 20 * GIB).ram_bytes == 24 * GIB
