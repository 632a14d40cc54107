"""The machines that models are judged for: Apple's chips with unified memory, and the one this runs on.

Sources: memory bandwidth and cores from Apple's technical specifications and press releases for each chip
(M1 of November 2020 to M5 Pro and M5 Max of March 2026). An M4 Ultra was never made. An M5 Ultra is not in
the table: at the time of writing there were only rumours of it. Where a chip was sold with fewer cores and a
slower memory (M3 Max, M4 Max, M5 Max), the row of the smaller memory is the slower one.

`tflops` are those of float32 on the GPU: cores x 128 units x 2 operations x clock, with the clocks that
philipturner/metal-benchmarks and applegpuinfo measured (1.28 GHz for M1, 1.40 for M2 and M3) and 1.8 GHz as
published for M4 and M5 (18.4 TFLOPS of 40 cores). The GPU cores of M5 have units for matrices; Apple reports
prompts that are read 3.3 to 4 times as fast as on M4, of which 3 are counted here.

`usable_bytes` is what Metal recommends for one process: two thirds of up to 32 GB, three quarters beyond
(llama.cpp prints 10.67 of 16 GiB, 96 of 128 GiB on macOS 14). Newer systems recommend more (11.8 of 16,
107.5 of 128 GiB), so these rows are on the careful side. For this machine MLX is asked.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from start_llm.core.model_listing import Machine
from start_llm.models.device import Device

GIB = 2**30
_SMALL_GB = 32
_MATRIX_UNITS = 3.0


def gib(count: float) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:,.1f} MiB"


@dataclass(frozen=True, slots=True)
class Chip:
    """A chip, and the sizes of memory that it was sold with, in GB."""

    name: str
    bandwidth_gbs: float
    cores: int
    clock_ghz: float
    memory: tuple[int, ...]
    has_matrix_units: bool = False

    @property
    def tflops(self) -> float:
        plain = self.cores * 128 * 2 * self.clock_ghz / 1000
        return plain * (_MATRIX_UNITS if self.has_matrix_units else 1)


CHIPS = (
    Chip("M1", 68.25, 8, 1.28, (8, 16)),
    Chip("M1 Pro", 200, 16, 1.3, (16, 32)),
    Chip("M1 Max", 400, 32, 1.3, (32, 64)),
    Chip("M1 Ultra", 800, 64, 1.3, (64, 128)),
    Chip("M2", 100, 10, 1.4, (8, 16, 24)),
    Chip("M2 Pro", 200, 19, 1.4, (16, 32)),
    Chip("M2 Max", 400, 38, 1.4, (32, 64, 96)),
    Chip("M2 Ultra", 800, 76, 1.4, (64, 128, 192)),
    Chip("M3", 100, 10, 1.4, (8, 16, 24)),
    Chip("M3 Pro", 150, 18, 1.4, (18, 36)),
    Chip("M3 Max", 300, 30, 1.4, (36, 96)),
    Chip("M3 Max", 400, 40, 1.4, (48, 64, 128)),
    Chip("M3 Ultra", 819, 80, 1.4, (96, 256, 512)),
    Chip("M4", 120, 10, 1.8, (16, 24, 32)),
    Chip("M4 Pro", 273, 20, 1.8, (24, 48, 64)),
    Chip("M4 Max", 410, 32, 1.8, (36,)),
    Chip("M4 Max", 546, 40, 1.8, (48, 64, 128)),
    Chip("M5", 153, 10, 1.8, (16, 24, 32), has_matrix_units=True),
    Chip("M5 Pro", 307, 20, 1.8, (24, 48, 64), has_matrix_units=True),
    Chip("M5 Max", 460, 32, 1.8, (36,), has_matrix_units=True),
    Chip("M5 Max", 614, 40, 1.8, (48, 64, 128), has_matrix_units=True),
)


def _usable(ram_gb: int) -> int:
    return ram_gb * GIB * 2 // 3 if ram_gb <= _SMALL_GB else ram_gb * GIB * 3 // 4


def _machines() -> Iterator[Machine]:
    for chip in CHIPS:
        for ram_gb in chip.memory:
            name = f"{chip.name} {ram_gb} GB"
            sizes, speeds = (ram_gb * GIB, _usable(ram_gb)), (chip.bandwidth_gbs, chip.tflops)
            yield Machine(name, chip.name, *sizes, *speeds, fuses_attention=True)


MACHINES: tuple[Machine, ...] = tuple(_machines())


def machine_named(name: str) -> Machine:
    """Return a machine of the table.

    Raises:
        KeyError: there is none of this name.
    """
    return {machine.name: machine for machine in MACHINES}[name]


def this_machine(device: Device, usable_bytes: int, float32_bytes: int = 0) -> Machine:
    """Return the machine that this runs on. Only of Apple's chips are bandwidth and speed known.

    Args:
        device: on Metal its name is that of the chip.
        usable_bytes: of MEMORY_BUDGET.
        float32_bytes: see `Machine`.
    """
    ram_bytes = device.usable_bytes if device.has_own_memory else device.host_bytes
    chip = device.name.removeprefix("Apple ").strip()
    known = _nearest(chip, round(ram_bytes / GIB))
    name = f"{chip} {round(ram_bytes / GIB)} GB"
    return Machine(
        *(name, chip, ram_bytes, usable_bytes),
        bandwidth_gbs=known.bandwidth_gbs if known else None,
        tflops=known.tflops if known else None,
        float32_bytes=float32_bytes,
        fuses_attention=device.kind == "Metal",
    )


def _nearest(chip: str, ram_gb: int) -> Machine | None:
    """Return the row of this chip whose memory is nearest."""
    rows = [row for row in MACHINES if row.chip == chip]
    return min(rows, key=lambda row: abs(row.ram_gb - ram_gb), default=None)
