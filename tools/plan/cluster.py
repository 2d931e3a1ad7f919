"""Find the smallest and the cheapest cluster of each device for given tokens and a limit in days or
dollars: the inverse of a plan.

The mesh is that of the configuration, whose data parallelism grows with the GPUs. A trace depends on
their number and not on the device, so all devices share it.
"""

from dataclasses import dataclass, replace

import tomli

from configs.load import load_config
from configs.schema import InputError
from configs.words import aligned
from tools.plan.device import Device
from tools.plan.pipeline import Stages
from tools.plan.plan import Plan, PlanInputs, make_plan
from tools.plan.rows import DEVICES

MOST = 16384  # GPUs that are tried
WORTH_A_ROW = 0.01  # how much cheaper than the smallest cluster the cheapest has to be
COLUMNS = ("device", "cluster", "GPUs", "days", "GPU-hours", "cost", "needed GiB", "MFU")


@dataclass(frozen=True)
class Cluster:
    """Cluster: a run on so many GPUs of one device."""

    device: str
    gpus: int
    days: float  # with what interruptions cost
    hours: float  # of all GPUs together
    usd: float
    needed: float  # GiB
    mfu: float

    @classmethod
    def of(cls, name: str, plan: Plan) -> "Cluster":
        inputs = plan.inputs
        seconds = plan.steps * plan.time.seconds / plan.goodput(plan.best_interval)
        hours = seconds * inputs.gpus / 3600
        return cls(
            name,
            inputs.gpus,
            seconds / 86400,
            hours,
            hours * inputs.usd_per_gpu_hour,
            plan.needed / 2**30,
            plan.mfu,
        )

    def keeps(self, days: float, usd: float) -> bool:
        return (not days or self.days <= days) and (not usd or self.usd <= usd)


def clusters(
    options: list[str], inputs: PlanInputs, per_node: int, devices: dict[str, Device]
) -> list[Cluster]:
    """Return every device with every number of GPUs, in doublings, on which the run is legal and
    fits."""
    stages = Stages()
    found = []
    for gpus in (2**i for i in range(MOST.bit_length())):
        per_host = min(gpus, per_node)
        try:
            cfg = load_config([*options, "--training.param_dtype=bfloat16"], gpus, per_host)
        except InputError:
            continue
        for name, device in devices.items():
            more = replace(inputs, gpus=gpus, per_host=per_host, device=device)
            plan = make_plan(cfg, more, stages)
            if plan.fits:
                found.append(Cluster.of(name, plan))
    return found


def known_devices() -> list[str]:
    return list(tomli.loads(DEVICES.read_text(encoding="utf-8")))


def answer(found: list[Cluster], days: float, usd: float) -> str:
    """Return the table: of each device the smallest and the cheapest cluster within the limit; or
    how near the nearest comes. Raises InputError where the run fits nowhere."""
    if not found:
        raise InputError(f"the run fits no device on up to {MOST:,} GPUs with this mesh")
    rows = [COLUMNS]
    for device in dict.fromkeys(cluster.device for cluster in found):
        of_device = [cluster for cluster in found if cluster.device == device]
        keeping = [cluster for cluster in of_device if cluster.keeps(days, usd)]
        if not keeping:
            nearest = min(of_device, key=lambda cluster: cluster.days if days else cluster.usd)
            rows.append(cells("none; nearest", nearest))
            continue
        smallest = min(keeping, key=lambda cluster: cluster.gpus)
        cheapest = min(keeping, key=lambda cluster: (cluster.hours, cluster.gpus))
        rows.append(cells("smallest", smallest))
        if cheapest.hours < smallest.hours * (1 - WORTH_A_ROW):
            rows.append(cells("cheapest", cheapest))
    return "\n".join(aligned(rows))


def cells(which: str, cluster: Cluster) -> tuple[str, ...]:
    return (
        cluster.device,
        which,
        f"{cluster.gpus:,}",
        f"{cluster.days:,.1f}",
        f"{cluster.hours:,.0f}",
        f"${cluster.usd:,.0f}" if cluster.usd else "-",
        f"{cluster.needed:.1f}",
        f"{cluster.mfu:.1%}",
    )
