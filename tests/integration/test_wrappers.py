"""torchao's low-bit optimizer states under FSDP2, and other wrapper subclasses of tensors."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import tieredckpt
from tests.support.frameworks import Workshop, workshop
from tests.support.ranks import run_ranks
from tests.support.states import config

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("torchao") is None,
        reason="torchao is not installed here (`make test` installs it)",
    ),
    pytest.mark.usefixtures("served"),
]

Content = dict[str, list[tuple[tuple[int, ...], bytes]]]
"""By key, shape and bytes of each tensor with bytes: of a wrapper, the inner ones."""

STEPS = 3


@pytest.fixture(scope="module")
def shop() -> Iterator[Workshop]:
    with workshop("torchao.optim", "tieredckpt.engine", "torch.distributed.fsdp") as found:
        yield found


class Job:
    """Training with FSDP2, whose states are 8-bit; those of biases are plain."""

    def __init__(
        self, runtime_dir: str, optimizer: str = "AdamW8bit", device: str = "cpu", **options: Any
    ) -> None:
        import torch
        import torch.distributed as dist
        import torchao.optim
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from tieredckpt.engine import Engine

        torch.compiler.set_stance("force_eager")  # torchao compiles each update
        torch.manual_seed(0)
        self.device = device
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
        self.model.to(device)
        for layer in self.model:
            fully_shard(layer, mesh=init_device_mesh(device, (dist.get_world_size(),)))
        kind = getattr(torchao.optim, optimizer)
        self.optimizer = kind(self.model.parameters(), lr=1e-2, **options)
        self.engine = Engine.open(config(Path(runtime_dir)))

    def train(self, step: int) -> None:
        import torch

        draw = torch.Generator().manual_seed(step)
        x = torch.randn(4, 64, generator=draw).to(self.device)
        loss = self.model[1](self.model[0](x)).pow(2).sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def resume(self, **options: Any) -> tuple[int | None, dict[str, Any]]:
        """Load, and continue with what was loaded: it must be in place."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self.state()
        before = addresses(state)
        step = self.engine.load(state, **options)
        assert addresses(state) == before
        loaded = state["model"], state["optimizer"]
        set_state_dict(
            self.model, self.optimizer, model_state_dict=loaded[0], optim_state_dict=loaded[1]
        )
        return step, state


def tensors(state: dict[str, Any]) -> dict[str, list[Any]]:
    import torch
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    from tieredckpt.dcp.state.wrappers import plain_parts

    flat = flatten_state_dict(state)[0]
    return {
        key: [getattr(part, "_local_tensor", part) for part in plain_parts(value)]
        for key, value in flat.items()
        if isinstance(value, torch.Tensor)
    }


def addresses(state: dict[str, Any]) -> Any:
    return {key: [part.data_ptr() for part in each] for key, each in tensors(state).items()}


def content(state: dict[str, Any]) -> Content:
    from tests.support.states import raw

    return {
        key: [(tuple(part.shape), raw(part.cpu())) for part in each]
        for key, each in tensors(state).items()
    }


def save(rank: int, runtime_dir: str, device: str = "cpu") -> list[Content]:
    """Train and save, in the background while the state changes, and last with dcp.save."""
    import torch.distributed.checkpoint as dcp

    job = Job(runtime_dir, device=device)
    assert job.engine.load({}) is None
    found = []
    for step in range(STEPS):
        job.train(step)
        state = job.state()
        found.append(content(state))
        if step == STEPS - 1:
            dcp.save(state, storage_writer=job.engine.writer(step))
        else:
            pending = job.engine.async_save(state, step)
            wrapped = state["optimizer"]["state"]["0.weight"]["exp_avg"].to_local()
            wrapped.codes.zero_()
            wrapped.scale.fill_(7)
            pending.result()
            job.resume(step=step)  # undo that
            assert content(job.state()) == found[-1]
    job.train(STEPS)
    found.append(content(job.state()))
    job.engine.close()
    return found


def load(rank: int, runtime_dir: str, device: str = "cpu") -> tuple[Content, Content]:
    """What is loaded, and the state one step later."""
    job = Job(runtime_dir, device=device)
    step, state = job.resume()
    assert step == STEPS - 1
    loaded = content(state)
    job.train(STEPS)
    after = content(job.state())
    job.engine.close()
    return loaded, after


def refused(rank: int, runtime_dir: str) -> None:
    """Loads that must fail by key and change nothing; then the newest checkpoint is damaged."""
    import torch.distributed as dist

    from tests.support.states import flip, manifest_of, slot_of
    from tieredckpt.errors import UsageError

    cases: list[Any] = [
        ("AdamW8bit", {"block_size": 128}, True, "its inner tensor 'scale' is"),
        ("AdamW4bit", {}, False, r"is a OptimState8bit in the .*, and another one"),
        ("_AdamW", {}, False, "is a OptimState8bit in the checkpoint, and a Tensor in"),
    ]
    for optimizer, options, strict, text in cases:
        job = Job(runtime_dir, optimizer, **options)
        job.train(0)
        state = job.state()
        before = content(state)
        with pytest.raises(UsageError, match=text) as caught:
            job.engine.load(state, strict=strict)
        assert "optimizer.state." in caught.value.fields["state_key"]
        assert content(state) == before
        job.engine.close()
    job = Job(runtime_dir)
    if rank == 0:
        segments = manifest_of(job.engine, STEPS - 1).segments
        flip(slot_of(Path(runtime_dir), segments[1].id), 4096)
    dist.barrier()
    assert job.resume()[0] == STEPS - 2
    job.engine.close()


def whole(of_ranks: list[Content], key: str) -> Any:
    """All ranks' codes and scales, and the table, which each of them has."""
    parts = [[data for _, data in each[key]] for each in of_ranks]
    if key.endswith((".step", ".lr")):
        return {each[0] for each in parts}
    if len(parts[0]) == 1:
        return b"".join(each[0] for each in parts)
    codes, scale, table = zip(*parts, strict=True)
    return b"".join(codes), b"".join(scale), set(table)


def test_eight_bit_states_of_fsdp2_come_back_bit_for_bit_on_any_number_of_ranks(
    shop: Workshop, runtime_dir: Path
):
    contents = shop.run(save, 2, str(runtime_dir))
    key = "optimizer.state.0.weight.exp_avg"
    assert [len(data) for _, data in contents[0][0][key]] == [8192, 128, 1024]
    last = [each[STEPS - 1] for each in contents]
    again = shop.run(load, 2, str(runtime_dir))
    assert [loaded for loaded, _ in again] == last
    assert [after for _, after in again] == [each[STEPS] for each in contents]
    again = [loaded for loaded, _ in shop.run(load, 4, str(runtime_dir))]
    for name in last[0]:
        assert whole(again, name) == whole(last, name), name
    where = ("--runtime-dir", str(runtime_dir))
    for command in ("ls", "verify"):
        assert tieredckpt(command, *where).returncode == 0
    shop.run(refused, 2, str(runtime_dir))
    assert "1 of 6 copies are damaged" in tieredckpt("verify", *where).stderr


@pytest.mark.gpu
def test_eight_bit_states_on_a_device_come_back_there_and_on_the_host(runtime_dir: Path):
    # Not in the workshop: an import of torchao opens the device, and no fork may use it then.
    (saved,) = run_ranks(save, 1, str(runtime_dir), "cuda")
    ((again, after),) = run_ranks(load, 1, str(runtime_dir), "cuda")
    assert again == saved[STEPS - 1]
    assert after == saved[STEPS]
    ((on_host, _),) = run_ranks(load, 1, str(runtime_dir), "cpu")
    assert on_host == again


# --- wrappers that are made one by one, in all ways of saving ------------------------------------


WAYS = ("thread", "again", "without collectives")


def wrappers(rank: int, number: int, *, odd: str = "") -> dict[str, Any]:
    """One of each sort, cut to the ranks. Of an odd one the last rank has a "plain" tensor, or the
    second half of the ranks another "table".
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.two_tensor import TwoTensor
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit

    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.randn(16, 1024, generator=torch.Generator().manual_seed(number)).bfloat16()
    mine = whole.chunk(world)[rank]

    def low_bit(kind: Any, rows: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = kind.zeros(tuple(rows.shape), block_size=256, dtype=torch.bfloat16)
        return made.copy_(rows.float())

    def two(one: torch.Tensor) -> torch.Tensor:
        return TwoTensor(one.clone(), -one)

    def dtensor(local: torch.Tensor, placement: Any) -> torch.Tensor:
        return DTensor.from_local(
            local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    if odd:
        made = low_bit(OptimState8bit, mine)
        if rank == world - 1 and odd == "plain":
            made = mine
        elif 2 * rank >= world:
            made.qmap += 1
        return {"odd": dtensor(made, Shard(0))}
    return {
        "8 bits": dtensor(low_bit(OptimState8bit, mine), Shard(0)),
        "4 bits": dtensor(low_bit(OptimState4bit, mine), Shard(0)),
        "nested": dtensor(TwoTensor(two(mine), two(mine + 1)), Shard(0)),
        "replicated": dtensor(low_bit(OptimState8bit, whole), Replicate()),
        "no DTensor": two(whole),
    }


def save_wrappers(rank: int, runtime_dir: str) -> int:
    """In each way a step; how many bytes the second background save of the stream has staged."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.testing._internal.two_tensor import TwoTensor

    from tieredckpt.engine import Engine

    with Engine.open(config(Path(runtime_dir))) as engine:
        for step, way in enumerate(WAYS):
            state = wrappers(rank, step)
            if way == "without collectives":
                dcp.save(state, storage_writer=engine.writer(step), use_collectives=False)
            else:
                pending = engine.async_save(state, step)
                for parts in tensors(state).values():
                    for part in parts:
                        part.zero_()  # training goes on
                pending.result()
                staged = engine.session.stager.last_bytes
        inside_out = {"key": TwoTensor(state["8 bits"], state["8 bits"])}
        with pytest.raises(CheckpointException, match="'key' is a wrapper around a DTensor"):
            engine.async_save(inside_out, 9).result()
        for odd in ("plain", "table"):
            dcp.save(wrappers(rank, 7, odd=odd), storage_writer=engine.writer(0, odd))
        return staged


def load_wrappers(rank: int, runtime_dir: str, errors: dict[str, str]) -> None:
    """Each step; with DCP's own planner, too. ``errors`` are those for odd states."""
    import torch.distributed.checkpoint as dcp

    from tieredckpt.engine import Engine
    from tieredckpt.errors import UsageError

    with Engine.open(config(Path(runtime_dir)), read_only=True) as engine:
        for step, _ in enumerate(WAYS):
            for own in (False, True):
                state = wrappers(rank, 99)
                before = addresses(state)
                if own:
                    dcp.load(state, storage_reader=engine.reader(step))
                else:
                    assert engine.load(state, step=step) == step
                assert content(state) == content(wrappers(rank, step))
                assert addresses(state) == before
        for odd in ("plain", "table"):
            state = wrappers(rank, 99, odd=odd)
            if odd in errors:
                with pytest.raises(UsageError, match=f"'odd' {errors[odd]}"):
                    engine.load(state, stream=odd)
            else:
                engine.load(state, stream=odd)
                assert content(state) == content(wrappers(rank, 7, odd=odd))


def test_wrappers_of_all_sorts_in_all_ways(shop: Workshop, runtime_dir: Path):
    staged = shop.run(save_wrappers, 2, str(runtime_dir))
    # Each is staged once: what both ranks have, by the one that writes it.
    assert abs(sum(staged) - 16 * 1024 * (1 + 0.5 + 4 * 2 + 1 + 2 * 2)) < 10_000
    shop.run(load_wrappers, 2, str(runtime_dir), {})
    for plan in [path for path in runtime_dir.rglob("*") if path.parent.name == "plans"]:
        plan.unlink()  # the segments describe the wrappers, too
    sorts = "is a (plain tensor|OptimState8bit) in the checkpoint"
    tables = "was saved in several pieces, whose inner tensors 'qmap' differ"
    shop.run(load_wrappers, 1, str(runtime_dir), {"plain": sorts, "table": tables})
    shop.run(load_wrappers, 4, str(runtime_dir), {"plain": sorts})
