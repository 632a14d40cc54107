"""Start the server, as `python -m start_llm serve` does. The project's first server had this name."""

import runpy
import sys

sys.argv.insert(1, "serve")
runpy.run_module("start_llm", run_name="__main__")
