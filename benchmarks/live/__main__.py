"""``python -m benchmarks.live``."""

from benchmarks.live.cli import main

if __name__ == "__main__":
    main()
