"""docs/reference/commands.md is what the command line prints of itself.

After a change: python -m tests.test_commands_page > docs/reference/commands.md
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from tieredckpt.cli.main import cli

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "commands.md"
HEAD = """\
# All commands

What `--help` prints of each, made from the command line itself
(`python -m tests.test_commands_page`). What they have in common is on
[the command line](command-line.md).
"""
WIDTH = 96


def commands(command: click.Command, path: str, parent: click.Context | None) -> Iterator[str]:
    """A section of each command that does something, groups first."""
    context = click.Context(
        command, info_name=path.rpartition(" ")[2], parent=parent, max_content_width=WIDTH,
        terminal_width=WIDTH, help_option_names=["-h", "--help"],
    )  # fmt: skip
    inner = command.commands if isinstance(command, click.Group) else {}
    text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    if parent is not None:
        yield f"\n## {path.partition(' ')[2]}\n\n```\n{text}\n```\n"
    for name in sorted(inner):
        if not inner[name].hidden:
            yield from commands(inner[name], f"{path} {name}", context)


def page() -> str:
    """The whole page."""
    return HEAD + "".join(commands(cli, "tieredckpt", None))


def test_the_page_is_what_the_commands_print():
    assert PAGE.read_text("utf-8") == page()


if __name__ == "__main__":
    click.echo(page(), nl=False)
