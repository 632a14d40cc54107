"""How people ask for what the demo model can do, as it is trained on them.

The wordings stand in `calls.txt`, `echoes.txt` and `questions.txt`, one in a line. The judge,
`benchmarks demo_model`, asks in words of its own, which stand nowhere here.
"""

from __future__ import annotations

import re
from pathlib import Path

from scripts.demo_model.words import Words


def _lines(name: str) -> list[str]:
    return Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()


_USE = (
    "use|please use|could you use|take|now use|use now|go and use|I would like you to use|"
    "you should use|can you use|call|invoke|make use of|then use|next, use|start|let us use"
).split("|")
_DO = (
    "run|read|open|fetch|execute|look up|check|load|get|print|list|search for|process|find|look at|"
    "view|handle|do|see|download|parse|work on"
).split("|")
_TOOLS = (
    "the {name} tool|the {name} tool|{name}|the tool {name}|the `{name}` tool|`{name}`|"
    'the "{name}" tool|the tool `{name}`|the tool called {name}|the function {name}|'
    "the {name} function"
).split("|")
_CALLS = _lines("calls.txt")
_VALUE_SHAPES = ("{}", "{}", "{}", "{}", "{}", "`{}`", "`{}`", '"{}"', "'{}'")
_SET_OFF = (":\n{}", "\n{}", ": {}", " this: {}")
_CALL_ENDS = (
    "||||.|.|!|?|.\n| please|, please.| now|. Thank you.|. Then tell me what it says.|. What does it say?"
    "|. I need the result.|\nReport what comes back."
).split("|")
_BEFORE = "|||||Hi. |Now |OK, |Next: |Hello! |One more thing: |First, |Good. ".split("|")

_ECHOES = _lines("echoes.txt")
_WORD_SHAPES = ("{}", "{}", "{}", "{}", '"{}"', "'{}'", "`{}`", "**{}**")
_ECHO_ENDS = "||||.|.|!| please|, please.|. Nothing else.|. No more than that.|?".split("|")

_QUESTIONS = _lines("questions.txt")

_COPIED = ("{value}", "{x}")
_ENOUGH_WORDS = 3
_VARIED = 0.35


def call(words: Words, name: str, value: str) -> str:
    """A request to call the tool `name` with `value`."""
    rng = words.rng
    frame, shape = _quoted(rng.choice(_CALLS), rng.choice(_VALUE_SHAPES), value)
    is_quoted = shape != "{}" or re.search(r"[\"'`]{value}", frame) is not None
    frame = _varied(words, frame, shows_itself=is_quoted or words.shows_itself(value))
    do = rng.choice(_DO) if rng.random() < 0.75 else words.plain_word()
    use = rng.choice(_USE) if rng.random() < 0.9 else words.plain_word()
    end = _ended(frame, rng.choice(_CALL_ENDS))
    if shape == "{}" and frame.endswith("{value}"):
        if end.startswith((" ", ",")):  # it could be part of the value
            end = ""
        if frame.removesuffix(" {value}")[-1].isalpha() and rng.random() < 0.1:
            frame, shape = frame.replace(" {value}", "{value}"), rng.choice(_SET_OFF)
    tool = rng.choice(_TOOLS).replace("{name}", name)
    text = (
        filled(words, frame)
        .replace("{use}", use)
        .replace("{do}", do)
        .replace("{tool}", tool)
        .replace("{name}", name)
    )
    return _begun(words, text, verbatim=name).replace("{value}", shape.replace("{}", value)) + end


def _quoted(frame: str, shape: str, value: str) -> tuple[str, str]:
    """With the frame's quotes around the value or those of the shape, or with none if the value has such."""
    own = re.search(r"([\"'`]){value}\1", frame)
    marks = own[1] if own else shape.replace("{}", "")
    if not own:
        return frame, "{}" if any(mark in value for mark in marks) else shape
    return (frame.replace(own[0], "{value}"), "{}") if marks in value else (frame, "{}")


def echo(words: Words, wanted: str) -> str:
    """A request to say `wanted`."""
    shape = words.rng.choice(_WORD_SHAPES)
    wording = _varied(words, words.rng.choice(_ECHOES))
    frame = filled(words, _begun(words, wording, verbatim="{"))
    if re.search(r"[\"'`]{x}", frame):
        shape = "{}"
    return frame.replace("{x}", shape.replace("{}", wanted)) + _ended(frame, words.rng.choice(_ECHO_ENDS))


def question(words: Words) -> str:
    """Anything that the model cannot do."""
    return filled(words, _begun(words, words.rng.choice(_QUESTIONS), verbatim="{"))


def _ended(frame: str, end: str) -> str:
    """The end, unless the frame has one of its own; another sentence may follow that."""
    if not frame.endswith((".", "?", "!")):
        return end
    return f" {end[2:]}" if end.startswith(". ") else ""


def _varied(words: Words, frame: str, *, shows_itself: bool = False) -> str:
    """Now and then with a word missing, added or replaced, if there are enough: there are more wordings than
    anybody lists.

    Args:
        shows_itself: where the text that is to be copied begins and ends can be seen from itself. Else what
            stands beside it stays, since it shows that.
    """
    rng = words.rng
    parts = frame.split(" ")
    copied = [place for place, part in enumerate(parts) if any(mark in part for mark in _COPIED)]
    kept = set(copied) if shows_itself else {place + step for place in copied for step in (-1, 0, 1)}
    free = [place for place, part in enumerate(parts) if part.isalpha() and place not in kept]
    if len(free) < _ENOUGH_WORDS or rng.random() >= _VARIED:
        return frame
    place = rng.choice(free)
    parts[place : place + 1] = rng.choice(
        ([], [words.any_word()], [words.any_word()], [words.any_word(), parts[place]])
    )
    return " ".join(parts)


def filled(words: Words, frame: str) -> str:
    """With something at random wherever the frame names a kind of it."""
    makers = {
        "thing": words.plain_word,
        "Thing": lambda: words.plain_word().capitalize(),
        "path": words.path,
        "number": lambda: str(words.rng.randint(0, 999)),
        "noise": lambda: words.phrase(1, 6),
        "text": lambda: words.filler(words.rng.randint(20, 300)),
        "block": lambda: "\n\n" + words.filler(words.rng.randint(20, 300)),
    }
    return re.sub("|".join(rf"{{{name}}}" for name in makers), lambda place: makers[place[0][1:-1]](), frame)


def _begun(words: Words, text: str, verbatim: str) -> str:
    """With something in front of it, and mostly a capital, unless it begins with what must stay as it is."""
    before = words.rng.choice(_BEFORE)
    if not before.endswith((", ", "w ")) and not text.startswith(verbatim) and words.rng.random() < 0.85:
        text = text[0].upper() + text[1:]
    return before + text
