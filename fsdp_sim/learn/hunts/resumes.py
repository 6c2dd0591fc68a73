"""A training that is saved on two ranks and goes on with one, as if nothing had been."""

# mypy: disable-error-code="operator, attr-defined"

from __future__ import annotations

from fsdp_sim.learn.hunts.training import Fault, Leaves, Training


def goes_on(seed):
    """Six steps of 8 rows each. Once without a break on two ranks; once saved after the third step, and from there on
    with one rank, which takes all rows of a batch. Rows and dropout do not depend on the number of ranks, so that both
    have the same losses."""
    import io

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    whole = StateDictOptions(full_state_dict=True)

    def job(ranks, steps, checkpoint=None):
        mesh, rank = DeviceMesh("cpu", list(range(ranks))), dist.get_rank()
        if rank >= ranks:
            return [], None
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
        for unit in (model[0], model[2], model):
            fully_shard(unit, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        data, dropout = torch.Generator().manual_seed(seed + 1), torch.Generator().manual_seed(seed + 2)
        done, losses = 0, []
        if checkpoint is not None:
            saved = torch.load(checkpoint)
            set_state_dict(
                model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"], options=whole
            )
            schedule.load_state_dict(saved["schedule"])
            data.set_state(saved["data"])
            dropout.set_state(saved["dropout"])
            done = saved["done"]
        for _ in range(done, steps):
            x = torch.randn(8, 32, generator=data)
            kept = torch.rand(8, 32, generator=dropout) > 0.1
            mine = slice(rank, None, ranks)
            loss = (model((x * kept)[mine]) - x.roll(1, 1)[mine]).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            done += 1
            mean = loss.detach() / ranks
            dist.all_reduce(mean, group=mesh.get_group())
            losses.append(mean.item())
        states = get_state_dict(model, optimizer, options=whole)
        saved = dict(zip(("model", "optimizer"), states, strict=True)) | {"schedule": schedule.state_dict()}
        saved |= {"data": data.get_state(), "dropout": dropout.get_state(), "done": done}
        checkpoint = io.BytesIO()
        torch.save(saved, checkpoint)
        checkpoint.seek(0)
        return losses, checkpoint

    unbroken, _ = job(2, 6)
    first, checkpoint = job(2, 3)
    then, _ = job(1, 6, checkpoint)
    return {"unbroken": unbroken, "resumed": first + then}


RESUME = Training(
    "After a restart on fewer ranks the losses are others",
    goes_on,
    (
        Fault(
            "the optimizer's state is not loaded",
            {
                "get_state_dict, set_state_dict": "get_state_dict, set_model_state_dict",
                'set_state_dict(\n    model, optimizer, model_state_dict=saved["model"], '
                'optim_state_dict=saved["optimizer"], options=whole\n)': (
                    'set_model_state_dict(model, saved["model"], options=whole)'
                ),
            },
        ),
        Fault("the schedule of the learning rate begins anew", {'schedule.load_state_dict(saved["schedule"])': ""}),
        Fault("the data is read from its beginning again", {'data.set_state(saved["data"])': ""}),
        Fault("dropout draws what it drew at the beginning", {'dropout.set_state(saved["dropout"])': ""}),
        Fault(
            "a rank takes the share of the batch that it would have of two",
            {"slice(rank, None, ranks)": "slice(rank, None, 2)"},
        ),
        Fault(
            "the count of steps is saved one behind, and the last step done again",
            {'"done": done}': '"done": done - 1}'},
        ),
    ),
    leaves=Leaves.LOSSES,
)
