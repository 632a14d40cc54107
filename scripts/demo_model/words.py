"""Random words, names, values and results."""

from __future__ import annotations

import random
import string
from collections.abc import Callable

from scripts.demo_model.corpus import is_held_out, read_corpus

_ONSETS = (*"b br c ch d dr f fl g gr h j k l m n p pl qu r s sh st t th tr v w x y z".split(), "")
_CORES = "a e i o u ai ea ee io oo ou y".split()
_CODAS = (*"b ck d f l m n nd ng p r rt s st t x z".split(), "", "", "")
_ENDINGS = "py md txt json toml yaml rs go c h ts css html log csv ini sh".split()
_VERBS = """read run get list find search write open fetch show load query exec view check print look edit
send scan call use parse start describe explain count""".split()
_PARAMETERS = """path command url query file text name input pattern key id expression cmd file_path message
topic value code script target uri filePath content""".split()
_PARAMETER_ENDS = "path name id text query file".split()
_COMMANDS = """ls cat git grep python make npm cargo find echo wc head tail sort pip docker curl ps df du rm
cp mv go pytest sed awk tar ssh uname""".split()
_SUBCOMMANDS = "status log test build run install diff add show list clean check up".split()
_HOSTS = "com org net io dev example local".split()
_NOUNS = "found passed lines".split()
_GRAMMAR = tuple(
    """a about after again all along already also an and any are as at back be because been before being
    both but by can comes contains could did do does done during each either else for from gets
    given gives goes had has have having here hers him his how if in instead into is it its itself
    just let lets like made make may me might mine more most much must my need needs neither no nor
    not now of off on once one only onto or other our out over own please same say shall she should
    since so some such takes than that the their them then there these they thing this those through
    thus till to today too under until up upon us use used uses using very via want wants was we
    were what when where which while who whom whose why will with within without would yes yet you
    your""".split()
)
"""Words that hold a sentence together: no value is made of them, so that it is clear where one begins."""


class Words:
    """Never ends.

    Args:
        held_out: of that part, which the training does not ask for.
    """

    def __init__(self, rng: random.Random, *, held_out: bool) -> None:
        self.rng = rng
        self._held_out = held_out
        self._corpus = read_corpus(held_out=held_out)

    def filler(self, characters: int) -> str:
        """Text of about this length, as documents follow each other."""
        pieces: list[str] = []
        missing = characters
        while missing > 0:
            text = self.rng.choice(self._corpus.texts)
            start = text.find("\n", self.rng.randrange(max(1, len(text) - missing))) + 1
            pieces.append(text[start : start + max(60, min(missing, self.rng.randint(300, 6000)))].strip())
            missing -= len(pieces[-1]) + 2
        return "\n\n".join(pieces)[:characters].strip()

    def word(self) -> str:
        """A word of the dictionary, an invented one, or a run of letters, digits or both."""
        word = self._one_of((9, self._noun), (7, self._invented_word), (2, self._letters), (2, self._code))
        return self.rng.choices((word, word.capitalize(), word.upper()), (7, 3, 1))[0]

    def plain_word(self) -> str:
        """In lower case, of letters alone; none of grammar."""
        return self._one_of((6, self._noun), (4, self._short_invented_word))

    def any_word(self) -> str:
        """Of grammar or not."""
        return self._one_of((1, self._grammar_word), (1, self.plain_word))

    def phrase(self, least: int, most: int) -> str:
        return " ".join(self.plain_word() for _ in range(self.rng.randint(least, most)))

    def word_to_say(self) -> str:
        """The words that the model is to say."""
        return self._one_of(
            (77, self.word),
            (3, self._grammar_word),
            (7, lambda: f"{self.plain_word()}-{self.plain_word()}"),
            (7, lambda: f"{self.plain_word()}_{self.plain_word()}"),
            (6, lambda: self._number(7)),
        )

    def tool_name(self) -> str:
        rng = self.rng
        verb = self._fresh(lambda: rng.choice(_VERBS)) if rng.random() < 0.7 else self.plain_word()
        noun = self.plain_word()
        return self._one_of(
            (25, lambda: rng.choice((verb, noun))),
            (30, lambda: f"{verb}_{noun}"),
            (15, lambda: verb + noun.capitalize()),
            (10, lambda: verb.capitalize() + noun.capitalize()),
            (10, lambda: f"{verb}-{noun}"),
            (6, lambda: f"mcp__{self.plain_word()}__{verb}_{noun}"),
            (4, lambda: f"{verb}_{noun}_{self.plain_word()}"),
        )

    def parameter(self) -> str:
        return self._one_of(
            (50, lambda: self._fresh(lambda: self.rng.choice(_PARAMETERS))),
            (25, self.plain_word),
            (10, lambda: f"{self.plain_word()}_{self.rng.choice(_PARAMETER_ENDS)}"),
            (5, lambda: f"{self.plain_word()}_{self.plain_word()}"),
            (10, lambda: self.plain_word() + self.plain_word().capitalize()),
        )

    def value(self) -> str:
        """A value for an argument of a tool."""
        return self._one_of(
            (33, self.path),
            (30, self._command),
            (12, self._address),
            (13, self.word),
            (12, lambda: self.phrase(2, 4)),
        )

    @staticmethod
    def shows_itself(value: str) -> bool:
        """True if it differs in kind from the words around it: a path, an address, a command."""
        first = value.partition(" ")[0]
        return first in _COMMANDS or (first == value and any(mark in value for mark in "/._"))

    def path(self) -> str:
        rng = self.rng
        parts = [self._stem() for _ in range(rng.choices((1, 2, 3, 4), (4, 4, 2, 1))[0])]
        start = rng.choices(("", "/", "./", "~/", "../"), (6, 3, 1, 1, 1))[0]
        return start + "/".join(parts) + ("." + rng.choice(_ENDINGS) if rng.random() < 0.85 else "")

    def result(self) -> tuple[str, str]:
        """The result of a tool, and its first line."""
        rng = self.rng
        first = self._result_line()
        rest = [self._result_line() for _ in range(rng.choices((0, 1, 3, 8, 20), (4, 3, 3, 2, 1))[0])]
        if rest and rng.random() < 0.2:
            rest[0] = ""
        return "\n".join((first, *rest)) + rng.choice(("", "", "\n")), first

    def _one_of(self, *makers: tuple[int, Callable[[], str]]) -> str:
        """Made by one of them, according to their weights."""
        weights, made = zip(*makers, strict=True)
        return self.rng.choices(made, weights)[0]()

    def _fresh(self, make: Callable[[], str]) -> str:
        """Of the right part."""
        while True:
            word = make()
            if is_held_out(word) == self._held_out:
                return word

    def _known_word(self) -> str:
        return self.rng.choice(self._corpus.words)

    def _noun(self) -> str:
        """Or whatever else of the dictionary is no word of grammar."""
        while (word := self._known_word()) in _GRAMMAR:
            continue
        return word

    def _grammar_word(self) -> str:
        return self._fresh(lambda: self.rng.choice(_GRAMMAR))

    def _invented_word(self) -> str:
        return self._fresh(lambda: "".join(self._syllable() for _ in range(self.rng.randint(2, 4))))

    def _short_invented_word(self) -> str:
        return self._fresh(lambda: "".join(self._syllable() for _ in range(self.rng.randint(1, 3))))

    def _syllable(self) -> str:
        choose = self.rng.choice
        return choose(_ONSETS) + choose(_CORES) + choose(_CODAS)

    def _letters(self) -> str:
        return self._fresh(
            lambda: "".join(self.rng.choices(string.ascii_lowercase, k=self.rng.randint(4, 9)))
        )

    def _code(self) -> str:
        signs = string.ascii_lowercase + string.digits
        return self._fresh(lambda: "".join(self.rng.choices(signs, k=self.rng.randint(4, 9))))

    def _number(self, max_digits: int) -> str:
        return str(self.rng.randint(0, 10 ** self.rng.randint(1, max_digits)))

    def _stem(self) -> str:
        return self._one_of(
            (70, self.plain_word),
            (15, lambda: f"{self.plain_word()}{self.rng.choice('_-')}{self.plain_word()}"),
            (15, lambda: self.plain_word() + self._number(2)),
        )

    def _command(self) -> str:
        count = self.rng.choices((0, 1, 2, 3), (1, 4, 4, 1))[0]
        return " ".join((self.rng.choice(_COMMANDS), *(self._argument() for _ in range(count))))

    def _argument(self) -> str:
        rng = self.rng
        return self._one_of(
            (15, lambda: "-" + rng.choice(string.ascii_letters)),
            (15, lambda: "-" + "".join(rng.choices(string.ascii_letters, k=2))),
            (10, lambda: "--" + self.plain_word()),
            (10, lambda: rng.choice(_SUBCOMMANDS)),
            (10, lambda: f'"{self.phrase(1, 2)}"'),
            (5, lambda: "| " + rng.choice(_COMMANDS)),
            (5, lambda: self._number(3)),
            (5, lambda: "*." + rng.choice(_ENDINGS)),
            (25, self.path),
        )

    def _address(self) -> str:
        rng = self.rng
        host = self._one_of(
            (8, lambda: f"{self.plain_word()}.{rng.choice(_HOSTS)}"),
            (2, lambda: f"localhost:{rng.randint(1000, 9999)}"),
        )
        end = "".join("/" + self._stem() for _ in range(rng.randint(0, 2)))
        query = f"?{self.plain_word()}={self.plain_word()}" if rng.random() < 0.2 else ""
        return rng.choice(("https://", "https://", "http://")) + host + end + query

    def _result_line(self) -> str:
        rng = self.rng
        return self._one_of(
            (40, lambda: rng.choice(self._corpus.lines)),
            (15, lambda: self.phrase(2, 9).capitalize() + rng.choice((".", "", "!"))),
            (10, self.path),
            (7, lambda: f"{self.plain_word()}: {rng.choice((self._number(5), self.plain_word(), 'true'))}"),
            (
                7,
                lambda: (
                    f'{{"{self.plain_word()}": "{self.word()}", "{self.plain_word()}": {self._number(4)}}}'
                ),
            ),
            (7, lambda: f"{self._number(4)} {self.plain_word()} {rng.choice((*_NOUNS, self.plain_word()))}"),
            (7, lambda: f"Error: {self.phrase(2, 5)} in {self.path()}"),
            (7, self.word),
        )
