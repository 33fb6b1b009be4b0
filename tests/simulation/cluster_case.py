"""One case of the simulated cluster: drawn from a seed, with faults at random moments.

``python -m tests.simulation.cluster_case SEED`` runs one small case and prints its trace.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from random import Random

from tests.simulation.cluster import Setting, World
from tests.simulation.cluster_host import Host
from tests.simulation.cluster_promises import Violation


class CaseFailed(AssertionError):
    """A promise was broken; says how to see it again."""


def small(seed: int) -> Setting:
    """A few hosts, and everything else drawn."""
    draw = Random(f"small {seed}")
    hosts = draw.choice((2, 3, 4, 5, 6, 8, 12, 16, 24))
    return Setting(
        seed=seed,
        hosts=hosts,
        replicas=draw.choice((1, 1, 2, 2, 3)),
        streams=("default",) if draw.random() < 0.7 else ("actor", "critic"),
        racks=draw.choice((0, 0, 3, 4)),
        segments=draw.choice((1, 1, 2, 3)),
        refill=draw.random() < 0.7,
        ack_each=draw.random() < 0.5,
        ack_gossip=draw.random() < 0.7,
        shrink=draw.choice((0.0, 0.0, 0.3)),
        faults=draw.choice((0.0, 0.05, 0.12, 0.12, 0.3)),
        disasters=draw.random() < 0.1,
    )


def run_case(setting: Setting, found: Counter[tuple[str, str]] | None = None) -> World:
    """Run it to its end. Raises CaseFailed if a promise does not hold."""
    world = World(setting)
    try:
        world.start()
        Faults(world)
        world.run()
        world.promises.end()
    except Violation as violation:
        trace = "\n".join(world.trace[-40:])
        raise CaseFailed(
            f"CLUSTER_SEED={setting.seed}: {setting} at {world.now_s:.3f} s: {violation}\n{trace}"
        ) from violation
    if found is not None:
        found.update(world.found)
    return world


class Faults:
    """What goes wrong in one case."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._kinds: tuple[Callable[[], None], ...] = (
            self.kill, self.kill, self.kill, self.reboot, self.end_trainers, self.restart_agent,
            self.restart_agent, self.cut, self.cut, self.slow,
        )  # fmt: skip
        self._last = 0
        world.after(0.1, self._turn)

    def _turn(self) -> None:
        world = self.world
        if world.saves >= world.setting.saves and world.running:
            world.after(world.setting.quiet_s, self._end)
            return
        world.after(world.interval_s(), self._turn)
        if world.random.random() < world.setting.faults:
            kind = world.random.choice(self._kinds)
            world.after(world.interval_s() * 3 * world.random.random(), kind)

    def _end(self) -> None:
        self.world.over = True

    def _member(self) -> Host:
        return self.world.members[self.world.random.randrange(len(self.world.members))]

    def _count(self, kind: str, *hosts: Host) -> None:
        self.world.found["faults", kind] += 1
        self.world.log(f"{kind} {' '.join(host.id for host in hosts)}")

    def kill(self) -> None:
        """Up to ``replicas`` hosts at once, for good."""
        world, most = self.world, self.world.placed.possible
        if world.setting.disasters and world.random.random() < 0.2:
            most = len(world.members) - 1
        if not self._may_lose() or not most:
            return
        hosts = world.random.sample(world.members, world.random.randint(1, most))
        world.promises.disaster |= len(hosts) > world.placed.possible
        for host in hosts:
            host.alive = False
            host.break_off()
        self._count("host lost", *hosts)
        world.fail(*hosts)

    def reboot(self) -> None:
        """A host loses its memory and comes back."""
        if not self._may_lose() or not self.world.placed.possible:
            return
        host = self._member()
        host.boot()
        self._count("host rebooted", host)
        self.world.fail(host)

    def _may_lose(self) -> bool:
        """Not while copies of an earlier loss are being made: that would be more at once."""
        return self.world.running and self.world.promises.healthy()

    def end_trainers(self) -> None:
        """The ranks die; no memory is lost."""
        self._count("trainers killed")
        self.world.fail()

    def restart_agent(self) -> None:
        """An agent dies and comes back; memory stays."""
        host = self._member()
        if host.up and host.alive:
            host.up = False
            host.break_off()
            self._count("agent killed", host)
            self.world.after(0.5 + 3 * self.world.random.random(), self._agent_back, host)

    def _agent_back(self, host: Host) -> None:
        host.up = True
        host.settle()

    def cut(self) -> None:
        """A host's agent cannot be reached, for a moment or for longer than it takes to be lost."""
        host = self._member()
        if not host.cut and host.alive:
            host.cut = True
            self._count("network cut", host)
            if self.world.random.random() < 0.3:
                self._count("stray", host)
                self.world.stray(host)
            self.world.after(self.world.random.choice((1, 10, 60)), self._heal, host)

    def _heal(self, host: Host) -> None:
        host.cut = False
        host.settle()

    def slow(self) -> None:
        """A host's link crawls."""
        host = self._member()
        host.slow = 20.0
        self._count("host slow", host)
        self.world.after(10 + 50 * self.world.random.random(), self._quick, host)

    def _quick(self, host: Host) -> None:
        host.slow = 1.0


def main() -> None:
    world = run_case(small(int(sys.argv[1])))
    print(*world.trace, dict(world.found), sep="\n")


if __name__ == "__main__":
    main()
