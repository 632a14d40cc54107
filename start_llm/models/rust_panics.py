"""Turn a panic of a library that is written in Rust into an error of the request that caused it.

Such a panic reaches Python as `pyo3_runtime.PanicException`, which nobody can import, and which is no
`Exception`: it would end the thread, and the client's connection with it.
"""

from collections.abc import Generator
from contextlib import contextmanager

from start_llm.core.errors import InternalError

_MODULE = "pyo3_runtime"


@contextmanager
def panics_as_errors(library: str) -> Generator[None]:
    """Run a block that calls this library.

    Raises:
        InternalError: the library has panicked.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != _MODULE:
            raise
        raise InternalError(f"{library} has failed: {error}") from error
