"""Renders the pages about models: `/`, `/health`, `/stats`, `/v1/models`, and load and unload."""

from datetime import UTC, datetime

from start_llm.core.chat import Json
from start_llm.core.errors import NotFound
from start_llm.server.page_request import Page, PageRequest, members
from start_llm.server.served_models import ListedModel, ServedModels


def greeting(models: ServedModels) -> Page:
    return 200, {"server": "start_llm", "model": _loading(models) or models.status.card.id}


def health(models: ServedModels) -> Page:
    """Return the health of the model in use, or that another one is loaded, which is well for a while."""
    loading = _loading(models)
    if reason := models.stuck_reason():
        return 503, {"status": "stuck", "reason": reason, "model": loading or models.status.card.id}
    if loading:
        return 200, {"status": "loading", "model": loading, "loading": loading}
    return models.status.health()


def _loading(models: ServedModels) -> str | None:
    return next((model.id for model in models.listed() if model.state == "loading"), None)


def stats(models: ServedModels) -> Page:
    status, body = models.status.stats(models.started_at)
    model = models.peek(None)
    mounted = model.adapters.listed() if model else ()
    adapters: list[Json] = [members(adapter, "id bytes=nbytes") for adapter in mounted]
    listed: list[Json] = [members(entry, "id state in_flight") for entry in models.listed()]
    in_all: dict[str, Json] = {"bytes": sum(adapter.nbytes for adapter in mounted), "mounted": adapters}
    return status, {**body, "adapters": in_all, "models": listed}


def model_list(models: ServedModels, request: PageRequest) -> Page:
    if _is_anthropics(request):
        return _anthropic_list(models)
    listed: list[Json] = [_entry(model, models.started_at) for model in models.listed()]
    return 200, {"object": "list", "data": listed}


def _anthropic_list(models: ServedModels) -> Page:
    """Return the models in the form of Anthropic's protocol, all on one page."""
    listed: list[Json] = [_anthropic_entry(model, models.started_at) for model in models.listed()]
    ids: list[Json] = [model.id for model in models.listed()]
    ends: dict[str, Json] = {"first_id": ids[0], "last_id": ids[-1]} if ids else {}
    return 200, {"data": listed, "has_more": False, **ends}


def one_model(models: ServedModels, request: PageRequest) -> Page:
    entry = _anthropic_entry if _is_anthropics(request) else _entry
    return 200, entry(_listed_model(models, request.name), models.started_at)


def _is_anthropics(request: PageRequest) -> bool:
    """Return whether the client speaks Anthropic's protocol, which has a form of its own for models."""
    return "anthropic-version" in request.headers


def _listed_model(models: ServedModels, name: str) -> ListedModel:
    """Return a model by its id or an alias, so a client can find out which ones there are."""
    model = next((model for model in models.listed() if name in (model.id, *model.aliases)), None)
    if model is None:
        raise NotFound(
            f"There is no model {name!r}; there is {', '.join(repr(model.id) for model in models.listed())}.",
            param="model",
        )
    return model


def load_model(models: ServedModels, request: PageRequest) -> Page:
    models.load(request.name)
    return _changed(models, request)


def unload_model(models: ServedModels, request: PageRequest) -> Page:
    models.unload(request.name)
    return _changed(models, request)


def _changed(models: ServedModels, request: PageRequest) -> Page:
    return 200, _entry(_listed_model(models, request.name), models.started_at)


def _anthropic_entry(model: ListedModel, started_at: int) -> dict[str, Json]:
    created = datetime.fromtimestamp(started_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": model.id, "display_name": model.id, "created_at": created}


def _entry(model: ListedModel, started_at: int) -> dict[str, Json]:
    body: dict[str, Json] = {
        "id": model.id,
        "object": "model",
        "created": started_at,
        "owned_by": "start_llm",
        "state": model.state,
        **({"aliases": list(model.aliases)} if model.aliases else {}),
    }
    if card := model.card:
        body |= members(
            card,
            # Its own name, LiteLLM's and vLLM's.
            "context_window max_input_tokens=context_window max_model_len=context_window "
            "max_output_tokens=context_window vision=sees reasoning=reasons",
        )
    return body
