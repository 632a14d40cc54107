"""What the benchmark of agents' turns says that nobody can avoid: it follows from what the client changed."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from benchmarks.agent_servers import HttpServer
from tests.agents.agent_account import SLACK_TOKENS, Ledger, Message, Rendering, Request, Sample, user
from tests.agents.agent_clients import CLIENTS, Change, Client, new_lines
from tests.agents.agent_shapes import SHAPES, Chat, Player, Reply, Size, build_model
from tests.serving import serving
from tests.templates.traits import trait_folder

pytestmark = pytest.mark.thorough

OPENING_TOKENS = 100
"""A comparison of tokens saves at most so many of a message that begins like an earlier one: an envelope."""
CALL = {
    "id": "call1",
    "type": "function",
    "function": {"name": "run_command", "arguments": '{"command": "ls"}'},
}


@pytest.fixture(scope="module")
def rendering(tmp_path_factory) -> Rendering:
    return Rendering(build_model("random", "qwen3", tmp_path_factory.mktemp("account") / "model"))


@dataclass
class ComparesTokens:
    """A server that computes what no earlier prompt or reply had at its place, and knows no conversations."""

    rendering: Rendering
    known: list[list[int]] = field(default_factory=list)

    def ask(self, request: Request) -> Reply:
        prompt = self.rendering.tokens(request)
        cached = max((common_length(prompt, earlier) for earlier in self.known), default=0)
        fields = {"content": f"Reply {len(self.known)}", "reasoning_content": "Hm.", "tool_calls": [CALL]}
        message = {"role": "assistant", **fields}
        answered = [*request.messages, message]
        self.known.append(self.rendering.tokens(Request.of(answered, request.tools)))
        return Reply(message=message, first_s=0.0, prompt_tokens=len(prompt), cached_tokens=cached)

    def leave(self, request: Request, after_s: float) -> None:
        raise NotImplementedError

    def prefilled_tokens(self) -> None:
        return None


def common_length(ids: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), len(other))


def samples(rendering: Rendering, client: Client, turns: int = 4) -> list[Sample]:
    player = Player(ComparesTokens(rendering), rendering, own=False)
    chat = Chat.begin(player, "Instructions", "Task", client=client)
    for _ in range(turns):
        chat.turn()
    return player._account.samples


def of_kind(*kinds: Change) -> Iterator[Client]:
    return (client for client in CLIENTS.values() if client.changes in kinds)


def named(clients: Iterator[Client]) -> list:
    return [pytest.param(client, id=client.title) for client in clients]


# ---------------------------------------------------------------------------------------------- what is new


def test_what_was_asked_and_answered_is_known_and_the_rest_is_new(rendering):
    ledger = Ledger(rendering)
    question, answer, more = user("What is this?"), {"role": "assistant", "content": "A file."}, user("Why?")
    first, second = Request.of([question]), Request.of([question, answer, more])
    assert ledger.charge(first).new == len(rendering.tokens(first))
    ledger.heard(first, answer)
    charge = ledger.charge(second)
    assert charge.new == charge.unavoidable
    behind = len(rendering.tokens(second)) - rendering.length_before_next(second, 2)
    assert charge.new == behind + rendering.closer_length + 1


def test_without_any_change_nothing_but_the_new_is_unavoidable(rendering):
    assert all(sample.new == sample.unavoidable for sample in samples(rendering, Client()))


@pytest.mark.parametrize("client", named(of_kind(Change.SPELLING)))
def test_who_only_spells_it_in_another_way_makes_nothing_unavoidable(rendering, client):
    assert all(sample.new == sample.unavoidable for sample in samples(rendering, client))


# ------------------------------------------------------------------------------------------ what must be read


@pytest.mark.parametrize("client", named(of_kind(Change.NEWS)))
def test_of_what_is_so_now_the_changed_lines_are_unavoidable(rendering, client):
    for number, sample in enumerate(samples(rendering, client)):
        before = client.spell(messages(), number - 1) if number else client.spell(messages(), number)
        lines = new_lines(client.spell(messages(), number), before)
        assert sample.unavoidable - sample.new == len(rendering.encode("\n".join(lines)))


def messages() -> list[Message]:
    return [{"role": "system", "content": "Rules"}, user("Question")]


def test_lines_that_are_the_same_or_gone_are_no_news():
    assert new_lines([user("one\nthree"), user("four")], before=[user("one\ntwo\nthree")]) == ["four"]


# ------------------------------------------------------------------------------- what must be computed again


@pytest.mark.parametrize("client", named(of_kind(Change.PREFIX)))
def test_behind_what_may_not_be_used_a_comparison_of_tokens_computes_what_is_unavoidable(rendering, client):
    """No server can do with less: it would have to use tokens that stood behind other ones."""
    played = samples(rendering, client)
    assert all(0 <= sample.unavoidable - sample.computed <= OPENING_TOKENS for sample in played)
    assert all(sample.unavoidable > sample.new for sample in played[2:])


@pytest.mark.parametrize("client", named(of_kind(Change.CONTENT)))
def test_new_text_counts_as_new(rendering, client):
    assert all(sample.new == sample.unavoidable for sample in samples(rendering, client))


# ---------------------------------------------------------------- templates that cannot show what agents send


SMALL = Size(turns=3, drifting=3, trunk=2, branch=1, resumed=1, others=1, long_tokens=100)
OPENING_OF_ALL = 8
"""Tokens with which every prompt opens: they are never computed again, and the account does not say so."""


@pytest.mark.long
@pytest.mark.sample(3)
@pytest.mark.parametrize("trait", ["no_system", "tools_before_last_user"])
@pytest.mark.parametrize("shape", ["turns", "branch", "results"])
def test_a_template_whose_roles_alternate_gets_what_the_server_makes_of_a_conversation(
    trait: str, shape: str, tmp_path
):
    """The account gave Gemma's template the client's own messages, and ended with what it raised."""
    folder = trait_folder(trait, tmp_path)
    rendering, asked = Rendering(folder), list[tuple[int, int | None]]()

    class Counting(HttpServer):
        def ask(self, request: Request) -> Reply:
            reply = super().ask(request)
            asked.append((len(rendering.tokens(request)), reply.prompt_tokens))
            return reply

    with serving(folder) as server:
        player = Player(Counting(f"{server.url}/v1", "default_model"), rendering, own=False)
        account = player.play(SHAPES[shape], SMALL)
    assert all(counted == reported for counted, reported in asked)
    for sample in account.samples if trait == "no_system" else ():
        assert -OPENING_OF_ALL <= sample.excess <= SLACK_TOKENS
