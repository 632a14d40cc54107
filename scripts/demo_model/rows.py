"""Conversations as rows of tokens."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from scripts.demo_model.conversations import Author, Conversation, Kind

_CHARACTERS_PER_TOKEN = 2.6


@dataclass(frozen=True)
class Rows:
    """The rows that one step learns.

    Attributes:
        ids: (rows, tokens), integers.
        kinds: (rows, tokens): the `Kind` of the token that follows.
        answers: (rows, tokens): number of the answer that the following token belongs to, from 1; else 0.
        behaviours: of each answer.
        prefix: (1, tokens): what stands in front of every row; None if nothing does.
    """

    ids: Tensor
    kinds: Tensor
    answers: Tensor
    behaviours: Sequence[str]
    prefix: Tensor | None

    @property
    def wanted(self) -> Tensor:
        """The token that follows each token."""
        return torch.roll(self.ids, -1, dims=1)


def make_rows(author: Author, tokenizer: Tokenizer, count: int, length: int, prefix_tokens: int = 0) -> Rows:
    """Rows of `length` tokens, behind about so many tokens of other text."""
    prefix = None
    if prefix_tokens:
        text = author.opening_filler(round(prefix_tokens * _CHARACTERS_PER_TOKEN))
        prefix = torch.tensor([tokenizer.encode(text).ids[:prefix_tokens]])
    ids = np.zeros((count, length), dtype=np.int64)
    kinds = np.zeros((count, length), dtype=np.int64)
    answers = np.zeros((count, length), dtype=np.int64)
    behaviours: list[str] = []
    for row in range(count):
        talk = author.write(round(length * _CHARACTERS_PER_TOKEN), after_filler=prefix is not None)
        tokens, token_kinds, numbers = _encoded(talk, tokenizer, behaviours)
        size = min(length, len(tokens))
        ids[row, :size] = tokens[:size]
        kinds[row, : size - 1] = token_kinds[1:size]
        answers[row, : size - 1] = numbers[1:size]
    ids, kinds, answers = (torch.from_numpy(array) for array in (ids, kinds, answers))
    return Rows(ids, kinds, answers, behaviours, prefix)


def _encoded(
    talk: Conversation, tokenizer: Tokenizer, behaviours: list[str]
) -> tuple[list[int], list[int], list[int]]:
    """Tokens, and of each the kind and the number of its answer; adds to `behaviours`."""
    encoding = tokenizer.encode(talk.text)
    kinds: list[int] = []
    answers: list[int] = []
    is_open = False
    for piece in talk.pieces:
        if piece.kind is not Kind.READ and not is_open:
            behaviours.append(piece.behaviour)
        # Reasoning that is empty is part of what is read.
        is_open = piece.kind is not Kind.READ
        kinds += [int(piece.kind)] * len(piece.text)
        answers += [len(behaviours) if is_open else 0] * len(piece.text)
    starts = [start for start, _ in encoding.offsets]
    return encoding.ids, [kinds[start] for start in starts], [answers[start] for start in starts]
