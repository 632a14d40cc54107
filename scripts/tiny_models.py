"""Build tiny models on disk for tests and benchmarks, in the layout of Hugging Face and mlx_lm.

`build` gives a family's real architecture random weights: it computes like a big model, but its text is
random. `build_chain` gives it weights that reproduce a script: every token leads to one other token, whatever
came before. Both take a fraction of a second and write a few megabytes. The result depends on the arguments
alone; the tokenizer also depends on the Python release, because it is trained on the standard library's
source.

    python scripts/tiny_models.py qwen3 FOLDER
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import importlib
import itertools
import json
import math
import sysconfig
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mlx.utils import tree_flatten
from safetensors.numpy import save
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

Config = dict[str, Any]
Weights = dict[str, np.ndarray]
Phrase = str | bytes

END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
SPECIAL_TOKENS = (PADDING, "<|im_start|>", END_OF_TURN, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""These are not special, so decoding keeps them: a server must see where reasoning or a call begins."""
CHATML_TOKENS = SPECIAL_TOKENS + MARKUP_TOKENS


@dataclass(frozen=True, kw_only=True)
class AddedTokens:
    """The texts that a tokenizer always encodes as one token each.

    Attributes:
        special: decoding may leave these out.
        markup: decoding keeps these.
        ends: the tokens that end a reply. The first is the tokenizer's EOS, and ends every chain.
        bos: the first token of a text that is encoded as a document.
    """

    special: tuple[str, ...]
    markup: tuple[str, ...] = ()
    ends: tuple[str, ...]
    bos: str | None = None
    padding: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        return self.special + self.markup


CHATML = AddedTokens(special=SPECIAL_TOKENS, markup=MARKUP_TOKENS, ends=(END_OF_TURN,), padding=PADDING)

CORPUS_BYTES = 1_000_000
MAX_POSITIONS = 131_072

LAYER_GAIN = 2.0
HEAD_GAIN = 4.0
CHAIN_LOGIT = 100.0
CHAIN_GAP = 20.0
"""A logit 20 below the right one gives a wrong token a probability of at most 2e-9 at temperature 1."""

CHAT_TEMPLATE = r"""
{#- ChatML with reasoning and tools. Reasoning stays only in the turns after the last user message. -#}
{%- macro text_of(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is iterable -%}
        {%- for part in content -%}
            {%- if part.type == 'text' -%}
                {{- part.text -}}
            {%- elif part.type in ('image', 'image_url') -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- else -%}
                {{- raise_exception('This template cannot show a part of type ' ~ part.type) -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}

{%- macro call_text(tool_call) -%}
    {{- '<tool_call>\n{"name": ' ~ tool_call.name | tojson ~ ', "arguments": ' -}}
    {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson -}}
    {{- '}\n</tool_call>' -}}
{%- endmacro -%}

{%- set first_is_system = messages and messages[0].role == 'system' -%}
{%- if tools -%}
    {{- '<|im_start|>system\n' -}}
    {%- if first_is_system -%}
        {{- text_of(messages[0].content) ~ '\n\n' -}}
    {%- endif -%}
    {{- 'Functions that you may call, one JSON object a line:\n<tools>' -}}
    {%- for tool in tools -%}
        {{- '\n' ~ tool | tojson -}}
    {%- endfor -%}
    {{- '\n</tools>\nA call is one JSON object with "name" and "arguments" inside tool_call tags.' -}}
    {{- '<|im_end|>\n' -}}
{%- endif -%}

{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {%- set last.user = loop.index0 -%}
    {%- endif -%}
{%- endfor -%}

{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- if not (tools and loop.first) -%}
            {{- '<|im_start|>system\n' ~ text_of(message.content) ~ '<|im_end|>\n' -}}
        {%- endif -%}
    {%- elif message.role == 'user' -%}
        {{- '<|im_start|>user\n' ~ text_of(message.content) ~ '<|im_end|>\n' -}}
    {%- elif message.role == 'assistant' -%}
        {%- set text = text_of(message.content) -%}
        {{- '<|im_start|>assistant\n' -}}
        {%- if message.reasoning_content and loop.index0 > last.user -%}
            {{- '<think>\n' ~ message.reasoning_content.strip('\n') ~ '\n</think>\n\n' -}}
        {%- endif -%}
        {{- text -}}
        {%- for tool_call in message.tool_calls or [] -%}
            {{- '\n' if text or not loop.first else '' -}}
            {{- call_text(tool_call.function if tool_call.function else tool_call) -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- elif message.role == 'tool' -%}
        {%- if loop.first or loop.previtem.role != 'tool' -%}
            {{- '<|im_start|>user' -}}
        {%- endif -%}
        {{- '\n<tool_response>\n' ~ text_of(message.content) ~ '\n</tool_response>' -}}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}
            {{- '<|im_end|>\n' -}}
        {%- endif -%}
    {%- else -%}
        {{- raise_exception('This template knows no role ' ~ message.role) -}}
    {%- endif -%}
{%- endfor -%}

{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if enable_thinking is defined and not enable_thinking -%}
        {{- '<think>\n\n</think>\n\n' -}}
    {%- endif -%}
{%- endif -%}
""".lstrip()

# --------------------------------------------------------------------------------------------------- families


@dataclass(frozen=True)
class Family:
    """One row of the table of architectures.

    Attributes:
        settings: the keys of config.json besides the common ones; None removes a common key.
        nested: all of these keys are in `text_config`.
        neutral_norm: the norm weight that scales by one. It is 0 for Gemma, which multiplies by 1 + weight.
    """

    architecture: str
    settings: Config
    nested: bool = False
    neutral_norm: float = 1.0


def _table(hidden: int, layers: int) -> dict[str, Family]:
    """Return the families by `model_type`, for models of this size."""
    half = hidden // 2
    plain = {"attention_bias": False}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": []}
    experts |= {
        "moe_intermediate_size": half,
        "shared_expert_intermediate_size": half,
        "norm_topk_prob": True,
    }
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_conv_kernel_dim": 4}
    linear |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    linear |= {"full_attention_interval": min(4, layers), "partial_rotary_factor": 0.25}
    rope = {"type": "default", "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    mrope = {"rope_parameters": rope | {"mrope_section": [3, 3, 2], "mrope_interleaved": True}}
    gemma = {"sliding_window": 128, "sliding_window_pattern": min(4, layers), "rope_local_base_freq": 1e4}
    gemma |= {"query_pre_attn_scalar": 64}
    oss = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128, "rope_theta": 150_000}
    oss |= {"layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]}
    latent = {"head_dim": None, "num_key_value_heads": 4, "kv_lora_rank": 64, "q_lora_rank": 96}
    latent |= {"qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    routed = {"n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_layer_freq": 1}
    routed |= {"moe_intermediate_size": half, "routed_scaling_factor": 1.8, "first_k_dense_replace": 1}
    routed |= {"n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    routed |= {"norm_topk_prob": True, "num_nextn_predict_layers": 0}
    dense_text = {"model_type": "qwen3_5_text"} | linear | mrope
    experts_text = {"model_type": "qwen3_5_moe_text"} | experts | linear | mrope
    return {
        "llama": Family("LlamaForCausalLM", plain),
        "qwen2": Family("Qwen2ForCausalLM", plain),
        "qwen3": Family("Qwen3ForCausalLM", plain),
        "qwen3_moe": Family("Qwen3MoeForCausalLM", experts),
        "qwen3_next": Family("Qwen3NextForCausalLM", experts | linear),
        "qwen3_5": Family("Qwen3_5ForConditionalGeneration", dense_text, nested=True),
        "qwen3_5_moe": Family("Qwen3_5MoeForConditionalGeneration", experts_text, nested=True),
        "gemma3_text": Family("Gemma3ForCausalLM", gemma, neutral_norm=0.0),
        "gpt_oss": Family("GptOssForCausalLM", oss),
        "glm4_moe_lite": Family("Glm4MoeLiteForCausalLM", latent | routed),
        "deepseek_v3": Family("DeepseekV3ForCausalLM", latent | routed),
    }


FAMILIES: tuple[str, ...] = tuple(_table(256, 4))


def _config(family: str, hidden: int, layers: int, vocab: int, ends: list[int], overrides: Config) -> Config:
    """Return the content of config.json. Overrides win, and go into `text_config` if the family has one."""
    row = _table(hidden, layers)[family]
    common = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 2 * hidden}
    common |= {"vocab_size": vocab, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    common |= {"rms_norm_eps": 1e-6, "max_position_embeddings": MAX_POSITIONS, "rope_theta": 1e6}
    chosen = common | {"tie_word_embeddings": False} | row.settings | overrides
    settings = {key: value for key, value in chosen.items() if value is not None}
    top = {"architectures": [row.architecture], "model_type": family, "torch_dtype": "float32"}
    top |= {"eos_token_id": ends[0] if len(ends) == 1 else ends}
    if row.nested:
        return top | {"tie_word_embeddings": settings["tie_word_embeddings"], "text_config": settings}
    return top | settings


def _neutral_norm(config: Config) -> float:
    return _table(256, 4)[config["model_type"]].neutral_norm


# -------------------------------------------------------------------------------------------------- tokenizer


def _corpus() -> Iterator[str]:
    """Yield about a megabyte of the standard library's source, the same for the same Python release."""
    left = CORPUS_BYTES
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")[:left]
        left -= len(text)
        yield text
        if not left:
            return


def byte_level_tokenizer(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> Tokenizer:
    """Return a byte-level BPE without added tokens. Line breaks stay together, whatever follows them."""
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    signs = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer = Tokenizer(models.BPE(vocab=dict(vocab), merges=list(merges)))
    cut = pre_tokenizers.Split(Regex(words + signs), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@functools.cache
def byte_alphabet() -> tuple[str, ...]:
    """Return the 256 characters that represent bytes in a byte-level vocabulary, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }
    return tuple(characters[byte] for byte in range(256))


@functools.lru_cache
def _trained_bpe(size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return `size` entries (text in the byte alphabet → id) and the merges, learned from `_corpus`."""
    if size == 256:
        return {character: byte for byte, character in enumerate(byte_alphabet())}, []
    tokenizer = byte_level_tokenizer({}, [])
    alphabet = list(byte_alphabet())
    tokenizer.train_from_iterator(
        _corpus(), trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    learned = json.loads(tokenizer.to_str())["model"]
    if len(learned["vocab"]) != size:
        raise ValueError(
            f"a vocabulary of {size} cannot be learned from the corpus: got {len(learned['vocab'])}"
        )
    return learned["vocab"], [tuple(merge) for merge in learned["merges"]]


def add_tokens(tokenizer: Tokenizer, texts: Iterable[str], special: Container[str] = SPECIAL_TOKENS) -> None:
    """Append each text as one vocabulary entry, which is matched anywhere in a prompt before the BPE runs."""
    for text in texts:
        token = AddedToken(text, special=text in special, normalized=False)
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])


def tiny_tokenizer(vocab: int, raw_entries: Iterable[str] = (), added: AddedTokens = CHATML) -> Tokenizer:
    """Return a tokenizer with `vocab` entries and the `raw_entries`.

    The added tokens come last and count for `vocab`. `raw_entries` (in the byte alphabet) come before them.
    """
    if vocab < 256 + len(added.texts):
        raise ValueError(f"a vocabulary needs at least {256 + len(added.texts)} entries, not {vocab}")
    learned, merges = _trained_bpe(vocab - len(added.texts))
    entries = dict.fromkeys([*sorted(learned, key=learned.__getitem__), *raw_entries])
    tokenizer = byte_level_tokenizer({text: index for index, text in enumerate(entries)}, merges)
    add_tokens(tokenizer, added.texts, added.special)
    if added.bos is not None:
        first = (added.bos, tokenizer.get_vocab()[added.bos])
        tokenizer.post_processor = processors.TemplateProcessing(f"{added.bos} $A", special_tokens=[first])
    return tokenizer


def end_ids(tokenizer: Tokenizer, added: AddedTokens) -> list[int]:
    """Return the ids of the tokens that end a reply, EOS first."""
    return [tokenizer.get_vocab()[text] for text in added.ends]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text in the middle of a prompt, without a beginning-of-text token."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def tokenizer_config(tokenizer: Tokenizer, added: AddedTokens = CHATML) -> Config:
    """Return the content of tokenizer_config.json for any tokenizer with these added tokens."""
    decoder = {
        str(index): {"content": token.content, "special": token.special, "normalized": token.normalized}
        | {"lstrip": False, "rstrip": False, "single_word": False}
        for index, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }
    names = {
        "bos_token": added.bos,
        "eos_token": added.ends[0],
        "pad_token": added.padding,
        "unk_token": None,
    }
    fixed = {
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
    }
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | names | fixed | {"added_tokens_decoder": decoder}


# ---------------------------------------------------------------------------------------------------- weights


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every parameter of mlx_lm's class for this config. Computes nothing."""
    architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    arguments = architecture.ModelArgs.from_dict(copy.deepcopy(config))
    parameters: Any = tree_flatten(architecture.Model(arguments).parameters())
    tied = config["tie_word_embeddings"]
    return {name: tuple(value.shape) for name, value in parameters if not (tied and "lm_head" in name)}


def random_weight(name: str, shape: tuple[int, ...], neutral_norm: float, seed: int) -> np.ndarray:
    """Return one float32 parameter, drawn from `seed` and its own name.

    A matrix preserves the scale of its input (deviation 1/sqrt(fan in)), times a gain. The gain lets the
    layers outweigh the last token's embedding; without it a random model repeats a short loop of tokens.
    """
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if "norm" in name:
        return np.full(shape, neutral_norm, np.float32)
    if name.endswith("A_log"):
        return np.log(random.uniform(1, 16, shape)).astype(np.float32)
    if name.endswith("dt_bias"):
        return np.ones(shape, np.float32)
    noise = random.standard_normal(shape, np.float32)
    if "embed_tokens" in name:
        return noise
    if len(shape) == 1 or name.endswith("bias"):
        return np.float32(0.1) * noise
    gain = HEAD_GAIN if "lm_head" in name else LAYER_GAIN
    return noise * np.float32(gain / math.sqrt(_fan_in(name, shape)))


def _fan_in(name: str, shape: tuple[int, ...]) -> int:
    is_convolution = "conv1d" in name or len(shape) > 3
    return math.prod(shape[1:] if is_convolution else shape[-1:])


def silence(weights: Weights, tokenizer: Tokenizer, added: AddedTokens) -> None:
    """Zero the `lm_head` rows of added tokens and of incomplete characters, so that output is plain text."""
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
    silent = [
        index
        for text, index in tokenizer.get_vocab().items()
        if text in added.texts or not _is_plain_text(bytes(byte_of[character] for character in text))
    ]
    for head in (value for name, value in weights.items() if "lm_head" in name):
        head[silent] = 0


def _is_plain_text(data: bytes) -> bool:
    text = data.decode(errors="replace")
    return "\ufffd" not in text and all(character.isprintable() or character in "\n\t" for character in text)


def _signs(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return float32 values +1 and -1 from a hash of `key`, equal on every machine and numpy version."""
    count = math.prod(shape)
    digest = hashlib.shake_256(key.encode()).digest(-(-count // 8))
    bits = np.unpackbits(np.frombuffer(digest, np.uint8), count=count)
    return (2 * bits.astype(np.float32) - 1).reshape(shape)


# ------------------------------------------------------------------------------------------- scripted weights


class Script(NamedTuple):
    """The chains of a scripted model, in the ids of its tokenizer.

    Attributes:
        links: from each token to the one that follows it.
        rows: of the embeddings: entries of the vocabulary, rounded up.
    """

    tokenizer: Tokenizer
    links: Mapping[int, int]
    rows: int


def script_of(
    chains: Mapping[str, Sequence[Phrase]],
    *,
    vocab: int = 2048,
    words: Iterable[str] = (),
    added: AddedTokens = CHATML,
) -> Script:
    """Make a tokenizer that has every phrase of the chains. See `build_chain`.

    Raises:
        ValueError: chains disagree, or a `str` would not decode to itself.
    """
    raw = [
        _raw_entry(phrase) for phrases in chains.values() for phrase in phrases if isinstance(phrase, bytes)
    ]
    tokenizer = tiny_tokenizer(vocab, raw, added)
    add_tokens(tokenizer, words)
    _add_phrases(tokenizer, chains)
    rows = -(-tokenizer.get_vocab_size() // 8) * 8
    return Script(tokenizer, _links(tokenizer, chains, added), rows)


def _links(
    tokenizer: Tokenizer, chains: Mapping[str, Sequence[Phrase]], added: AddedTokens
) -> dict[int, int]:
    """Return a map from each token id to the id that follows it.

    Raises:
        ValueError: two chains give a token different successors.
    """
    links: dict[int, int] = {}
    for start, phrases in chains.items():
        ends = [] if phrases and phrases[-1] in added.ends else [added.ends[0]]
        tokens = [
            _ids(tokenizer, start)[-1],
            *(_phrase_id(tokenizer, phrase) for phrase in [*phrases, *ends]),
        ]
        for before, after in itertools.pairwise(tokens):
            if links.setdefault(before, after) != after:
                text = tokenizer.id_to_token(before)
                raise ValueError(f"{text!r} has two successors: the next token depends on the last one alone")
    return links


def _phrase_id(tokenizer: Tokenizer, phrase: Phrase) -> int:
    if isinstance(phrase, str):
        (index,) = _ids(tokenizer, phrase)
        return index
    token_id = tokenizer.token_to_id(_raw_entry(phrase))
    if token_id is None:
        raise ValueError(f"{phrase!r} is not in the vocabulary")
    return token_id


def _raw_entry(data: bytes) -> str:
    alphabet = byte_alphabet()
    return "".join(alphabet[byte] for byte in data)


def _add_phrases(tokenizer: Tokenizer, chains: Mapping[str, Sequence[Phrase]]) -> None:
    """Make every text of the chains one vocabulary entry.

    Decoders treat an added token as bytes if all its characters belong to the byte alphabet, such as é.

    Raises:
        ValueError: a text would not decode to itself.
    """
    misread = {character for character in byte_alphabet() if not character.isascii()}
    for phrase in itertools.chain.from_iterable(chains.values()):
        if isinstance(phrase, bytes) or len(_ids(tokenizer, phrase)) == 1:
            continue
        if misread.intersection(phrase):
            raise ValueError(
                f"{phrase!r} has letters that decoders take for bytes: give phrase.encode() instead"
            )
        add_tokens(tokenizer, [phrase])


def _chain_embeddings(tokens: int, hidden: int, links: Mapping[int, int], seed: int) -> np.ndarray:
    """Return embeddings [tokens, hidden] of ±1.

    Tokens without a successor share one half of their rows, which stands for the end of the turn.
    """
    rows = _signs(f"{seed} embed_tokens", (tokens, hidden))
    nowhere = [index for index in range(tokens) if index not in links]
    rows[nowhere, : hidden // 2] = _signs(f"{seed} nowhere", (hidden // 2,))
    return rows


def _chain_head(embeddings: np.ndarray, links: Mapping[int, int], end_of_turn: int, seed: int) -> np.ndarray:
    """Return an `lm_head` [tokens, hidden] that gives every token's successor the logit CHAIN_LOGIT."""
    hidden = embeddings.shape[1]
    head = np.zeros_like(embeddings)
    for before, after in links.items():
        head[after] += embeddings[before] * np.float32(CHAIN_LOGIT / hidden)
    head[end_of_turn, : hidden // 2] += _signs(f"{seed} nowhere", (hidden // 2,)) * np.float32(
        2 * CHAIN_LOGIT / hidden
    )
    return head


def _check_gap(embeddings: np.ndarray, head: np.ndarray, links: Mapping[int, int], end_of_turn: int) -> None:
    """Check that no wrong token's logit is within CHAIN_GAP of the right one's, so that sampling is safe.

    Raises:
        ValueError: the chains are too long for the hidden size.
    """
    logits = embeddings @ head.T
    tokens = np.arange(len(logits))
    right = np.array([links.get(index, end_of_turn) for index in range(len(logits))])
    best = logits[tokens, right]
    logits[tokens, right] = -np.inf
    if (gap := float((best - logits.max(axis=1)).min())) < CHAIN_GAP:
        raise ValueError(
            f"the chains are too long for {head.shape[1]} hidden dimensions: logit gap {gap:.1f}"
        )


def _chain_weight(name: str, shape: tuple[int, ...], neutral_norm: float, seed: int) -> np.ndarray:
    """Return any other parameter: zero if it writes into the residual stream, else scaled random signs."""
    if "norm" in name:
        return np.full(shape, neutral_norm, np.float32)
    if len(shape) == 1 or name.endswith("bias") or name.split(".")[-2] in ("o_proj", "out_proj", "down_proj"):
        return np.zeros(shape, np.float32)
    return _signs(f"{seed} {name}", shape) / np.float32(math.sqrt(shape[-1]))


def chain_weights(
    shapes: Mapping[str, tuple[int, ...]],
    links: Mapping[int, int],
    end_of_turn: int,
    *,
    neutral_norm: float = 1.0,
    seed: int = 0,
) -> Weights:
    """Return the parameters of a text network that goes from token to token along the links.

    Args:
        shapes: of its parameters, by name.
        end_of_turn: follows every token that has no link.
        neutral_norm: see `Family`.

    Raises:
        ValueError: the chains are too long for the hidden size.
    """
    embed_name, head_name = (next(n for n in shapes if part in n) for part in ("embed_tokens", "lm_head"))
    tokens, hidden = shapes[embed_name]
    embeddings = _chain_embeddings(tokens, hidden, links, seed)
    head = _chain_head(embeddings, links, end_of_turn, seed)
    _check_gap(embeddings, head, links, end_of_turn)
    weights = {name: _chain_weight(name, shape, neutral_norm, seed) for name, shape in shapes.items()}
    return weights | {embed_name: embeddings, head_name: head}


# ---------------------------------------------------------------------------------------------------- folders


def _write_json(path: Path, content: Config) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(folder: Path, weights: Weights) -> None:
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "mlx"}))
    size = {"total_size": sum(value.nbytes for value in weights.values())}
    index = {"metadata": size, "weight_map": dict.fromkeys(sorted(weights), "model.safetensors")}
    _write_json(folder / "model.safetensors.index.json", index)


def write_tokenizer(folder: Path, tokenizer: Tokenizer, chat_template: str, added: AddedTokens) -> None:
    """Write the files of a tokenizer: its entries, its settings and its chat template."""
    _write_json(folder / "tokenizer_config.json", tokenizer_config(tokenizer, added))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


def write_model(folder: Path, config: Config, weights: Weights) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder, weights)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": config["eos_token_id"]})


def build(  # noqa: PLR0913 (keywords, all of them optional)
    family: str,
    folder: Path,
    *,
    hidden: int = 256,
    layers: int = 4,
    vocab: int = 2048,
    seed: int = 0,
    chat_template: str = CHAT_TEMPLATE,
    added: AddedTokens = CHATML,
    **config_overrides: Any,
) -> Path:
    """Write a random model and return its folder. Its greedy text is varied and never ends by itself.

    Args:
        family: one of FAMILIES.
        vocab: entries of the vocabulary, with the added tokens.
        config_overrides: replace keys of config.json; None removes a key.

    Raises:
        KeyError: the family is unknown.
    """
    tokenizer = tiny_tokenizer(vocab, added=added)
    config = _config(family, hidden, layers, vocab, end_ids(tokenizer, added), config_overrides)
    neutral_norm = _neutral_norm(config)
    shapes = parameter_shapes(config)
    weights = {name: random_weight(name, shape, neutral_norm, seed) for name, shape in shapes.items()}
    silence(weights, tokenizer, added)
    write_model(folder, config, weights)
    write_tokenizer(folder, tokenizer, chat_template, added)
    return folder


def build_chain(  # noqa: PLR0913 (the keywords of `build` and a few more)
    folder: Path,
    chains: Mapping[str, Sequence[Phrase]],
    *,
    family: str = "qwen3",
    hidden: int = 128,
    layers: int = 1,
    vocab: int = 2048,
    seed: int = 0,
    words: Iterable[str] = (),
    chat_template: str = CHAT_TEMPLATE,
    added: AddedTokens = CHATML,
    **config_overrides: Any,
) -> Path:
    r"""Write a model that answers with a script, and return its folder.

    A key of `chains` is the token that ends the prompt (in our template `"\n"`, without thinking `"\n\n"`).
    Its phrases follow, one token each, and EOS after the last, unless the last phrase ends a reply itself.
    The model follows the script greedily and at any usual temperature. A token outside the chains leads to
    EOS.

    A `str` is one vocabulary entry, to which prompts are tokenised as well. `bytes` are an entry to which no
    prompt is tokenised (so a reply differs from its own echo), and may be part of a character. The next token
    depends on the last one alone. So a phrase may be in two places only if the same phrase follows it: split
    a repeated text differently.

    Args:
        words: entries that only shorten prompts.
        vocab: entries of the vocabulary, without `words` and without phrases.

    Raises:
        ValueError: chains disagree, are too long for `hidden`, or a `str` would not decode to itself.
    """
    script = script_of(chains, vocab=vocab, words=words, added=added)
    ends = end_ids(script.tokenizer, added)
    config = _config(family, hidden, layers, script.rows, ends, config_overrides)
    neutral_norm = _neutral_norm(config)
    shapes = parameter_shapes(config)
    weights = chain_weights(shapes, script.links, ends[0], neutral_norm=neutral_norm, seed=seed)
    write_model(folder, config, weights)
    write_tokenizer(folder, script.tokenizer, chat_template, added)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random model.")
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    print(build(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
