"""Report the load of each layer's experts: how a run's tokens are spread over them.

Counts are integers of the global batch, so the numbers are the same on every mesh. Every
50 steps (train.py::EXPERT_STEPS) they become metrics, a line of `experts.jsonl` in the run's folder,
and a warning where routing collapses.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from configs.schema import InputError
from configs.words import plural
from models.mtp import layers_in_all
from models.terms import AuxiliaryTerms
from parallelisms.mesh import Mesh
from training.balance import sum_over_routed
from training.lines import whole_lines

logger = logging.getLogger("plumbline")

IDLE = 0.1  # an expert is idle if it gets less than this times the mean load of its layer
# Auxiliary terms (models/terms.py) that are reported here, by layer
TERMS = ("expert_counts", "balance_loss", "router_entropy")
COLLAPSED = 0.5  # routing collapses in a layer of whose experts this share is idle
FILE = "experts.jsonl"


class ExpertLoad:
    """Statistics of a model's mixtures since the last report, from the steps that changed weights.

    sums: name of TERMS -> number of the layer -> the sum: counts of the global batches, the others
    of this rank's tokens. A stage of a pipeline has its own layers.
    """

    def __init__(self, mesh: Mesh, args: Any) -> None:
        """args: the model's numbers; it has experts."""
        self.mesh, self.args = mesh, args
        self.reset()

    def reset(self) -> None:
        self.steps = 0
        self.sums: dict[str, dict[int, Tensor]] = {name: {} for name in TERMS}

    def add(self, terms: AuxiliaryTerms) -> None:
        """Add a step that changed weights. No host-device sync."""
        self.steps += 1
        for name, sums in self.sums.items():
            for layer, value in terms.sums[name].items():
                sums[layer] = sums.get(layer, 0) + value.double()

    def report(self, step: int, model: nn.Module) -> tuple[dict[str, float], dict]:
        """Return the metrics of the steps since the last report, and their line of `experts.jsonl`,
        and reset the counts. Warns where routing collapses. Called by all ranks, and all get the
        same."""
        X, layers = self.args.n_experts, layers_in_all(self.args)
        # counts, two sums, range of the biases
        table = torch.zeros(layers, X + 3, dtype=torch.float64, device=self.mesh.device)
        counts = self.sums["expert_counts"]
        balance = self.sums["balance_loss"]
        entropy = self.sums["router_entropy"]
        for layer, mixture in model.mixtures().items():
            if layer in counts:
                table[layer, :X] = counts[layer]
                table[layer, X] = balance.get(layer, 0)
                table[layer, X + 1] = entropy[layer]
            if self.args.balancing_bias:
                table[layer, X + 2] = mixture.router.bias.max() - mixture.router.bias.min()
        sums = table[:, X : X + 2].contiguous()
        table[:, X : X + 2] = sum_over_routed(sums, self.mesh)
        rows = {
            layer: row
            for layer, row in enumerate(self.mesh.sum_over_pp(table).tolist())
            if sum(row[:X])
        }
        loads = {layer: list(map(int, row[:X])) for layer, row in rows.items()}
        values = self.metrics(rows, loads)
        line = {"step": step, "steps": self.steps, "counts": loads}
        if collapsed := [
            str(layer) for layer in loads if values[f"idle_experts/layer-{layer}"] >= COLLAPSED * X
        ]:
            where = f"{plural(len(collapsed), 'layer')} {', '.join(collapsed)}"
            option = (
                "training.expert_bias_speed" if self.args.balancing_bias else "model.balance_loss"
            )
            logger.warning(
                f"step {step}: routing collapses: in {where} at least half of the {X} experts got "
                "less than a tenth of "
                f"the mean load in the last {self.steps} steps. Raise {option}, or lower "
                "optimizer.lr"
            )
        self.reset()
        return values, line

    def metrics(
        self, rows: dict[int, list[float]], counts: dict[int, list[int]]
    ) -> dict[str, float]:
        """Return the metrics. rows: of the table in `report`, by the number of the layer."""
        values: dict[str, float] = {}
        for layer, row in rows.items():
            mean = sum(counts[layer]) / self.args.n_experts
            tokens = sum(counts[layer]) / self.args.experts_per_token
            balance, entropy, bias_range = row[self.args.n_experts :]
            values |= {
                f"expert_load/layer-{layer}": max(counts[layer]) / mean,
                f"idle_experts/layer-{layer}": sum(count < IDLE * mean for count in counts[layer]),
                f"router_entropy/layer-{layer}": entropy / tokens,
            }
            values |= (
                {f"balance_loss/layer-{layer}": balance / tokens} if self.args.balance_loss else {}
            )
            values |= (
                {f"expert_bias_range/layer-{layer}": bias_range} if self.args.balancing_bias else {}
            )
        return (
            {"expert_load": max(values[f"expert_load/layer-{layer}"] for layer in rows)} | values
            if rows
            else {}
        )


def recorded(folder: Path) -> list[dict]:
    """Read a run's `experts.jsonl`, oldest line first: "step", "steps" (how many steps up to this
    one were counted) and "counts", a list [X] by the number of the layer: how many tokens of the
    global batches each expert got. Raises InputError."""
    path = folder / FILE
    try:
        return [
            line | {"counts": {int(layer): counts for layer, counts in line["counts"].items()}}
            for line in whole_lines(path)
        ]
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}): is this the folder of a run with experts "
            "that has done 50 steps?"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a record of experts: {error}") from None
