"""Parses calls that only the end of the reply tells from text."""

from start_llm.formats.reading.parts import CallReader, ParsedText, Part, State


class LastBlockReader:
    """Reads a block that is calls only if the reply ends behind it, and only as the model wrote them.

    Args:
        beginning: the text of the block that has been read already.
    """

    def __init__(self, reader: CallReader, beginning: str) -> None:
        self.state: State = "reading"
        self.rest = ""
        self.was_repaired = False
        self._reader = reader
        self._parts: list[Part] = []
        self._read(beginning)

    def feed(self, text: str) -> list[Part]:
        self._read(text)
        return []

    def close(self, complete: bool) -> list[Part]:
        if not complete or self._reader.state != "done" or self.state == "failed":
            self.state = "failed"
            return []
        self.state = "done"
        return self._parts

    def _read(self, text: str) -> None:
        if self._reader.state == "reading":
            self._parts += self._reader.feed(text)
            text = self._reader.rest
        is_over = self._reader.state == "done"
        is_text = any(isinstance(part, ParsedText) for part in self._parts)
        if (
            self._reader.state == "failed"
            or self._reader.was_repaired
            or is_text
            or (is_over and text.strip())
        ):
            self.state = "failed"
