"""Multi-token prediction: layers behind the last one, each of which predicts a token further on
(DeepSeek-V3, arXiv:2412.19437, section 2.2).

Layer k, from 1 on, gets the hidden state before it and the embedding of the token k places on, and
predicts the token after that one. Embedding and output projection are those of the model. The mean
of the layers' losses, times `training.mtp_weight`, is trained on. In validation and sampling these
layers do nothing. Their numbers follow those of the other layers, as in published files.

Shapes:  B batch   T sequence   D = dim   K = mtp_depth, the layers
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import arithmetic, moe
from models.layers import Block, Documents
from models.terms import AuxiliaryTerms, Term

LossHead = Callable[[Tensor, Tensor], Tensor]  # (hidden states, output weight) -> summed loss


@dataclass(frozen=True)
class LossAhead:
    """A loss head with what the predictions of tokens further on need."""

    loss: LossHead
    further: Sequence[LossHead]  # of each of the K layers
    tokens: Tensor  # int64 [B, K, T]: the tokens 1 to K places on
    weight: float  # of the mean of the layers' losses

    def __call__(self, h: Tensor, weight: Tensor) -> Tensor:
        return self.loss(h, weight)


class Prediction(nn.Module):
    """What a block has more that predicts a token further on: its input is a hidden state joined with
    the embedding of that token. To be inherited before the class of the block."""

    def __init__(self, args: Any, *parts: Any):
        """parts: as the block takes them."""
        super().__init__(args, *parts)
        of_its_norms = type(self.ffn_norm)
        self.token_norm = of_its_norms(args.dim, eps=args.norm_eps)
        self.hidden_norm = of_its_norms(args.dim, eps=args.norm_eps)
        self.w_pair = nn.Linear(2 * args.dim, args.dim, bias=False)
        self.norm = of_its_norms(args.dim, eps=args.norm_eps)

    def forward(self, h: Tensor, following: Tensor, *inputs: Any) -> tuple[Tensor, dict[str, Term]]:
        """h, following [B, T, D]; inputs: as the block takes them -> [B, T, D], normalised for the
        output projection, and what the block reports."""
        pair = torch.cat((self.token_norm(following), self.hidden_norm(h)), -1)  # [B, T, 2 D]
        result = super().forward(self.w_pair(pair), *inputs)
        h, terms = result if isinstance(result, tuple) else (result, {})
        return self.norm(h), terms


class PredictionBlock(Prediction, Block):
    """A dense block that predicts a token further on."""


class PredictionMixture(Prediction, moe.MixtureBlock):
    """A block with experts that predicts a token further on."""


class MultiTokenDecoder(moe.SparseDecoder):
    """A decoder with args.mtp_depth layers that predict further tokens, in the last stage. With a
    pipeline that stage has a copy of the embedding, as of a tied weight."""

    def __init__(self, args: Any, layers: range | None = None):
        super().__init__(args, layers)
        if not self.last or not args.mtp_depth:
            return
        for number in layers_ahead(args):
            self.layers[str(number)] = self.prediction(args, number)

    def copies_embedding(self) -> bool:
        return self.args.tied_embeddings or self.args.mtp_depth > 0

    def prediction(self, args: Any, number: int) -> nn.Module:
        """Return a new layer that predicts a token further on."""
        raise NotImplementedError

    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        for number, block in self.layers.items():
            if int(number) < self.args.n_layers:
                yield number, block

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        loss_head: LossHead = F.linear,
        documents: Documents | None = None,
        terms: AuxiliaryTerms | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """Compute `models/layers.py::Decoder.forward`. loss_head: a `LossAhead` if `terms` are
        given."""
        if terms is None or not self.last or not self.args.mtp_depth:
            return super().forward(x, positions, loss_head, documents, terms, real)
        if not isinstance(loss_head, LossAhead):
            raise TypeError(
                f"model.mtp_depth = {self.args.mtp_depth} trains with tokens further on, and this "
                "loss head has none (models/mtp.py::LossAhead)"
            )
        inputs = (*self.rope(positions), documents, real)

        def with_further(h: Tensor, weight: Tensor) -> Tensor:
            loss = loss_head(h, weight)
            return self.predict(loss, h, weight, loss_head, terms, inputs)

        return super().forward(x, positions, with_further, documents, terms, real)

    def predict(
        self,
        loss: Tensor,
        h: Tensor,
        weight: Tensor,
        ahead: LossAhead,
        terms: AuxiliaryTerms,
        inputs: tuple,
    ) -> Tensor:
        """Return the loss, whose backward adds the gradients of the predictions. h [B, T, D]: as
        the output projection gets it; weight [V, D]: that of the output projection."""
        of_each = ahead.weight / self.args.mtp_depth
        for k, number in enumerate(layers_ahead(self.args), 1):
            h, reported = self.ahead(k, h, ahead.tokens[:, k - 1], inputs)
            loss = terms.add(loss, reported, number)
            further = ahead.further[k - 1](h, weight)
            loss = terms.add_loss(loss, f"mtp_loss_{k}", further, of_each)
        return loss

    def ahead(
        self, k: int, h: Tensor, tokens: Tensor, inputs: tuple
    ) -> tuple[Tensor, dict[str, Term]]:
        """Run layer k, from 1 on. h [B, T, D]: of the layer before it; tokens int64 [B, T]: those k
        places on; inputs: cos, sin, documents and real, as in `forward`."""
        number = self.args.n_layers + k - 1
        if number not in self.mixtures():
            inputs = inputs[:-1]  # padding matters to experts alone
        return self.layers[str(number)](h, self.embed(tokens), *inputs)


def layers_ahead(args: Any) -> range:
    """Return the numbers of the layers that predict further tokens."""
    return range(args.n_layers, args.n_layers + args.mtp_depth)


def layers_in_all(args: Any) -> int:
    """Count the layers of any model, those that predict further tokens included."""
    return args.n_layers + getattr(args, "mtp_depth", 0)


def is_ahead(args: Any, parameter: str) -> bool:
    """Return whether a parameter is of a layer that predicts a further token, by its name."""
    numbers = range(args.n_layers, layers_in_all(args))
    return any(parameter.startswith(f"layers.{number}.") for number in numbers)


def layers_worth(args: Any, flops: Callable[[Any], float]) -> float:
    """Return the FLOPs of the predictions over those of a layer; 0 for a model without. flops: of
    its `Args`."""
    if not getattr(args, "mtp_depth", 0):
        return 0.0
    of_a_layer = flops(replace(args, n_layers=args.n_layers + 1)) - flops(args)
    return (flops(args) - flops(replace(args, mtp_depth=0))) / of_a_layer


def tp_plan(args: Any) -> dict[str, str]:
    """Return the rows of what these layers have more than others."""
    plan = {}
    for number in layers_ahead(args):
        layer = f"layers.{number}"
        plan[f"{layer}.token_norm"] = "sequence_plain"
        plan[f"{layer}.hidden_norm"] = "sequence_plain"
        plan[f"{layer}.w_pair"] = "slice_linear"
        plan[f"{layer}.norm"] = "sequence"
    return plan


def describe(args: Any) -> str:
    """Return the end of a line that describes a model; empty for one without."""
    if not args.mtp_depth:
        return ""
    return f"; {arithmetic.layers(args.mtp_depth)} more for further tokens"


def multiplied(args: Any) -> int:
    """Count the weights that one of these layers multiplies with more than a layer does: its own
    projection, and once more that of the output."""
    return 2 * args.dim**2 + args.vocab_size * args.dim
