"""``tieredckpt run``: its options."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from tieredckpt.cli.main import cli


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nnodes=2"], "--nnodes of torchrun: live recovery works on one host so far"),
        (["--rdzv_backend", "c10d"], "--rdzv-backend of torchrun: the ranks of a host need no"),
        (["--standalone"], "--standalone of torchrun"),
        (["--hang", "soon"], "neither auto nor seconds"),
        (["--hang", "-1"], "neither auto nor seconds"),
        (["-m", "--no-python"], "--module and --no-python exclude each other"),
        (["--unknown"], "No such option"),
    ],
)
def test_what_is_refused(options: list[str], message: str):
    command = ["run", "--nproc_per_node", "2", *options, "train.py"]
    found = CliRunner().invoke(cli, command)
    assert found.exit_code == 2, found.output
    assert message in found.output
