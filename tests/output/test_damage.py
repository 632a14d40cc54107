"""No damaged reply harms an agent, and a harm would be found."""

import pytest

from tests.output.corpus.damage import HARMS, Tags, Tally, check, outputs
from tests.output.corpus.writers import WRITERS

QWEN = WRITERS["qwen_xml"]
SWALLOWED = (
    "<tool_call>\n<function=note>\n<parameter=path>\n/a.txt <parameter=limit>\n2\n</parameter>\n</function>"
)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", sorted(WRITERS))
def test_no_damaged_reply_harms_an_agent(name):
    tags, tally = Tags.of(WRITERS[name]), Tally()
    for text, is_single in outputs(WRITERS[name], 40).items():
        check(WRITERS[name], text, tally, tags, is_single=is_single)
    assert tally.outputs == 40
    assert tally.calls
    assert not [example for example in tally.examples if example[0] in HARMS]


def test_an_argument_in_an_argument_would_be_found():
    tally = Tally()
    check(QWEN, SWALLOWED, tally, Tags.of(QWEN))
    assert tally.harms["wrong"]
    check(QWEN, SWALLOWED, tally, Tags.of(QWEN), is_single=False)
    assert tally.harms["words"]


@pytest.mark.parametrize("name", sorted(name for name, writer in WRITERS.items() if writer.streams))
def test_every_tag_of_an_argument_would_be_found_and_the_end_of_a_value_too(name):
    text = WRITERS[name].call("write", path="/a.txt", text="one", limit=2)
    tags = Tags.of(WRITERS[name])
    path, note, limit = tags.beginning.finditer(text)
    assert tags.is_swallowed(text[path.end() :])
    assert not tags.is_swallowed(text[limit.end() :])
    assert tags.has_several_readings("path", text[path.end() :])
    swallowed = f"/a.txt\n{text[note.start() : note.end()]}one"
    assert tags.may_swallow or not tags.has_several_readings("path", swallowed)
    assert tags.has_several_readings("text", swallowed)
