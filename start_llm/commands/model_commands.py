"""The commands about models: `models`, `search`, `pull`, `fit`, `rm`."""

import argparse
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TextIO

from start_llm.config.settings import Settings
from start_llm.core.columns import columns
from start_llm.core.errors import ModelError
from start_llm.core.model_listing import LibraryEntry, Machine
from start_llm.library.download import folder_at, pull
from start_llm.library.fit import ModelShape, arithmetic, beside, report
from start_llm.library.fit_table import as_markdown, as_text
from start_llm.library.fit_together import together_lines
from start_llm.library.folders import Library, shape_in
from start_llm.library.hub import REPOSITORY, Hub
from start_llm.library.progress import Progress
from start_llm.library.shelf import shape_on_hub
from start_llm.library.well_known import WELL_KNOWN
from start_llm.models.machines import gib
from start_llm.wiring.kv_bits import loss_lines
from start_llm.wiring.memory_plan import own_machine
from start_llm.wiring.model_places import model_folders, model_name, model_places

_INTERRUPTED = 130
_MOST_RESULTS = 15
HEAD = ("model", "place", "type", "size", "bits", "fits", "context", "tok/s")
_PIPED = (120, 24)


def models(settings: Settings, _options: argparse.Namespace, out: TextIO) -> int:
    """Print the models on this machine."""
    entries = _library(settings).entries()
    if not entries:
        out.write("There are no models on this machine. start_llm pull REPO downloads one.\n")
        return 0
    out.writelines(f"{line}\n" for line in columns([HEAD, *map(_row, entries)]))
    return 0


def rows_and_words(settings: Settings) -> list[tuple[tuple[str, ...], str]]:
    """Return for each model on this machine what `models` shows, and what `--model` takes for it."""
    entries = _library(settings).entries()
    return [(_row(entry), entry.repo_id if entry.place == "hub" else entry.path) for entry in entries]


def search(_settings: Settings, options: argparse.Namespace, out: TextIO, hub: Hub | None = None) -> int:
    """Print the models on the hub whose names have these words; 1 if there is none."""
    words = " ".join(options.words)
    models = (hub or Hub()).search(words, _MOST_RESULTS)
    if not models:
        out.write(f"No model for MLX on the hub has {words!r} in its name.\n")
        return 1
    out.writelines(
        f"{line}\n"
        for line in columns(
            [("model", "downloads a month"), *((model.repo_id, f"{model.downloads:,}") for model in models)]
        )
    )
    out.write("\nstart_llm fit NAME says whether it fits this machine, start_llm pull NAME downloads it.\n")
    return 0


def pull_model(settings: Settings, options: argparse.Namespace, out: TextIO) -> int:
    """Download a model; 130 if it was interrupted."""
    if not REPOSITORY.fullmatch(options.repo):
        raise ModelError(f"{options.repo!r} is not the name of a repository (owner/name).")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        folder = pull(options.repo, Hub(), Progress())
    except KeyboardInterrupt:
        out.write("\nStopped. What has come is kept: the same command goes on.\n")
        return _INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, before)
    out.write(f"{folder}\n")
    out.writelines(f"{line}\n" for line in _page(shape_in(options.repo, folder), own_machine(settings)))
    return 0


def fit_model(settings: Settings, options: argparse.Namespace, out: TextIO) -> int:
    """Print whether a model fits, and why; without a name, each of MODEL_DIR. 1 if one does not."""
    if options.table:
        width = shutil.get_terminal_size(_PIPED).columns
        out.write(as_markdown() if options.format == "markdown" else as_text(width))
        return 0
    machine = own_machine(settings)
    if options.model or len(model_folders(settings)) < 2:
        shape = _shape(settings, options.model or model_name(settings))
        out.writelines(f"{line}\n" for line in (*_page(shape, machine), *loss_lines(settings)))
        return 0 if report(shape, machine).fits else 1
    return _fit_folder(settings, machine, out)


def _fit_folder(settings: Settings, machine: Machine, out: TextIO) -> int:
    """Print whether each model of MODEL_DIR fits, and whether they do together. 1 if one does not."""
    shapes: list[ModelShape] = []
    folders = model_folders(settings)
    for name, folder in folders.items():
        try:
            shape = shape_in(name, folder)
        except ModelError as error:
            out.write(f"{name} cannot be judged. {error}\n\n")
            continue
        shapes.append(shape)
        out.writelines(f"{line}\n" for line in (*_page(shape, machine), ""))
    if len(shapes) > 1:
        out.write(f"{beside(shapes, machine, settings.engine.max_kv_size)}\n")
    out.writelines(f"{line}\n" for line in loss_lines(settings))
    all_fit = len(shapes) == len(folders) and all(report(shape, machine).fits for shape in shapes)
    return 0 if all_fit else 1


def remove_model(
    settings: Settings, options: argparse.Namespace, out: TextIO, answers: TextIO | None = None
) -> int:
    """Remove a model, after a question. 1 if the answer was no."""
    library = _library(settings)
    library.check_removable(options.repo)
    size = sum(entry.size_bytes for entry in library.entries() if entry.repo_id == options.repo)
    if not options.yes:
        out.write(f"Remove {options.repo} ({gib(size)})? [y/N] ")
        out.flush()
        if (answers or sys.stdin).readline().strip().lower() not in ("y", "yes"):
            out.write("Nothing was removed.\n")
            return 1
    out.writelines(f"Removed {path}\n" for path in library.remove(options.repo))
    return 0


type _Command = Callable[[Settings, argparse.Namespace, TextIO], int]
COMMANDS: Mapping[str, _Command] = {
    "models": models,
    "search": search,
    "pull": pull_model,
    "fit": fit_model,
    "rm": remove_model,
}


def _library(settings: Settings) -> Library:
    return Library(model_places(settings, Hub()), own_machine(settings))


def _shape(settings: Settings, name: str) -> ModelShape:
    """Return the figures of a folder, of a model on disk, of a well-known one, or of one on the hub."""
    folder = folder_at(name) or _library(settings).folder(name)
    if folder is not None:
        return shape_in(name if REPOSITORY.fullmatch(name) else Path(folder).name, folder)
    known = next((row for row in WELL_KNOWN if row.repository == name), None)
    if known:
        return known.shape
    if not REPOSITORY.fullmatch(name):
        raise ModelError(f"{name!r} is no folder, none of `models`, and not the name of a repository.")
    try:
        return shape_on_hub(name, Hub())
    except ModelError as error:
        raise ModelError(f"{name!r} is not on this machine, and the hub did not help. {error}") from error


def _page(shape: ModelShape, machine: Machine) -> Iterable[str]:
    fit = report(shape, machine)
    yield f"{shape.name} on {machine.name}: {fit.verdict}."
    yield ""
    yield from (f"  {line}" for line in arithmetic(shape, machine, fit))
    yield ""
    yield from together_lines(shape, machine)


def _row(entry: LibraryEntry) -> tuple[str, ...]:
    seen = entry.report
    speed = seen.decode_tps if seen else None
    fits = "incomplete" if not entry.complete else "no" if not entry.supported else "?"
    if seen and entry.complete and entry.supported:
        fits = "yes" if seen.fits else "no"
    return (
        entry.repo_id,
        entry.place,
        entry.model_type or "?",
        gib(entry.size_bytes),
        str(entry.quant_bits or "-"),
        fits,
        f"{seen.context_tokens:,}" if seen else "-",
        f"{speed:,.0f}" if speed is not None else "-",
    )
