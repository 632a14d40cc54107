"""Loads LoRA adapters beside a model, and exchanges its layers between two forward passes.

An adapter wraps some layers of the network in modules of mlx_lm, which add its change to what the layer
computes. Its wrappers and the layers of the base model are both kept, so another adapter is mounted by
putting other modules into the network: nothing is loaded or computed for that.
"""

import copy
import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from start_llm.core.adapters import BASE_MODEL, AdapterStack, MountedAdapter, adapter_names
from start_llm.core.chat import Json
from start_llm.core.errors import InvalidRequest, NotFound
from start_llm.models import mlx_lm_utils
from start_llm.models.identity import weights_digest

_CONFIG, _WEIGHTS = "adapter_config.json", "adapters.safetensors"
_INNER = ("linear", "embedding")
"""Attributes in which mlx_lm's wrappers have the layer that they change."""
_STACKABLE = frozenset({"LoRALinear", "LoRASwitchLinear", "LoRAEmbedding"})
"""Wrappers that only add to what their layer computes, whatever that is."""


@dataclass(frozen=True, slots=True)
class _Adapter:
    """A mounted adapter.

    Attributes:
        layers: its wrappers, by the paths of the layers that they stand for.
    """

    description: MountedAdapter
    digest: bytes
    layers: Mapping[str, Any]


class Adapters:
    """The adapters of a model.

    `load` and `mount` run on the engine thread, the other methods on any. A request keeps the layers of its
    stack, so it is finished as it began, even if an adapter is removed meanwhile.
    """

    def __init__(self, network: Any) -> None:
        self._network = network
        self._lock = threading.Lock()
        self._adapters: dict[str, _Adapter] = {}
        self._base: dict[str, Any] = {}  # of every layer that an adapter ever stood for
        self._mounted = BASE_MODEL

    @property
    def nbytes(self) -> int:
        """Memory of all adapters."""
        with self._lock:
            return sum(adapter.description.nbytes for adapter in self._adapters.values())

    def listed(self) -> list[MountedAdapter]:
        with self._lock:
            return [adapter.description for adapter in self._adapters.values()]

    def stack(self, spec: str) -> AdapterStack:
        """See `core.adapters.AdapterChoice`."""
        with self._lock:
            chosen = [self._named(name) for name in adapter_names(spec)]
        if len({adapter.description.id for adapter in chosen}) < len(chosen):
            raise InvalidRequest("'adapter' names an adapter twice.", param="adapter")
        if not chosen:
            return BASE_MODEL
        digest = hashlib.blake2b(b"".join(adapter.digest for adapter in chosen), digest_size=16).digest()
        return AdapterStack(digest=digest, layers=_stacked(chosen))

    def _named(self, name: str) -> _Adapter:
        if adapter := self._adapters.get(name):
            return adapter
        there = f"there is {', '.join(map(repr, self._adapters))}" if self._adapters else "none is mounted"
        raise InvalidRequest(f"'adapter' names {name!r}, and {there}.", param="adapter")

    def load(self, name: str, folder: Path) -> MountedAdapter:
        """Load an adapter, try it, and let requests choose it. One of the same name is replaced.

        Raises:
            InvalidRequest: it is none for this model. Nothing has changed then.
        """
        config = _read_config(folder)
        self.mount(BASE_MODEL)
        before = self._modules
        try:
            layers = self._wrapped(folder, before)
            logits = self._network(mx.array([[0]]))
            is_sound = bool(mx.all(mx.isfinite(logits)).item())
        except Exception as error:
            # mlx_lm raises whatever fits what is wrong with the files.
            raise _unusable(folder, f"{type(error).__name__}: {error}") from error
        finally:
            self._put_in(before)
        if not is_sound:
            raise _unusable(folder, "with it, the model computes values that are no numbers")
        adapter = _Adapter(_description(name, folder, config, layers), _digest(layers), layers)
        with self._lock:
            self._adapters[name] = adapter
        return adapter.description

    def _wrapped(self, folder: Path, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return the wrappers of an adapter, which are in the network then."""
        mlx_lm_utils.load_adapters(self._network, str(folder))
        after = self._modules
        layers = {path: after[path] for path in _changed(before, after)}
        if not layers:
            raise ValueError("it changes no layer of this model")
        for path, wrapper in layers.items():
            wrapper.eval()  # without dropout, which is for training
            mx.eval(wrapper.parameters())
            self._base[path] = before[path]
        return layers

    def _put_in(self, before: Mapping[str, Any]) -> None:
        """Put the layers back that were in the network before."""
        self._exchange({path: before[path] for path in _changed(before, self._modules)})

    @property
    def _modules(self) -> dict[str, Any]:
        """The modules of the network, by their paths."""
        return dict(self._network.named_modules())

    def remove(self, name: str) -> None:
        """Take an adapter from the choice of requests.

        Raises:
            NotFound: there is none of this name.
        """
        with self._lock:
            if name not in self._adapters:
                raise NotFound(f"No adapter {name!r} is mounted.", param="id")
            del self._adapters[name]

    def mount(self, stack: AdapterStack) -> None:
        """Let the network compute under these adapters from now on."""
        if stack.digest == self._mounted.digest:
            return
        base = {path: self._base[path] for path in self._mounted.layers}
        self._exchange({**base, **stack.layers})
        self._mounted = stack

    def _exchange(self, layers: Mapping[str, Any]) -> None:
        if layers:
            self._network.update_modules(tree_unflatten(list(layers.items())))


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the paths at which another module stands. What was inside of one has no path any more."""
    return [path for path, module in before.items() if path in after and after[path] is not module]


def _stacked(adapters: Sequence[_Adapter]) -> Mapping[str, Any]:
    """Return the layers of several adapters: each wraps those of the adapters before it.

    Raises:
        InvalidRequest: one of several does more than to add to a layer.
    """
    layers = dict(adapters[0].layers)
    for adapter in adapters[1:]:
        for path, wrapper in adapter.layers.items():
            layers[path] = _around(wrapper, layers[path]) if path in layers else wrapper
    return layers


def _around(wrapper: Any, inner: Any) -> Any:
    """Return a copy of a wrapper that stands around another wrapper."""
    kinds = {type(layer).__name__ for layer in (wrapper, inner)}
    if not kinds <= _STACKABLE:
        raise InvalidRequest(
            f"'adapter' stacks adapters that cannot be: their layers are {', '.join(sorted(kinds))}.",
            param="adapter",
        )
    outer = copy.copy(wrapper)
    setattr(outer, next(name for name in _INNER if name in wrapper), inner)
    return outer


def _read_config(folder: Path) -> Mapping[str, Json]:
    """Return the config of an adapter in mlx_lm's format.

    Raises:
        InvalidRequest: it has none, or one of another format.
    """
    try:
        config = cast("Json", json.loads((folder / _CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise _unusable(folder, f"{_CONFIG} cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(config, dict):
        raise _unusable(folder, f"{_CONFIG} is no JSON object")
    if "peft_type" in config or "base_model_name_or_path" in config:
        raise _unusable(folder, "it has the format of PEFT; convert it to that of mlx_lm first")
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise _unusable(
            folder, f"its fine_tune_type is {kind!r}, which replaces weights; load the fused model instead"
        )
    if not (folder / _WEIGHTS).is_file():
        raise _unusable(folder, f"it has no {_WEIGHTS}")
    return config


def _description(
    name: str, folder: Path, config: Mapping[str, Json], layers: Mapping[str, Any]
) -> MountedAdapter:
    parameters = cast("Mapping[str, Any]", config["lora_parameters"])
    return MountedAdapter(
        id=name,
        path=str(folder),
        rank=int(parameters["rank"]),
        scale=float(parameters["scale"]),
        nbytes=sum(_own_bytes(wrapper) for wrapper in layers.values()),
        layers=len(layers),
    )


def _own_bytes(wrapper: Any) -> int:
    return sum(values.nbytes for _, values in _own_weights(wrapper))


def _own_weights(wrapper: Any) -> list[tuple[str, mx.array]]:
    """Return the parameters of a wrapper without those of the layer in it."""
    named = cast("list[tuple[str, mx.array]]", tree_flatten(wrapper.parameters()))
    return [(name, values) for name, values in named if name.partition(".")[0] not in _INNER]


def _digest(layers: Mapping[str, Any]) -> bytes:
    """Return 16 bytes for what is in memory: the files may have changed since they were read."""
    weights = [
        (f"{path}.{name}", values)
        for path, wrapper in layers.items()
        for name, values in _own_weights(wrapper)
    ]
    rules = sorted((path, type(wrapper).__name__, wrapper.scale) for path, wrapper in layers.items())
    content = weights_digest(weights) + json.dumps(rules).encode()
    return hashlib.blake2b(content, digest_size=16).digest()


def _unusable(folder: Path, reason: str) -> InvalidRequest:
    return InvalidRequest(f"The adapter in {folder} cannot be used: {reason}.", param="path")
