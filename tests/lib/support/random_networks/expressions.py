"""Draws functions of a tensor, as source: slices, reductions, element-wise functions, reshapes."""

from __future__ import annotations

from support.random_networks.spot import Source, Spot, call


def piece(s: Spot) -> Source:
    """Returns slices, cuts, or rearrangements along any dim."""
    d = s.number(1, s.dims + 1)
    n = s.shape[d]
    a = s.number(0, n - 1)
    length = s.number(1, n - a)
    return call(
        "Expression",
        s.pick(
            f"x[{':, ' * d}{a}:{a + length}]",
            f"x[{':, ' * d}{-length}:]",
            f"x[..., ::{s.number(1, 2)}]",
            f"x.narrow({d}, {a}, {length})",
            f"torch.cat(x.chunk(2, {d})[::-1], {d})",
            f"torch.stack(x.split({s.number(1, n)}, dim={d})[:1]).sum(0)",
            f"torch.cat([t * (i + 1) for i, t in enumerate(x.split(2, {d}))], {d})",
            f"torch.stack(x.unbind({d})[::-1], {d})",
            f"torch.stack([x, x * x], {d}).amax({d})",
            "torch.stack([x, x * x], 1).flatten(1, 2)",
            f"x.flip({d})",
            f"x.roll({s.number(-2, 2)}, {d})",
            f"torch.roll(x, {s.each(-1, 2)}, {tuple(range(2, s.dims + 2))})",
            f"x.unfold({d}, 1, 1).squeeze(-1)",
            f"x.transpose({s.dim()}, {s.dim()}) + 1",
            f"x.index_select({d}, torch.tensor([{a}, 0]))",
            f"x.repeat_interleave(2, {d})",
            f"x.select({d}, {a}).unsqueeze({d}) + x",
            f"torch.diff(x, dim={d})",
            f"torch.cat([x, x[{':, ' * d}:1]], {d})",
            f"torch.tensor_split(x, 2, {d})[0]",
        ),
    )


def reduction(s: Spot) -> Source:
    dims, d = s.some_dims(), s.number(1, s.dims + 1)
    over = s.pick(f"{dims}", f"{d}", str(tuple(range(2, s.dims + 2))))
    return call(
        "Expression",
        s.pick(
            f"x - x.mean({over}, keepdim=True)",
            f"x * x.amax({over}, keepdim=True)",
            f"x + x.amin({over}, keepdim=True)",
            f"x / (1 + x.square().sum({over}, keepdim=True))",
            f"x / (1 + torch.norm(x, dim={over}, keepdim=True))",
            f"x / (1 + x.abs().std({over}, keepdim=True, unbiased=False))",
            f"(x - x.mean()) * torch.rsqrt(x.var({over}, unbiased=False, keepdim=True) + 0.1)",
            f"x - torch.logsumexp(x, {over}, keepdim=True)",
            f"x * x.max({d}, keepdim=True)[0] + x.min({d}, keepdim=True).values",
            f"F.normalize(x, dim={d}, eps=0.1)",
            "F.softmax(x.flatten(2), 2).view_as(x)",
            "x + x.sum()",
            "x / (1 + x.abs().max())",
            f"torch.linalg.vector_norm(x, 2, {over}, keepdim=True) * x",
            f"torch.cumsum(x, {d}) * 0.3",
            f"x * x.abs().mean({over}, keepdim=True)",
            f"x + x.median({d}, keepdim=True)[0]",
            f"F.log_softmax(x, {d})",
            f"(x * x.detach()).sum({d}, keepdim=True) + x",
        ),
    )


def pointwise(s: Spot) -> Source:
    return call(
        "Expression",
        s.pick(
            "x.clamp(-0.5, 1.0)",
            "torch.where(x > 0, x, 0.1 * x)",
            "x.masked_fill(x.detach() > 1, 0.5)",
            "x.mul(2).add_(1).tanh_()",
            "torch.lerp(x, x * x, 0.3)",
            "torch.addcmul(x, x, x, value=0.1)",
            "x * (x.sigmoid() > 0.5)",
            "x - 0.1 * x.pow(3).clamp(max=2)",
            "torch.maximum(x, -x * 0.5)",
            "(x.abs() + 0.1).log()",
            "(x.square() + 1).sqrt()",
            "torch.atan2(x, x.square() + 1)",
            "x.to(torch.float64).contiguous().clone()",
            "1 / (1 + torch.exp(-x))",
            "torch.zeros_like(x).add_(x) + torch.ones_like(x)",
            "x + x.new_zeros(x.shape[1:]) + x.new_ones(1)",
            "x * torch.linspace(0.5, 1, x.shape[-1], dtype=x.dtype)",
            "x.detach() * 0.1 + x",
            "torch.expm1(x.clamp(max=1))",
        ),
    )


def reshaped(s: Spot) -> Source:
    c, last = s.channels, s.dims + 1
    groups = s.pick(*(g for g in range(1, c + 1) if c % g == 0))
    spatial = ", ".join(f"x.shape[{d}]" for d in range(2, s.dims + 2))
    return call(
        "Expression",
        s.pick(
            "x.flatten(2).reshape(x.shape) * 2",
            f"x.view(x.shape[0], {groups}, -1, {spatial}).sum(2)",
            f"x.unflatten(1, ({groups}, {c // groups})).transpose(1, 2).flatten(1, 2)",
            f"torch.channel_shuffle(x, {groups})",
            f"x.permute(0, {', '.join(map(str, range(2, s.dims + 2)))}, 1).movedim(-1, 1)",
            "x.movedim(1, -1).softmax(-1).movedim(-1, 1)",
            f"x.transpose(1, {last}).contiguous().transpose(1, {last})",
            f"x.unsqueeze(2).expand(-1, -1, 2, {', '.join(['-1'] * s.dims)}).mean(2)",
            f"x.repeat(1, 2, {', '.join('1' * s.dims)})",
            f"x.view(-1, 1, {spatial}).view(x.shape[0], -1, {spatial})",
            f"x.flatten(0, 1).unflatten(0, (x.shape[0], {c}))",
            "torch.cat([x, x.square()], 1)[:, ::2]",
        ),
    )
