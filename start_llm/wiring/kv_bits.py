"""Let pages be quantised as the settings ask, and say what that costs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from start_llm.cache.kv_format import KVFormat, LayerFormat, MixedKVFormat, PageFormat, first_quantized
from start_llm.cache.layers import Layers
from start_llm.config.settings import Settings
from start_llm.core.chat import Json
from start_llm.core.errors import SettingsError
from start_llm.models.architecture import completed
from start_llm.models.kv_config import KV_CONFIG, read_kv_config
from start_llm.models.layer_costs import keeps_latents

_BITS_OF = {"uniform": (4, 8, "config"), "turboquant": (3.5, 4)}
FOUR_BITS = (
    "With uniform 4 bits, 6 to 18 % of the likeliest tokens change on real text behind restored pages "
    "(docs/prompt-cache.md#kv-bits). KV_QUANT_SCHEME=turboquant changes 1 to 3 % at 4 bits."
)


def check_kv_bits(settings: Settings) -> None:
    """Refuse bits that the scheme does not have.

    Raises:
        SettingsError: it does not have them.
    """
    bits, scheme = settings.kv.bits, settings.kv.quant_scheme
    allowed = _BITS_OF[scheme]
    if bits is not None and bits not in allowed:
        other = next((name for name, values in _BITS_OF.items() if bits in values), "")
        raise SettingsError(
            f"KV_BITS={bits}: KV_QUANT_SCHEME={scheme} has {' or '.join(map(str, allowed))}. Set "
            f"KV_QUANT_SCHEME={other}, or other bits."
        )


def loss_lines(settings: Settings) -> list[str]:
    """Return what to say of the loss before a model is loaded."""
    is_coarse = settings.kv.bits == 4 and settings.kv.quant_scheme == "uniform"
    return [FOUR_BITS] if is_coarse and settings.cache.is_on else []


def quantize_pages(
    settings: Settings, folder: Path, config: Mapping[str, Json], layers: Layers, probe: list[Any]
) -> list[str]:
    """Let the layers quantise pages, if the settings ask for it. Returns what the user has to know.

    Args:
        folder: the model's.
        config: the model's.
        probe: caches that hold some tokens.

    Raises:
        SettingsError: nothing would be quantised, or too much would be lost.
        ModelError: kv_config.json is missing or wrong.
    """
    bits = settings.kv.bits
    if bits is None:
        is_alone = settings.kv.quant_scheme != "uniform"
        return ["KV_QUANT_SCHEME=turboquant has no effect without KV_BITS=4 or 3.5."] if is_alone else []
    check_kv_bits(settings)
    if not settings.cache.is_on or layers.unknown:
        raise SettingsError(
            f"KV_BITS={bits} is for the pages of the prompt cache, and there is none. Leave KV_BITS out."
        )
    if keeps_latents(completed(config)):
        raise SettingsError(
            f"KV_BITS={bits}: this model keeps a latent of keys and values (MLA), which is small "
            "already and loses too much when it is quantised (docs/prompt-cache.md). Leave KV_BITS out."
        )
    form = _format(settings, folder, len(probe))
    if not layers.quantize_pages(form, probe):
        raise SettingsError(
            f"KV_BITS={bits}: this model has no layer whose pages can be quantised; its layers "
            "keep a window or a state, or have KV of a width that does not fill bytes. Leave KV_BITS out."
        )
    return loss_lines(settings) if isinstance(form, KVFormat) else _mixed_lines(form, layers)


def _format(settings: Settings, folder: Path, layers: int) -> PageFormat:
    start = first_quantized(settings.kv.quant_start, settings.cache.page_size)
    if isinstance(settings.kv.bits, str):
        entries = read_kv_config(folder, layers)
        formats = [(entry.layer, LayerFormat(entry.bits, entry.group_size)) for entry in entries]
        return MixedKVFormat(formats, start)
    return KVFormat(settings.kv.bits or 0, settings.kv.group_size, start, settings.kv.quant_scheme)


def _mixed_lines(form: MixedKVFormat, layers: Layers) -> list[str]:
    names = [name for name in layers.quantizer.names if name] if layers.quantizer else []
    lines: list[str] = []
    if exact := len(form.layers) - len(names):
        named = f"{len(form.layers)} layers in {KV_CONFIG}"
        lines.append(f"{exact} of the {named} stay exact: they keep a window or a state.")
    return [*lines, FOUR_BITS] if "kv4" in names else lines
