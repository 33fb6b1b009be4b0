"""How likely replicas survive that several hosts are lost at once: exact, and by trying.

``python -m benchmarks.survival`` prints the table of docs/operate/placement.md (Markdown);
``--trials N`` adds what N drawn losses per cell came to, ``--plot FILE`` draws it (matplotlib).

A host's data is lost if it and all holders of its copies are lost; so what counts are the sets
{host} + holders, and how many of them there are. With replicas = r and m = 1 + r:

* groups: N / m sets of m hosts, apart from each other. A loss of k hosts is survived if no group is
  whole in it. Each group contributes (1 + x)^m - x^m, everything but the loss of all; the number of
  survived losses is the coefficient of x^k in the product over the groups.
* ring: host i's copies are on i+1 .. i+r, so a loss is survived if no m neighbours are in it. The
  N - k survivors cut the circle into N - k gaps of 0 .. r lost hosts. Gap sequences that sum to k
  are the coefficient of x^k in ((1 - x^m) / (1 - x))^(N-k), and each belongs to N / (N - k) losses
  (N places to begin at; N - k survivors to begin with).
* what is left over (N not divisible by m) is one ring of m + N mod m hosts beside the groups.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from fractions import Fraction
from math import comb
from random import Random

from tieredckpt.policy.placement import PlacementHost, place

SIZES = (8, 16, 64, 256, 1000)
REPLICAS = (1, 2)
LOSSES = (2, 3, 4)


def _product(one: Sequence[int], other: Sequence[int], most: int) -> list[int]:
    found = [0] * (most + 1)
    for i, a in enumerate(one[: most + 1]):
        for j, b in enumerate(other[: most + 1 - i]):
            found[i + j] += a * b
    return found


def survived_by_ring(hosts: int, replicas: int, lost: int) -> int:
    """Of the losses of ``lost`` hosts at once, those in which no 1 + replicas are neighbours."""
    size, left = 1 + replicas, hosts - lost
    if left <= 0:
        return 0
    gaps = sum(
        (-1) ** j * comb(left, j) * comb(lost - j * size + left - 1, left - 1)
        for j in range(lost // size + 1)
    )
    count = Fraction(hosts * gaps, left)
    assert count.denominator == 1
    return int(count)


def survived_by_groups(hosts: int, replicas: int, lost: int) -> int:
    """The same for groups, and one ring of what is left over."""
    size = 1 + replicas
    rest = hosts % size
    ring = size + rest if rest else 0
    group = [comb(size, k) for k in range(size + 1)]
    group[size] = 0
    found = [survived_by_ring(ring, replicas, k) if k else 1 for k in range(min(ring, lost) + 1)]
    for _ in range((hosts - ring) // size):
        found = _product(found, group, lost)
    return found[lost] if lost < len(found) else 0


def survival(hosts: int, replicas: int, lost: int) -> tuple[float, float]:
    """Probability that no data is lost, with our placement and with a ring."""
    ways = comb(hosts, lost)
    return (
        survived_by_groups(hosts, replicas, lost) / ways,
        survived_by_ring(hosts, replicas, lost) / ways,
    )


def ring_of(hosts: int, replicas: int) -> list[frozenset[int]]:
    """The sets of hosts that must not be lost together, of a ring."""
    return [frozenset((i + step) % hosts for step in range(1 + replicas)) for i in range(hosts)]


def groups_of(hosts: int, replicas: int) -> list[frozenset[int]]:
    """The same of what ``policy/placement.py`` decides."""
    holders = place([PlacementHost(f"{n:06}") for n in range(hosts)], replicas).holders
    return list({frozenset(map(int, (host, *held))) for host, held in holders.items()})


def tried(
    sets: Sequence[frozenset[int]], hosts: int, lost: int, trials: int, random: Random
) -> float:
    """How many of ``trials`` drawn losses left each set with a survivor, as a share."""
    by_host: dict[int, list[frozenset[int]]] = {}
    for each in sets:
        by_host.setdefault(min(each), []).append(each)
    survived = 0
    for _ in range(trials):
        gone = set(random.sample(range(hosts), lost))
        survived += not any(each <= gone for host in gone for each in by_host.get(host, ()))
    return survived / trials


def table(trials: int = 0, seed: int = 1) -> list[str]:
    """Lines of Markdown."""
    random = Random(seed)
    more = " groups, tried | ring, tried |" if trials else ""
    lines = [
        f"| hosts | replicas | lost at once | groups | ring | ring loses |{more}",
        "| --- " * (6 + 2 * bool(trials)) + "|",
    ]
    for replicas in REPLICAS:
        for hosts in SIZES:
            for lost in LOSSES:
                ours, ring = survival(hosts, replicas, lost)
                times = (1 - ring) / (1 - ours) if ours < 1 else 1.0
                line = f"| {hosts} | {replicas} | {lost} | {_show(ours)} | {_show(ring)} | "
                line += "both none |" if ring == 1 else f"{times:.2f} times as often |"
                for sets in (
                    (groups_of(hosts, replicas), ring_of(hosts, replicas)) if trials else ()
                ):
                    line += f" {_show(tried(sets, hosts, lost, trials, random))} |"
                lines.append(line)
    return lines


def _show(probability: float) -> str:
    # As many digits as tell it from certainty.
    return "1" if probability == 1 else f"{100 * probability:.6g} %"


def plot(path: str) -> None:
    """Probability of a loss over the number of hosts, as a picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(REPLICAS), figsize=(9, 3.6), sharey=True)
    for axis, replicas in zip(axes, REPLICAS, strict=True):
        for number, lost in enumerate(range(1 + replicas, 5)):
            sizes = [n for n in range(8, 1025) if n % (1 + replicas) == 0]
            found = [survival(n, replicas, lost) for n in sizes]
            color = f"C{number}"
            axis.plot(sizes, [1 - a for a, _ in found], color, label=f"{lost} lost, groups")
            axis.plot(sizes, [1 - b for _, b in found], color + ":", label=f"{lost} lost, ring")
        axis.set(xscale="log", yscale="log", xlabel="hosts", title=f"replicas: {replicas}")
        axis.legend(fontsize=7)
    axes[0].set_ylabel("probability that data is lost")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--trials", type=int, default=0)
    parser.add_argument("--plot")
    options = parser.parse_args()
    print(*table(options.trials), sep="\n")
    if options.plot:
        plot(options.plot)


if __name__ == "__main__":
    main()
