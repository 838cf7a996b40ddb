"""The PyTorch programs of from_pytorch_parallelism.md, run by lab/pytorch.py.

The page shows the functions above the line unchanged. torchrun runs this file as two
processes, which connect through a file and communicate over Gloo on 127.0.0.1 only.
"""

import json
import os
import pickle
import signal
import socket
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def problem():
    """Return inputs x and targets y, f32[8, 4], and weights w1 and w2, f32[4, 4]."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 4))
    y = rng.uniform(-1, 1, size=(8, 4))
    w1 = rng.normal(size=(4, 4)) / 2
    w2 = rng.normal(size=(4, 4)) / 2
    return np.float32(x), np.float32(y), np.float32(w1), np.float32(w2)


def tensors():
    """Return the arrays of problem() as tensors."""
    return [torch.from_numpy(array) for array in problem()]


def layers(w1, w2):
    """Return two layers without biases; nn.Linear stores its matrix as [out, in]."""
    first = nn.Linear(4, 4, bias=False)
    second = nn.Linear(4, 4, bias=False)
    first.weight.data.copy_(w1.T)
    second.weight.data.copy_(w2.T)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh())


def train(model, x, y, steps=4):
    """Train on x and y, f32[n, 4]; return all losses and the last step's calls."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(steps):
        with CommDebugMode() as calls:
            loss = mse_loss(model(x), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, calls


def ddp(rank):
    x, y, w1, w2 = tensors()
    mine = slice(4 * rank, 4 * rank + 4)
    model = DistributedDataParallel(layers(w1, w2))
    own, calls = train(model, x[mine], y[mine])
    return report(model.module, own, calls)


def buckets(rank):
    x, y, w1, w2 = tensors()
    mine = slice(4 * rank, 4 * rank + 4)
    model = DistributedDataParallel(layers(w1, w2), bucket_cap_mb=1e-6)
    own, calls = train(model, x[mine], y[mine])
    return report(model.module, own, calls)


def no_sync(rank):
    x, y, w1, w2 = tensors()
    first = slice(4 * rank, 4 * rank + 2)
    second = slice(4 * rank + 2, 4 * rank + 4)
    model = DistributedDataParallel(layers(w1, w2))
    with CommDebugMode() as calls, model.no_sync():
        mse_loss(model(x[first]), y[first]).backward()
    with CommDebugMode() as last_calls:
        mse_loss(model(x[second]), y[second]).backward()
    gradient = model.module[0].weight.grad.T.tolist()
    return {
        "calls": counts(calls),
        "last calls": counts(last_calls),
        "gradient": gradient,
    }


def unused(rank):
    x, y, w1, w2 = tensors()
    both = nn.ModuleDict({"used": layers(w1, w2), "unused": layers(w1, w2)})
    both.forward = lambda x: both["used"](x)
    model = DistributedDataParallel(both)
    mse_loss(model(x), y).backward()
    try:
        model(x)  # the second step
    except RuntimeError as error:
        return {"error": str(error)}


def placements(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    a = torch.arange(16.0).reshape(4, 4)
    whole = distribute_tensor(a, mesh, [Replicate()])
    rows = distribute_tensor(a, mesh, [Shard(0)])
    columns = distribute_tensor(a, mesh, [Shard(1)])
    partial = columns @ rows
    return {
        "rows to whole": moved(rows, Replicate()),
        "rows to columns": moved(rows, Shard(1)),
        "whole to rows": moved(whole, Shard(0)),
        "partial to whole": moved(partial, Replicate()),
        "partial to rows": moved(partial, Shard(0)),
        "partial": {
            "placements": str(partial.placements),
            "held": partial.to_local().tolist(),
        },
        "tanh": tanh(partial),
        "rows to partial": refused(rows, Partial()),
    }


def moved(tensor, placement):
    with CommDebugMode() as calls:
        result = tensor.redistribute(placements=[placement])
    return {"calls": counts(calls), "held": result.to_local().tolist()}


def tanh(partial):
    with CommDebugMode() as calls:
        result = torch.tanh(partial)
    return {"calls": counts(calls), "placements": str(result.placements)}


def refused(tensor, placement):
    try:
        tensor.redistribute(placements=[placement])
    except RuntimeError as error:
        return {"error": str(error)}


def fully_sharded(w1, w2, again=True):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    model = layers(w1, w2)
    fully_shard(model[0], mesh=mesh, reshard_after_forward=again)
    fully_shard(model[2], mesh=mesh, reshard_after_forward=again)
    fully_shard(model, mesh=mesh, reshard_after_forward=again)
    return model


def fsdp(rank, again=True):
    x, y, w1, w2 = tensors()
    mine = slice(4 * rank, 4 * rank + 4)
    model = fully_sharded(w1, w2, again)
    own, calls = train(model, x[mine], y[mine])
    return report(model, own, calls)


def split_layers(w1, w2):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("model",))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(layers(w1, w2), mesh, plan)


def tensor_parallel(rank):
    x, y, w1, w2 = tensors()
    model = split_layers(w1, w2)
    losses, calls = train(model, x, y)  # every rank has all examples
    return report(model, losses, calls)


def pipeline(rank, schedule_class):
    x, y, w1, w2 = tensors()
    part = layers(w1, w2)[2 * rank : 2 * rank + 2]  # one layer and its tanh
    stage = PipelineStage(part, rank, num_stages=2, device=torch.device("cpu"))
    schedule = schedule_class(stage, n_microbatches=4, loss_fn=mse_loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.5)
    means = []
    for _ in range(4):
        losses = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
            means.append(torch.stack(losses).mean().item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": means, "weight": part[0].weight.T.tolist()}


def checkpoint(rank):
    x, y, w1, w2 = tensors()
    mine = slice(4 * rank, 4 * rank + 4)
    model = fully_sharded(w1, w2)
    own, _ = train(model, x[mine], y[mine], steps=2)
    dcp.save(model.state_dict(), checkpoint_id="checkpoint")

    model = split_layers(0 * w1, 0 * w2)
    state = model.state_dict()
    dcp.load(state, checkpoint_id="checkpoint")  # into the existing tensors
    model.load_state_dict(state)
    losses, calls = train(model, x, y, steps=2)
    found = report(model, losses, calls)
    found["files"] = sorted(os.listdir("checkpoint"))
    return found


def recorder(rank):
    group = dist.new_group(timeout=timedelta(seconds=10))
    calls = 3 if rank == 0 else 2  # rank 1 leaves one out
    error = ""
    try:
        for _ in range(calls):
            dist.all_reduce(torch.ones(4), group=group)
    except RuntimeError as timeout:
        error = type(timeout).__name__
    trace = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
    entries = [e for e in trace["entries"] if e["process_group"][0] == group.group_name]
    made = [f"{e['collective_seq_id']} {e['profiling_name']}" for e in entries]
    return {"made": made, "error": error}


class Rows(Dataset):
    """A hundred examples f32[4]; all four values of one are its index."""

    def __len__(self):
        return 100

    def __getitem__(self, number):
        return np.full(4, number, np.float32)


def loader_of(rank, how):
    """Return a loader whose two workers, started by `how`, read this rank's half."""
    sampler = DistributedSampler(Rows(), num_replicas=2, rank=rank, drop_last=True)
    return DataLoader(
        Rows(),
        batch_size=16,  # of this process
        sampler=sampler,
        drop_last=True,  # 50 examples make three batches
        collate_fn=np.stack,  # NumPy arrays, not tensors
        num_workers=2,
        multiprocessing_context=how,
        persistent_workers=True,
    )


def feed(rank):
    import jax  # in here, so that workers do not import it
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    address = one_address()
    jax.distributed.initialize(address, 2, rank, coordinator_bind_address=address)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    over_all = NamedSharding(mesh, PartitionSpec("data"))

    found = {}
    for how in ("fork", "spawn"):
        batches = []
        loader = loader_of(rank, how)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for epoch in (0, 1):
                loader.sampler.set_epoch(epoch)  # without it, all epochs are equal
                for mine in loader:  # f32[16, 4]
                    batch = jax.make_array_from_process_local_data(over_all, mine)
                    batches.append(batch)
        mine = [[s.data[:, 0].tolist() for s in b.addressable_shards] for b in batches]
        told = [str(w.message) for w in caught if "os.fork()" in str(w.message)]
        found[how] = {"shape": batches[0].shape, "rows": mine, "warned": told[:1]}
    jax.distributed.shutdown()
    return found


# ---------------------------------------------------------- not shown on the page


def one_address() -> str:
    """Return the address of a free port, the same in both processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = [f"127.0.0.1:{probe.getsockname()[1]}"]
    dist.broadcast_object_list(address)
    return address[0]


def counts(calls: CommDebugMode) -> dict[str, int]:
    """Return how often each collective was called, by its name in PyTorch."""
    return {str(name): n for name, n in calls.get_comm_counts().items()}


def report(model: nn.Module, own: list[float], calls: CommDebugMode) -> dict:
    """Return a rank's losses and their mean over ranks, its calls, and of each weight,
    as [in, out], the block on this rank and the full matrix."""
    mean = torch.tensor(own)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    found = {"own": own, "losses": mean.tolist(), "calls": counts(calls)}
    for name, weight in ("w1", model[0].weight), ("w2", model[2].weight):
        whole = weight.detach()
        if isinstance(whole, DTensor):
            found[f"{name} placements"] = str(whole.placements)
            found[f"{name} held"] = whole.to_local().T.tolist()
            whole = whole.full_tensor()
        found[name] = whole.T.tolist()
    return found


PROGRAMS = {
    "ddp": ddp,
    "buckets": buckets,
    "no_sync": no_sync,
    "unused": unused,
    "placements": placements,
    "fsdp": fsdp,
    "fsdp, kept": lambda rank: fsdp(rank, again=False),
    "tensor_parallel": tensor_parallel,
    "gpipe": lambda rank: pipeline(rank, ScheduleGPipe),
    "1f1b": lambda rank: pipeline(rank, Schedule1F1B),
    "feed": feed,
    "checkpoint": checkpoint,
    "recorder": recorder,
}


def work() -> None:
    """Run these programs as one of two processes, and write the results to a file.

    Rank 1 fails at its first start, so that torchrun restarts both.
    """
    limit, *wanted = sys.argv[1:]
    signal.alarm(int(limit))  # ends this process, even in a deadlock
    warnings.filterwarnings("ignore", "Full backward hook")
    rank, attempt = (int(os.environ[n]) for n in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
    if (rank, attempt) == (1, 0):
        sys.exit("Rank 1 fails at its first start, as it should.")
    meet = f"file://{Path(f'meet{attempt}').absolute()}"
    dist.init_process_group("gloo", meet, rank=rank, world_size=2)
    found = {"torchrun": {"restarts": attempt, "world": os.environ["WORLD_SIZE"]}}
    found |= {name: PROGRAMS[name](rank) for name in wanted or PROGRAMS}
    dist.barrier()
    Path(f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    work()
