"""What each rank of a benchmark runs: ``python -m tieredckpt.bench SETTINGS``, by torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
import msgspec
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tieredckpt.bench.clean import clean
from tieredckpt.bench.compare import compare
from tieredckpt.bench.rank import Rank
from tieredckpt.bench.recover import recover
from tieredckpt.bench.save import save
from tieredckpt.bench.settings import Settings
from tieredckpt.bench.show import show
from tieredckpt.errors import TieredCkptError

RUN = {"save": save, "recover": recover, "compare": compare}


def main() -> None:
    """Run the benchmark of the argument; rank 0 stores or prints the result."""
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    rank: Rank | None = None
    try:
        rank = Rank(settings)
        found = RUN[settings.mode](rank)
        if rank.number == 0:
            if settings.result:
                Path(settings.result).write_bytes(msgspec.json.encode(found))
            else:
                show(found, settings)
    except (TieredCkptError, CheckpointException) as error:
        why: BaseException = error
        if isinstance(error, CheckpointException):  # DCP's, with all ranks' failures
            why = next(iter(error.failures.values()))[0]
        click.echo(f"error: rank {os.environ.get('RANK', '0')}: {why}", err=True)
        # The others may wait for this rank: torchrun ends them. The command deletes what is left.
        if rank is not None and rank.local == 0 and not settings.result:
            clean(rank.settings)
        os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
