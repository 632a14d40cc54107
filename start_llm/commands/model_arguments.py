"""The arguments of the commands about models and of `doctor`, which import much themselves."""

from typing import Any

from start_llm.config.flags import add_flags


def add_model_commands(commands: Any) -> None:
    """Add the commands about models."""
    listed = commands.add_parser("models", help="list the models on this machine", allow_abbrev=False)
    searched = commands.add_parser("search", help="search the hub for models for MLX", allow_abbrev=False)
    searched.add_argument("words", metavar="WORD", nargs="+", help="of the name, such as qwen3 4bit")
    pulled = commands.add_parser("pull", help="download a model, or go on with it", allow_abbrev=False)
    pulled.add_argument("repo", metavar="REPO", help="owner/name on the Hugging Face hub")
    fitted = commands.add_parser("fit", help="whether a model fits this machine", allow_abbrev=False)
    fitted.add_argument("model", metavar="MODEL", nargs="?", help="a folder, a listed model, or owner/name")
    fitted.add_argument("--table", action="store_true", help="twenty well-known models on eight machines")
    fitted.add_argument("--format", choices=("table", "markdown"), default="table", help="of --table")
    removed = commands.add_parser("rm", help="remove a model from this machine", allow_abbrev=False)
    removed.add_argument("repo", metavar="REPO", help="a name that `models` lists")
    removed.add_argument("--yes", action="store_true", help="do not ask")
    for command in (listed, fitted, removed):
        add_flags(command, "--model-dir")


def add_doctor(commands: Any) -> None:
    """Add `doctor`."""
    doctor = commands.add_parser(
        "doctor", help="examine this machine with a model, in about five minutes", allow_abbrev=False
    )
    add_flags(doctor)
    doctor.add_argument("--json", metavar="FILE", default="doctor.json", help="where to write the report")
    doctor.add_argument(
        "--quick", action="store_true", help="a tenth of the conversations, in about a minute"
    )
