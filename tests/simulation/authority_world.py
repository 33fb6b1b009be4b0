"""Jobs, partitions, restarts and people over simulated hosts: one case per seed.

The agents are the product's own (``authority_adapter.py``), on hardware of
``authority_host.py``; ``authority_oracle.py`` says what must not happen. One seed, with its trace:

    python -m tests.simulation.authority_world 17
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.simulation import authority_adapter as product
from tests.simulation import authority_host as hw
from tests.simulation.authority_adapter import NAMESPACE, Part, Rank, Rules, Run, simulated
from tests.simulation.authority_oracle import Job, Kind, Oracle, Save, Sight, Violation
from tieredckpt.errors import NamespaceInUseError, StaleAttemptError, TieredCkptError
from tieredckpt.format.manifest import decode_attempt
from tieredckpt.format.records import decode_decision, decode_intent, is_tombstone
from tieredckpt.storage.memory.slot import REPLICA_ID, Label

DEAD_S = 140.0
"""After so long, with everybody asking, a dead host must have been noticed."""

CROWDED = 1 << 20
"""From this seed on hosts have more than one rank, which may take their time to die, and the ranks
tell their agents of hosts of earlier jobs."""

CALM = "calm"
"""No theme of the draw: one job that saves, restarts and loses agents, over links that work."""
THEMES: dict[str, dict[str, float]] = {
    "mixed": {"look": 0.3, "purge": 0.2, "move": 0.5, "die": 0.3},
    "cut off": {"cut_off": 5, "side_start": 8, "side_save": 6, "mend": 1, "restart": 1},
    "moved": {"move": 3, "bucket_slow": 2, "cut_bucket": 2, "save": 8, "time": 3},
    "pressed": {"move": 1.5, "cut_bucket": 1, "save": 12, "time": 3},
    "dead host": {"die": 5, "forward": 6, "time": 4},
    "agents cut": {"cut_host": 4, "time": 5, "save": 6},
    "anew": {"cut_off": 4, "purge": 3, "side_start": 2, "side_save": 2, "mend": 2, "restart": 1},
    "looking": {"look": 5},
}
"""What a case is about: how much more likely some events are than else."""

WEIGHTS: dict[str, float] = {
    "save": 12, "restart": 1.5, "move": 0.2, "cut_host": 0.6, "cut_pair": 0.5, "cut_off": 0.6,
    "side_start": 1.0, "side_save": 1.0, "side_end": 1.0, "mend": 1.2, "kill_agent": 0.7,
    "die": 0.2, "forward": 0.3, "revive": 0.6, "look": 0.04, "purge": 0.04, "bucket_slow": 0.4,
    "cut_bucket": 0.3, "time": 1.0, "clock": 0.4,
}  # fmt: skip


@dataclass(eq=False)
class Started:
    """A job that holds sessions."""

    job: Job
    run: Run
    step: int = 0
    pending: list[Part] | None = None
    """Sealed, and not committed yet."""


class Case:
    """See the module."""

    def __init__(self, seed: int, theme: str | None = None) -> None:
        self.seed = seed
        self.world = world = hw.World(seed)
        hw.enter(world)
        self.rng = world.rng
        self.oracle = Oracle()
        self.counts: Counter[str] = Counter()
        self.trace = world.trace
        world.deleted = self._memory_deleted
        world.freed = self._freed
        world.store.watch = self._watch  # type: ignore[assignment]
        self.theme = theme or self.rng.choice(sorted(THEMES))
        more = THEMES.get(self.theme, {})
        self.weights = {name: weight + more.get(name, 0.0) for name, weight in WEIGHTS.items()}
        if self.theme == CALM:
            self.weights = {n: w for n, w in WEIGHTS.items() if n in ("save", "restart", "time")}
            self.weights |= {"kill_agent": 1.0, "bucket_slow": 0.5, "clock": 0.5}
        for number in range(self.rng.choice((2, 2, 3, 3, 3, 4, 5))):
            machine = hw.Machine(f"h{number}", f"10.0.0.{number}:1")
            world.machines[machine.name] = machine
            world.owners[machine.address] = machine.name
            machine.mono_ahead_s = self.rng.random() * 1e5
            machine.wall_ahead_s = self.rng.choice((0.0, 0.0, -3600.0, 7200.0))
        self.has_bucket = self.rng.random() < (0.95 if self.theme in ("moved", "pressed") else 0.6)
        self.token = self.rng.choice(("", "t" * 32))
        self.tier_lazy = self.rng.choice((0.0, 0.5, 0.9)) if self.theme != "pressed" else 0.9
        self.crowd = Random(f"crowd {seed}") if seed >= CROWDED else None
        self.main: Started | None = None
        self.sides: dict[str, Started] = {}
        self.attempts: dict[int, list[Job]] = {}
        """Whose attempts had which number: only to name the finding."""
        self.off: set[str] = set()
        """Hosts that are cut off from everybody, jobs' own network included."""
        self.dead_since: dict[str, float] = {}
        self.runs: dict[str, Job] = {}
        """Who is meant by a claim: it may come late, when its ranks are dead."""
        self.rules = self._draw_rules()

    def say(self, text: str) -> None:
        self.trace.append(f"{self.world.now_s - 1e6:8.1f} {text}")

    # --- what hardware tells ----------------------------------------------------------------------

    def _memory_deleted(self, place: str, save_id: str, by: hw.Machine) -> None:
        host = place.rpartition(" ")[2]
        if not self.oracle.purging:
            self.say(f"  {place}: {self._name(save_id)} goes")
        save = self.oracle.saves.get(save_id)
        machine = self.world.machines[host]
        holds = save is not None and self._is_whole(save)
        holds &= any(product.has_segment(machine, each) for each in (save.parts if save else ()))
        self.oracle.memory_deleted(host, save_id, holds=holds)

    def _freed(self, machine: hw.Machine, label: Label) -> None:
        if label.session_id == REPLICA_ID:
            return
        save = self.oracle.of_segment.get(label.segment_id)
        named = save is not None and product.has_manifest(machine, save.save_id)
        if save is not None and not self.oracle.purging:
            self.say(f"  {machine.name}: its part of {save} is given back")
        whole = save is not None and self._is_whole(save, besides=label.segment_id)
        self.oracle.segment_freed(machine.name, label.segment_id, named=named, whole=whole)

    def _is_whole(self, save: Save, besides: str = "") -> bool:
        """Whether every part is somewhere: in a memory, though its host may be away, or in the
        bucket.
        """
        return all(
            f"segments/{each}" in self.world.store.objects
            or any(product.has_segment(other, each) for other in self.world.machines.values())
            for each in save.parts
            if each != besides
        )

    def _watch(self, how: str, key: str, data: bytes | None, by: object) -> None:
        if key.startswith("verdicts/") and data is not None and decode_decision(data).goes:
            notice = self.world.store.objects.get("notices/" + key.removeprefix("verdicts/"))
            if notice is not None and isinstance(by, hw.Machine):
                for _, save_id in decode_intent(notice[0]).saves:
                    self.say(f"  bucket: that {self._name(save_id)} goes is decided by {by.name}")
                    self.oracle.bucket_decided(save_id, by.name)
        if key.startswith("claims/") and data is not None and isinstance(by, hw.Machine):
            job = self.runs[decode_attempt(data).run]
            self.say(f"  bucket: {key} is of {job}, by {by.name}")
            self.oracle.claimed(job)
        if not key.startswith("manifests/"):
            return
        save_id = key[-32:]
        if data is not None and not is_tombstone(data):
            self.say(f"  bucket: {self._name(save_id)} is there")
            if (save := self.oracle.saves.get(save_id)) is not None:
                save.in_bucket = True
        elif isinstance(by, hw.Machine):
            self.say(f"  bucket: {self._name(save_id)} is deleted by {by.name}")
            self.oracle.bucket_deleted(save_id, by.name)

    def _name(self, save_id: str) -> str:
        return str(self.oracle.saves.get(save_id, save_id[:6]))

    # --- jobs -------------------------------------------------------------------------------------

    def _draw_rules(self) -> Rules:
        """What the user asks for; where the job moves, later jobs are to keep more."""
        rng, first = self.rng, not self.oracle.jobs
        on_pressure = rng.choice(("keep", "drop_oldest_queued"))
        keep, kept, replicas = (1, 2, 3), (1, 2, 4), (0, 1, 1, 2)
        if self.theme in ("moved", "pressed"):
            keep = (1, 1, 2)
            kept = (1, 1, 2) if first else (2, 4, 4)
            if rng.random() < 0.7:
                on_pressure = "drop_oldest_queued" if first else "keep"
        if self.theme in ("cut off", "anew"):
            replicas = (1, 2, 2)
        return Rules(
            keep=rng.choice(keep),
            bucket_keep=rng.choice(kept) if self.has_bucket else 0,
            on_pressure=on_pressure,
            replicas=rng.choice(replicas),
        )

    def _start(
        self, kind: Kind, machines: list[hw.Machine], rules: Rules, pred: Job | None
    ) -> Started | None:
        """Ranks open their engines and load; None: they stopped with an error."""
        number = len(self.oracle.jobs) + 1
        coordinator = self.rng.randrange(len(machines)) if self.rng.random() < 0.6 else 0
        run = Run(self.world, machines, rules, coordinator, self.token, self.crowd)
        job = Job(
            number=number, kind=kind, hosts=tuple(each.name for each in machines),
            keep=rules.keep, bucket_keep=rules.bucket_keep,
            epoch=pred.epoch if kind == "side" and pred is not None else self.oracle.epoch,
            pred=pred, started_s=self.world.now_s, boots={m.name: m.boot for m in machines},
        )  # fmt: skip
        self.oracle.started(job)
        self.runs[run.run_id] = job
        self.say(
            f"{job} on {','.join(job.hosts)} (keep {rules.keep}, bucket {rules.bucket_keep}, "
            f"{rules.on_pressure}, replicas {rules.replicas}; {machines[coordinator].name} saves)"
        )
        started = Started(job, run)
        try:
            run.open()
            faults, self.world.faults = self.world.faults, 0.0
            try:
                sight = self._sight(job, run)
                choose = self._chooser(kind)
                found = run.load(choose)
            finally:
                self.world.faults = faults
        except TieredCkptError as error:
            self.say(f"  stops: {type(error).__name__}: {error}"[:200])
            self.counts[f"{kind} stopped"] += 1
            self._end(started)
            return None
        self.counts[f"{kind} loaded"] += 1
        self.say(f"  loads {self._name(found) if found else None}")
        self.oracle.check_load(job, found, sight, run.warned)
        save = self.oracle.saves.get(found) if found else None
        if machines[0].reaches_bucket:
            job.seen_lease = self.oracle.lease
        self.oracle.loaded(job, save)
        started.step = save.step if save is not None else 0
        return started

    def _chooser(self, kind: Kind) -> product.Choose | None:
        """What a person answers who is told of a fork; None: nobody is asked just now.

        The main job's last checkpoint, as who runs it knows where it got to; else any but those of
        a run that they have deleted.
        """
        if kind != "main" or self.rng.random() < 0.3:
            return None

        def choose(sides: list[str]) -> str:
            self.counts["fork chosen"] += 1
            main = self.oracle.ruling_main()
            line = [each.save_id for each in main.line()] if main is not None else []
            now = self.oracle.epoch
            old = {each for each, save in self.oracle.saves.items() if save.job.epoch != now}

            def unlikely(each: str) -> tuple[bool, int, bool]:
                at, near = self.oracle.saves.get(each), len(line)
                while at is not None and near == len(line):  # how far it is the main job's
                    near = line.index(at.save_id) if at.save_id in line else near
                    at = at.parent
                return each in old, near, each not in line

            chosen = min(sides, key=unlikely)
            self.say(f"  a fork; {self._name(chosen)} is chosen")
            return chosen

        return choose

    def _sight(self, job: Job, run: Run) -> Sight:
        """What the loading host can read for certain."""
        world, first = self.world, run.machines[0]
        token = product.served_with(first)
        pred = job.pred
        names = set(job.hosts)
        if pred is not None and pred.boots.get(first.name) == first.boot:
            names |= set(pred.hosts)
        hosts = [first]
        for name in sorted(names - {first.name}):
            machine = world.machines[name]
            asked = world.passes(first, machine) and world.passes(machine, first)
            owned = world.owners[machine.address] == name
            known = bool(token) and product.served_with(machine) == token
            if asked and owned and known and machine.life is not None:
                hosts.append(machine)
        sealed = {
            slot.label.segment_id
            for machine in hosts
            for slot in machine.slots.values()
            if slot.label.state == "sealed"
        }
        objects = world.store.objects if job.bucket_keep and first.reaches_bucket else {}
        sight = Sight([], [])
        for save in reversed(self.oracle.saves.values()):
            if save.told != "acked":
                continue
            committed = objects.get(product.bucket_key(save.save_id), (b"", 0, 0.0))[0]
            in_bucket = bool(committed) and not is_tombstone(committed)
            if not in_bucket and not any(product.has_manifest(m, save.save_id) for m in hosts):
                continue
            sight.named.append(save)
            if all(each in sealed or f"segments/{each}" in objects for each in save.parts):
                sight.whole.append(save)
        return sight

    def _end(self, started: Started) -> None:
        started.run.end()
        started.job.ended_s = self.world.now_s

    def _seal(self, started: Started) -> bool:
        """All ranks write their parts. False: not now."""
        run = started.run
        if any(not machine.up for machine in run.machines):
            return False
        try:
            started.pending = run.seal()
        except TieredCkptError as error:
            self.say(f"{started.job} cannot write: {error}"[:200])
            self.counts["not written"] += 1
            return False
        return True

    def _commit(self, started: Started) -> None:
        """The coordinator commits what was sealed, and hears what became of it."""
        job, run, parts = started.job, started.run, started.pending
        assert parts is not None
        started.pending = None
        started.step += 10
        made: list[Save] = []

        def begun(save_id: str) -> None:
            named = {each.segment: each.host for each in parts}
            made.append(self.oracle.begun(job, save_id, started.step, named))

        try:
            run.commit(parts, started.step, begun)
        except TieredCkptError as error:
            self._not_saved(started, made[0] if made else None, error, parts)
            return
        finally:
            for each in run.attempts:
                self.attempts.setdefault(each, []).append(job)
            run.attempts.clear()
        self.say(f"{job} has saved step {started.step} ({made[0].save_id[:6]})")
        self.counts[f"{job.kind} saved"] += 1
        self.oracle.acked(made[0])
        if self.theme in ("moved", "cut off", "anew") and self.rng.random() < 0.6:
            for machine in run.machines:  # copies, and uploads, are made before the next event
                self._tier_turn(machine)
                self.drain(6)

    def _not_saved(
        self, started: Started, save: Save | None, error: TieredCkptError, parts: list[Part]
    ) -> None:
        job = started.job
        self.say(f"{job} has not saved step {started.step}: {type(error).__name__}: {error}"[:300])
        denied = "was released" in str(error)
        if isinstance(error, StaleAttemptError | NamespaceInUseError) or denied:
            self.counts[f"{job.kind} refused"] += 1
            number = error.fields.get("newest_attempt")
            blamed = self.attempts.get(number, []) if isinstance(number, int) else []
            self.oracle.refused(job, save, error, denied=denied, blamed=blamed)
            self._end(started)
            self._gone(started)
            return
        self.counts["save failed"] += 1
        if save is not None:
            save.told = "unknown"
        elif error.fields.get("outcome") != "unknown":
            started.run.failed(parts)

    def _gone(self, started: Started) -> None:
        if self.main is started:
            self.main = None
        for host in [h for h, each in self.sides.items() if each is started]:
            del self.sides[host]

    # --- events -----------------------------------------------------------------------------------

    def up(self) -> list[hw.Machine]:
        return [each for each in self.world.machines.values() if each.up]

    def _last_main(self) -> Job | None:
        jobs = [j for j in self.oracle.jobs if j.kind == "main" and j.epoch == self.oracle.epoch]
        return jobs[-1] if jobs else None

    def on_save(self) -> None:
        if self.main is None:
            last = self._last_main()
            if last is None or last.base is not None or last.saves or self.rng.random() < 0.3:
                self.on_restart()  # else it has just stopped with an error
            return
        waited = self.main.pending is not None
        if waited or (self._seal(self.main) and self.rng.random() < 0.7):
            self._commit(self.main)

    def on_restart(self, *, move: bool = False) -> None:
        """The main job's ranks are killed and started again, on the hosts that can be had."""
        lingering = self._end_main()
        self._start_main(move=move)
        for run, rank in lingering:
            run.end_rank(rank)

    def _end_main(self) -> list[tuple[Run, Rank]]:
        """The main job is over; what is left of its ranks, if some take their time to die."""
        if self.main is None:
            return []
        (run, crowd), lingering = (self.main.run, self.crowd), list[tuple[Run, Rank]]()
        if crowd is not None and crowd.random() < 0.5:
            lingering = [(run, rank) for rank in run.ranks if crowd.random() < 0.5]
            for rank in run.ranks:
                if (run, rank) not in lingering:
                    run.end_rank(rank)
            self.main.job.ended_s = self.world.now_s
            self.say(f"{len(lingering)} ranks of {self.main.job} are left")
            self.ticks(crowd.choice((0, 1)))
        else:
            self._end(self.main)
        self.main = None
        return lingering

    def _start_main(self, *, move: bool) -> None:
        free = [each for each in self.up() if each.name not in self.off]
        free = [each for each in free if each.name not in self.sides]
        before = self._last_main()
        if not free:
            return
        if before is None:
            count = self.rng.choice((len(free), self.rng.randrange(1, len(free) + 1)))
            chosen = self.rng.sample(free, count)
        else:
            again = [each for each in free if each.name in before.hosts]
            fresh = [each for each in free if each.name not in before.hosts]
            if move and len(again) > 1:
                again = again[1:]
            if move or (not again and self.rules.bucket_keep):
                again += fresh[: self.rng.randrange(1, 3)]
            chosen = again
        if not chosen:
            return
        changes = 0.7 if move else 0.1 if self.theme != CALM else 0.0
        if self.rng.random() < changes:
            self.rules = self._draw_rules()
        self.main = self._start("main", chosen, self.rules, before)

    def on_move(self) -> None:
        """The next start is on other hosts, with other rules; who led lives on without a job."""
        self.on_restart(move=True)

    def on_cut_host(self) -> None:
        """A host's agent is cut off on the agents' network; the job's own network works."""
        host = self.rng.choice(sorted(self.world.machines))
        if self.main is not None and self.rng.random() < 0.5:
            run = self.main.run
            host = run.machines[run.coordinator].name
        way = self.rng.choice(("both", "both", "in", "out"))
        for other in self.world.machines:
            if other != host:
                self.world.cuts |= {(host, other)} if way != "in" else set()
                self.world.cuts |= {(other, host)} if way != "out" else set()
        self.say(f"the agents' network: {host} is cut ({way})")

    def on_cut_pair(self) -> None:
        one, other = self.rng.sample(sorted(self.world.machines), 2)
        self.world.cuts.add((one, other))
        if self.rng.random() < 0.5:
            self.world.cuts.add((other, one))
        self.say(f"the agents' network: {one} and {other} are cut")

    def on_cut_off(self) -> None:
        """A host loses all networks: the job dies, and is started again without it, or not yet."""
        free = [each.name for each in self.up() if each.name not in self.off]
        if len(free) < 2:
            return
        mine = [h for h in free if self.main is not None and h in self.main.job.hosts]
        host = self.rng.choice(mine or free)
        if self.theme in ("cut off", "anew") and self.rng.random() < 0.6:
            self.pass_time(30.0)  # else a host alone has nothing that is whole
        self.off.add(host)
        for other in self.world.machines:
            if other != host:
                self.world.cuts |= {(host, other), (other, host)}
        if self.rng.random() < 0.7:
            self.world.machines[host].reaches_bucket = False
        self.say(f"{host} is cut off from everybody")
        if self.main is not None and host in self.main.job.hosts:
            self._end(self.main)
            self.main = None

    def on_side_start(self) -> None:
        """The launcher of a host that is cut off starts the job there, alone."""
        if not self.off:
            return
        host = self.rng.choice(sorted(self.off))
        machine = self.world.machines[host]
        if not machine.up:
            return
        if host in self.sides:
            self._end(self.sides.pop(host))
        pred = next((j for j in reversed(self.oracle.jobs) if host in j.hosts), None)
        rules = self.rules if self.rng.random() < 0.7 else self._draw_rules()
        started = self._start("side", [machine], rules, pred)
        if started is not None:
            self.sides[host] = started

    def on_side_save(self) -> None:
        if self.sides:
            started = self.sides[self.rng.choice(sorted(self.sides))]
            if started.pending is not None or self._seal(started):
                self._commit(started)

    def on_side_end(self) -> None:
        if self.sides:
            started = self.sides.pop(self.rng.choice(sorted(self.sides)))
            self.say(f"{started.job} ends")
            self._end(started)

    def on_mend(self) -> None:
        """All links work again; a job that runs on a host that was cut off is ended, or not yet."""
        self.world.cuts.clear()
        self.off.clear()
        for machine in self.world.machines.values():
            machine.reaches_bucket = True
        self.say("all links are mended")
        for host in sorted(self.sides):
            if self.rng.random() < 0.7:
                self._end(self.sides.pop(host))

    def on_kill_agent(self) -> None:
        machine = self.world.machines[self.rng.choice(sorted(self.world.machines))]
        if machine.life is None or not machine.up:
            return
        self.say(f"the agent of {machine.name} is killed")
        self.world.kill_agent(machine)
        if self.rng.random() < 0.7:
            product.boot(self.world, machine)

    def on_die(self) -> None:
        """A host loses its power."""
        live = self.up()
        if len(live) < 3 or self.dead_since:
            return
        machine = self.rng.choice(live)
        self.say(f"{machine.name} loses its power")
        self.world.kill_agent(machine)
        for started in (self.main, *self.sides.values()):
            for rank in started.run.ranks if started is not None else ():
                if rank.machine is machine:
                    started.run.end_rank(rank)
        machine.lose_memory()
        if (side := self.sides.pop(machine.name, None)) is not None:
            self._end(side)
        self.off.discard(machine.name)
        self.dead_since[machine.name] = self.world.now_s

    def on_forward(self) -> None:
        """Another host answers at a dead one's address."""
        if not self.dead_since:
            return
        dead = self.rng.choice(sorted(self.dead_since))
        other = self.rng.choice(self.up())
        self.world.owners[self.world.machines[dead].address] = other.name
        self.say(f"{other.name} answers at the address of {dead}")

    def on_revive(self) -> None:
        if not self.dead_since:
            return
        host = self.rng.choice(sorted(self.dead_since))
        del self.dead_since[host]
        machine = self.world.machines[host]
        machine.up = True
        self.world.owners[machine.address] = host
        self.say(f"{host} is back, with an empty memory")

    def on_look(self) -> None:
        """Somebody opens the namespace with a configuration of his own, loads, and leaves."""
        busy = {*(self.main.job.hosts if self.main else ()), *self.sides}
        free = [m for m in self.up() if m.name not in busy and m.name not in self.off]
        if not free:
            return
        started = self._start("looker", [self.rng.choice(free)], self._draw_rules(), None)
        if started is not None:
            self._end(started)

    def on_purge(self) -> None:
        """A person deletes the namespace wherever it can be reached, and begins anew."""
        if self.main is not None:
            self._end(self.main)
            self.main = None
        self.say("the namespace is deleted, and begun anew")
        self.oracle.purging = True
        try:
            for machine in self.up():
                if machine.name in self.off or machine.name in self.sides:
                    continue
                if machine.life is None:
                    product.boot(self.world, machine)
                product.purge(self.world, machine)
        finally:
            self.oracle.purging = False
        self.world.store.objects.clear()
        self.oracle.epoch += 1
        self.on_restart()

    def on_bucket_slow(self) -> None:
        self.tier_lazy = self.rng.choice((0.0, 0.5, 0.98))

    def on_cut_bucket(self) -> None:
        """A host does not reach the bucket for a while; the others do."""
        hosts = sorted(self.world.machines)
        idle = [h for h in hosts if self.main is not None and h not in self.main.job.hosts]
        host = self.rng.choice(idle if idle and self.rng.random() < 0.6 else hosts)
        self.world.machines[host].reaches_bucket = False
        self.say(f"{host} does not reach the bucket")

    def on_time(self) -> None:
        self.pass_time(40.0)

    def on_clock(self) -> None:
        machine = self.rng.choice(list(self.world.machines.values()))
        machine.wall_ahead_s += self.rng.choice((-86400.0, -60.0, 60.0, 86400.0))

    # --- agents' own turns ------------------------------------------------------------------------

    def ticks(self, count: int) -> None:
        """Some agents have their turns, some of what waits for a thread gets one."""
        names = sorted(self.world.machines)
        for _ in range(count):
            machine = self.world.machines[self.rng.choice(names)]
            if machine.life is None:
                continue
            turn = self.rng.random()
            if turn < 0.4:
                product.gossip_tick(self.world, machine)
            elif turn < 0.8:
                self._tier_turn(machine)
            else:
                product.reap_tick(self.world, machine)
            for _ in range(self.rng.choice((0, 2, 5))):
                self.world.run_task()

    def _tier_turn(self, machine: hw.Machine) -> None:
        if self.rng.random() >= self.tier_lazy:
            product.prune_tick(self.world, machine)

    def pass_time(self, seconds: float, rounds: int = 2) -> None:
        """Everybody has turns while time passes."""
        for _ in range(rounds):
            self.world.now_s += seconds / rounds
            for machine in self.world.machines.values():
                if machine.life is not None:
                    product.gossip_tick(self.world, machine)
            self.drain(40)
            for machine in self.world.machines.values():
                if machine.life is not None:
                    self._tier_turn(machine)
            self.drain(20)

    def drain(self, most: int) -> None:
        for _ in range(most):
            if not self.world.run_task():
                return

    # --- a case -----------------------------------------------------------------------------------

    def run(self) -> None:
        """All of it. Raises Violation."""
        self.say(f"a case of the theme {self.theme!r}, {len(self.world.machines)} hosts")
        rng, names = self.rng, list(self.weights)
        chances = [self.weights[name] for name in names]
        self.world.faults = rng.choice((0.0, 0.0, 0.02, 0.06)) if self.theme != CALM else 0.0
        self.on_restart()
        for _ in range(rng.randrange(10, 26)):
            name = rng.choices(names, chances)[0]
            self.counts[name] += 1
            call: Callable[[], None] = getattr(self, f"on_{name}")
            call()
            self.world.now_s += rng.expovariate(1 / 3.0)
            self.ticks(rng.choice((0, 1, 2)))
            self.check()
        self.settle()

    def check(self) -> None:
        """What holds at any time."""
        main = self.main
        if main is None or not main.job.acked or not self.has_bucket:
            return
        if main.run.rules.on_pressure != "keep" or not main.job.bucket_keep:
            return
        for save in main.job.acked[-6:]:
            for machine in main.run.machines if not save.in_bucket else ():
                if product.given_up(machine, save.save_id):
                    self.oracle.check_given_up(save, machine.name)

    def settle(self) -> None:
        """Everything is mended, and time passes: the job saves, and its restart loads that."""
        self.world.faults = 0.0
        self.tier_lazy = 0.0
        self.on_mend()
        for machine in self.up():
            if machine.life is None and machine.objects.get(NAMESPACE):
                product.boot(self.world, machine)
        self.pass_time(12.0, 1)
        self._check_dead()
        if self.main is not None and all(m.up for m in self.main.run.machines):
            self.on_save()
            if self.main is not None and self.main.pending is not None:
                self._commit(self.main)
        self.on_restart()
        if self.main is not None:
            self.on_save()
            self.check()
        self.pass_time(25.0, 1)
        self.on_restart()

    def _check_dead(self) -> None:
        """The running job's leader has noticed every member that is dead."""
        main = self.main
        if main is None or not main.run.machines[0].up:
            return
        gone = [h for h in main.job.hosts if h in self.dead_since]
        if not gone or len(main.job.hosts) < 2:
            return
        for _ in range(4):
            self.pass_time(DEAD_S / 4, 1)
        leader = main.run.machines[0]
        if leader.life is None:
            return
        for host in gone:
            self.oracle.check_lost(host, product.believed_alive(leader), leader.name)
            self.counts["dead noticed"] += 1
        live = [each for each in main.run.machines if each.up and each.life is not None]
        wanted = 1 + min(main.run.rules.replicas, len(live) - 1)
        for save in main.job.acked[-1:]:
            if product.said_replicated(leader, save.save_id):
                copies = {s: sum(product.has_segment(x, s) for x in live) for s in save.parts}
                few = [segment[:6] for segment, count in copies.items() if count < wanted]
                self.oracle.check_copies(save, leader.name, few)
                self.counts["copies there"] += 1


def run_case(
    seed: int, counts: Counter[str] | None = None, *, theme: str | None = None
) -> Case:  # fmt: skip
    """One case. Raises Violation, with the seed and the trace."""
    case = Case(seed, theme)
    try:
        case.run()
    except Violation as found:
        found.add_note(f"seed {seed}:\n" + "\n".join(case.trace[-60:]))
        found.trace = case.trace
        raise
    finally:
        if counts is not None:
            counts.update(case.counts)
    return case


def main() -> None:
    with simulated():
        try:
            print(*run_case(int(sys.argv[1])).trace, sep="\n")
        except Violation as found:
            print(*found.trace, sep="\n")
            print(found)


if __name__ == "__main__":
    main()
