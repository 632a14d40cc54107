"""The engine thread: prefill, decode, sampling, stopping."""

# start_llm.models has to be imported before mlx_lm: see there.
import start_llm.models  # noqa: F401  # pyright: ignore[reportUnusedImport]
