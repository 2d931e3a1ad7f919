"""Mixtures of experts: for each token a router chooses some of many feed-forward layers (Shazeer et
al., arXiv:1701.06538).

No token is dropped and no expert has a capacity: dispatch sorts the rows by expert, and one grouped
GEMM multiplies them. The weights of all experts stand in one parameter per matrix.

The words: the router chooses the experts of each token. Dispatch sorts copies of the tokens by
expert, combine adds the weighted outputs of a token's experts.

Shapes:  B batch   T sequence   D = dim   N = B T tokens   X experts   k experts of a token   M = N k rows
         F hidden units of an expert
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.kernels.grouped_product import grouped_product
from models.kernels.precision import wide
from models.layers import Block, Decoder, Documents, FeedForward
from models.local import local
from models.terms import Term


class ExpertChoice(NamedTuple):
    """The experts that a router chose for N tokens, and their weights."""

    experts: Tensor  # int64 [N, k]
    weights: Tensor  # float32 [N, k]: of the experts' outputs
    affinities: Tensor  # float32 [N, X]: positive, and 1 in sum for each token


class Router(nn.Module):
    """Chooses the k experts with the highest scores; everything is computed in float32.

    args has n_experts and experts_per_token; router_score "softmax" or "sigmoid";
    normalised_weights: whether the weights of a token are divided by their sum; routed_scale: a
    factor of all weights; expert_groups and groups_per_token: only experts of so many of the groups
    are chosen (1 and 1: no groups); balancing_bias: whether there is a bias.

    The bias of an expert is added to its score where experts are chosen, and nowhere else
    (DeepSeek-V3, arXiv:2412.19437, section 2.1.2): it weights no output. No gradient reaches it;
    `training/balance.py` moves it after each step.
    """

    def __init__(self, args: Any):
        super().__init__()
        self.args = args
        self.weight = nn.Parameter(torch.empty(args.n_experts, args.dim))
        if args.balancing_bias:
            self.bias = nn.Parameter(torch.empty(args.n_experts), requires_grad=False)

    def logits(self, x: Tensor) -> Tensor:
        """x [N, D] -> float32 [N, X]. A family may add to it (models/gpt_oss.py)."""
        weight = local(self.weight)
        return F.linear(wide(x), wide(weight))

    def forward(self, x: Tensor) -> ExpertChoice:
        """x [N, D]."""
        args = self.args
        logits = self.logits(x)  # [N, X]
        scores = logits.softmax(-1) if args.router_score == "softmax" else logits.sigmoid()
        wanted = scores.detach() + self.bias if args.balancing_bias else scores.detach()
        if args.expert_groups > 1:
            wanted = self.within_best_groups(wanted)
        experts = wanted.topk(args.experts_per_token, -1).indices
        weights = scores.gather(-1, experts)
        if args.normalised_weights:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # all scores may be 0
        affinities = scores
        if args.router_score != "softmax":
            affinities = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        return ExpertChoice(experts, weights * args.routed_scale, affinities)

    def within_best_groups(self, wanted: Tensor) -> Tensor:
        """Return the scores [N, X], and -inf outside of each token's best groups. A group is as
        good as the sum of its two best experts (DeepSeek-V3's inference code; the report, section
        2.1.2, sums as many as a token has of each node)."""
        groups = wanted.unflatten(-1, (self.args.expert_groups, -1))  # [N, groups, X / groups]
        merits = groups.topk(2, -1).values.sum(-1)  # [N, groups]
        best = merits.topk(self.args.groups_per_token, -1).indices
        outside = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
        return groups.masked_fill(outside[..., None], float("-inf")).flatten(-2)


class Experts(nn.Module):
    """X layers of SwiGLU, as `models/layers.py::FeedForward`."""

    def __init__(self, args: Any):
        super().__init__()
        # [X, F, D], [X, D, F], [X, F, D]
        self.w1 = nn.Parameter(torch.empty(args.n_experts, args.expert_dim, args.dim))  # gate
        self.w2 = nn.Parameter(torch.empty(args.n_experts, args.dim, args.expert_dim))  # down
        self.w3 = nn.Parameter(torch.empty(args.n_experts, args.expert_dim, args.dim))  # up
        self.gradient_factor = 1.0  # of all weights here; parallelisms/ep.py::distribute sets it

    def parts(self, *weights: Tensor) -> list[Tensor]:
        """Return weights as forward multiplies with them: those of this rank's experts."""
        return [local(weight, self.gradient_factor) for weight in weights]

    def weights(self) -> list[Tensor]:
        """Return w1, w2 and w3 as forward multiplies with them, then what else a subclass computes
        with."""
        return self.parts(self.w1, self.w2, self.w3)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows [M, D], sorted by expert; counts int64 [X]: how many each has -> [M, D]."""
        w1, w2, w3 = self.weights()
        # [M, F]
        hidden = F.silu(grouped_product(rows, w1, counts)) * grouped_product(rows, w3, counts)
        return grouped_product(hidden, w2, counts)


@dataclass
class SortedRows:
    """The state of `LocalDispatcher` between its methods."""

    rows: Tensor  # [M, D], sorted by expert: of tokens, then of their results
    counts: Tensor  # int64 [X]: the rows of each expert
    order: Tensor  # int64 [M]: which (token, choice) each row is of
    weights: Tensor  # [N, k]


class LocalDispatcher(nn.Module):
    """Dispatch and combine where one rank has all experts. Expert parallelism puts another
    dispatcher in its place (parallelisms/ep_dispatch.py), with the same three methods; the state that leads
    from one to the next is its own."""

    def dispatch(
        self, tokens: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor
    ) -> SortedRows:
        """Send each token to its experts. tokens [N, D]; chosen int64 [N, k]; weights [N, k];
        counts int64 [X]: the rows of each expert."""
        order = chosen.flatten().argsort(stable=True)
        return SortedRows(tokens[order // chosen.shape[1]], counts, order, weights)

    def compute(self, state: SortedRows, experts: nn.Module) -> SortedRows:
        """Run the experts on the rows that have come."""
        results = experts(state.rows, state.counts)
        return SortedRows(results, state.counts, state.order, state.weights)

    def combine(self, state: SortedRows) -> Tensor:
        """Return the weighted sum of the results of each token's experts, [N, D]."""
        return weighted(state.rows, state.order, state.weights)


def inverse(order: Tensor) -> Tensor:
    """Return the inverse permutation: the row that each place has got. int64 [M] -> [M]."""
    numbers = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, numbers)


def weighted(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, [N, D]. rows [M, D]: their outputs, sorted
    by expert; order int64 [M]: which (token, choice) each is of; weights [N, k]."""
    of_tokens = rows[inverse(order)].view(*weights.shape, rows.shape[1])  # [N, k, D]
    return torch.bmm(weights.to(rows.dtype)[:, None], of_tokens).squeeze(1)


class BalanceLoss(nn.Module):
    """DeepSeek-V3's sequence-wise balance loss (arXiv:2412.19437, equations 17 to 20), times the
    tokens of each sequence and summed over the sequences.

    Equation 20 averages the affinities over a sequence. Here each token adds its own, so that the
    loss of a sequence is the sum over the ranks that share it, and is divided by the tokens of the
    global batch like every other loss.
    """

    def __init__(self, args: Any):
        super().__init__()
        self.n_experts = args.n_experts
        self.factor = args.balance_loss

    def forward(self, affinities: Tensor, counts: Tensor) -> Tensor:
        """affinities [B, T, X], of T tokens that may be a part of a sequence; counts int64 [B, X]:
        the tokens of each whole sequence that chose an expert."""
        counts = counts.to(affinities.dtype)
        # [B, X], 1 where all experts get as many
        share = counts / counts.sum(-1, keepdim=True).clamp(min=1) * self.n_experts
        return self.factor * torch.einsum("btx,bx->", affinities, share)


class MixtureOfExperts(nn.Module):
    """In the place of a block's feed-forward layer. args.n_shared_experts experts work on every
    token, as one layer. router and experts: those of a family that has its own."""

    def __init__(self, args: Any, router: Router | None = None, experts: Experts | None = None):
        super().__init__()
        self.args = args
        self.router = router or Router(args)
        self.experts = experts or Experts(args)
        self.dispatcher = LocalDispatcher()
        self.balance = BalanceLoss(args)
        self.shared_experts: FeedForward | None = None
        if args.n_shared_experts:
            self.shared_experts = FeedForward(args.dim, args.n_shared_experts * args.expert_dim)

    def shared(self, x: Tensor) -> Tensor:
        """Return the output of the shared experts, [B, T, D] as x is."""
        return self.shared_experts(x)

    def forward(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, dict[str, Term]]:
        """x [B, T, D] -> [B, T, D], and what is reported of these tokens: int64 [X] how many each
        expert got; the entropy of each token's affinities, in nats, and the balance loss, both
        summed over the tokens. real: bool [B, T], which tokens are no padding: of others nothing is
        reported; None: all are reported."""
        tokens = x.flatten(0, 1)  # [N, D]
        choice = self.router(tokens)
        chosen = choice.experts.view(len(x), -1)  # int64 [B, T k]
        counts = self.count(chosen, torch.ones_like(chosen))
        state = self.dispatcher.dispatch(tokens, choice.experts, choice.weights, counts.sum(0))
        # computed while the rows are on their way
        shared = None if self.shared_experts is None else self.shared(x)
        state = self.dispatcher.compute(state, self.experts)
        out = self.dispatcher.combine(state).view_as(x)
        if shared is not None:
            out = out + shared
        affinities = choice.affinities.view(*x.shape[:2], -1)  # [B, T, X]
        if real is not None:
            affinities = affinities * real[..., None]
            counts = self.count(chosen, real.long().repeat_interleave(choice.experts.shape[1], 1))
        return out, self.report(affinities, counts)

    def count(self, chosen: Tensor, tokens: Tensor) -> Tensor:
        """Count what each expert gets of each sequence: chosen int64 [B, T k]; tokens int64 [B, T k],
        1 where a token is counted -> int64 [B, X]."""
        return chosen.new_zeros(len(chosen), self.args.n_experts).scatter_add_(1, chosen, tokens)

    def report(self, affinities: Tensor, counts: Tensor) -> dict[str, Term]:
        """Return what is reported: affinities [B, T, X]; counts int64 [B, X]."""
        terms = {}
        if self.args.balance_loss:
            balance = self.balance(affinities, counts)
            terms["balance_loss"] = Term(balance, weight=1.0)  # its factor is in it
        entropy = torch.special.entr(affinities.detach()).sum()
        terms["router_entropy"] = Term(entropy)
        terms["expert_counts"] = Term(counts.sum(0))
        return terms


class MixtureBlock(Block):
    """A block whose feed-forward layer is a mixture of experts."""

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        documents: Documents | None = None,
        real: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Term]]:
        h = x + self.attention(self.attention_norm(x), cos, sin, documents)  # [B, T, D]
        out, terms = self.feed_forward(self.ffn_norm(h), real)
        return h + out, terms


class SparseDecoder(Decoder):
    """A decoder, some blocks of which may be a `MixtureBlock`."""

    def mixtures(self) -> dict[int, nn.Module]:
        """Return the mixtures of experts by the number of their layer."""
        return {
            int(number): layer.feed_forward
            for number, layer in self.layers.items()
            if isinstance(layer.feed_forward, MixtureOfExperts)
        }


TP_PLAN_OF_SHARED = {  # experts that get all tokens, split as a dense feed-forward layer is
    "layers.*.feed_forward.shared_experts": "gather_sequence",
    "layers.*.feed_forward.shared_experts.w1": "columns",
    "layers.*.feed_forward.shared_experts.w3": "columns",
    "layers.*.feed_forward.shared_experts.w2": "rows",
}


def tp_plan(args: Any) -> dict[str, str]:
    """Return a plan that splits only the shared experts, which get all tokens. A mixture works on
    this rank's slice of the sequence."""
    mixture = {"layers.*.feed_forward": "slice", "layers.*.feed_forward.router": "router"}
    return mixture | (TP_PLAN_OF_SHARED if args.n_shared_experts else {})


def describe(args: Any, active: int) -> str:
    """active: how many of the parameters work on a token."""
    return (
        f"{active:,} of the parameters for each token: "
        f"{args.experts_per_token} of {args.n_experts} experts"
    )


def multiplied(args: Any) -> int:
    """Count the weights of a mixture that a token is multiplied with: of the router, the shared
    experts, and as many of the others as it is sent to."""
    experts = args.experts_per_token + args.n_shared_experts
    return 3 * args.dim * args.expert_dim * experts + args.n_experts * args.dim
