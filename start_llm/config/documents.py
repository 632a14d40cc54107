"""Write the table of settings as documents: `start_llm settings`."""

import textwrap

from start_llm.config.settings import TEXT, WITHOUT_EFFECT, SettingSpec, all_rows

_LEAST_WIDTH = 40


def as_env_file() -> str:
    """Return the text of `.env.example`."""
    lines = [
        "# Settings of start_llm. Copy to .env and uncomment what you want to change.",
        "# Flags of `start_llm serve` win over the environment, which wins over .env.",
        "# Written by `start_llm settings --format env`.",
    ]
    section = None
    for row in all_rows():
        if row.section != section:
            section = row.section
            lines += ["", f"# --- {section} ---"]
        lines += ["", f"# {_help(row)}"]
        lines.append(f"#{row.name}={row.default}")
    return "\n".join(lines) + "\n"


def as_markdown() -> str:
    """Return the table of `docs/settings.md`."""
    lines = ["| Variable | Default | What it does |", "|---|---|---|"]
    for row in all_rows():
        default = f"`{row.default}`" if row.default else "unset"
        lines.append(f"| `{row.name}` | {default} | {_help(row)}{_expected(row)} |")
    return "\n".join(lines) + "\n"


def as_table(width: int) -> str:
    """Return the settings for a terminal of this width, by section; a meaning stands below its name."""
    lines: list[str] = []
    section = None
    for row in all_rows():
        if row.section != section:
            section = row.section
            lines += ["", section.upper()]
        lines.append(f"  {row.name}={row.default}" if row.default else f"  {row.name}  (unset)")
        wrapped = textwrap.wrap(
            f"{_help(row)}{_expected(row)}",
            max(width - 6, _LEAST_WIDTH),
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += [f"      {line}" for line in wrapped]
    return "\n".join(lines[1:]) + "\n"


def _expected(row: SettingSpec) -> str:
    return "" if row.kind is TEXT else f" Expects {row.kind.documented or row.kind.expected}."


def _help(row: SettingSpec) -> str:
    return f"Has no effect. {row.help}" if row in WITHOUT_EFFECT else row.help
