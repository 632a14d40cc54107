"""The variables of prompts, caches, images and replies, in groups."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from start_llm.config.setting_types import (
    BOOLEAN,
    CACHE_BYTES,
    DISK_BYTES,
    FOLDER_OR_OFF,
    KV_BITS,
    SECONDS,
    SIZE,
    always,
    choice,
    integer,
    number,
    number_choice,
)
from start_llm.config.variable import variable
from start_llm.core.chat import KeptReasoning
from start_llm.core.limits import ImageLimits
from start_llm.core.prompt_policy import DriftPolicy, PromptPolicy
from start_llm.core.repetition import RepetitionPolicy
from start_llm.core.sampling import RANGES, Range, SamplingChoice

_SMALLEST_PAGE = 256

# A variable is a row: its name, type and default, and then what it does.
# fmt: off


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSettings:
    """How KV is quantised at rest."""

    section: ClassVar[str] = "KV cache"
    bits: float | Literal["config"] | None = variable("KV_BITS", KV_BITS, None,
        "Bits per element of KV at rest: pages in memory and on disk are quantised when they are cut, and "
        "dequantised when they are restored. Running sequences and the first page are never quantised. A hit "
        "may then change an answer (docs/prompt-cache.md). 3.5 is for KV_QUANT_SCHEME=turboquant, 8 for "
        "uniform; config takes the bits of each layer from kv_config.json in the model's folder. OFF: pages "
        "are exact. --kv-quant says the same.", shown="OFF")
    group_size: int = variable("KV_GROUP_SIZE", number_choice((32, 64, 128)), 64,
        "Elements that share a scale in uniformly quantised KV, as far as it divides the width of a head.")
    quant_start: int = variable("QUANTIZED_KV_START", integer(0, 2**31 - 1), 5000,
        "Position in the prompt from which pages are quantised; what is before it stays exact, and the first "
        "page in any case.")
    quant_scheme: Literal["uniform", "turboquant"] = variable(
        "KV_QUANT_SCHEME", choice(("uniform", "turboquant")), "uniform",
        "How KV is quantised: uniform has even steps, with a scale for each group; turboquant rotates each "
        "head's keys and values first, and loses far less at 4 bits.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """What is kept in memory."""

    section: ClassVar[str] = "Prompt cache"
    is_on: bool = variable("PROMPT_CACHE", BOOLEAN, True,
        "Keep what was computed for later prompts; off is what --no-cache says.")
    max_bytes: int | float = variable("PROMPT_CACHE_MAX_BYTES", CACHE_BYTES, 0.5,
        "Memory for everything computed, what running requests hold included: those are never cut short, the "
        "rest gives way to them. 0 = no cap of its own: all that MEMORY_BUDGET leaves. --hot-cache-max-size "
        "says the same.", shown="50%")
    block_size: int = variable("PROMPT_CACHE_BLOCK_SIZE", integer(1, 4096), 256,
        "Tokens of a block. Blocks are stored in pages of at least 256 tokens, as smaller arrays are slower "
        "to cut; prompts are matched to the token whatever it is.")
    initial_blocks: int = variable("INITIAL_CACHE_BLOCKS", integer(1, 65536), 1,
        "Pages that the caches of a new conversation have room for, and by which they grow. More saves "
        "copies while a prompt is computed, and costs memory. --initial-cache-blocks says the same.")
    max_conversations: int | None = variable("PROMPT_CACHE_MAX_ENTRIES_GLOBAL", integer(1, 1_000_000), None,
        "Conversations kept; of more, those go that were not used for the longest time. Unset: as many as "
        "there is memory for, and 24 once it is short.")
    ttl_s: float | None = variable("PROMPT_CACHE_TTL_SECONDS", number(Range(0, 10**9)), None,
        "Age at which an unused conversation goes, with the next request; 0 = never. Unset: 1800, but only "
        "once memory is short, so that a lunch break does not empty the cache.")
    transcript_idle_s: float = variable("PROMPT_CACHE_SESSION_MAX_IDLE_SECONDS", number(Range(0, 10**9)), 0,
        "Age in seconds at which what is known of an unused conversation goes (the transcript store); 0 = "
        "never, only when its memory is full, least recently used first.")
    identifies_images: bool = variable(
        "CACHE_VLM_IMAGE_IDENTITY", always("what was computed of an image belongs to its exact pixels"), True,
        "What was computed of an image is reused for the same image alone.")

    @property
    def page_size(self) -> int:
        """Tokens of a page: the smallest multiple of the block size that is at least 256."""
        return self.block_size * math.ceil(_SMALLEST_PAGE / self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SSDSettings:
    """What is kept on the disk."""

    section: ClassVar[str] = "Prompt cache"
    folder: str | None = variable("SSD_CACHE_DIR", FOLDER_OR_OFF, None,
        "Folder in which what was computed outlives the server, with the texts and reasoning of "
        "conversations, in clear, for this user alone to read. Unset: prompt-cache in STATE_ROOT; off: none. "
        "--ssd-cache-dir and --paged-ssd-cache-dir say the same.")
    max_size: int | float | None = variable("SSD_CACHE_MAX_SIZE", DISK_BYTES, None,
        "Size of that folder, whatever models it holds; it never takes more than 80% of what is free or its "
        "own. Unset: 100GB of a folder that SSD_CACHE_DIR names, else 20GB and at most 10% of what is free "
        "or its own. --ssd-cache-max-size and --paged-ssd-cache-max-size say the same.")
    write_after_s: float = variable("SSD_CACHE_WRITE_AFTER_SECONDS", SECONDS, 30.0,
        "Time without use after which what was computed is written to it. What was used twice is written "
        "sooner, and the rest when the server stops.")
    max_write_per_day: int = variable("SSD_CACHE_MAX_WRITE_PER_DAY", SIZE, 200 * 10**9,
        "Bytes that may be written to it in a day (UTC), to spare the disk; 0 = any.", shown="200GB")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSettings(PromptPolicy):
    """How a prompt is made of a conversation."""

    section: ClassVar[str] = "Prompt"
    thinking: bool | None = variable("DEFAULT_THINKING", BOOLEAN, None,
        "Whether models think unless the request says otherwise. Unset: as the model's template does it when "
        "nothing is set.")
    kept_reasoning: KeptReasoning = variable(
        "PRESERVE_THINKING", choice(("true", "template", "false")), "true",
        "Which earlier reasoning stays in the prompt: true, all that was computed; template, what the "
        "template shows; false, none.")
    with_rules: bool = variable("CACHE_CANONICALIZE_TOOL_CONTEXT", BOOLEAN, True,
        "Find conversations again although clients change metadata in them: the table of rules in "
        "prompt/drift.")
    drift: DriftPolicy = variable("CACHE_DRIFT_POLICY", choice(("note", "exact")), "note",
        "A date, a clock or a status in a prompt that was computed has changed. note: keep what was "
        "computed, and tell the model in a short note what is so now. exact: compute anew from there on; "
        "implies PRESERVE_THINKING=template.")
    checks_keys: bool = variable("CACHE_NORM_SAFETY_CHECK", BOOLEAN, False,
        "Compare a conversation as it stands if what would be looked through, because clients change it, is "
        "more than a tenth of its text.")
    shortens_writes: bool = variable("NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT", BOOLEAN, False,
        "Show the content of past `write` calls as a digest. Dangerous: the model no longer sees what it "
        "wrote, and may write it again from memory.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings(ImageLimits):
    """Images in requests."""

    section: ClassVar[str] = "Images"
    max_bytes: int = variable("IMAGE_MAX_BYTES", integer(1, 2**33), 32 * 2**20,
        "Largest file of an image, in bytes.")
    max_pixels: int = variable("IMAGE_MAX_PIXELS", integer(1, 2**31 - 1), 50_000_000,
        "Most pixels of an image. It is decoded in memory, with three or four bytes for each.")
    max_count: int = variable("IMAGE_MAX_COUNT", integer(1, 100_000), 100,
        "Most images of a request, those of earlier messages included.")
    max_tokens: int = variable("IMAGE_MAX_TOKENS", integer(64, 2**20), 4096,
        "Most tokens of an image. Larger images are made smaller until they fit.")
    fetches: bool = variable("IMAGE_URLS", BOOLEAN, False,
        "Fetch images at http:// and https:// addresses of the public internet. Off: the server fetches "
        "nothing, and takes data: URLs alone.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings(SamplingChoice):
    """Sampling where a request says nothing. None: as the model's files say."""

    section: ClassVar[str] = "Generation"
    temperature: float | None = variable("DEFAULT_TEMPERATURE", number(RANGES["temperature"]), None,
        "Sampling temperature, 0 = greedy. Unset: the model's generation_config.json, else 0.1.")
    top_p: float | None = variable("DEFAULT_TOP_P", number(RANGES["top_p"]), None,
        "Nucleus sampling, 0 or 1 = off. Unset: the model's, else 0.9.")
    top_k: int | None = variable("DEFAULT_TOP_K", integer(0, int(RANGES["top_k"].high)), None,
        "Candidates to sample from, 0 = off. Unset: the model's, else 40.")
    min_p: float | None = variable("DEFAULT_MIN_P", number(RANGES["min_p"]), None,
        "Least probability, as a share of the most likely token's, 0 = off. Unset: the model's, else 0.05.")
    repetition_penalty: float | None = variable(
        "DEFAULT_REPETITION_PENALTY", number(RANGES["repetition_penalty"]), None,
        "Factor against repeated tokens, 1 = off. Unset: the model's, else 1.0: a penalty on braces and "
        "identifiers ruins tool calls.")
    repetition_context_size: int | None = variable(
        "DEFAULT_REPETITION_CONTEXT_SIZE", integer(0, int(RANGES["repetition_context_size"].high)), None,
        "Tokens that the repetition penalty looks back on. Unset: 256.")
    hlg: bool = variable("HLG_SAMPLING", BOOLEAN, False,
        "Sample with a tone curve (hybrid log-gamma) in place of top-p, top-k and min-p, unless `hlg` in the "
        "request says otherwise; the temperature is its slope. --hlg-sampling says the same.")
    hlg_width: float | None = variable("HLG_WIDTH", number(RANGES["hlg_width"]), None,
        "Distance from the pivot within which the curve is linear, in nats. Unset: 4.")
    hlg_shoulder: float | None = variable("HLG_SHOULDER", number(RANGES["hlg_shoulder"]), None,
        "Scale in which the contrast fades above the pivot; smaller fades sooner. Unset: 4.")
    hlg_toe: float | None = variable("HLG_TOE", number(RANGES["hlg_toe"]), None,
        "Scale in which the contrast fades below the pivot. Unset: 6.")
    hlg_pivot_offset: float | None = variable("HLG_PIVOT_OFFSET", number(RANGES["hlg_pivot_offset"]), None,
        "Distance of the pivot below the most likely token, in nats. Unset: 6.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySettings:
    """Where a reply ends."""

    section: ClassVar[str] = "Generation"
    max_tokens: int | None = variable("DEFAULT_MAX_TOKENS", integer(1, 2**31 - 1), None,
        "Length of a reply whose request sets no limit. Unset: the rest of the context window.")
    repetition: RepetitionPolicy = variable("REPETITION", choice(("stop", "tell", "off")), "stop",
        "A reply repeats one piece for 2,000 tokens, or a conversation makes the same call with the same "
        "result again and again. stop: the reply ends as if it had reached its limit, unless it is inside a "
        "call or its form is demanded, and the terminal tells of both; tell: it only tells; off: neither.")
