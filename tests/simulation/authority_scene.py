"""Hosts on which a test tells by hand what happens to jobs: the stage of scenes of authority."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation import authority_adapter as product
from tests.simulation import authority_host as hw
from tests.simulation.authority_adapter import Part, Rules, Run
from tieredckpt.errors import TieredCkptError
from tieredckpt.format.records import is_tombstone

TOKEN = "t" * 32
RULES = Rules(keep=2, bucket_keep=0, on_pressure="keep", replicas=0)


class Broken(AssertionError):
    """What a scene is about was not so. How it gets there are plain assertions."""


def promise(kept: bool, text: str) -> None:
    """Raise Broken unless it was kept."""
    if not kept:
        raise Broken(text)


class Scene:
    """Hosts h0, h1 and so on, all linked."""

    def __init__(self, hosts: int) -> None:
        self.world = hw.World(1)
        hw.enter(self.world)
        for number in range(hosts):
            machine = hw.Machine(f"h{number}", f"10.0.0.{number}:1")
            self.world.machines[machine.name] = machine
            self.world.owners[machine.address] = machine.name
        self.hosts = list(self.world.machines.values())
        self.parts: dict[str, list[Part]] = {}
        """By save id."""

    def run(self, hosts: list[hw.Machine], rules: Rules = RULES) -> Run:
        """A job with a rank on each of these; engines are open, nothing is loaded."""
        run = Run(self.world, hosts, rules, 0, TOKEN)
        run.open()
        return run

    def save(self, run: Run, step: int) -> str:
        parts = run.seal()
        save_id = run.commit(parts, step, lambda save_id: None)
        self.parts[save_id] = parts
        return save_id

    def has_parts(self, save_id: str) -> list[bool]:
        """Whether the host of each rank still has that rank's part."""
        return [
            product.has_segment(self.world.machines[each.host], each.segment)
            for each in self.parts[save_id]
        ]

    def cut(self, host: hw.Machine, *, off: bool = True) -> None:
        """Its agent neither reaches other hosts' agents nor is reached."""
        for other in self.hosts:
            if other is not host:
                pairs = {(host.name, other.name), (other.name, host.name)}
                self.world.cuts = self.world.cuts | pairs if off else self.world.cuts - pairs

    def pass_time(self, seconds: float = 6.0, rounds: int = 2, *, tiers: bool = True) -> None:
        for _ in range(rounds):
            self.world.now_s += seconds / rounds
            alive = [machine for machine in self.hosts if machine.life is not None]
            for machine in alive:
                product.gossip_tick(self.world, machine)
            self._work()
            for machine in alive if tiers else ():
                product.prune_tick(self.world, machine)
            self._work()
            for machine in alive:
                product.reap_tick(self.world, machine)

    def _work(self) -> None:
        for _ in range(60):
            if not self.world.run_task():
                break

    def held(self, host: hw.Machine) -> set[str]:
        """Save ids of the manifests in a host's memory."""
        return {each.save_id for each in product._namespace(host).catalog.manifests()}

    def in_bucket(self, save_id: str) -> bool:
        """Whether it is committed there, and was not deleted."""
        data, *_ = self.world.store.objects.get(product.bucket_key(save_id), (b"",))
        return bool(data) and not is_tombstone(data)


def said(call: Callable[[], object]) -> TieredCkptError | None:
    """What a caller is told that its request was refused with; None: it was done."""
    try:
        call()
    except TieredCkptError as error:
        return error
    return None
