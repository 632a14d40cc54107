"""Reasoning between marks, and answers that talk about marks."""

from dataclasses import replace

from start_llm.core.family import Family
from start_llm.formats.registry import family_by_name
from tests.output.corpus.case import NO_TOOLS, TAGS, Call, Case
from tests.output.corpus.common import READ
from tests.output.corpus.writers import WRITERS

_QWEN = WRITERS["qwen_xml"].family
_ORPHAN = replace(_QWEN, orphan_close=True)
_GEMMA = Family(name="gemma4", reasoning=family_by_name("gemma4").reasoning, formats=("gemma4",))
_MISTRAL = Family(name="mistral", reasoning=family_by_name("mistral").reasoning)
_KIMI = family_by_name("kimi")
COHERE = Family(
    name="cohere",
    reasoning=family_by_name("cohere").reasoning,
    answer_marks=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    formats=("hermes",),
)
K3 = Family(
    name="kimi_k3",
    reasoning=family_by_name("kimi_k3").reasoning,
    answer_marks=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    formats=("hermes",),
)
"""Families with marks around their answers."""
HUNYUAN, ERNIE = family_by_name("hunyuan"), family_by_name("ernie")
GRANITE = replace(family_by_name("granite"), reasoning=TAGS)
"""Families with marks around their answers that ordinary text may have too."""
_UNTHINKING = replace(K3, reasoning=None)
_MARKED = Call("write", {"text": "<|channel>thought a<channel|><|START_RESPONSE|>b"})
_NONE = Family(name="none")
_CALL = WRITERS["qwen_xml"].write([READ])
_KIMIS = WRITERS["kimi"].write([READ])
_SECTION = "<|tool_calls_section_begin|>"


def _case(name, text, reasoning="", content="", calls: tuple[Call, ...] = (), family=_QWEN, **more) -> Case:
    return Case(
        name=name, text=text, reasoning=reasoning, content=content, calls=calls, family=family, **more
    )


CASES = (
    _case("reasoning and an answer", "<think>\nHm.\n\nWell.\n</think>\n\nDone.\n", "Hm.\n\nWell.", "Done.\n"),
    _case("white space before reasoning", " \n<think>Hm.</think>Done.", "Hm.", "Done."),
    _case("empty reasoning", "<think>\n\n</think>\n\nDone.", "", "Done."),
    _case("reasoning alone", "<think>\nHm.\n</think>\n", "Hm."),
    _case("spaces that belong to reasoning", "<think>  Hm.  </think>  Done.", "  Hm.  ", "  Done."),
    _case(
        "reasoning that the prompt opened",
        "\n\nHm.\n</think>\n\nDone.",
        "Hm.",
        "Done.",
        reasoning_is_open=True,
    ),
    _case("reasoning that is closed at once", "</think>Done.", "", "Done.", reasoning_is_open=True),
    _case("reasoning that never ends", "<think>Hm.\n\n", "Hm.\n\n"),
    _case("half a mark at the end of reasoning", "<think>Hm.\n</thi", "Hm.\n</thi"),
    _case("half a mark inside reasoning", "<think>a </thin </think >b</think>c", "a </thin </think >b", "c"),
    _case("the opening mark inside reasoning", "<think>a <think> b</think>c", "a <think> b", "c"),
    _case("opening marks in a row", "<think><think>\n<think>Hm.</think>Done.", "Hm.", "Done."),
    _case("half an opening mark", "<thin", "", "<thin"),
    _case("an opening mark that is none", "  <thinking>a", "", "  <thinking>a"),
    _case(
        "marks in an answer", "<think>a</think>Use <think> and </think>.", "a", "Use <think> and </think>."
    ),
    _case(
        "marks in an answer without reasoning", "Use <think> and </think>.", "", "Use <think> and </think>."
    ),
    _case("a closing mark that nothing opened", "a</think>b", "", "a</think>b"),
    _case("no text", ""),
    _case("nothing but white space", " \n ", "", " \n "),
    _case("reasoning although none was asked for", "<think>a</think>b", "a", "b", thinking=False),
    _case("Gemma's marks", "<|channel>thought\nHm.\n<channel|>Done.", "Hm.", "Done.", family=_GEMMA),
    _case("Gemma's marks around nothing", "<|channel>thought\n<channel|>Done.", "", "Done.", family=_GEMMA),
    _case("Mistral's marks", "[THINK]Hm.[/THINK]Done.", "Hm.", "Done.", family=_MISTRAL),
    _case("a model without reasoning", "<think>a</think>b", "", "<think>a</think>b", family=_NONE),
    _case("an orphaned close", "Hm.\n</think>\n\nDone.", "Hm.", "Done.", family=_ORPHAN),
    _case("an orphaned close and a call", f"Hm.\n</think>\n{_CALL}", "Hm.", "", (READ,), family=_ORPHAN),
    _case("an open although orphans may be", "<think>Hm.</think>Done.", "Hm.", "Done.", family=_ORPHAN),
    _case("no close at all", "Done.\n", "Done.\n", "Done.\n", family=_ORPHAN),
    _case(
        "no close and a call", f"I look.\n{_CALL}", f"I look.\n{_CALL}", "I look.", (READ,), family=_ORPHAN
    ),
    _case("no close and a cut", "Done.", "Done.", family=_ORPHAN, complete=False),
    _case(
        "no close where none was asked for", "a</think>b", "", "a</think>b", family=_ORPHAN, thinking=False
    ),
    _case("open reasoning of an orphan", "Hm.", "Hm.", "", family=_ORPHAN, reasoning_is_open=True),
    _case("a real open that is cut", "<think>Hm.", "Hm.", "", family=_ORPHAN, complete=False),
    _case("a real open that never ends", "<think>Hm.", "Hm.", "", family=_ORPHAN),
    _case(
        "Hermes in open reasoning",
        "<think><tool_call>",
        "<tool_call>",
        "",
        family=replace(_QWEN, reasoning=TAGS),
    ),
    _case("two pieces of reasoning", "<think>a</think>\n \n<think>\nb\n</think>\n\nDone.", "ab", "Done."),
    _case("three pieces of reasoning", "<think>a</think><think></think><think>c</think>Done.", "ac", "Done."),
    _case("reasoning after one that the prompt opened", "a</think>\n<think>b</think>c", "ab", "c",
          reasoning_is_open=True),
    _case("reasoning after one that was assumed", "a</think>\n<think>b</think>c", "ab", "c", family=_ORPHAN),
    _case("second reasoning that never ends", "<think>a</think>\n<think>b", "ab"),
    _case("half an opening mark after reasoning", "<think>a</think>\n<thin", "a", "<thin"),
    _case("reasoning in an answer that talks of it", "<think>a</think>b\n<think>c</think>", "a",
          "b\n<think>c</think>"),
    _case("a mark that opens what the prompt has opened", "<think>\nHm.</think>Done.", "Hm.", "Done.",
          reasoning_is_open=True),
    _case("a doubled opener at the start", "<think>\n<think>\n\nHm.</think>Done.", "Hm.", "Done."),
    _case("half a doubled opener", "<think>\n<thinHm.</think>Done.", "<thinHm.", "Done."),
    _case("a doubled opener that is cut", "<think><thin", "<thin", complete=False),
    _case("a closing mark before an answer", "\n</think>\n\nDone.", "", "Done."),
    _case("a closing mark too many", "<think>a</think>\n</think>\n\nDone.", "a", "Done."),
    _case("nothing but marks", "<think></think></think>"),
    _case("nothing but a closing mark", "</think>", thinking=False),
    _case("an opening mark that is cut", "\n<thin", complete=False),
    _case("a closing mark that is cut", "</thin", complete=False),
    _case("a letter that begins a mark", "<t", "", "<t", complete=False),
    _case("Gemma's channels without a label",
          "<|channel>first<channel|><|channel>thoughtful<channel|>One.<|channel>so<channel|>Two.",
          "firstthoughtfulso", "One.Two.", family=_GEMMA),
    _case("Gemma's channel without a label, and nothing else", "<|channel>just thinking<channel|>",
          "just thinking", "", family=_GEMMA),
    _case("Gemma's closing mark after an answer", "Yes?<channel|>", "", "Yes?", family=_GEMMA),
    _case("Gemma's empty reasoning after an answer",
          "Yes.\n<|channel>thought\n<channel|><|channel>thought\n<channel|>", "", "Yes.\n", family=_GEMMA),
    _case("Gemma's thought in an answer", "One.\n<|channel>thought\nHm.\n<channel|>\nTwo.", "Hm.",
          "One.\nTwo.", family=_GEMMA),
    _case("Gemma's doubled opener", "<|channel>thought\n<|channel>thought\nHm.<channel|>Yes.", "Hm.",
          "Yes.", family=_GEMMA),
    _case("Gemma's opener inside a thought", "<|channel>thought\nHm.<|channel>thought Well.<channel|>Yes.",
          "Hm. Well.", "Yes.", family=_GEMMA),
    _case("Gemma's marks around a call",
          f"<channel|>{WRITERS['gemma4'].write([READ])}<channel|><|channel>thought\nHm.<channel|>Yes.",
          "Hm.", "Yes.", (READ,), family=_GEMMA),
    _case("Gemma's marks in an argument", WRITERS["gemma4"].write([_MARKED]), "", "", (_MARKED,),
          family=_GEMMA),
    _case("Gemma's half a mark", "Yes.<|channel>", "", "Yes.", family=_GEMMA),
    _case("Gemma's half a mark at the start", "<|channel>thou", "", "", family=_GEMMA),
    _case("Gemma's mark in a call that is none", "<|tool_call>call:<channel|>!", "",
          "<|tool_call>call:!", family=_GEMMA),
    _case("a bracket at the end of an answer", "a[", "", "a[", family=_MISTRAL),
    _case("Mistral's reasoning in an answer", "a[THINK]b[/THINK]c[THINK]d[/THINK]", "bd", "ac",
          family=_MISTRAL),
    _case("a section of calls ends reasoning", f"Hm.\n{_KIMIS}", "Hm.", "", (READ,), reasoning_is_open=True,
          family=_KIMI),
    _case("a misspelt section of calls ends reasoning", f"Hm.\n{_KIMIS.replace('calls_', 'call_')}\nYes.",
          "Hm.", "Yes.", (READ,), reasoning_is_open=True, family=_KIMI),
    _case("a section of calls ends reasoning that is closed after it", f"Hm.\n{_KIMIS}</think>Yes.", "Hm.",
          "</think>Yes.", (READ,), reasoning_is_open=True, family=_KIMI),
    _case("a section of calls after a call in reasoning", f"Hm. {_CALL}{_KIMIS}", f"Hm. {_CALL}", "",
          (READ,), reasoning_is_open=True, family=_KIMI),
    _case("a section of calls that is cut in reasoning", f"Hm. {_SECTION[:-3]}", f"Hm. {_SECTION[:-3]}", "",
          reasoning_is_open=True, family=_KIMI, complete=False),
    _case("a section of calls without tools", f"Hm. {_KIMIS}", f"Hm. {_KIMIS}", "", reasoning_is_open=True,
          family=_KIMI, tools=NO_TOOLS),
    _case("marks around an answer", "<|START_THINKING|>Hm.<|END_THINKING|>\n<|START_RESPONSE|>\nYes.\n"
          "<|END_RESPONSE|>", "Hm.", "\nYes.\n", family=COHERE),
    _case("marks around an answer alone", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "", "Yes.",
          family=COHERE),
    _case("marks around nothing", "<|START_THINKING|>Hm.<|END_THINKING|> <|START_RESPONSE|><|END_RESPONSE|>",
          "Hm.", family=COHERE),
    _case("a mark of answers that is cut", "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESP", "Hm.",
          family=COHERE, complete=False),
    _case("a mark of answers that is cut after an answer", "<|START_RESPONSE|>Yes.<|END_R", "", "Yes.",
          family=COHERE, complete=False),
    _case("an operator at the end of an answer", "<|START_RESPONSE|>f <|", "", "f <|", family=COHERE),
    _case("marks around a call", f"<|START_RESPONSE|>I look.\n<|END_RESPONSE|>{_CALL}<|END_RESPONSE|>", "",
          "I look.", (READ,), family=COHERE),
    _case("a mark of answers after a call in reasoning",
          f"<|START_THINKING|>Hm. {_CALL}<|END_RESPONSE|>", "Hm. ", "", (READ,), family=COHERE),
    _case("a mark of answers in half a call in reasoning", "<|START_THINKING|><tool_call><|END_RESPONSE|>a",
          "<tool_call>a", "", family=COHERE),
    _case("a mark of answers in an argument", WRITERS["hermes"].write([_MARKED]), "", "", (_MARKED,),
          family=COHERE),
    _case("marks of several words", "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes."
          "<|close|>response<|sep|><|close|>message<|sep|>", "Hm.", "Yes.", family=K3),
    _case("words that are half marks", "<|open|>response<|sep|>a <|open|>resp b", "", "a <|open|>resp b",
          family=K3),
    _case("marks around an answer of a model without reasoning",
          "<|open|>response<|sep|>Yes.<|close|>message<|sep|>", "", "Yes.", family=_UNTHINKING),
    _case("Gemma's mark twice", "<|channel><|channel>thought\nHm.<channel|>Done.", "Hm.", "Done.",
          family=_GEMMA),
    _case("Gemma's mark twice after an answer", "Done.<|channel><|channel>thought\nHm.<channel|>", "Hm.",
          "Done.", family=_GEMMA),
    _case("a call at once that might be assumed reasoning", _CALL, calls=(READ,), family=_ORPHAN),
    _case("a call at once after white space", f"\n\n{_CALL}\nDone.", "", "Done.", (READ,), _ORPHAN),
    _case("no call at once", "<tool_call> is a tag.", "", "<tool_call> is a tag.", family=_ORPHAN),
    _case("an answer between ordinary marks", "<think>\nHm.\n</think>\n<answer>\nDone.\n</answer>", "Hm.",
          "Done.", family=HUNYUAN),
    _case("an answer between marks in its line", "<answer>Done.</answer>", "", "Done.", family=HUNYUAN),
    _case("white space after the last mark", "<answer>\nDone.\n</answer>\n ", "", "Done.", family=HUNYUAN),
    _case("no last mark", "<answer>\nDone.\n", "", "Done.\n", family=HUNYUAN),
    _case("half a last mark", "<answer>\nDone.\n</ans", "", "Done.\n</ans", family=HUNYUAN),
    _case("an answer that is empty", "<think>\n\n</think>\n<answer>\n\n</answer>", family=HUNYUAN),
    _case("an answer about its marks", "<answer>\nWrite <answer>\n</answer> so.\n</answer>", "",
          "Write <answer>\n</answer> so.", family=HUNYUAN),
    _case("marks that do not begin the answer", "So: <answer>1</answer>", "", "So: <answer>1</answer>",
          family=HUNYUAN),
    _case("calls between the marks", f"<think>Hm.</think>\n<answer>\n{_CALL}\n</answer>", "Hm.", "",
          (READ,), HUNYUAN),
    _case("text and calls between the marks", f"<answer>\nI look.\n{_CALL}\n</answer>", "", "I look.",
          (READ,), HUNYUAN),
    _case("ERNIE's marks", "Hm.\n</think>\n\n<response>\nDone.\n</response>\n", "Hm.", "Done.",
          family=ERNIE, reasoning_is_open=True),
    _case("Granite's marks", "<think>Hm.</think><response>Done.</response>", "Hm.", "Done.", family=GRANITE),
    _case("another family's marks", "<response>Done.</response>", "", "<response>Done.</response>"),
)  # fmt: skip
