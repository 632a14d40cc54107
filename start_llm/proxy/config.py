"""Build LiteLLM's configuration file and the environment of its process.

The file is JSON, which every YAML parser accepts.
"""

import json
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from start_llm.access.backend_secret import BackendSecret
from start_llm.config.settings import Settings
from start_llm.core.chat import Json

_ROUTER = "start_llm.proxy.litellm_router.chosen_deployment"
IDLE_S, HEADER_S = "START_LLM_PROXY_IDLE_S", "START_LLM_PROXY_HEADER_S"
BODY_S = "START_LLM_PROXY_BODY_S"
"""The variables of the child that have the seconds of `core.limits.ServerLimits`."""
_BACKENDS, _SECRET = "START_LLM_BACKENDS", "START_LLM_BACKEND_SECRET"

# LiteLLM reads these when it is imported. Without them it downloads price lists, news and templates, reads
# any .env above site-packages, serves an admin UI and allows every web page (CORS `*`).
_LOCAL_ONLY: Mapping[str, str] = {
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_LOCAL_BLOG_POSTS": "True",
    "LITELLM_LOCAL_POLICY_TEMPLATES": "True",
    "LITELLM_LOCAL_AUTOROUTER_PRESETS": "True",
    "LITELLM_DONT_SHOW_FEEDBACK_BOX": "True",
    "LITELLM_LOG": "ERROR",
    "DISABLE_ADMIN_UI": "True",
    "NO_DOCS": "True",
    "NO_REDOC": "True",
    "NO_OPENAPI": "True",
}
_FOREIGN_PREFIXES = ("LITELLM_", "REDIS_", "LANGFUSE_", "OTEL_")
_FOREIGN_NAMES = frozenset(
    "DATABASE_URL DIRECT_URL HOST PORT DEBUG DETAILED_DEBUG NUM_WORKERS CONFIG_FILE_PATH "
    "HTTP_PROXY HTTPS_PROXY ALL_PROXY http_proxy https_proxy all_proxy".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """What one proxy is to do.

    Attributes:
        backend: the server's own address, such as `http://127.0.0.1:8080`. `PROXY_BACKENDS` has others.
        first_model: the server's name of it.
        secret: shared with the server.
    """

    settings: Settings
    backend: str
    first_model: str
    secret: BackendSecret

    @property
    def backends(self) -> tuple[str, ...]:
        """The addresses of all servers, the server's own first."""
        return tuple(dict.fromkeys((self.backend, *self.settings.proxy.backends)))

    @property
    def port(self) -> int:
        """The port on loopback."""
        return self.settings.proxy.port

    @property
    def model(self) -> str:
        """LiteLLM's name of the first model; any other name is one of its wildcard."""
        return self.settings.proxy.model_id or f"openai/{self.first_model}"

    @property
    def keys(self) -> tuple[str, ...]:
        """A client must send one of these; if empty, no key is required."""
        return self.settings.proxy.keys or self.settings.access.keys

    @property
    def python(self) -> str:
        """The interpreter that has LiteLLM installed."""
        return self.settings.proxy.python or sys.executable


def configuration(config: ProxyConfig) -> str:
    """Return the text of LiteLLM's configuration file: for its router, which server has which model."""
    return json.dumps(
        {
            "model_list": [
                _entry(backend, name) for backend in config.backends for name in (config.model, "*")
            ],
            "litellm_settings": {"callbacks": [_ROUTER]} if len(config.backends) > 1 else {},
            "router_settings": {"num_retries": 0, "disable_cooldowns": True},
        },
        indent=2,
    )


def api_base(url: str) -> str:
    """Return the address of a server's protocols, as LiteLLM needs it."""
    return f"{url}/v1"


def _entry(backend: str, name: str) -> Json:
    return {
        "model_name": name,
        "litellm_params": {
            "model": f"litellm_proxy/{name}",
            "api_base": api_base(backend),
        },
    }


def environment(config: ProxyConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the child's variables: ours, and those inherited ones that do not change LiteLLM's behaviour."""
    kept = {
        name: value
        for name, value in inherited.items()
        if name not in _FOREIGN_NAMES and not name.startswith(_FOREIGN_PREFIXES) and name != "LD_PRELOAD"
    }
    access, http = config.settings.access, config.settings.http
    return {
        **kept,
        **_LOCAL_ONLY,
        "LITELLM_CORS_ORIGINS": f"http://127.0.0.1:{config.port}",
        # LiteLLM does not start without a master key. Nobody uses this one: no open route asks for it.
        "LITELLM_MASTER_KEY": f"sk-{secrets.token_urlsafe(32)}",
        "START_LLM_PROXY_KEYS": ",".join(config.keys),
        "START_LLM_PROXY_HOSTS": ",".join(access.hosts),
        "START_LLM_PROXY_ORIGINS": ",".join(access.origins),
        "START_LLM_PROXY_MOST_BYTES": str(http.max_body_bytes),
        IDLE_S: str(http.idle_s),
        HEADER_S: str(http.header_s),
        BODY_S: str(http.body_s),
        _BACKENDS: ",".join(config.backends),
        _SECRET: config.secret.text,
        "NO_PROXY": "127.0.0.1,localhost,::1",
        "PYTHONUNBUFFERED": "1",
    }
