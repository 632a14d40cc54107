"""The error tree.

StartLLMError
├── StartupError                 the server cannot start: message on stderr, exit status 2
│   ├── SettingsError
│   ├── ModelError
│   │   └── HubError             the hub cannot be reached
│   ├── PortError
│   ├── LaunchError              a client cannot be started
│   ├── RanksApart               processes of one model do not find each other: status 75
│   └── CommandError             a command cannot do what it is asked for
├── RequestError                 refused: a body in the protocol's form, or an event of a begun stream
│   ├── InvalidRequest           400
│   │   ├── InvalidImage         400
│   │   └── ContextOverflow      400
│   │       └── OverBudget       400
│   ├── Unauthorized             401
│   ├── Forbidden                403
│   ├── NotFound                 404
│   ├── MethodNotAllowed         405
│   ├── RequestTimeout           408
│   ├── Conflict                 409
│   ├── LengthRequired           411
│   ├── BodyTooLarge             413
│   ├── UnsupportedMediaType     415
│   ├── RateLimited              429
│   ├── HeadersTooLarge          431
│   ├── InternalError            500
│   ├── BadGateway               502
│   └── Overloaded               503
├── EngineDied                   the engine thread is gone: 500
├── ConstraintViolated           a reply does not follow its output constraint
└── ClientGone                   the client has disconnected
"""

from collections.abc import Mapping, Sequence

_ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def anthropic_type(status: int) -> str:
    """Return Anthropic's error type for a status. OpenAI's clients look at the status alone."""
    return _ANTHROPIC_TYPES.get(status, "invalid_request_error")


class StartLLMError(Exception):
    """Base class of every error that this package raises on purpose."""


class StartupError(StartLLMError):
    """The server cannot start. The message says what is wrong and how to fix it.

    Attributes:
        status: of the process that ends for it.
    """

    status = 2


class RanksApart(StartupError):
    """Processes that compute one model together do not find each other, and may when they try again."""

    status = 75


class SettingsError(StartupError):
    """A setting has an invalid value."""


class ModelError(StartupError):
    """The model cannot be found, downloaded or loaded."""


class HubError(ModelError):
    """The hub cannot be reached, or stopped in the middle of a file."""


class PortError(StartupError):
    """The address cannot be bound."""


class LaunchError(StartupError):
    """A client cannot be started for a server, or no server runs that it could be started for."""


class CommandError(StartupError):
    """A command cannot do what it is asked for. The message says why, and what to do instead."""


class RequestError(StartLLMError):
    """A request that is refused.

    It is before the status line is written, unless its stream has begun while its model was loaded (ADR 16).

    Attributes:
        status: HTTP status code.
        kind: machine-readable class of the error (`error.type` in OpenAI's protocol).
        param: path of the field at fault, such as `messages[2].content`; None if no field is.
        code: finer machine-readable code, or None.
        headers: additional response headers.
    """

    status = 400
    kind = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.headers: Mapping[str, str] = {}


class InvalidRequest(RequestError):
    """The endpoint does not accept the body; `param` names the field."""


class InvalidImage(InvalidRequest):
    """An image of the request is not accepted; `code` is OpenAI's name for what is wrong."""

    def __init__(self, message: str, *, param: str, code: str | None) -> None:
        super().__init__(message, param=param)
        self.code = code


class ContextOverflow(InvalidRequest):
    """The prompt leaves no room for a reply in the context window; eviction or waiting cannot help.

    Attributes:
        window: tokens that prompt and reply may have together.

    Args:
        is_counted: False if the prompt was not encoded, because it surely has at least that many.
    """

    code = "context_length_exceeded"

    def __init__(self, *, prompt_tokens: int, window: int, param: str, is_counted: bool = True) -> None:
        self._length = str(prompt_tokens) if is_counted else f"at least {prompt_tokens}"
        super().__init__(
            f"This model's maximum context length is {window} tokens. However, your messages resulted in "
            f"{self._length} tokens, which leaves no room for a reply.",
            param=param,
        )
        self.prompt_tokens = prompt_tokens
        self.window = window


class OverBudget(ContextOverflow):
    """The prompt fits the model's context window, but not this machine's memory.

    Eviction or waiting cannot help.

    Args:
        window: tokens that fit into memory.
        budget_bytes: memory budget for everything.
    """

    kind = "memory_admission"
    code = "context_over_budget"

    def __init__(
        self, *, prompt_tokens: int, window: int, budget_bytes: int, param: str, is_counted: bool = True
    ) -> None:
        super().__init__(prompt_tokens=prompt_tokens, window=window, param=param, is_counted=is_counted)
        self.message = (
            f"This model's maximum context length is {window} tokens within the memory budget of "
            f"{budget_bytes / 2**30:.1f} GiB. However, your messages resulted in {self._length} tokens."
        )


class Unauthorized(RequestError):
    """The API key is missing or wrong."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.headers = {"WWW-Authenticate": "Bearer"}


class Forbidden(RequestError):
    """The request comes from a web page, or its Host is not one of the server's."""

    status = 403
    kind = "permission_error"


class NotFound(RequestError):
    """There is no such path or object."""

    status = 404
    kind = "not_found_error"


class MethodNotAllowed(RequestError):
    """The path exists but accepts only the methods in `allowed`."""

    status = 405

    def __init__(self, message: str, *, allowed: Sequence[str] = ("GET", "HEAD", "POST")) -> None:
        super().__init__(message)
        self.headers = {"Allow": ", ".join(allowed)}


class RequestTimeout(RequestError):
    """The client did not finish sending the request in time."""

    status = 408
    kind = "timeout_error"


def body_too_slow(body_s: float) -> RequestTimeout:
    return RequestTimeout(f"The body did not arrive within {body_s:g} seconds.")


class Conflict(RequestError):
    """The object is not in a state in which this can be done to it."""

    status = 409
    kind = "conflict_error"


class LengthRequired(RequestError):
    """The body has no usable Content-Length."""

    status = 411


class BodyTooLarge(RequestError):
    """The body is longer than MAX_BODY_BYTES."""

    status = 413


def body_too_large(max_body_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is longer than the {max_body_bytes} bytes that MAX_BODY_BYTES allows.")


class UnsupportedMediaType(RequestError):
    """The body's Content-Type is not JSON, or its Content-Encoding is not known."""

    status = 415


class HeadersTooLarge(RequestError):
    """The request line or the headers are too long."""

    status = 431


class InternalError(RequestError):
    """The engine failed before any part of the reply was sent."""

    status = 500
    kind = "server_error"


class BadGateway(RequestError):
    """Another server, such as the hub of models, did not give what is needed."""

    status = 502
    kind = "upstream_error"


class Overloaded(RequestError):
    """The server is busy; the client should retry after `retry_after_s` seconds."""

    status = 503
    kind = "overloaded_error"

    def __init__(self, message: str, *, retry_after_s: int = 2) -> None:
        super().__init__(message)
        self.headers = {"Retry-After": str(retry_after_s)}


class RateLimited(RequestError):
    """The API key has had as much as it may; the client should retry after `retry_after_s` seconds."""

    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.headers = {"Retry-After": str(retry_after_s)}


class EngineDied(StartLLMError):
    """The engine thread has ended, so no more replies can be generated."""


class ConstraintViolated(StartLLMError):
    """A reply violated its output constraint, or the constraint has become too large to follow."""


class ClientGone(StartLLMError):
    """The client closed its connection, or stopped reading for too long."""
