"""torchao's low-bit optimizer states under FSDP2, and other wrapper subclasses of tensors."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import tieredckpt
from tests.support.frameworks import Workshop, workshop
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
        self, runtime_dir: str, optimizer: str = "AdamW8bit", *, odd: bool = False, **options: Any
    ) -> None:
        import torch
        import torch.distributed as dist
        import torchao.optim
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from tieredckpt.engine import Engine

        torch.compiler.set_stance("force_eager")  # torchao compiles each update
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
        if odd:  # of two ranks one has 4096 elements, which torchao quantizes, and one fewer
            self.model.append(torch.nn.Linear(2048, 3, bias=False))
        for layer in self.model:
            fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        kind = getattr(torchao.optim, optimizer)
        self.optimizer = kind(self.model.parameters(), lr=1e-2, **options)
        self.engine = Engine.open(config(Path(runtime_dir)))

    def train(self, step: int) -> None:
        import torch

        draw = torch.Generator().manual_seed(step)
        x = torch.randn(4, 64, generator=draw)
        loss = self.model[1](self.model[0](x)).pow(2).sum()
        for layer in self.model[2:]:
            loss = loss + layer(torch.randn(2, 2048, generator=draw)).pow(2).sum()
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
        key: [(tuple(part.shape), raw(part)) for part in each]
        for key, each in tensors(state).items()
    }


def save(rank: int, runtime_dir: str, odd: bool) -> list[Content]:
    """Train and save, once with dcp.save; in the background training goes on at once."""
    import torch.distributed.checkpoint as dcp

    job = Job(runtime_dir, odd=odd)
    assert job.engine.load({}) is None
    found = []
    for step in range(STEPS):
        job.train(step)
        state = job.state()
        found.append(content(state))
        if not step:
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


def load(rank: int, runtime_dir: str, odd: bool, step: int | None) -> tuple[Content, Content]:
    """What is loaded, and the state one step later."""
    job = Job(runtime_dir, odd=odd)
    found, state = job.resume(step=step)
    assert found == (STEPS - 1 if step is None else step)
    loaded = content(state)
    job.train(found + 1)
    after = content(job.state())
    job.engine.close()
    return loaded, after


def refused(rank: int, runtime_dir: str, cases: list[Any]) -> None:
    """Loads that must fail by key and change nothing."""
    from tieredckpt.errors import UsageError

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
    contents = shop.run(save, 2, str(runtime_dir), False)
    key = "optimizer.state.0.weight.exp_avg"
    assert [len(data) for _, data in contents[0][0][key]] == [8192, 128, 1024]
    for step in (0, None):
        number = STEPS - 1 if step is None else step
        again = shop.run(load, 2, str(runtime_dir), False, step)
        assert [loaded for loaded, _ in again] == [each[number] for each in contents]
        assert [after for _, after in again] == [each[number + 1] for each in contents]
    last = [each[STEPS - 1] for each in contents]
    for ranks in (1, 4):
        again = [loaded for loaded, _ in shop.run(load, ranks, str(runtime_dir), False, None)]
        for name in last[0]:
            assert whole(again, name) == whole(last, name), name
    cases = [
        (
            "AdamW8bit",
            {"block_size": 128},
            True,
            r"inner tensor 'scale' of 'optimizer\.state\.0.weig",
        ),
        (
            "AdamW4bit",
            {},
            False,
            "is another OptimState8bit in the state|is another OptimState4bit",
        ),
        (
            "_AdamW",
            {},
            False,
            "is a OptimState8bit in the checkpoint, .* and a Tensor in the state",
        ),
    ]
    shop.run(refused, 2, str(runtime_dir), cases)
    where = ("--runtime-dir", str(runtime_dir))
    for command in ("ls", "verify"):
        assert tieredckpt(command, *where).returncode == 0
    shop.run(damage, 2, str(runtime_dir))
    assert "1 of 6 copies are damaged" in tieredckpt("verify", *where).stderr


def damage(rank: int, runtime_dir: str) -> None:
    """Codes of the newest checkpoint are damaged: all ranks load the one before."""
    import torch.distributed as dist

    from tests.support.states import flip, manifest_of, slot_of

    job = Job(runtime_dir)
    job.train(0)
    if rank == 0:
        segments = manifest_of(job.engine, STEPS - 1).segments
        flip(slot_of(Path(runtime_dir), segments[1].id), 4096)
    dist.barrier()
    assert job.resume()[0] == STEPS - 2
    job.engine.close()


def test_ranks_of_which_one_has_a_plain_tensor(shop: Workshop, runtime_dir: Path):
    saved = shop.run(save, 2, str(runtime_dir), True)
    key = "optimizer.state.2.weight.exp_avg"
    assert [len(found[0][key]) for found in saved] == [3, 1]
    again = shop.run(load, 2, str(runtime_dir), True, None)
    assert [loaded for loaded, _ in again] == [found[STEPS - 1] for found in saved]
    text = r"'optimizer\.state\.2\.weight\.exp_avg(_sq)?' is a plain tensor in the checkpoint"
    shop.run(refused, 1, str(runtime_dir), [("AdamW8bit", {"odd": True}, True, text)])
