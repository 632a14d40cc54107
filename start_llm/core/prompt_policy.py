"""What the user wants of prompts."""

from dataclasses import dataclass
from typing import Literal

from start_llm.core.chat import KeptReasoning

type DriftPolicy = Literal["note", "exact"]
"""`note`: notes tell the model changed values. `exact`: any difference makes another conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPolicy:
    """What the user wants of prompts.

    Attributes:
        thinking: whether the model reasons if the request does not say; None: the template's default.
        kept_reasoning: which reasoning of earlier turns the model is shown.
        with_rules: apply the rules for what clients change in a conversation (`prompt.drift.RULES`).
        drift: what happens when values about the current state change.
        checks_keys: compare a conversation exactly if rules would leave out more than a tenth of its text.
        shortens_writes: replace the content of earlier `write` calls by a digest.
    """

    thinking: bool | None = None
    kept_reasoning: KeptReasoning = "template"
    with_rules: bool = True
    drift: DriftPolicy = "note"
    checks_keys: bool = False
    shortens_writes: bool = False

    @property
    def shown_reasoning(self) -> KeptReasoning:
        """The reasoning that prompts have: with drift `exact` no more than what a fresh rendering shows."""
        is_exact = self.drift == "exact" and self.kept_reasoning == "true"
        return "template" if is_exact else self.kept_reasoning
