"""Holds back trailing white space. A state machine without I/O."""


class TrailingSpace:
    """Holds back white space at the end of a text until it is known whether it belongs to the text.

    The cost per piece is constant, even if a model writes nothing but line breaks.

    Args:
        characters: the characters to hold back; all white space if None.
    """

    def __init__(self, characters: str | None = None) -> None:
        self._characters = characters
        self._held: list[str] = []

    def pass_on(self, text: str) -> str:
        """Return the text that can be sent after `text` arrived. White space at its end is held back."""
        stripped = text.rstrip(self._characters)
        ready = self.release() + stripped if stripped else ""
        if len(stripped) < len(text):
            self._held.append(text[len(stripped) :])
        return ready

    def release(self) -> str:
        """Return the held white space, which belongs to the text."""
        held = "".join(self._held)
        self._held.clear()
        return held

    def drop(self) -> None:
        """Discard the held white space."""
        self._held.clear()
