"""The table of settings: one row per variable. Settings are read once, at start, and never change.

A value comes from a command-line flag, else from the environment, else from `.env`. An empty value counts as
unset. `.env.example` and the table in `docs/settings.md` are made from the rows (see `config.documents`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, NamedTuple

from start_llm.config.setting_types import (
    ALIASES,
    BOOLEAN,
    BYTES,
    CACHE_BYTES,
    DISK_BYTES,
    FOLDER_OR_OFF,
    HOSTS,
    KEYS,
    KV_BITS,
    MODELS,
    ORIGINS,
    PORT,
    SECONDS,
    SECRET,
    SIZE,
    TEXT,
    SettingKind,
    always,
    choice,
    integer,
    number,
    number_choice,
)
from start_llm.core.errors import SettingsError
from start_llm.core.sampling import RANGES, Range
from start_llm.formats.registry import FAMILIES


class SettingSpec(NamedTuple):
    """The description of one variable, for documents and error messages.

    Attributes:
        default: the default as it would be written in `.env`; empty if there is none.
        help: what it does; of a variable without effect, why it has nothing to do.
        section: the heading under which documents list it.
    """

    name: str
    kind: SettingKind
    default: str
    help: str
    section: str


def _variable(
    name: str,
    kind: SettingKind,
    default: Any,
    help: str,  # noqa: A002 - as argparse calls it
    section: str,
    shown: str | None = None,
) -> Any:
    text = shown if shown is not None else "" if default is None else str(default)
    return field(default=default, metadata={"row": SettingSpec(name, kind, text, help, section)})


_MODEL = "Model"
_SERVER = "Server"
_GENERATION = "Generation"
_KV = "KV cache"
_PROMPT_CACHE = "Prompt cache"
_IMAGES = "Images"
_PROXY = "Proxy"
_LOGS = "Logging"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings. None means unset; each row's help says what then happens."""

    model_path: str | None = _variable(
        "MODEL_PATH", TEXT, None,
        "Model folder, or Hugging Face repository (owner/name) to download. Unset: "
        "lmstudio-community/GLM-4.7-Flash-MLX-4bit on Apple silicon, the demo model elsewhere. A second "
        "--model is one of MORE_MODELS.", _MODEL,
    )  # fmt: skip
    more_models: tuple[str, ...] = _variable(
        "MORE_MODELS", MODELS, (),
        "Models beside MODEL_PATH, as folders or repositories with commas between. Requests load the one "
        "that they name. --model says the same from its second time on.", _MODEL, shown="",
    )  # fmt: skip
    model_dir: str | None = _variable(
        "MODEL_DIR", TEXT, None,
        "Folder with models (NAME or OWNER/NAME). Requests load the one that they name. MODEL_PATH is the "
        "name of the one to begin with; unset: the first one. --model-dir says the same.", _MODEL,
    )  # fmt: skip
    max_loaded: int = _variable(
        "MAX_LOADED_MODELS", integer(0, 1000), 0,
        "Models that stay loaded beside each other at most; 0 = as many as have room for a prompt of their "
        "whole context window.", _MODEL,
    )  # fmt: skip
    model_idle_s: float = _variable(
        "MODEL_IDLE_SECONDS", number(Range(0, 10**9)), 0,
        "Time without a request after which a model is unloaded. The next request for it loads it again; 0 = "
        "never.", _MODEL,
    )  # fmt: skip
    load_wait_s: float = _variable(
        "MODEL_LOAD_WAIT_SECONDS", SECONDS, 240.0,
        "Time for which a request without `stream` waits for its model to be loaded. Then it is answered 503 "
        "with Retry-After, and the model is loaded all the same. A stream waits as long as it takes.", _MODEL,
    )  # fmt: skip
    pinned: tuple[str, ...] = _variable(
        "MODEL_PINS", MODELS, (),
        "Models that stay loaded once they are, with commas between. --pin says the same.", _MODEL, shown="",
    )  # fmt: skip
    aliases: tuple[str, ...] = _variable(
        "MODEL_ALIASES", ALIASES, (),
        "Other names for models, as ALIAS=MODEL with commas between. With claude-haiku-4-5=small, requests "
        "for the first load the second.", _MODEL, shown="",
    )  # fmt: skip
    strict_names: bool = _variable(
        "STRICT_MODEL_NAMES", BOOLEAN, False,
        "A request for a name that no model has returns 404 with the names that there are. Off: the model "
        "that was used last answers it, because clients ask for small models of their own.", _MODEL,
        shown="false",
    )  # fmt: skip
    adapter_dir: str | None = _variable(
        "ADAPTER_DIR", TEXT, None,
        "Folder below which LoRA adapters are, in mlx_lm's format. Requests mount them (docs/api.md); unset: "
        "none. --adapter-dir says the same.", _MODEL,
    )  # fmt: skip
    cpu_dequantize: Literal["auto", "off"] = _variable(
        "CPU_DEQUANTIZE", choice(("auto", "off")), "auto",
        "On a computer without a GPU, quantised and 16-bit weights are converted to float32 when they are "
        "loaded, if they then take at most half of MEMORY_BUDGET: it computes faster with them. "
        "off: they stay as they are.", _MODEL,
    )  # fmt: skip
    family: str | None = _variable(
        "MODEL_FAMILY", choice(tuple(FAMILIES), "the name of a format"), None,
        "Form of the model's reasoning and tool calls. Unset: found in its template and vocabulary.", _MODEL,
    )  # fmt: skip
    mlx_host: str = _variable(
        "MLX_HOST", TEXT, "127.0.0.1",
        "Address to listen on; beside 127.0.0.1 also ::1. Anything but loopback lets others on the network "
        "use the model, and needs MLX_API_KEY.", _SERVER,
    )  # fmt: skip
    mlx_port: int = _variable("MLX_PORT", PORT, 8080, "Port to listen on; 0 takes a free one.", _SERVER)
    keys: tuple[str, ...] = _variable(
        "MLX_API_KEY", KEYS, (),
        "Keys with commas between: clients must send one. Different keys share nothing. Unset: none.",
        _SERVER, shown="",
    )  # fmt: skip
    hosts: tuple[str, ...] = _variable(
        "ALLOWED_HOSTS", HOSTS, (),
        "Names by which clients call the server, beside localhost and its address, with commas between. "
        "Others are refused: a web page may have made them lead here.", _SERVER, shown="",
    )  # fmt: skip
    origins: tuple[str, ...] = _variable(
        "ALLOWED_ORIGINS", ORIGINS, (),
        "Origins of web pages, editors and apps that may use the server from a browser, with commas between: "
        "http://localhost:3000, app://obsidian.md, vscode-webview://*. All others are refused.",
        _SERVER, shown="",
    )  # fmt: skip
    drain_s: float = _variable(
        "DRAIN_SECONDS", number(Range(0, 3600)), 10,
        "Time that running requests have to end after SIGTERM or Ctrl-C; then they are cut. What is left of "
        "it is for writing to SSD_CACHE_DIR. A second signal ends at once.", _SERVER,
    )  # fmt: skip
    batch: int = _variable(
        "BATCH", integer(1, 256), 4, "Replies that are generated at once; further requests wait.", _SERVER
    )
    max_waiting: int = _variable(
        "MAX_QUEUED_REQUESTS", integer(1, 100_000), 256,
        "Requests that may wait for their turn; one more is answered 503 with Retry-After.", _SERVER,
    )  # fmt: skip
    memory: int | float = _variable(
        "MEMORY_BUDGET", BYTES, 1.0,
        "Memory for weights, caches and computing together, as a size or as a share of what the system lets "
        "models use. A prompt that cannot fit is refused; one that does not fit now waits. --memory-budget "
        "says the same.", _SERVER, shown="100%",
    )  # fmt: skip
    preempt_after_s: float = _variable(
        "REPLY_TURN_SECONDS", SECONDS, 4.0,
        "Time after which a reply gives its place to a request that waits for one, to go on later where it "
        "was. Only as long as there is memory for all of them.", _SERVER,
    )  # fmt: skip
    chunk_s: float = _variable(
        "DECODE_STALL_SECONDS", number(Range(0.01, 60)), 0.23,
        "Time for which running replies may stand still while a piece of a prompt is computed. Longer pieces "
        "are computed faster.", _SERVER,
    )  # fmt: skip
    stall_s: float = _variable(
        "ENGINE_STALL_SECONDS", SECONDS, 60.0,
        "Time without progress after which /health says that the engine is stuck.", _SERVER,
    )  # fmt: skip
    load_stall_s: float = _variable(
        "MODEL_LOAD_STALL_SECONDS", SECONDS, 120.0,
        "Time after which /health says that a model which is being loaded is stuck, beyond what reading its "
        "weights takes at 20 MB/s.", _SERVER,
    )  # fmt: skip
    ends_when_stuck: bool = _variable(
        "END_WHEN_STUCK", BOOLEAN, False,
        "End the process, with status 70, when /health says that it is stuck, so that what runs it starts it "
        "again. start_llm service sets it.", _SERVER, shown="false",
    )  # fmt: skip
    max_body_bytes: int = _variable(
        "MAX_BODY_BYTES", integer(1024, 2**33), 64 * 2**20, "Longest request body, in bytes.", _SERVER
    )
    max_connections: int = _variable(
        "MAX_CONNECTIONS", integer(1, 100_000), 512,
        "Open connections; beyond it the one without a whole request for longest is closed.", _SERVER,
    )  # fmt: skip
    idle_s: float = _variable(
        "HTTP_IDLE_TIMEOUT_SECONDS", SECONDS, 130.0,
        "Silence between two requests of a connection. Proxies keep theirs for 120 s, so longer than that.",
        _SERVER,
    )  # fmt: skip
    header_s: float = _variable(
        "HTTP_HEADER_TIMEOUT_SECONDS", SECONDS, 10.0, "Time for a client to send all headers.", _SERVER
    )
    body_s: float = _variable(
        "HTTP_BODY_TIMEOUT_SECONDS", SECONDS, 60.0, "Time for a client to send the whole body.", _SERVER
    )
    write_s: float = _variable(
        "HTTP_WRITE_TIMEOUT_SECONDS", SECONDS, 30.0,
        "Time for which a client may read nothing before its request is given up.", _SERVER,
    )  # fmt: skip
    keep_alive_s: float = _variable(
        "STREAM_KEEP_ALIVE_SECONDS", number(Range(0.01, 10)), 8.0,
        "Silence in a stream after which an empty data event is sent, so that clients keep waiting.", _SERVER,
    )  # fmt: skip
    state_root: str = _variable(
        "STATE_ROOT", TEXT, "state",
        "Folder of what outlives the server, seen from the repository or the folder of a package's user: the "
        "key by which it knows its own reasoning when clients send it back sealed, the folders of clients "
        "that it launches, and the addresses of running servers, by which commands find them.", _SERVER,
    )  # fmt: skip
    response_kept_s: float = _variable(
        "RESPONSE_STORE_TTL_SECONDS", number(Range(0, 10**9)), 3600,
        "Time for which a response can be gone on from (previous_response_id); 0 = none is kept.", _SERVER,
    )  # fmt: skip
    response_bytes: int = _variable(
        "RESPONSE_STORE_MAX_BYTES", integer(0, 2**40), 32 * 2**20,
        "Memory for them, in bytes of JSON; the least recently used go first. 0 = none is kept.", _SERVER,
    )  # fmt: skip
    proxy: bool = _variable(
        "PROXY", BOOLEAN, True, "Run the LiteLLM proxy; off is what --no-proxy says.", _PROXY, shown="true"
    )
    proxy_port: int = _variable("PROXY_PORT", integer(1, 65535), 4000, "Port of the proxy.", _PROXY)
    proxy_model_id: str | None = _variable(
        "PROXY_MODEL_ID", TEXT, None,
        "Model name that the proxy lists; any other name reaches the same model. Unset: openai/ and the name "
        "of the model.", _PROXY,
    )  # fmt: skip
    proxy_wait_s: float = _variable(
        "PROXY_STARTUP_WAIT_SECONDS", SECONDS, 60.0,
        "Time after which a proxy that does not answer yet is reported. The first server slept 2 s blindly; "
        "LiteLLM needs 5 to 30 s.", _PROXY,
    )  # fmt: skip
    proxy_python: str | None = _variable(
        "PROXY_PYTHON", TEXT, None, "Interpreter that has LiteLLM. Unset: the server's own.", _PROXY
    )
    proxy_keys: tuple[str, ...] = _variable(
        "PROXY_API_KEY", KEYS, (), "The same for clients of the proxy. Unset: MLX_API_KEY.", _PROXY, shown="",
    )  # fmt: skip
    backend_secret: str | None = _variable(
        "BACKEND_SECRET", SECRET, None,
        "With it the proxy signs for the server whose request it passes on. Unset: new at each start, as it "
        "should be.", _PROXY,
    )  # fmt: skip
    max_kv_size: int = _variable(
        "MAX_KV_SIZE", integer(1, 2**31 - 1), 196_608,
        "Most tokens of prompt and reply together. The model's own window applies if it is smaller. A longer "
        "prompt is refused; nothing is ever dropped from its middle.", _KV,
    )  # fmt: skip
    kv_bits: float | Literal["config"] | None = _variable(
        "KV_BITS", KV_BITS, None,
        "Bits per element of KV at rest: pages in memory and on disk are quantised when they are cut, and "
        "dequantised when they are restored. Running sequences and the first page are never quantised. A hit "
        "may then change an answer (docs/prompt-cache.md). 3.5 is for KV_QUANT_SCHEME=turboquant, 8 for "
        "uniform; config takes the bits of each layer from kv_config.json in the model's folder. OFF: pages "
        "are exact. --kv-quant says the same.", _KV, shown="OFF",
    )  # fmt: skip
    kv_group_size: int = _variable(
        "KV_GROUP_SIZE", number_choice((32, 64, 128)), 64,
        "Elements that share a scale in uniformly quantised KV, as far as it divides the width of a head.",
        _KV,
    )  # fmt: skip
    kv_quant_start: int = _variable(
        "QUANTIZED_KV_START", integer(0, 2**31 - 1), 5000,
        "Position in the prompt from which pages are quantised; what is before it stays exact, and the first "
        "page in any case.", _KV,
    )  # fmt: skip
    kv_quant_scheme: Literal["uniform", "turboquant"] = _variable(
        "KV_QUANT_SCHEME", choice(("uniform", "turboquant")), "uniform",
        "How KV is quantised: uniform has even steps, with a scale for each group; turboquant rotates each "
        "head's keys and values first, and loses far less at 4 bits.", _KV,
    )  # fmt: skip
    prompt_cache: bool = _variable(
        "PROMPT_CACHE", BOOLEAN, True,
        "Keep what was computed for later prompts; off is what --no-cache says.", _PROMPT_CACHE, shown="true",
    )  # fmt: skip
    cache_bytes: int | float = _variable(
        "PROMPT_CACHE_MAX_BYTES", CACHE_BYTES, 0.5,
        "Memory for everything computed, what running requests hold included: those are never cut short, the "
        "rest gives way to them. 0 = no cap of its own: all that MEMORY_BUDGET leaves. --hot-cache-max-size "
        "says the same.",
        _PROMPT_CACHE, shown="50%",
    )  # fmt: skip
    block_size: int = _variable(
        "PROMPT_CACHE_BLOCK_SIZE", integer(1, 4096), 256,
        "Tokens of a block. Blocks are stored in pages of at least 256 tokens, as smaller arrays are slower "
        "to cut; prompts are matched to the token whatever it is.", _PROMPT_CACHE,
    )  # fmt: skip
    initial_blocks: int = _variable(
        "INITIAL_CACHE_BLOCKS", integer(1, 65536), 1,
        "Pages that the caches of a new conversation have room for, and by which they grow. More saves "
        "copies while a prompt is computed, and costs memory. --initial-cache-blocks says the same.",
        _PROMPT_CACHE,
    )  # fmt: skip
    max_conversations: int | None = _variable(
        "PROMPT_CACHE_MAX_ENTRIES_GLOBAL", integer(1, 1_000_000), None,
        "Conversations kept; of more, those go that were not used for the longest time. Unset: as many as "
        "there is memory for, and 24 once it is short.", _PROMPT_CACHE,
    )  # fmt: skip
    cache_ttl_s: float | None = _variable(
        "PROMPT_CACHE_TTL_SECONDS", number(Range(0, 10**9)), None,
        "Age at which an unused conversation goes, with the next request; 0 = never. Unset: 1800, but only "
        "once memory is short, so that a lunch break does not empty the cache.", _PROMPT_CACHE,
    )  # fmt: skip
    ssd_folder: str | None = _variable(
        "SSD_CACHE_DIR", FOLDER_OR_OFF, None,
        "Folder in which what was computed outlives the server, with the texts and reasoning of "
        "conversations, in clear, for this user alone to read. Unset: prompt-cache in STATE_ROOT; off: none. "
        "--ssd-cache-dir and --paged-ssd-cache-dir say the same.", _PROMPT_CACHE,
    )  # fmt: skip
    ssd_max_size: int | float | None = _variable(
        "SSD_CACHE_MAX_SIZE", DISK_BYTES, None,
        "Size of that folder, whatever models it holds; it never takes more than 80% of what is free or its "
        "own. Unset: 100GB of a folder that SSD_CACHE_DIR names, else 20GB and at most 10% of what is free "
        "or its own. --ssd-cache-max-size and --paged-ssd-cache-max-size say the same.", _PROMPT_CACHE,
    )  # fmt: skip
    ssd_write_after_s: float = _variable(
        "SSD_CACHE_WRITE_AFTER_SECONDS", SECONDS, 30.0,
        "Time without use after which what was computed is written to it. What was used twice is written "
        "sooner, and the rest when the server stops.", _PROMPT_CACHE,
    )  # fmt: skip
    ssd_max_write_per_day: int = _variable(
        "SSD_CACHE_MAX_WRITE_PER_DAY", SIZE, 200 * 10**9,
        "Bytes that may be written to it in a day (UTC), to spare the disk; 0 = any.", _PROMPT_CACHE,
        shown="200GB",
    )  # fmt: skip
    transcript_idle_s: float = _variable(
        "PROMPT_CACHE_SESSION_MAX_IDLE_SECONDS", number(Range(0, 10**9)), 0,
        "Age in seconds at which what is known of an unused conversation goes (the session turn store); 0 = "
        "never, only when its memory is full, least recently used first.", _PROMPT_CACHE,
    )  # fmt: skip
    canonicalizes: bool = _variable(
        "CACHE_CANONICALIZE_TOOL_CONTEXT", BOOLEAN, True,
        "Find conversations again although clients change metadata in them: the table of rules in "
        "prompt/drift.", _PROMPT_CACHE, shown="true",
    )  # fmt: skip
    drift: Literal["note", "exact"] = _variable(
        "CACHE_DRIFT_POLICY", choice(("note", "exact")), "note",
        "A date, a clock or a status in a prompt that was computed has changed. note: keep what was "
        "computed, and tell the model in a short note what is so now. exact: compute anew from there on; "
        "implies PRESERVE_THINKING=template.", _PROMPT_CACHE,
    )  # fmt: skip
    isolates_tenants: bool = _variable(
        "CACHE_SESSION_PARTITIONING", BOOLEAN, True,
        "Share nothing between requests that came with different API keys.", _PROMPT_CACHE, shown="true",
    )  # fmt: skip
    checks_keys: bool = _variable(
        "CACHE_NORM_SAFETY_CHECK", BOOLEAN, False,
        "Compare a conversation as it stands if what would be looked through, because clients change it, is "
        "more than a tenth of its text.", _PROMPT_CACHE, shown="false",
    )  # fmt: skip
    shortens_writes: bool = _variable(
        "NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT", BOOLEAN, False,
        "Show the content of past `write` calls as a digest. Dangerous: the model no longer sees what it "
        "wrote, and may write it again from memory.", _PROMPT_CACHE, shown="false",
    )  # fmt: skip
    identifies_images: bool = _variable(
        "CACHE_VLM_IMAGE_IDENTITY", always("what was computed of an image belongs to its exact pixels"), True,
        "What was computed of an image is reused for the same image alone.", _PROMPT_CACHE, shown="true",
    )  # fmt: skip
    image_tokens: int = _variable(
        "IMAGE_MAX_TOKENS", integer(64, 2**20), 4096,
        "Most tokens of an image. Larger images are made smaller until they fit.", _IMAGES,
    )  # fmt: skip
    image_bytes: int = _variable(
        "IMAGE_MAX_BYTES", integer(1, 2**33), 32 * 2**20, "Largest file of an image, in bytes.", _IMAGES
    )
    image_pixels: int = _variable(
        "IMAGE_MAX_PIXELS", integer(1, 2**31 - 1), 50_000_000,
        "Most pixels of an image. It is decoded in memory, with three or four bytes for each.", _IMAGES,
    )  # fmt: skip
    image_count: int = _variable(
        "IMAGE_MAX_COUNT", integer(1, 100_000), 100,
        "Most images of a request, those of earlier messages included.", _IMAGES,
    )  # fmt: skip
    fetches_images: bool = _variable(
        "IMAGE_URLS", BOOLEAN, False,
        "Fetch images at http:// and https:// addresses of the public internet. Off: the server fetches "
        "nothing, and takes data: URLs alone.", _IMAGES, shown="false",
    )  # fmt: skip
    temperature: float | None = _variable(
        "DEFAULT_TEMPERATURE", number(RANGES["temperature"]), None,
        "Sampling temperature, 0 = greedy. Unset: the model's generation_config.json, else 0.1.", _GENERATION,
    )  # fmt: skip
    top_p: float | None = _variable(
        "DEFAULT_TOP_P", number(RANGES["top_p"]), None,
        "Nucleus sampling, 0 or 1 = off. Unset: the model's, else 0.9.", _GENERATION,
    )  # fmt: skip
    top_k: int | None = _variable(
        "DEFAULT_TOP_K", integer(0, int(RANGES["top_k"].high)), None,
        "Candidates to sample from, 0 = off. Unset: the model's, else 40.", _GENERATION,
    )  # fmt: skip
    min_p: float | None = _variable(
        "DEFAULT_MIN_P", number(RANGES["min_p"]), None,
        "Least probability, as a share of the most likely token's, 0 = off. Unset: the model's, else 0.05.",
        _GENERATION,
    )  # fmt: skip
    hlg: bool = _variable(
        "HLG_SAMPLING", BOOLEAN, False,
        "Sample with a tone curve (hybrid log-gamma) in place of top-p, top-k and min-p, unless `hlg` in the "
        "request says otherwise; the temperature is its slope. --hlg-sampling says the same.", _GENERATION,
        shown="false",
    )  # fmt: skip
    hlg_width: float | None = _variable(
        "HLG_WIDTH", number(RANGES["hlg_width"]), None,
        "Distance from the pivot within which the curve is linear, in nats. Unset: 4.", _GENERATION,
    )  # fmt: skip
    hlg_shoulder: float | None = _variable(
        "HLG_SHOULDER", number(RANGES["hlg_shoulder"]), None,
        "Scale in which the contrast fades above the pivot; smaller fades sooner. Unset: 4.", _GENERATION,
    )  # fmt: skip
    hlg_toe: float | None = _variable(
        "HLG_TOE", number(RANGES["hlg_toe"]), None,
        "Scale in which the contrast fades below the pivot. Unset: 6.", _GENERATION,
    )  # fmt: skip
    hlg_pivot_offset: float | None = _variable(
        "HLG_PIVOT_OFFSET", number(RANGES["hlg_pivot_offset"]), None,
        "Distance of the pivot below the most likely token, in nats. Unset: 6.", _GENERATION,
    )  # fmt: skip
    repetition_penalty: float | None = _variable(
        "DEFAULT_REPETITION_PENALTY", number(RANGES["repetition_penalty"]), None,
        "Factor against repeated tokens, 1 = off. Unset: the model's, else 1.0 (the first server's 1.08 "
        "never acted, and a penalty on braces and identifiers ruins tool calls).", _GENERATION,
    )  # fmt: skip
    repetition_context_size: int | None = _variable(
        "DEFAULT_REPETITION_CONTEXT_SIZE", integer(0, int(RANGES["repetition_context_size"].high)), None,
        "Tokens that the repetition penalty looks back on. Unset: 256.", _GENERATION,
    )  # fmt: skip
    thinking: bool | None = _variable(
        "DEFAULT_THINKING", BOOLEAN, None,
        "Whether models think unless the request says otherwise. Unset: as the model's template does it when "
        "it is told nothing.", _GENERATION,
    )  # fmt: skip
    kept_reasoning: Literal["true", "template", "false"] = _variable(
        "PRESERVE_THINKING", choice(("true", "template", "false")), "true",
        "Which earlier reasoning stays in the prompt: true, all that was computed; template, what the "
        "template shows; false, none.", _GENERATION,
    )  # fmt: skip
    max_tokens: int | None = _variable(
        "DEFAULT_MAX_TOKENS", integer(1, 2**31 - 1), None,
        "Length of a reply whose request sets no limit. Unset: the rest of the context window.", _GENERATION,
    )  # fmt: skip

    repetition: Literal["stop", "tell", "off"] = _variable(
        "REPETITION", choice(("stop", "tell", "off")), "stop",
        "A reply repeats one piece for 2,000 tokens, or a conversation makes the same call with the same "
        "result again and again. stop: the reply ends as if it had reached its limit, unless it is inside a "
        "call or its form is demanded, and the terminal tells of both; tell: it only tells; off: neither.",
        _GENERATION,
    )  # fmt: skip
    deadline_s: float = _variable(
        "GENERATION_WATCHDOG_SECONDS", number(Range(0, 10**9)), 600.0,
        "Time for a request, from when its turn comes, without the time in which others have their turn; 0 = "
        "any. Then its reply ends as if it had reached its limit. What was computed stays.", _GENERATION,
    )  # fmt: skip

    traces: bool = _variable(
        "ENABLE_REQUEST_LOGGING", BOOLEAN, True,
        "Write a trace: a line of JSON for each request, without its text, in a file for each session.",
        _LOGS, shown="true",
    )  # fmt: skip
    log_root: str = _variable(
        "LOG_ROOT", TEXT, "logs",
        "Folder of the traces (at most 512 MiB of them are kept), of proxy.log and of the proxy's locks, "
        "seen from the repository or the folder of a package's user. The server goes on without what cannot "
        "be written there.",
        _LOGS,
    )  # fmt: skip
    traces_prompts: bool = _variable(
        "LOG_PROMPTS", BOOLEAN, False,
        "Write prompts and replies into the trace too, in clear.", _LOGS, shown="false",
    )  # fmt: skip
    shows_images: bool = _variable(
        "VLM_CACHE_DEBUG", BOOLEAN, False,
        "Print for each prompt with images its first 64 tokens, and where each image stands, by the start of "
        "its name, and whether the cache had it.", _LOGS, shown="false",
    )  # fmt: skip

    @classmethod
    def rows(cls) -> Iterator[tuple[Field[Any], SettingSpec]]:
        for slot in fields(cls):
            yield slot, slot.metadata["row"]


@dataclass(frozen=True, slots=True)
class SettingSource:
    """A source of values: its name for error messages, and its variables."""

    name: str
    variables: Mapping[str, str]


ENV_SOURCE = ".env"
"""The name of the source that is the file."""


def load(*sources: SettingSource) -> Settings:
    """Read the settings from several sources, the strongest first.

    Raises:
        SettingsError: names every variable with an invalid value, and the values that it expects.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for slot, row in Settings.rows():
        found = _find(row.name, sources)
        if found is None:
            continue
        text, source = found
        try:
            values[slot.name] = row.kind.read(text)
        except (ValueError, KeyError):
            shown = "..." if row.kind.is_secret else repr(text)
            problems.append(f"{row.name}={shown} ({source}): expected {row.kind.expected}.")
    if problems:
        raise SettingsError("\n".join(problems))
    return Settings(**values)


def set_without_effect(*sources: SettingSource) -> list[SettingSpec]:
    """Return the variables that are set and have no effect, so that the user can be told."""
    return [row for row in WITHOUT_EFFECT if _find(row.name, sources) is not None]


def _find(name: str, sources: tuple[SettingSource, ...]) -> tuple[str, str] | None:
    for source in sources:
        text = source.variables.get(name, "").strip()
        if text:
            return text, source.name
    return None


def _without_effect(name: str, default: str, section: str, help: str) -> SettingSpec:  # noqa: A002
    return SettingSpec(name, TEXT, default, help, section)


# Variables of the project's first documents that have nothing to choose here.
WITHOUT_EFFECT: tuple[SettingSpec, ...] = (
    _without_effect("PROMPT_CACHE_MAX_ENTRIES_PER_SESSION", "2", _PROMPT_CACHE,
           "Titles, sub-agents and branches share a session's id, so no session has a limit of its own; "
           "memory and PROMPT_CACHE_MAX_ENTRIES_GLOBAL decide for all together."),
    _without_effect("CACHE_USE_BLOCK_INDEX", "true", _PROMPT_CACHE,
           "Pages are looked up by chain hash; there is no other way."),
)  # fmt: skip


def all_rows() -> list[SettingSpec]:
    """Return every row, grouped by section in the order in which sections first appear."""
    rows = [*(row for _, row in Settings.rows()), *WITHOUT_EFFECT]
    sections = list(dict.fromkeys(row.section for row in rows))
    return sorted(rows, key=lambda row: sections.index(row.section))
