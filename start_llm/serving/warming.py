"""Reads what a client's conversations begin with, because somebody asks for it before the client does."""

from collections.abc import Callable
from dataclasses import replace

from start_llm.core.client_presence import LOOK_S, check_client
from start_llm.core.engine_request import EngineRequest
from start_llm.core.errors import InternalError
from start_llm.core.events import Failed, Finished
from start_llm.core.prompt_report import Receipt
from start_llm.serving.answer import GenerationPort
from start_llm.serving.prompt_account import PromptAccount
from start_llm.transcripts.beginnings import Beginning

type Submit = Callable[[EngineRequest], GenerationPort]


def warm(submit: Submit, beginning: Beginning) -> Receipt:
    """Read a beginning into memory, from the disk or by computing it, and return where it came from.

    It makes way for what somebody waits for, as all background requests do.

    Args:
        submit: puts a request into the engine's queue.

    Raises:
        Overloaded: the engine's queue is full.
        EngineDied: the engine has stopped.
        InternalError: it could not be computed.
        ClientGone: the client has left. What was read until then is kept.
    """
    request = replace(beginning.request(), is_background=True)
    account = PromptAccount(request.prompt.ids, range(0))
    generation = submit(request)
    try:
        while True:
            check_client()
            for event in generation.take(LOOK_S):
                account.note(event)
                match event:
                    case Finished():
                        return account.receipt()
                    case Failed(message):
                        raise InternalError(message)
                    case _:
                        pass
    finally:
        generation.cancel()
