"""ASGI's types."""

from collections.abc import Awaitable, Callable
from typing import Any

type Send = Callable[[Any], Awaitable[None]]
type Receive = Callable[[], Awaitable[Any]]
type Application = Callable[[Any, Receive, Send], Awaitable[None]]
