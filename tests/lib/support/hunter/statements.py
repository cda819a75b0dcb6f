"""Lists the statements of programs, as templates that use the names in `World`.

`M` is a network, `Y` an output, `X` an input, `K` a number, `D` a dim. A statement need not be
legal everywhere: statements that torch refuses are removed from the program.
"""

# ruff: noqa: E501  a statement is a line

from __future__ import annotations

LOOKING = """
if here: repr(Y)
if here: str(X)
if here: local(Y)
if here: local(X).sum()
repr(Y); local(Y)
if here and Y.requires_grad: Y.retain_grad()
if here and Y.requires_grad: Y.register_hook(lambda g: None)
if here and X.requires_grad: X.register_hook(lambda g: repr(g) and None)
if here: pick(M, K).register_hook(lambda g: None)
if here: pick(M, K).register_post_accumulate_grad_hook(lambda p: None)
if here: part(M, K).register_forward_hook(lambda m, a, o: repr(o) and None)
if here: part(M, K).register_forward_hook(lambda m, a, o: local(o) is None or None)
if here: part(M, K).register_forward_pre_hook(lambda m, a: repr(a) and None)
if here: part(M, K).register_full_backward_hook(lambda m, i, o: None)
if here: part(M, K).register_forward_hook(lambda m, a, o: o.register_hook(lambda g: None) and None if o.requires_grad else None)
if here: part(M, K).register_forward_hook(lambda m, a, o: o.retain_grad() if o.requires_grad else None)
part(M, K).register_forward_hook(lambda m, a, o: repr(o) and None)
if here and Y.requires_grad: s = local(Y) * 1; torch.autograd.grad(s.square().sum(), s, retain_graph=True)
if here and Y.requires_grad: s = (local(Y) * 2).sum(); torch.autograd.grad(s.square(), s, retain_graph=True)
if here and Y.requires_grad: s = local(Y) * 1; Y.register_hook(lambda g, s=s, a=s.square().sum(): torch.autograd.grad(a, s, retain_graph=True) and None)
if here: copy.deepcopy(M)
if here: M.state_dict()
if here: [p.grad is None or p.grad.shape for p in M.parameters()]
if here: (Y.shape, Y.dtype, Y.requires_grad, Y.is_leaf, Y.grad_fn)
""".strip().splitlines()
"""Inspections, mostly on one rank, that never change anything."""

DATA = """
for p in M.parameters(): p.data.mul_(0.9)
for p in M.parameters(): p.data.clamp_(-0.05, 0.05)\\nstir(M)
pick(M, K).data.neg_()
pick(M, K).detach().numpy()[...] *= 0.5
pick(M, K).detach().mul_(1.1)
torch._foreach_mul_([p.data for p in M.parameters()], 0.9)
with torch.no_grad(): pick(M, K).mul_(0.9)
with torch.no_grad(): pick(M, K).copy_(pick(M, K) * 0.7)
for b in M.buffers(): b.is_floating_point() and b.add_(0.1)
for b in M.buffers(): b.is_floating_point() and b.data.mul_(0.5)
with torch.no_grad(): X.mul_(0.5)
X.detach().mul_(2)
with torch.no_grad(): Y.mul_(0.5)
Y.detach().add_(1)
for a, b in zip(E.parameters(), M.parameters()): a.data.lerp_(b.data, 0.5)
with torch.no_grad(): [a.copy_(b) for a, b in zip(E.parameters(), M.parameters())]
E.load_state_dict(M.state_dict())
M.load_state_dict(scaled(M.state_dict()))
part(M, K).register_forward_hook(lambda m, a, o: [p.data.mul_(0.9) for p in m.parameters()] and None)
part(M, K).register_forward_hook(lambda m, a, o: [p.detach().zero_() for p in m.parameters()] and None)
for m in M.modules(): m.register_forward_hook(lambda m, a, o: [p.data.mul_(0.9) for p in m.parameters(recurse=False)] and None)
swap(M, E)
see('average', swapped(M, E, X), 'rows')
E.update_parameters(M)
for p in M.parameters(): p.data = p.data * 0.5
with torch.no_grad(): pick(M, K).set_((pick(M, K) * 0.8).detach())
v = nn.utils.parameters_to_vector(M.parameters()) * 0.9\\nnn.utils.vector_to_parameters(v.detach(), M.parameters())
for a, b in zip(E.parameters(), M.parameters()): a.data, b.data = b.data, a.data
""".strip().splitlines()
"""Changes that bypass autograd; `E` is an average of the weights of `M`."""

REPLACING = """
X.data.add_(0.3)
Y.data.mul_(0.5)
""".strip().splitlines()
"""Changes, bypassing autograd, of activations that autograd saved."""

SURGERY = """
M.requires_grad_(True)
part(M, K).requires_grad_(False)
part(M, K).requires_grad_(True)
pick(M, K).requires_grad_(False)
M.eval()
M.train()
part(M, K).eval()
M.cpu()
M.double()
M.load_state_dict(scaled(M.state_dict()), assign=True)
part(M, K).weight = nn.Parameter(part(M, K).weight.detach() * 0.5)
E = copy.deepcopy(M)
M.zero_grad()
M.zero_grad(set_to_none=False)
pick(M, K).grad = None
""".strip().splitlines()
"""Changes of the network itself."""

SAVING = """
states = reloaded((M.state_dict(), opt.state_dict()))
states = reloaded((M.state_dict(), opt.state_dict()))
state = reloaded(M.state_dict())\\nM.load_state_dict(state)
M.load_state_dict(reloaded(M.state_dict()))
M.load_state_dict(reloaded(M.state_dict()), assign=True)
M.load_state_dict(states[0])
M.load_state_dict(states[0], assign=True)
opt.load_state_dict(reloaded(opt.state_dict()))
M.load_state_dict(states[0])\\nopt.load_state_dict(states[1])
M.load_state_dict(reloaded(M.state_dict()), assign=True)\\nopt = torch.optim.SGD(P, 0.05, momentum=0.9)
""".strip().splitlines()
"""Checkpoints saved and loaded in the middle of training."""

CASTING = """
M.float().double()\\nstir(M)
M.half().double()\\nstir(M)
M.to(torch.float32).to(torch.float64)\\nstir(M)
""".strip().splitlines()
"""Casts that give parameters new memory: changes of the network."""

HOOKS = """
pick(M, K).register_hook(lambda g: g.clamp(-1e-3, 1e-3))
pick(M, K).register_hook(lambda g: g.tanh() * 0.01)
pick(M, K).register_hook(lambda g: g * 2)
pick(M, K).register_hook(lambda g: g / (g.norm() + 1))
pick(M, K).register_hook(lambda g: see('hook', g))
[p.register_hook(lambda g: g.clamp(-1e-2, 1e-2)) for p in trained(M)]
pick(M, K).register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])
pick(M, K).register_post_accumulate_grad_hook(lambda p: see('grad', p.grad))
pick(M, K).register_post_accumulate_grad_hook(lambda p: (p.grad.clamp_(-1e-3, 1e-3), None)[1])
Y.register_hook(lambda g: g * 0.5)
Y.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
Y.register_hook(lambda g: see('dy', g, 'share'))
X.register_hook(lambda g: see('dx', g, 'share'))
part(M, K).register_forward_hook(lambda m, a, o: o * 1.5)
part(M, K).register_forward_hook(lambda m, a, o: o.mul_(0.5))
part(M, K).register_forward_pre_hook(lambda m, a: (a[0] * 0.5,))
part(M, K).register_full_backward_hook(lambda m, i, o: see('into', i[0], into(m)))
part(M, K).register_full_backward_hook(lambda m, i, o: (i[0] * 0.5,))
""".strip().splitlines()
"""Hooks that change or record their arguments, on all ranks."""

VIEWS = """
v = Y.flatten(2)
v = Y[:, :, 0]
v = Y[:, :1]
v = Y[:, :, 1:]
v = Y[..., ::2]
v = Y.flatten(1)
v = Y.reshape(Y.shape[0], -1)
v = Y.view(Y.shape[0], -1)
v = Y.transpose(1, 2)
v = Y.movedim(1, -1)
v = Y.permute(*range(Y.dim())[::-1]).permute(*range(Y.dim())[::-1])
v = Y.detach()
v = Y.unsqueeze(2)
v = Y.squeeze()
v = Y.chunk(2, 2)[0]
v = Y.split(1, 1)[0]
v = Y.unbind(2)[0]
v = Y.narrow(2, 0, 1)
v = Y.select(-1, 0)
v = Y.diagonal(0, 1, 2)
v = Y.unfold(2, 2, 1)
v = Y.expand_as(Y)
v = Y.swapaxes(1, -1)
v = Y.view_as(Y)
v = Y.mT
v = Y.contiguous()
v = Y.to(Y.dtype)
v = Y.data
v = Y.flatten(2).transpose(1, 2)
v = Y.unflatten(1, (1, -1))
""".strip().splitlines()

CHANGES = """
Y.mul_(2)
Y.add_(1)
Y.zero_()
F.relu(Y, inplace=True)
F.leaky_relu_(Y, 0.1)
Y[:, :, :1] = 0
Y[:, 0] += 1
Y[Y > 0.5] = 0.1
Y.clamp_(-0.1, 0.1)
Y.copy_(Y * 3)
Y.neg_()
Y += 1
Y.masked_fill_(Y > 0.2, 0.0)
Y.fill_(0.5)
torch.sigmoid_(Y)
Y.index_fill_(1, torch.tensor([0]), 0.3)
Y.data.mul_(2)
v.mul_(2)
v.zero_()
v += 1
v[:, :1] = 0
F.relu(v, inplace=True)
""".strip().splitlines()
"""In-place changes of bases and views."""

INDICES = """
torch.where(Y > 0.1)
(Y * 1e6).round().nonzero()
(Y * 1e6).round().nonzero(as_tuple=True)
torch.argwhere(Y > 0)
Y.argmax()
Y.argmin()
Y.argmax(D)
Y.argmin(D, keepdim=True)
Y.max(D)
Y.min(D)
Y.topk(1, D)
Y.topk(2, 1)
Y.flatten().topk(2)
Y.sort(D)[0]
Y.round().argsort(D, stable=True)
Y.median(D)
Y.median()
Y.mode(D)
Y.kthvalue(1, D)
Y.cummax(D)
Y.cummin(D)
(Y * 1e6).round().count_nonzero()
(Y * 1e6).round().count_nonzero(D)
torch.unique(Y.round())
torch.unique(Y.round(), return_inverse=True, return_counts=True)
torch.unique_consecutive(Y.round())
torch.bucketize(Y, torch.tensor([0.0, 0.5]))
torch.searchsorted(torch.tensor([0.0, 0.5]), Y)
torch.histc(Y, 4, -1, 1)
torch.bincount((Y > 0).long().flatten())
Y.numel()
Y.nelement()
len(Y)
Y.element_size()
Y.nbytes
Y.dim()
tuple(Y.shape)
Y.sum().item()
float(Y.abs().max())
bool((Y > 0).any())
int((Y > 0).sum())
Y.tolist()
Y.numpy()
Y.masked_select(Y > 0)
Y[Y > 0.2]
Y.take(torch.tensor([0, 1]))
Y.gather(D, torch.zeros_like(Y, dtype=torch.long))
torch.multinomial(torch.ones(3), 1).numel()
torch.equal(Y, Y.clone())
torch.allclose(Y, Y * 1)
torch.isclose(Y, Y).all()
F.max_pool3d(Y, 2, return_indices=True)
F.adaptive_max_pool3d(Y, 2, return_indices=True)
F.max_pool3d(Y, 3, 2, 1, return_indices=True)
Y.quantile(0.5)
Y.aminmax()
Y.std()
torch.std_mean(Y)
torch.nn.utils.parameters_to_vector(M.parameters())
torch.tril_indices(3, 3)
Y.storage_offset()
""".strip().splitlines()
"""Expressions whose results hold indices, counts or sizes."""

LOSSES = """
Y.square().mean()
Y.sin().mean()
Y.abs().mean()
F.mse_loss(Y, like(Y, K))
F.l1_loss(Y, like(Y, K))
(Y * like(Y, K)).mean()
F.cross_entropy(Y, labels(Y, K))
full(Y).square().mean()
full(Y).sin().mean() + Y.square().mean()
F.mse_loss(full(Y), like(Y, K))
Y.square().mean() + 0.01 * sum(p.square().sum() for p in M.parameters())
F.binary_cross_entropy_with_logits(Y, (like(Y, K) > 0).to(Y.dtype))
Y.mean(dim=tuple(range(2, Y.dim()))).square().mean()
Y.flatten(1).logsumexp(1).mean()
""".strip().splitlines()
"""Means over samples: a group's loss is the mean over its own samples."""

SUMS = """
Y.square().sum()
Y.norm()
F.mse_loss(Y, like(Y, K), reduction='sum')
Y.amax()
Y.std()
(Y.square().sum() / (1 + (Y > 0).sum()))
""".strip().splitlines()
"""Losses that are not means: only for one group."""

OUTSIDE = """
(head(Y)).square().mean()
F.mse_loss(head(Y), like(head(Y), K))
Y.square().mean() * torch.exp(-learned) + learned
(Y * learned).sin().mean()
head(full(Y)).square().mean()
(full(Y) * learned).square().mean()
(head(Y) * learned).square().mean() + full(Y).mean()
""".strip().splitlines()
"""Losses with parameters outside of parallelized models."""

FORWARDS = """
Y = M(X)
Y = M(X)
Y = M(X)
Y = M(X)
Y = M(X * 1)
Y = checkpointed(M, X)
Y = X\\nfor each in M: Y = each(Y)
Y = torch.func.functional_call(M, dict(M.named_parameters()), (X,))
""".strip().splitlines()

BACKWARDS = """
L.backward()
L.backward()
L.backward()
L.backward()
L.backward(retain_graph=True)
L.backward(retain_graph=True)\\nL.backward()
(L * 3).backward()
torch.autograd.backward([L])
L.backward(inputs=trained(M))
see('grads', torch.autograd.grad(L, trained(M), allow_unused=True))
see('grads', torch.autograd.grad(L, trained(M), retain_graph=True, allow_unused=True))\\nL.backward()
see('dx', torch.autograd.grad(L, X), 'share')
""".strip().splitlines()

FAST = """
see('fast', adapted(M, X, K % 3, computed=False))
see('fast', adapted(M, X, K % 3, computed=True))
""".strip().splitlines()
"""Gradients with plain tensors in place of parameters."""

PENALTIES = """
g, = torch.autograd.grad(L, X, create_graph=True)\\n(L + g.square().sum()).backward(retain_graph=True)
g, = torch.autograd.grad(L, X, create_graph=True)\\ng.square().sum().backward(retain_graph=True)
gs = torch.autograd.grad(L, trained(M), create_graph=True)\\nsum(g.square().sum() for g in gs).backward(retain_graph=True)
L.backward(create_graph=True)\\n(L + sum(p.grad.square().sum() for p in trained(M) if p.grad is not None)).backward(retain_graph=True)
""".strip().splitlines()
"""Second derivatives, only for one group."""

OPTIMIZERS = """
torch.optim.SGD(P, 0.05)
torch.optim.SGD(P, 0.05, momentum=0.9)
torch.optim.SGD(P, 0.1, foreach=True, weight_decay=0.1)
torch.optim.Adam(P, 1e-2, eps=1e-2)
torch.optim.AdamW(P, 1e-2, eps=1e-2)
torch.optim.RMSprop(P, 1e-2, eps=1e-2)
""".strip().splitlines()

AFTER_BACKWARD = """
see('norm', nn.utils.clip_grad_norm_(params(M), 0.1))
nn.utils.clip_grad_value_(params(M), 1e-3)
for p in M.parameters(): p.grad is not None and p.grad.mul_(0.5)
see('total', nn.utils.get_total_norm([p.grad for p in M.parameters() if p.grad is not None]))
""".strip().splitlines()

ZEROING = """
opt.zero_grad()
opt.zero_grad()
opt.zero_grad(set_to_none=False)
M.zero_grad()
""".strip().splitlines()

RAISING = """
pick(M, K).register_hook|M(X).square().mean().backward()
pick(M, K).register_post_accumulate_grad_hook|M(X).square().mean().backward()
part(M, K).register_full_backward_hook|M(X).square().mean().backward()
part(M, K).register_full_backward_hook|M(X).square().mean().backward()
part(M, K).register_full_backward_hook|M(X).square().mean().backward()
part(M, K).register_forward_hook|M(X).square().mean().backward()
part(M, K).register_forward_pre_hook|M(X)
""".strip().splitlines()
"""Points where a raising hook is registered, and the pass that it interrupts."""

RAISING_LATER = """
Y.register_hook|Y.square().mean().backward(retain_graph=True)
pick(M, K).register_hook|Y.square().mean().backward(retain_graph=True)
pick(M, K).register_hook|L.backward(retain_graph=True)
pick(M, K).register_hook|L.backward(retain_graph=True)
part(M, K).register_full_backward_hook|L.backward(retain_graph=True)
""".strip().splitlines()
"""The same for graphs that wait for their backward."""

DIFFERENT = """
x = rows(0) + (0.01 if here and t >= K else 0.0)
if here and t == K: M.load_state_dict(scaled(M.state_dict()))
if here and t == K: pick(M, K).data.mul_(1.1)
if here and t == K: pick(M, K).data.view(-1)[K % pick(M, K).numel()] += 1e-3
if here and t == K: part(M, K).eps = 0.1; pick(M, K).data.add_(0.1)
y = y + like(y, 100 * t + (7 if here and t >= K else 0))
""".strip().splitlines()
"""Different data on one rank from step `K` on."""

OTHER_NUMBERS = """
y = y * (0.5 if here and t >= K else 2)
y = y.sin() if here and t >= K else y
y = F.leaky_relu(y, 0.1 if here and t == K else 0.2)
y = y[:, (1 if here and t >= K else 0) % y.shape[1]] * 1 if y.shape[1] > 1 else y * (t if here else -t)
""".strip().splitlines()
"""Different computations of one rank on its part of a sample, from step `K` on."""
