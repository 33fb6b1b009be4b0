"""The ``tieredckpt`` command: its groups, and how it reports errors.

Never imports torch. JSON goes to standard output; messages and errors go to standard error.
"""

from __future__ import annotations

import os
import sys

import click

from tieredckpt.bench import command as bench
from tieredckpt.cli import agent, config, doctor, live, run, status
from tieredckpt.cli.checkpoints import ls, pin, recovery, verify, weights
from tieredckpt.cli.output import printable
from tieredckpt.errors import (
    AgentError,
    ConfigError,
    NoRecoverableCheckpointError,
    TieredCkptError,
    UsageError,
)
from tieredckpt.rpc.messages.base import package_version
from tieredckpt.storage.file_io import denied

EXIT_CODES: tuple[tuple[type[TieredCkptError], int], ...] = (
    (ConfigError, 2),
    (UsageError, 2),
    (NoRecoverableCheckpointError, 3),
    (AgentError, 4),
    (TieredCkptError, 1),
)
"""The first class that matches decides. A wrong option gives 2, too."""


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done; 1 failed; 2 wrong usage or configuration; "
    "3 no recoverable checkpoint; 4 the node agent cannot be reached.",
)
@click.version_option(package_version(), prog_name="tieredckpt")
def cli() -> None:
    """Inspect, check and operate tiered checkpoints.

    The configuration is --config FILE, else $TIEREDCKPT_CONFIG, else ./tieredckpt.yaml.

    \b
    Examples:
      tieredckpt config check tieredckpt.yaml --state-size 80GiB --ranks 8
      tieredckpt doctor
      tieredckpt ls
      tieredckpt recovery plan --json
      tieredckpt agent status
    """


for command in (
    agent.group, status.status, status.peers, ls.ls, recovery.group, pin.group, pin.pin,
    pin.unpin, pin.undelete, pin.purge, ls.group, config.group, verify.verify, agent.spill,
    run.run, live.group, weights.export, weights.import_, weights.show, bench.group, doctor.doctor,
):  # fmt: skip
    cli.add_command(command)


def main() -> None:
    """Run the command line and exit. Prints our errors as one message, without a traceback."""
    try:
        # Without stand-alone mode click returns the code of --help and --version.
        code = cli.main(prog_name="tieredckpt", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except TieredCkptError as error:
        click.secho("error: ", fg="red", bold=True, nl=False, err=True)
        click.echo(printable(str(error)), err=True)
        sys.exit(next(code for kind, code in EXIT_CODES if isinstance(error, kind)))
    except BrokenPipeError:
        # The reader has closed the pipe, as in `tieredckpt ls | head`.
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        # A full disk or an unreadable folder, which a traceback does not explain better.
        click.echo(f"error: {error}{denied(error)}", err=True)
        # Python flushes the rest at exit, which must not fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
