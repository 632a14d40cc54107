"""What the server says of a tokenizer whose `decode` no table of tokens can repeat."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import TinyModel
from tests.serving import serving


@pytest.mark.thorough
def test_the_start_warns_of_a_decoder_that_changes_tokens_beside_others(
    tiny_model: TinyModel, tmp_path: Path
):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("qwen3", hidden=64, layers=1), folder)
    path = folder / "tokenizer.json"
    rules = json.loads(path.read_text(encoding="utf-8"))
    joining = {"type": "Replace", "pattern": {"Regex": "[a-z ]{2}"}, "content": "-"}
    rules["decoder"] = {"type": "Sequence", "decoders": [rules["decoder"], joining]}
    path.write_text(json.dumps(rules), encoding="utf-8")
    with serving(folder) as server:
        assert "it changes tokens beside others. Replies are spelled token by token." in server.printed()
        body = {"model": "m", "messages": [{"role": "user", "content": "Fish?"}], "max_tokens": 4}
        assert server.post("/v1/chat/completions", body)["usage"]["completion_tokens"] == 4


def test_the_start_warns_of_no_usual_tokenizer(tiny_model: TinyModel):
    with serving(tiny_model("qwen3", hidden=64, layers=1)) as server:
        assert "token by token" not in server.printed()
