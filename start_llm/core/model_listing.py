"""What the library of models tells: models on disk, whether they fit, downloads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

type DownloadState = Literal["active", "paused", "done", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """A model on a machine.

    Attributes:
        context_tokens: the longest sequence that fits, at most the model's own window.
        typical_context_tokens: the length at which bytes and speeds are given.
        kv_bytes: of a sequence of that length.
        transient_bytes: of computing a prompt, or an image in the vision tower.
        image_bytes: for images that are kept as the tower has seen them.
        read_bytes: that one token reads: active weights, and the cache.
        decode_tps, prefill_tps: None if the machine's speed is not known.
        verdict: in words.
    """

    fits: bool
    context_tokens: int
    typical_context_tokens: int
    weights_bytes: int
    kv_bytes: int
    transient_bytes: int
    usable_bytes: int
    read_bytes: int
    decode_tps: float | None
    prefill_tps: float | None
    verdict: str
    image_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.transient_bytes + self.image_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryEntry:
    """A model on disk.

    Attributes:
        repo_id: owner and name; the folder's name if it has no owner.
        place: where it was found: `models`, `hub`, `lm-studio` or `model-dir`.
        path: the model's folder.
        quant_bits: of the weights; None if they are not quantised.
        complete: False if files are missing.
        report: on this machine; None if its config or its weights cannot be read.
    """

    repo_id: str
    place: str
    path: str
    model_type: str | None
    size_bytes: int
    quant_bits: int | None
    vision: bool
    supported: bool
    complete: bool
    serving: bool
    report: FitReport | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """The state of one download. Times are seconds since 1970; bytes include what was there before."""

    id: str
    repo_id: str
    state: DownloadState
    current_file: str | None
    received_bytes: int
    total_bytes: int
    files_done: int
    files_total: int
    bytes_per_sec: int
    started_at: int
    finished_at: int | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine.

    Attributes:
        name: for tables, such as `M4 Pro 24 GB`.
        chip: such as `M4 Pro`.
        usable_bytes: of the memory, for weights, caches and computing.
        bandwidth_gbs: of the memory, in 10^9 bytes a second; None if unknown.
        tflops: float operations of its GPU, in 10^12 a second; None if unknown.
        float32_bytes: weights are converted to float32 if they then take no more; see `models.float32`.
        fuses_attention: attention makes no scores of all pairs. Metal has a kernel for it, and a CPU none.
    """

    name: str
    chip: str
    ram_bytes: int
    usable_bytes: int
    bandwidth_gbs: float | None = None
    tflops: float | None = None
    float32_bytes: int = 0
    fuses_attention: bool = False

    @property
    def ram_gb(self) -> int:
        return round(self.ram_bytes / 2**30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One model on this machine, and on all that are known.

    Attributes:
        arithmetic: lines that show how the figures come about.
        sku_context: the length for which `skus` say whether it fits.
        skus: machine and report.
    """

    model: str
    machine: Machine
    report: FitReport
    arithmetic: Sequence[str]
    sku_context: int
    skus: Sequence[tuple[Machine, FitReport]]


class ModelLibrary(Protocol):
    """Finds models, and judges them. Every method may raise `RequestError`."""

    def entries(self) -> Sequence[LibraryEntry]: ...

    def fit(self, model: str | None, repo: str | None) -> Fit:
        """Judge the loaded model, one of the library, or a repository of which files are here.

        Nobody is asked.
        """
        ...

    def fit_on_hub(self, repo: str) -> Fit:
        """Judge a repository by what the hub tells about it."""
        ...


class DownloadQueue(Protocol):
    """Downloads models. Every method may raise `RequestError`."""

    def list(self, tenant: bytes) -> Sequence[Download]: ...

    def start(self, tenant: bytes, repo_id: str) -> Download: ...

    def pause(self, tenant: bytes, name: str) -> Download: ...

    def resume(self, tenant: bytes, name: str) -> Download: ...

    def remove(self, tenant: bytes, name: str) -> Download: ...
