"""The ways in which models are spread over ranks, with their optimizers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tieredckpt.testing.dcp import oracle
from tieredckpt.testing.dcp.job import Job
from tieredckpt.testing.dcp.scenario import scenario
from tieredckpt.testing.dcp.scenarios.sharding import cut


def network() -> nn.Sequential:
    """Layers of sizes that no number of ranks divides."""
    return nn.Sequential(
        nn.Linear(9, 13), nn.LayerNorm(13), nn.Linear(13, 6, bias=False), nn.Linear(6, 5)
    )


class Trainer:
    """A model and its optimizer, trained for a step so that the optimizer has a state.

    Args:
        model: As it is spread over the ranks.
        options: How their state dict is taken.
    """

    def __init__(self, model: nn.Module, options: StateDictOptions | None = None) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, foreach=False)
        self.options = options
        model(torch.ones(4, 9)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """Both, under fully qualified names."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optimizer": optimizer}

    def put(self, step: int) -> None:
        """Give all parameters and moments the values of ``step``."""
        state = self.state()
        oracle.fill(state, step)
        self.take(state)

    def take(self, state: dict[str, Any]) -> None:
        """Set both from a state dict."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self.options,
        )

    def save(self, job: Job, step: int) -> None:
        """Train to ``step``, as far as one can tell from outside, and save."""
        self.put(step)
        job.save(self.state(), step)

    def load(self, job: Job, step: int) -> None:
        """Load, set the model and the optimizer, and compare what they hold then."""
        self.put(-1)
        state = self.state()
        state["optimizer"]["param_groups"] = _without_rates(state["optimizer"]["param_groups"])
        job.load(state, step)
        self.take(state)
        found = self.state()
        # Per layer a weight, mostly a bias, and of each two moments and a step count.
        assert oracle.check(found, step) >= 12
        for name, rate in _rates(found["optimizer"]["param_groups"]):
            assert rate == 0.5, f"the learning rate of {name} is {rate}"


def _without_rates(groups: Any) -> Any:
    if isinstance(groups, list):
        return [{**group, "lr": 0.125} for group in groups]
    return groups


def _rates(groups: Any) -> list[tuple[str, float]]:
    return [(str(number), group["lr"]) for number, group in enumerate(groups)]


def sharded_model(mesh: DeviceMesh | None = None) -> nn.Module:
    """The network under FSDP2."""
    model = network()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@scenario(2)
def fsdp2(job: Job) -> None:
    """FSDP2: model and optimizer by get_state_dict, loaded into fresh ones"""
    Trainer(sharded_model()).save(job, 1)
    job.restart()
    Trainer(sharded_model()).load(job, 1)


@scenario(4, 2, 3)
def fsdp2_other_world_sizes(job: Job) -> None:
    """FSDP2 saved on 4 ranks, loaded on 2 and saved there, loaded on 3"""
    trainer = Trainer(sharded_model())
    if job.stage:
        trainer.load(job, job.stage)
    trainer.save(job, job.stage + 1)


@scenario(4)
def hsdp(job: Job) -> None:
    """HSDP: sharded in two groups of two, replicated over them; loaded as HSDP and as FSDP"""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    Trainer(sharded_model(mesh)).save(job, 1)
    job.restart()
    Trainer(sharded_model(mesh)).load(job, 1)
    Trainer(sharded_model()).load(job, 1)


@scenario(2)
def ddp(job: Job) -> None:
    """DistributedDataParallel: replicated, written once; loaded as DDP and as FSDP2"""
    Trainer(nn.parallel.DistributedDataParallel(network())).save(job, 1)
    job.restart()
    Trainer(nn.parallel.DistributedDataParallel(network())).load(job, 1)
    Trainer(sharded_model()).load(job, 1)


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    """The network with its first and third layer cut over ``mesh``."""
    plan = {"0": ColwiseParallel(output_layouts=_REPLICATED), "2": RowwiseParallel(
        input_layouts=_REPLICATED)}  # fmt: skip
    return parallelize_module(network(), mesh, plan)


_REPLICATED = torch.distributed.tensor.Replicate()


@scenario(2)
def tensor_parallelism(job: Job) -> None:
    """parallelize_module: column-wise and row-wise layers; loaded as TP and as FSDP2"""
    Trainer(tensor_parallel(init_device_mesh("cpu", (2,)))).save(job, 1)
    job.restart()
    Trainer(tensor_parallel(init_device_mesh("cpu", (2,)))).load(job, 1)
    Trainer(sharded_model()).load(job, 1)


def two_ways(data: int, tensor: int) -> nn.Module:
    """FSDP2 over tensor parallelism: strided shards."""
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
    model = tensor_parallel(mesh["tensor"])
    assert isinstance(model, nn.Sequential)
    for layer in model:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model


@scenario(4, 4, 2)
def fsdp2_over_tensor_parallelism(job: Job) -> None:
    """2 data-parallel x 2 tensor-parallel ranks, loaded as 4 x 1, 1 x 4 and on two ranks"""
    if job.stage == 0:
        Trainer(two_ways(2, 2)).save(job, 1)
    elif job.stage == 1:
        Trainer(two_ways(2, 2)).load(job, 1)
        Trainer(two_ways(4, 1)).load(job, 1)
        Trainer(two_ways(1, 4)).load(job, 1)
    else:
        Trainer(two_ways(1, 2)).load(job, 1)


def stage_layers(job: Job, layers: int, interleaved: bool) -> dict[str, Any]:
    """A pipeline's layers of this rank: a run of them, or every n-th."""
    per_rank = -(-layers // job.world)
    mine = [
        number
        for number in range(layers)
        if (number % job.world if interleaved else number // per_rank) == job.rank
    ]
    return {
        f"layers.{number}": {"weight": torch.zeros(5, number + 1), "bias": torch.zeros(number)}
        for number in mine
    }


@scenario(4, 2)
def pipeline(job: Job) -> None:
    """Pipeline stages with disjoint keys, 7 layers on 4 ranks, then on 2"""
    if job.stage == 0:
        job.save_filled(stage_layers(job, 7, interleaved=False), 1)
        job.restart()
    job.load_checked(stage_layers(job, 7, interleaved=False), 1)


@scenario(4, 3)
def interleaved_pipeline(job: Job) -> None:
    """Interleaved stages saved on 4 ranks, loaded interleaved on 3, and in runs"""
    if job.stage == 0:
        job.save_filled(stage_layers(job, 11, interleaved=True), 1)
    else:
        job.load_checked(stage_layers(job, 11, interleaved=True), 1)
        job.load_checked(stage_layers(job, 11, interleaved=False), 1)


def experts(job: Job, groups: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    """Experts that are each cut over a sub-mesh; a rank outside of all of them has none."""
    state: dict[str, Any] = {}
    for number, ranks in enumerate(groups):
        mesh = DeviceMesh("cpu", list(ranks))  # collective over all ranks
        if job.rank in ranks:
            state[f"experts.{number}"] = cut(mesh, (5, 4), Shard(0))
    return state


@scenario(4)
def expert_parallelism(job: Job) -> None:
    """Experts on the sub-meshes (0, 1) and (2, 3) beside what all have; then other ones"""

    def state(groups: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
        return {"router": torch.zeros(6), **experts(job, groups)}

    job.save_filled(state(((0, 1), (2, 3))), 1)
    job.restart()
    job.load_checked(state(((0, 1), (2, 3))), 1)
    job.load_checked(state(((0, 2), (3, 1))), 1)


@scenario(4)
def ranks_with_nothing(job: Job) -> None:
    """All experts on the ranks 1 and 2: the others, the coordinator too, write and read nothing"""
    job.save_filled(experts(job, ((1, 2),)), 1)
    job.restart()
    state = experts(job, ((1, 2),))
    oracle.fill(state, -1)
    job.load(state, 1)
    assert oracle.check(state, 1) == (1 if job.rank in (1, 2) else 0)


def grid(job: Job, pipelines: int, data: int, tensor: int) -> dict[str, Any]:
    """8 layers over pipeline x data x tensor ranks; each weight is cut over data and tensor."""
    mesh = init_device_mesh("cpu", (pipelines, data, tensor), mesh_dim_names=("p", "d", "t"))
    mine = mesh.get_local_rank("p")
    inner = mesh["d", "t"]
    per_stage = 8 // pipelines
    return {
        f"layers.{number}": {
            "column": cut(inner, (9, 10), Shard(0), Shard(1)),
            "row": cut(inner, (10, 7), Shard(1), Shard(0)),
            "both": cut(inner, (11, 3), Shard(0), Shard(0)),
            "norm": torch.zeros(10),
        }
        for number in range(mine * per_stage, (mine + 1) * per_stage)
    }


LAYOUTS = ((2, 1, 2), (1, 2, 2), (4, 1, 1), (2, 2, 1), (1, 1, 4))


@scenario(4, 4, 4, 4, 4)
def three_dimensional_layouts(job: Job) -> None:
    """TP x PP x DP, saved in five layouts, each loaded into the next one"""
    if job.stage:
        job.load_checked(grid(job, *LAYOUTS[job.stage]), job.stage)
    job.save_filled(grid(job, *LAYOUTS[job.stage]), job.stage + 1)
    job.load_checked(grid(job, *LAYOUTS[(job.stage + 1) % len(LAYOUTS)]), job.stage + 1)


@scenario(2)
def offloaded_optimizer(job: Job) -> None:
    """get_state_dict(cpu_offload=True): state dicts that are copies on the CPU"""
    options = StateDictOptions(cpu_offload=True)
    Trainer(sharded_model(), options).save(job, 1)
    job.restart()
    Trainer(sharded_model(), options).load(job, 1)
    Trainer(sharded_model()).load(job, 1)


@scenario(2)
def full_state_dict(job: Job) -> None:
    """get_state_dict(full_state_dict, cpu_offload): gathered on rank 0, the other has nothing"""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    trainer = Trainer(sharded_model())
    trainer.put(1)
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer, options=options)
    assert bool(model) == (job.rank == 0)
    job.save({"model": model, "optimizer": optimizer}, 1)
    job.restart()
    Trainer(sharded_model()).load(job, 1)


@scenario(2)
def flattened_optimizer(job: Job) -> None:
    """get_state_dict(flatten_optimizer_state_dict=True), as torchtitan saves it"""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    trainer = Trainer(sharded_model(), options)
    trainer.put(1)
    job.save(trainer.state(), 1)
    job.restart()
    fresh = Trainer(sharded_model(), options)
    fresh.put(-1)
    state = fresh.state()
    for name in state["optimizer"]:
        if name.endswith(".lr"):
            state["optimizer"][name] = 0.125
    job.load(state, 1)
    fresh.take(state)
    assert oracle.check(fresh.state(), 1) >= 12
    assert fresh.optimizer.param_groups[0]["lr"] == 0.5


@scenario(2)
def two_optimizers(job: Job) -> None:
    """One model, one optimizer for each half of it, and a momentum that only one of them has"""
    model = sharded_model()
    parameters = list(model.parameters())
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(parameters[:3], lr=0.5, momentum=0.9),
        torch.optim.AdamW(parameters[3:], lr=0.5),
    ]
    model(torch.ones(4, 9)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()

    def state() -> dict[str, Any]:
        found, inner = get_state_dict(model, optimizers)
        return {"model": found, "optimizers": inner}

    job.save_filled(state(), 1)
    job.restart()
    job.load_checked(state(), 1)


@scenario(2)
def gathered_parameters(job: Job) -> None:
    """After a load, FSDP2 computes with the loaded values"""
    model = sharded_model()
    Trainer(model).save(job, 1)
    job.restart()
    fresh = Trainer(sharded_model())
    fresh.load(job, 1)
    weight = dict(fresh.model.named_parameters())["3.bias"]
    assert isinstance(weight, DTensor)
    dist.barrier()
    oracle.assert_same("bias", weight.full_tensor().detach(), oracle.whole("model.3.bias", 1, (5,)))
