"""What the real model is asked. It is pretrained only: it goes on with a text, and obeys no instruction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PROMPTS: Mapping[str, str] = {
    "Python": "def fibonacci(n):\n",
    "indented Python": "class A:\n    def __init__(self):\n        self.all = []\n\n    def add(self, x):\n",
    "JavaScript": "function debounce(callback, delay) {\n  let timer = null;\n",
    "Go with tabs": "func Sum(values []int) int {\n\ttotal := 0\n\tfor _, value := range values {\n",
    "shell": "#!/usr/bin/env bash\nset -euo pipefail\nfor file in *.txt; do\n",
    "YAML": "services:\n  web:\n    image: nginx\n    ports:\n      - 80:80\n  db:\n    image: postgres\n",
    "diff": "--- a/main.py\n+++ b/main.py\n@@ -1,3 +1,3 @@\n def main():\n-    print('hello')\n+",
    "SQL": "SELECT name, COUNT(*)\nFROM orders\nWHERE",
    "JSON": '[{"name": "Ada", "born": 1815}, {"name": "Alan", "born": 1912}, {"name": "Grace", "born":',
    "indented JSON": '{\n    "name": "Ada",\n    "tags": [\n        "poetry",\n        "logic"\n    ],\n',
    "Markdown table": "| city | country |\n|---|---|\n| Paris | France |\n| Rome | Italy |\n| Berlin |",
    "aligned columns": "name      age   city\nAda        36   London\nAlan       41   Leeds\nGrace      85 ",
    "HTML": "<ul>\n  <li>One</li>\n  <li>Two</li>\n",
    "emoji": "Weather: sun ☀️, rain 🌧️, snow ❄️. Animals: dog 🐶, cat 🐱, mouse 🐭, fox 🦊, bear 🐻,",
    "joined emoji": "👩‍💻 👨‍🚀 👩‍🔬 👨‍👩‍👧 🏳️‍🌈 👩‍💻 👨‍🚀 👩‍🔬 👨‍👩‍👧",
    "Chinese": "中国的首都是北京。日本的首都是",
    "Russian": "Москва — столица России. Париж —",
    "combining marks": "Cafe\u0301, nai\u0308ve, re\u0301sume\u0301, Cafe\u0301, nai\u0308ve,",
    "prose": "The capital of France is",
    "blank lines": "1. First\n\n\n2. Second\n\n\n3. Third\n\n\n",
}
CHATS: Mapping[str, list[dict[str, Any]]] = {
    "question": [{"role": "user", "content": "What is the capital of Italy?"}],
    "code": [{"role": "user", "content": "Write a Python function that adds two numbers.\n\n```python\n"}],
    "system text": [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "Is the sky blue? 🌤️"},
    ],
    "third turn": [
        {"role": "user", "content": "1, 2, 3"},
        {"role": "assistant", "content": "4, 5, 6"},
        {"role": "user", "content": "7, 8, 9"},
        {"role": "assistant", "content": "10, 11, 12"},
        {"role": "user", "content": "13, 14, 15"},
    ],
}
LEFT_OUT = {"Python", "JavaScript", "shell", "diff", "SQL", "Markdown table", "HTML", "Russian"}
"""CI asks none of these: others are like them."""
