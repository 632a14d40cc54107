"""Turns what a request and the policy want of reasoning into options of the chat template."""

from dataclasses import dataclass

from start_llm.core.chat import ChatRequest, Json, Thinking
from start_llm.core.prompt_policy import PromptPolicy
from start_llm.prompt.template_audit.facts import BUDGET_OPTION, TemplateFacts


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """The options of one model's template."""

    facts: TemplateFacts
    policy: PromptPolicy

    def of(self, request: ChatRequest) -> dict[str, Json]:
        """Return the options of a request. The client's override the policy's.

        A value of the switch that the server could not read is left to the template.
        """
        kept = self.facts.preserve if self.policy.shown_reasoning == "true" else {}
        return {**kept, **request.template_options, **self._of_thinking(request)}

    def thinks(self, thinking: Thinking) -> bool:
        """Return whether the model thinks: as the request says, or the policy, or the template."""
        switch = self.facts.switch
        own = switch.thinks if switch else True
        choices = (choice for choice in (thinking.on, self.policy.thinking) if choice is not None)
        return next(choices, own)

    def _of_thinking(self, request: ChatRequest) -> dict[str, Json]:
        """Return the options for reasoning, its effort and its budget."""
        thinking, switch, effort = request.thinking, self.facts.switch, self.facts.effort
        on = self.thinks(thinking)
        is_set = thinking.on is None and switch is not None and switch.option in request.template_options
        switched = switch.options(on=on) if switch and not is_set else {}
        if on and self.facts.tells_budget and thinking.budget is not None:
            switched[BUDGET_OPTION] = thinking.budget
        word = thinking.effort if on or switch else "minimal"
        if effort is None or word is None:
            return switched
        return {**effort.options(word), **switched} if not on else {**switched, **effort.options(word)}
