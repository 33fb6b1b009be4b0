"""``python -m tieredckpt``: the same as the ``tieredckpt`` command."""

from tieredckpt.cli.main import main

if __name__ == "__main__":
    main()
