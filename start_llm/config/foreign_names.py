"""Names that other servers have for settings of this one. In `.env` they would be ignored."""

from collections.abc import Mapping, Sequence

from start_llm.config.settings import ENV_SOURCE, SettingSource

_MEANT: Mapping[str, tuple[str, ...]] = {
    "MODEL_PATH": ("MODEL", "MODEL_ID", "MODEL_NAME", "DEFAULT_MODEL", "LLM_MODEL", "LLAMA_ARG_MODEL"),
    "MODEL_DIR": ("MODELS_DIR", "MODELS_PATH", "MODEL_FOLDER", "OLLAMA_MODELS"),
    "MLX_HOST": ("HOST", "BIND", "BIND_ADDRESS", "SERVER_HOST", "OLLAMA_HOST", "LLAMA_ARG_HOST"),
    "MLX_PORT": ("PORT", "SERVER_PORT", "LLAMA_ARG_PORT"),
    "MLX_API_KEY": ("API_KEY", "API_KEYS", "SERVER_API_KEY", "VLLM_API_KEY", "LLAMA_API_KEY"),
    "PROXY_PORT": ("LITELLM_PORT",),
    "PROXY_API_KEY": ("LITELLM_MASTER_KEY", "LITELLM_API_KEY"),
    "MAX_KV_SIZE": (
        *("CONTEXT_LENGTH", "CONTEXT_SIZE", "CONTEXT_WINDOW", "CTX_SIZE", "N_CTX", "NUM_CTX", "MAX_CONTEXT"),
        *("MAX_MODEL_LEN", "OLLAMA_CONTEXT_LENGTH", "LLAMA_ARG_CTX_SIZE"),
    ),
    "BATCH": ("BATCH_SIZE", "MAX_NUM_SEQS", "OLLAMA_NUM_PARALLEL", "LLAMA_ARG_N_PARALLEL"),
    "KV_BITS": ("OLLAMA_KV_CACHE_TYPE", "KV_CACHE_DTYPE", "KV_CACHE_TYPE"),
    "MODEL_IDLE_SECONDS": ("KEEP_ALIVE", "OLLAMA_KEEP_ALIVE", "MODEL_TTL"),
    "PROMPT_CACHE_MAX_BYTES": ("CACHE_SIZE", "PROMPT_CACHE_SIZE"),
    "DEFAULT_MAX_TOKENS": ("MAX_TOKENS", "MAX_COMPLETION_TOKENS", "MAX_OUTPUT_TOKENS"),
    "DEFAULT_TEMPERATURE": ("TEMPERATURE", "TEMP"),
    "DEFAULT_TOP_P": ("TOP_P",),
    "DEFAULT_TOP_K": ("TOP_K",),
    "DEFAULT_MIN_P": ("MIN_P",),
    "ALLOWED_ORIGINS": ("CORS_ORIGINS", "CORS_ALLOW_ORIGIN", "OLLAMA_ORIGINS"),
    "LOG_ROOT": ("LOG_DIR", "LOGS_DIR"),
}
"""Setting to what others call it."""
FOREIGN_NAMES: Mapping[str, str] = {name: meant for meant, names in _MEANT.items() for name in names}


def foreign_lines(sources: Sequence[SettingSource]) -> list[str]:
    """Return a sentence for each foreign name in `.env` whose setting is set nowhere.

    In the environment such names belong to other programs.
    """
    is_set = {name for source in sources for name, text in source.variables.items() if text.strip()}
    in_file = (name for source in sources if source.name == ENV_SOURCE for name in source.variables)
    foreign = ((name, FOREIGN_NAMES.get(name.upper())) for name in in_file)
    return [
        f".env has {name}, which is no setting of start_llm and has no effect. Is {meant} meant?"
        for name, meant in foreign
        if meant and meant not in is_set
    ]
