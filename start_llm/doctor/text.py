"""English text for examinations: as much of it as is needed, and always the same."""

import random

_WORDS = (
    "the a harbour boat rope lamp tide keeper letter morning evening stone wind gate bridge river village "
    "carpenter teacher garden winter summer clock mountain road friend window table bread water song story "
    "finds carries watches opens closes remembers follows builds mends counts leaves keeps shows writes "
    "slowly quickly quietly again already never often beside before after under over near without behind "
    "old new small large green grey early late warm cold bright heavy empty quiet"
).split()
_SENTENCE = (6, 13)

PASSAGE = (
    "A lighthouse keeper wrote down the weather every morning for thirty years. He noted the wind, the "
    "height of the tide and the number of ships that passed before noon. When he retired, the harbour "
    "office asked for his notebooks, because nobody else had measured anything on that coast. They "
    "filled a whole shelf. A young engineer copied the numbers into a table and found that storms came "
    "two weeks earlier than they used to. She drove out to the keeper's house to tell him. He was "
    "mending a net in front of the door and was not surprised. The birds, he said, had been telling him "
    "the same thing since the old bridge was built, and they had never been wrong about the spring."
)
"""A passage that no model has seen, of the kind that all have seen."""


def prose(seed: str, words: int) -> str:
    """Return sentences of this many words. Other seeds give other sentences."""
    rng, left, sentences = random.Random(seed), words, list[str]()
    while left > 0:
        count = min(rng.randint(*_SENTENCE), left)
        sentences.append(" ".join(rng.choices(_WORDS, k=count)).capitalize() + ".")
        left -= count
    return " ".join(sentences)
