"""The variables of the server, its models, its engine and its proxy, in groups."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from start_llm.config.setting_types import (
    ALIASES,
    BOOLEAN,
    BYTES,
    HOSTS,
    KEYS,
    MODELS,
    ORIGINS,
    PORT,
    SECONDS,
    SECRET,
    SERVERS,
    TEXT,
    choice,
    integer,
    number,
)
from start_llm.config.variable import variable
from start_llm.core.limits import STALL_S, ServerLimits, TimeLimits
from start_llm.core.sampling import Range
from start_llm.formats.registry import FAMILIES

# A variable is a row: its name, type and default, and then what it does.
# fmt: off


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The models that are served."""

    section: ClassVar[str] = "Model"
    path: str | None = variable("MODEL_PATH", TEXT, None,
        "Model folder, or Hugging Face repository (owner/name) to download. Unset: "
        "lmstudio-community/GLM-4.7-Flash-MLX-4bit on Apple silicon, the demo model elsewhere. A second "
        "--model is one of MORE_MODELS.")
    more: tuple[str, ...] = variable("MORE_MODELS", MODELS, (),
        "Models beside MODEL_PATH, as folders or repositories with commas between. Requests load the one "
        "that they name. --model says the same from its second time on.")
    dir: str | None = variable("MODEL_DIR", TEXT, None,
        "Folder with models (NAME or OWNER/NAME). Requests load the one that they name. MODEL_PATH is the "
        "name of the one to begin with; unset: the first one. --model-dir says the same.")
    max_loaded: int = variable("MAX_LOADED_MODELS", integer(0, 1000), 0,
        "Models that stay loaded beside each other at most; 0 = as many as have room for a prompt of their "
        "whole context window.")
    idle_s: float = variable("MODEL_IDLE_SECONDS", number(Range(0, 10**9)), 0,
        "Time without a request after which a model is unloaded. The next request for it loads it again; 0 = "
        "never.")
    pinned: tuple[str, ...] = variable("MODEL_PINS", MODELS, (),
        "Models that stay loaded once they are, with commas between. --pin says the same.")
    aliases: tuple[str, ...] = variable("MODEL_ALIASES", ALIASES, (),
        "Other names for models, as ALIAS=MODEL with commas between. With claude-haiku-4-5=small, requests "
        "for the first load the second.")
    strict_names: bool = variable("STRICT_MODEL_NAMES", BOOLEAN, False,
        "A request for a name that no model has returns 404 with the names that there are. Off: the model "
        "that was used last answers it, because clients ask for small models of their own.")
    adapter_dir: str | None = variable("ADAPTER_DIR", TEXT, None,
        "Folder below which LoRA adapters are, in mlx_lm's format. Requests mount them (docs/api.md); unset: "
        "none. --adapter-dir says the same.")
    cpu_dequantize: Literal["auto", "off"] = variable("CPU_DEQUANTIZE", choice(("auto", "off")), "auto",
        "On a computer without a GPU, quantised and 16-bit weights are converted to float32 when they are "
        "loaded, if they then take at most half of MEMORY_BUDGET: it computes faster with them. off: they "
        "stay as they are.")
    family: str | None = variable("MODEL_FAMILY", choice(tuple(FAMILIES), "the name of a format"), None,
        "Form of the model's reasoning and tool calls. Unset: found in its template and vocabulary.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The address of the server, its end, and the folder of what outlives it."""

    section: ClassVar[str] = "Server"
    host: str = variable("MLX_HOST", TEXT, "127.0.0.1",
        "Address to listen on; beside 127.0.0.1 also ::1. Anything but loopback lets others on the network "
        "use the model, and needs MLX_API_KEY.")
    port: int = variable("MLX_PORT", PORT, 8080, "Port to listen on; 0 takes a free one.")
    drain_s: float = variable("DRAIN_SECONDS", number(Range(0, 3600)), 10,
        "Time that running requests have to end after SIGTERM or Ctrl-C; then they are cut. What is left of "
        "it is for writing to SSD_CACHE_DIR. A second signal ends at once.")
    ends_when_stuck: bool = variable("END_WHEN_STUCK", BOOLEAN, False,
        "End the process, with status 70, when /health says that it is stuck, so that what runs it starts it "
        "again. start_llm service sets it.")
    state_root: str = variable("STATE_ROOT", TEXT, "state",
        "Folder of what outlives the server, seen from the repository or the folder of a package's user: the "
        "key by which it knows its own reasoning when clients send it back sealed, the folders of clients "
        "that it launches, the addresses of running servers, by which commands find them, the prompt cache "
        "on disk (SSD_CACHE_DIR), and kernels that were compiled for a card.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """Who may use the server."""

    section: ClassVar[str] = "Server"
    keys: tuple[str, ...] = variable("MLX_API_KEY", KEYS, (),
        "Keys with commas between: clients must send one. Different keys share nothing. Unset: none.")
    hosts: tuple[str, ...] = variable("ALLOWED_HOSTS", HOSTS, (),
        "Names by which clients call the server, beside localhost and its address, with commas between. "
        "Others are refused: a web page may have made them lead here.")
    origins: tuple[str, ...] = variable("ALLOWED_ORIGINS", ORIGINS, (),
        "Origins of web pages, editors and apps that may use the server from a browser, with commas between: "
        "http://localhost:3000, app://obsidian.md, vscode-webview://*. All others are refused.")
    requests_at_once: int = variable("KEY_REQUESTS_AT_ONCE", integer(0, 2**31 - 1), 0,
        "Requests of one API key that are answered at once; one more returns 429. 0 = any. Requests without "
        "a key are those of one key.")
    tokens_per_minute: int = variable("KEY_TOKENS_PER_MINUTE", integer(0, 2**31 - 1), 0,
        "Tokens a minute that may be computed for one API key: of prompts without what is cached, and of "
        "replies. Then 429 with the time to wait. 0 = any.")
    isolates_tenants: bool = variable("CACHE_SESSION_PARTITIONING", BOOLEAN, True,
        "Share nothing between requests that came with different API keys.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(TimeLimits):
    """Requests at a time, their memory and time."""

    section: ClassVar[str] = "Server"
    chunk_s: float = variable("DECODE_STALL_SECONDS", number(Range(0.01, 60)), STALL_S,
        "Time for which running replies may stand still while a piece of a prompt is computed. Longer pieces "
        "are computed faster.")
    preempt_after_s: float = variable("REPLY_TURN_SECONDS", SECONDS, 4.0,
        "Time after which a reply gives its place to a request that waits for one, to go on later where it "
        "was. Only as long as there is memory for all of them.")
    deadline_s: float = variable("GENERATION_WATCHDOG_SECONDS", number(Range(0, 10**9)), 600.0,
        "Time for a request, from when its turn comes, without the time in which others have their turn; 0 = "
        "any. Then its reply ends as if it had reached its limit. What was computed stays.")
    stall_s: float = variable("ENGINE_STALL_SECONDS", SECONDS, 60.0,
        "Time without progress after which /health says that the engine is stuck.")
    load_stall_s: float = variable("MODEL_LOAD_STALL_SECONDS", SECONDS, 120.0,
        "Time after which /health says that a model which is being loaded is stuck, beyond what reading its "
        "weights takes at 20 MB/s.")
    batch: int = variable("BATCH", integer(1, 256), 4,
        "Replies that are generated at once; further requests wait.")
    speculation: Literal["auto", "off"] = variable("SPECULATION", choice(("auto", "off")), "auto",
        "A reply that runs alone is drafted: tokens that followed the same ones before, in its prompt, in "
        "itself or in earlier conversations of the same API key, are verified together, in one forward pass. "
        "The reply stays the same. auto: where that is faster, which is measured; off: never.")
    idle_work: Literal["auto", "on", "off"] = variable("IDLE_WORK", choice(("auto", "on", "off")), "auto",
        "While nobody waits, what the next request of a conversation will begin with is read into free "
        "memory, and given up for whatever arrives. auto: unless the machine runs on battery; on: there too; "
        "off: never.")
    max_waiting: int = variable("MAX_QUEUED_REQUESTS", integer(1, 100_000), 256,
        "Requests that may wait for their turn; one more is answered 503 with Retry-After.")
    memory: int | float = variable("MEMORY_BUDGET", BYTES, 1.0,
        "Memory for weights, caches and computing together, as a size or as a share of what the system lets "
        "models use. A prompt that cannot fit is refused; one that does not fit now waits. --memory-budget "
        "says the same.", shown="100%")
    max_kv_size: int = variable("MAX_KV_SIZE", integer(1, 2**31 - 1), 196_608,
        "Most tokens of prompt and reply together. The model's own window applies if it is smaller. A longer "
        "prompt is refused; nothing is ever dropped from its middle.")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings(ServerLimits):
    """Connections, and the time that clients and the server may take."""

    section: ClassVar[str] = "Server"
    max_connections: int = variable("MAX_CONNECTIONS", integer(1, 100_000), 512,
        "Open connections; beyond it the one without a whole request for longest is closed.")
    max_body_bytes: int = variable("MAX_BODY_BYTES", integer(1024, 2**33), 64 * 2**20,
        "Longest request body, in bytes.")
    idle_s: float = variable("HTTP_IDLE_TIMEOUT_SECONDS", SECONDS, 130.0,
        "Silence between two requests of a connection. Proxies keep theirs for 120 s, so longer than that.")
    header_s: float = variable("HTTP_HEADER_TIMEOUT_SECONDS", SECONDS, 10.0,
        "Time for a client to send all headers.")
    body_s: float = variable("HTTP_BODY_TIMEOUT_SECONDS", SECONDS, 60.0,
        "Time for a client to send the whole body.")
    write_s: float = variable("HTTP_WRITE_TIMEOUT_SECONDS", SECONDS, 30.0,
        "Time for which a client may read nothing before its request is given up.")
    keep_alive_s: float = variable("STREAM_KEEP_ALIVE_SECONDS", number(Range(0.01, 10)), 8.0,
        "Silence in a stream after which an empty data event is sent, so that clients keep waiting.")
    load_wait_s: float = variable("MODEL_LOAD_WAIT_SECONDS", SECONDS, 240.0,
        "Time for which a request without `stream` waits for its model to be loaded. Then it is answered 503 "
        "with Retry-After, and the model is loaded all the same. A stream waits as long as it takes.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSettings:
    """Responses that can be gone on from."""

    section: ClassVar[str] = "Server"
    kept_s: float = variable("RESPONSE_STORE_TTL_SECONDS", number(Range(0, 10**9)), 3600,
        "Time for which a response can be gone on from (previous_response_id); 0 = none is kept.")
    max_bytes: int = variable("RESPONSE_STORE_MAX_BYTES", integer(0, 2**40), 32 * 2**20,
        "Memory for them, in bytes of JSON; the least recently used go first. 0 = none is kept.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """The LiteLLM proxy."""

    section: ClassVar[str] = "Proxy"
    is_on: bool = variable("PROXY", BOOLEAN, True, "Run the LiteLLM proxy; off is what --no-proxy says.")
    port: int = variable("PROXY_PORT", integer(1, 65535), 4000, "Port of the proxy.")
    model_id: str | None = variable("PROXY_MODEL_ID", TEXT, None,
        "Name of the first model in LiteLLM's configuration; any other name reaches it too, and /v1/models "
        "is the server's own list. Unset: openai/ and the name of the model.")
    wait_s: float = variable("PROXY_STARTUP_WAIT_SECONDS", SECONDS, 60.0,
        "Time after which a proxy that does not answer yet is reported; LiteLLM needs 5 to 30 s.")
    python: str | None = variable("PROXY_PYTHON", TEXT, None,
        "Interpreter that has LiteLLM's proxy, Pillow and backports.zstd; for PROXY_BACKENDS "
        "prometheus-client too. Unset: the server's own.")
    keys: tuple[str, ...] = variable("PROXY_API_KEY", KEYS, (),
        "Keys with commas between that clients of the proxy must send. Unset: MLX_API_KEY.")
    backend_secret: str | None = variable("BACKEND_SECRET", SECRET, None,
        "With it the proxy signs for the server whose request it passes on. Unset: new at each start, as it "
        "should be for one server. Those of PROXY_BACKENDS need the same one; it also opens those that ask "
        "for a key.")
    backends: tuple[str, ...] = variable("PROXY_BACKENDS", SERVERS, (),
        "Other servers behind this proxy, beside the one that starts it. A conversation stays with its "
        "server; see docs/scale.md.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """What is written about requests."""

    section: ClassVar[str] = "Logging"
    traces: bool = variable("ENABLE_REQUEST_LOGGING", BOOLEAN, True,
        "Write a trace: a line of JSON for each request, without its text, in a file for each session.")
    root: str = variable("LOG_ROOT", TEXT, "logs",
        "Folder of the traces (at most 512 MiB of them are kept), of the logs and of the proxy's locks, "
        "seen from the repository or the folder of a package's user. The server goes on without what cannot "
        "be written there.")
    traces_prompts: bool = variable("LOG_PROMPTS", BOOLEAN, False,
        "Write prompts and replies into the trace too, in clear.")
    shows_images: bool = variable("VLM_CACHE_DEBUG", BOOLEAN, False,
        "Print for each prompt with images its first 64 tokens, and where each image stands, by the start of "
        "its name, and whether the cache had it.")
