"""Run several hundred ops on Float8Tensors, classify each, and write docs/dispatch_table.md.

    python -m tests.tensor.dispatch_table

An op is an expression over the names of ``operands``. It is evaluated once with Float8Tensors and
once with their dequantized values, and the two results must agree.
"""

import copy
import functools
import math
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import float8lab
from float8lab.tensor import Float8Tensor, quantize
from float8lab.tensor.compute import DEQUANTIZE_INSIDE

TORCH = ".".join(torch.__version__.split(".")[:2])
PAGE = Path(__file__).resolve().parents[2] / "docs" / "dispatch_table.md"

NATIVE, INSIDE, REQUANTIZE = "native", "inside", "requantize"
DEQUANTIZE, ERROR = "dequantize", "error"

GRANULARITIES = {
    "tensor": ((-1, -1), "fp32"), "row": ((1, -1), "fp32"), "column": ((-1, 1), "pow2"),
    "1x128": ((1, 128), "fp32"), "128x128": ((128, 128), "fp32"), "mx": ((1, 32), "e8m0"),
}  # fmt: skip

SIZE = 160  # two blocks of 128, the second cut off by the edge; five of 32


def _expressions(text: str) -> tuple[str, ...]:
    """Split a text into expressions, at semicolons and ends of lines."""
    return tuple(expression.strip() for expression in re.split(r";|\n", text.strip()))


OPS: dict[str, tuple[str, ...]] = {
    "Views": _expressions("""
        x.detach(); x.data; x.alias_()
        torch.ops.aten.alias(x)
        x.view(2, 80, 160); x.view(64, 400); x.view(-1); x.view(32, 5, 160); x.view_as(p)
        x.reshape(160, 2, 80); x.reshape(-1, 40); x.flatten(); x.ravel()
        x.unflatten(0, (5, 32)); x.unflatten(1, (32, 5)); x.t(); x.T; x.mT; x.H; x.adjoint()
        x.transpose(0, 1); x.swapaxes(0, 1); x.swapdims(0, 1); x.permute(1, 0); x.movedim(0, 1)
        x.view(4, 40, 160).permute(2, 0, 1); x.unsqueeze(1); x.unsqueeze(0).squeeze(0)
        x.unsqueeze(0).squeeze()
        x[None]
        x.expand(3, 160, 160); x.unsqueeze(1).expand(160, 3, 160)
        torch.broadcast_to(x, (2, 160, 160))
        x.expand_as(p)
        x[0]; x[-1]; x[3, 5]; x[:, 7]; x[..., 0]
        x.select(1, 130)
        x[10:20]; x[128:]; x[:128, :128]; x[100:150]; x[:, 100:150]; x[::2]; x[:, ::3]
        x[3:90:7]; x[5:5]
        x.narrow(0, 32, 64); x.split(64); x.split([100, 60], 1); x.split(32, 1); x.chunk(5)
        x.chunk(3, 1); x.tensor_split(3); x.unbind(); x.unbind(1); x.hsplit(2); x.vsplit(2)
        list(x)
        x.as_strided((160, 160), (160, 1)); x.as_strided((160, 160), (1, 160))
        x.as_strided((32, 160), (160, 1), 160); x.as_strided((5, 160), (0, 1)); x.diagonal()
        torch.diagonal(x, offset=2)
        x.unfold(0, 8, 4)
        torch.atleast_3d(x); torch.atleast_2d(x); torch.broadcast_tensors(x, p)
        torch.meshgrid(x[0], x[1], indexing="ij")
        x.real; x.view(torch.int32); x.view(torch.uint8); x.t_(); x.unsqueeze_(0); x.squeeze_()
        x.resize_(4, 4); x.set_(p)
    """),
    "Copies, moves and allocation": _expressions("""
        x.clone(); x.clone(memory_format=torch.contiguous_format); x.contiguous()
        x.t().contiguous(); x.cpu(); x.to("cpu"); x.to("cpu", copy=True); x.to(torch.bfloat16)
        x.to(torch.float64); x.to(torch.int32); x.to(torch.float8_e5m2); x.to(p); x.type_as(p)
        x.float(); x.half(); x.bfloat16(); x.double(); x.long(); x.bool(); x.type(torch.float16)
        x.is_pinned(); x.is_shared(); x.share_memory_(); x.is_contiguous(); x.stride()
        x.element_size(); x.nbytes; x.numel(); x.dim(); x.is_floating_point(); x.dequantize()
        copy.copy(x); copy.deepcopy(x)
        pickle.loads(pickle.dumps(x))
        x.tolist()
        x[0, 0].item()
        float(x[0, 0]); bool(x[0, 0]); len(x)
        x.numpy(); x.numpy(force=True).tolist()
        torch.empty_like(x).shape
        x.new_empty(3, 4).shape; x.new_zeros(3, 4); x.new_zeros((2, 3, 4)); x.new_ones(3, 4)
        x.new_full((3, 4), 2.0); x.new_tensor([1.0]); x.new_empty_strided((3, 4), (4, 1)).shape
        torch.zeros_like(x); torch.ones_like(x); torch.full_like(x, 3.0); torch.rand_like(x)
        torch.randn_like(x); torch.randint_like(x, 5)
        torch.empty_like(x, dtype=torch.int32).shape
    """),
    "Indexing, joining, reordering": _expressions("""
        x[i]; x[:, i]; x[i.view(2, 2)]; x[-i]; x[i, i]; x[row_mask]; x[mask]
        x.index_select(0, i); x.index_select(1, i); x.gather(1, i.view(1, 4)); x.take(i)
        x.take_along_dim(i.view(1, 4), 1); x.masked_select(mask)
        F.embedding(i, x); F.embedding(i.view(2, 2), x); F.embedding(i, x, padding_idx=0)
        F.embedding_bag(i.view(2, 2), x)
        torch.cat([x, y]); torch.cat([x, y], 1); torch.cat([x[:32], y])
        torch.cat([x[:30], y[:20]], 0); torch.cat([x[:, :128], y], 1); torch.cat([x, p])
        torch.concat([x, y]); torch.stack([x, y]); torch.stack([x, y], -1); torch.stack([x, p])
        torch.hstack([x, y]); torch.vstack([x, y]); torch.dstack([x, y]); torch.block_diag(x, y)
        x.flip(0); x.flip(0, 1); x.fliplr(); x.flipud(); x.rot90(); x.roll(32, 0); x.roll(1, 1)
        x.roll(3); x.repeat(2, 1); x.repeat(2, 1, 3); x.tile(1, 2); x.repeat_interleave(2, 0)
        F.pad(x, (1, 2))
        x.tril(); x.triu()
        torch.diag(x); torch.diag_embed(x[0]); torch.diagonal_scatter(x, v)
        torch.slice_scatter(x, p[:3], 0, 0, 3); torch.select_scatter(x, v, 0, 1)
        x.masked_fill(mask, 0.0); x.masked_scatter(mask, p); x.scatter(1, i.view(1, 4), 2.0)
        x.index_add(0, i, p[:4]); x.index_copy(0, i, p[:4]); x.index_fill(0, i, 1.0)
        x.index_put((i,), p[:4])
        torch.where(mask, x, y); torch.where(mask, x, 0.0); torch.combinations(x[0, :5])
        torch.cartesian_prod(x[0, :5], x[1, :5]); torch.tril_indices(3, 3)
        F.pixel_shuffle(x.view(1, 4, 80, 80), 2)
        F.fold(x.view(1, 160, 160), (20, 20), (10, 4), stride=1).shape
        F.unfold(x.view(1, 1, 160, 160), 8, stride=8); F.one_hot(i)
    """),
    "Products": _expressions("""
        x @ y.t(); x @ y; x @ p; p @ x
        torch.mm(x, y.t()); torch.matmul(x, y.t())
        F.linear(x, y); F.linear(x, y, v); F.linear(p, x); F.linear(p.view(2, 80, 160), x, v)
        F.linear(x.view(5, 32, 160), y)
        torch.addmm(v, x, y.t()); torch.addmm(p, x, y.t()); torch.addmm(v, x, y.t(), beta=0.5)
        x.addmm(x, y)
        torch.bmm(x.view(5, 32, 160), y.t().expand(5, 160, 160))
        x.view(5, 32, 160) @ y.view(5, 32, 160).mT
        torch.baddbmm(p.view(5, 32, 160), x.view(5, 32, 160), y.t().expand(5, 160, 160))
        x.view(4, 40, 160) @ y.t(); x.mv(v)
        x @ x[0]
        x[0] @ y.t(); x[0].dot(x[1])
        torch.vdot(x[0], y[0]); torch.inner(x, y); torch.outer(x[0], y[0])
        torch.ger(x[0], y[0]); torch.einsum("ik,jk->ij", x, y)
        torch.tensordot(x, y, dims=([1], [1]))
        torch.linalg.multi_dot([x, y.t()])
        torch.kron(x[:2, :2], y[:2, :2]); torch.addmv(v, x, v); torch.addr(p, v, v) + x
        torch.addbmm(p, x.view(1, 160, 160), y.t().view(1, 160, 160))
        F.bilinear(p[:2], p[:2], x.view(1, 160, 160))
        torch.cdist(x, y)
        F.conv2d(x.view(1, 1, 160, 160), p[:3, :3].reshape(1, 1, 3, 3))
        F.conv1d(x.view(1, 160, 160), p[:, :5].reshape(5, 160, 1))
        F.conv1d(p.view(1, 160, 160), x.view(160, 160, 1))
    """),
    "Norms and attention": _expressions("""
        F.layer_norm(x, (160,)); F.layer_norm(x, (160,), v, v)
        F.layer_norm(x, (160,), x[0], x[1]); F.layer_norm(p, (160,), x[0])
        F.rms_norm(x, (160,)); F.rms_norm(x, (160,), v); F.rms_norm(p, (160,), x[0])
        F.layer_norm(x.view(5, 32, 160), (32, 160))
        nn.LayerNorm(160)(x); nn.RMSNorm(160)(x)
        F.group_norm(x.view(5, 32, 160), 4); F.batch_norm(x, v, v.abs(), training=False)
        F.instance_norm(x.view(5, 32, 160)); F.local_response_norm(x.view(5, 32, 160), 3)
        F.normalize(x); F.scaled_dot_product_attention(q, q, q)
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
        F.scaled_dot_product_attention(q, k[:, :1], k[:, :1], enable_gqa=True)
        F.scaled_dot_product_attention(q, k, k, attn_mask=p[:40, :40])
        F.scaled_dot_product_attention(q, pq, pq); F.softmax(x, -1); F.log_softmax(x, -1)
        F.softmin(x, -1)
    """),
    "Questions": _expressions("""
        x.isnan(); x.isinf(); x.isfinite(); x.isposinf(); x.isneginf(); x.isreal()
        torch.equal(x, x); torch.equal(x, y); torch.equal(x, p); torch.allclose(x, x)
        torch.allclose(x, p); torch.isclose(x, y)
        x == y; x == p; x == 0; x != y; x < 0; x <= p; x > y; x >= 0.5; p > x
        torch.eq(x, y)
        x.signbit(); x.all(); x.any()
        0.0 in x
        x.nonzero(); x.count_nonzero(); x.is_same_size(y); x.is_set_to(y)
        x[0, 0].is_nonzero()
        torch.is_tensor(x); torch.is_floating_point(x); torch.numel(x); torch.isin(x, y)
        torch.can_cast(x.dtype, torch.float32); torch.result_type(x, 1)
    """),
    "In place": _expressions("""
        x.add_(p); x.add_(y); x.add_(1); x.add_(p, alpha=2); x.sub_(p); x.mul_(2); x.mul_(p)
        x.mul_(v); x.div_(3); x.div_(p); x.neg_(); x.abs_(); x.sqrt_(); x.square_(); x.pow_(2)
        x.exp_(); x.log1p_(); x.sin_(); x.tanh_(); x.sigmoid_(); x.relu_(); x.reciprocal_()
        x.rsqrt_(); x.clamp_(-1, 1); x.clamp_min_(0); x.clip_(-1, 1); x.round_(); x.floor_()
        x.sign_(); x.erf_(); x.lerp_(p, 0.3); x.addcmul_(p, p); x.addcdiv_(p, p); x.addmm_(p, p)
        x.addr_(v, v); x.copysign_(p); x.fmod_(1.0); x.remainder_(1.0); x.hypot_(p); x.atan2_(p)
        x.nan_to_num_(); x.copy_(p); x.copy_(y); x.copy_(v); x.copy_(y.to(torch.bfloat16))
        p.clone().copy_(x); p.clone().add_(x)
        x.fill_(3.0); x.fill_(v[0]); x.zero_(); x.normal_(); x.uniform_(); x.bernoulli_(0.5)
        x.exponential_(); x.log_normal_(); x.random_(5); x.masked_fill_(mask, 0.0)
        x.masked_scatter_(mask, p); x.index_add_(0, i, p[:4]); x.index_copy_(0, i, p[:4])
        x.index_fill_(0, i, 1.0); x.index_put_((i,), p[:4]); x.scatter_(1, i.view(1, 4), 2.0)
        x.scatter_add_(1, i.view(1, 4), p); x.put_(i, v[:4]); x.tril_(); x.triu_()
        x.fill_diagonal_(1.0); x.apply_(abs); x.cumsum_(0); x.renorm_(2, 0, 1.0)
        x.requires_grad_(False); x.__setitem__(0, 1.0); x.__setitem__((slice(3, 50), 7), 2.0)
        x.__setitem__(slice(0, 2), p[:2]); x.__setitem__(mask, 0.0); x.__setitem__(i, p[:4])
        x[0].zero_(); x[3:50].mul_(2); x[1:3].copy_(p[:2])
        x.t()[5].add_(1); x.view(-1)[:1000].fill_(2.0); x.diagonal().zero_(); x.data.mul_(2)
        x.detach().sub_(1)
        nn.init.zeros_(x); nn.init.ones_(x); nn.init.constant_(x, 0.5); nn.init.normal_(x)
        nn.init.uniform_(x); nn.init.xavier_uniform_(x); nn.init.xavier_normal_(x)
        nn.init.kaiming_uniform_(x); nn.init.kaiming_normal_(x); nn.init.trunc_normal_(x)
        nn.init.orthogonal_(x); nn.init.eye_(x); nn.init.sparse_(x, 0.5)
        torch.add(x, p, out=p.clone()); torch.mul(p, p, out=x); torch.clamp(p, 0, 1, out=x)
    """),
    "Optimizer steps over lists": _expressions("""
        torch._foreach_add_([x, y], 1.0); torch._foreach_add_([x, y], [p, p])
        torch._foreach_add_([x, y], [p, p], alpha=2); torch._foreach_sub_([x, y], [p, p])
        torch._foreach_mul_([x, y], 0.5); torch._foreach_mul_([x, y], [0.5, 2.0])
        torch._foreach_mul_([x, y], [p, p]); torch._foreach_div_([x, y], 2.0)
        torch._foreach_addcmul_([x, y], [p, p], [p, p], 0.1)
        torch._foreach_addcdiv_([x, y], [p, p], [p.abs() + 1, p.abs() + 1], 0.1)
        torch._foreach_lerp_([x, y], [p, p], 0.1); torch._foreach_copy_([x, y], [p, p])
        torch._foreach_copy_([x], [y]); torch._foreach_copy_([p.clone()], [y])
        torch._foreach_zero_([x, y]); torch._foreach_sqrt_([x, y]); torch._foreach_neg_([x, y])
        torch._foreach_abs_([x, y]); torch._foreach_clamp_min_([x, y], 0.0)
        torch._foreach_maximum_([x, y], [p, p]); torch._foreach_add([x, y], 1.0)
        torch._foreach_mul([x, y], [p, p]); torch._foreach_norm([x, y])
        torch._foreach_sqrt([x, y])
        step(torch.optim.SGD, x, p); step(torch.optim.SGD, x, p, momentum=0.9)
        step(torch.optim.SGD, x, p, foreach=True); step(torch.optim.SGD, x, p, fused=True)
        step(torch.optim.Adam, x, p); step(torch.optim.Adam, x, p, foreach=True)
        step(torch.optim.Adam, x, p, fused=True); step(torch.optim.AdamW, x, p)
        step(torch.optim.AdamW, x, p, foreach=True); step(torch.optim.AdamW, x, p, fused=True)
        step(torch.optim.AdamW, x, p, amsgrad=True); step(torch.optim.Adagrad, x, p)
        step(torch.optim.RMSprop, x, p); step(torch.optim.Adadelta, x, p)
        step(torch.optim.Adamax, x, p); step(torch.optim.NAdam, x, p)
        step(torch.optim.RAdam, x, p)
        nn.utils.parameters_to_vector([x, y]); nn.utils.get_total_norm([x, y])
    """),
    "Element by element": _expressions("""
        x + y; x + p; p + x; x + 1; 1 - x; x - y; x * 2; x * p; x * v; x / y; x // 1; x % 1
        x**2; 2**x; -x; +x; abs(x)
        torch.add(x, y, alpha=2); torch.sub(x, p); torch.rsub(x, 1); torch.true_divide(x, 2)
        torch.floor_divide(x, 0.5)
        x.abs(); x.neg(); x.positive(); x.acos(); x.acosh(); x.asin(); x.asinh(); x.atan()
        x.atanh(); x.atan2(p); x.ceil(); x.clamp(-1, 1); x.clamp(min=p); x.clip(0, 1)
        x.copysign(p); x.cos(); x.cosh(); x.deg2rad(); x.digamma(); x.erf(); x.erfc()
        x.erfinv(); x.exp(); x.exp2(); x.expm1(); x.fix(); x.float_power(2); x.floor()
        x.fmax(p); x.fmin(p); x.fmod(1.0); x.frac(); x.frexp(); x.heaviside(p); x.hypot(p)
        x.i0(); x.ldexp(i[0]); x.lerp(p, 0.3); x.lgamma(); x.log(); x.log10(); x.log1p()
        x.log2(); x.logaddexp(p); x.logical_and(y); x.logical_not(); x.logical_or(y)
        x.logical_xor(y); x.logit(); x.maximum(y); x.minimum(p); x.nan_to_num(); x.nextafter(p)
        x.pow(2); x.pow(p); x.rad2deg(); x.reciprocal(); x.remainder(1.0); x.round()
        x.round(decimals=1); x.rsqrt(); x.sgn(); x.sigmoid(); x.sign(); x.sin(); x.sinc()
        x.sinh(); x.sqrt(); x.square(); x.tan(); x.tanh(); x.trunc(); x.xlogy(p)
        x.addcmul(p, p); x.addcdiv(p, p)
        torch.polar(x.abs(), y); torch.complex(x, y); torch.special.entr(x)
        torch.special.expit(x); torch.special.ndtr(x); torch.special.zeta(x, 2)
        torch.bernoulli(x.dequantize().sigmoid()) + x; torch.normal(x, 1.0)
        torch.bitwise_and(x, 1); torch.bitwise_not(x); torch.bucketize(x, v.sort()[0])
        torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)
        F.relu(x); F.relu6(x); F.leaky_relu(x); F.elu(x); F.selu(x); F.celu(x); F.gelu(x)
        F.gelu(x, approximate="tanh"); F.silu(x); F.mish(x); F.softplus(x); F.softsign(x)
        F.softshrink(x); F.hardshrink(x); F.tanhshrink(x); F.hardtanh(x); F.hardswish(x)
        F.hardsigmoid(x); F.logsigmoid(x); F.threshold(x, 0.1, 0.0); F.glu(x); F.prelu(x, v[:1])
        F.rrelu(x); F.dropout(x, 0.5); F.dropout(x, 0.5, training=False)
        F.alpha_dropout(x, 0.5); F.dropout1d(x, 0.5)
    """),
    "Reductions, sorts and scans": _expressions("""
        x.sum(); x.sum(0); x.sum(1, keepdim=True); x.mean(); x.mean(-1); x.prod(); x.prod(0)
        x.max(); x.max(0); x.min(); x.min(1)
        torch.amax(x); torch.amax(x, 1); torch.amin(x, 0)
        x.aminmax(); x.argmax(); x.argmin(0); x.std(); x.std(0); x.var(); x.var(1)
        torch.std_mean(x); torch.var_mean(x, 1)
        x.median(); x.median(0); x.nanmedian(); x.mode(); x.nansum(); x.nanmean()
        x.quantile(0.5); x.nanquantile(0.5, 0); x.norm(); x.norm(1); x.norm(dim=1)
        torch.dist(x, y)
        x.logsumexp(1); x.logcumsumexp(0); x.cumsum(0); x.cumprod(1); x.cummax(0); x.cummin(0)
        x.diff(); x.sort(); x.argsort(); x.msort(); x.topk(3); x.kthvalue(2); x.unique()
        x.unique_consecutive(); x.histc(10)
        torch.histogram(x, 10); torch.bincount(i)
        torch.searchsorted(v.sort()[0], x[0].dequantize()) + x[0]; torch.trapezoid(x)
        torch.cumulative_trapezoid(x); torch.gradient(x)
        x.renorm(2, 0, 1.0); x.trace(); x.cov(); x.corrcoef()
    """),
    "Linear algebra and FFT": _expressions("""
        x.det(); x.logdet(); x.slogdet(); x.inverse(); x.pinverse(); x.matrix_power(2)
        x.matrix_exp()
        torch.linalg.norm(x); torch.linalg.vector_norm(x); torch.linalg.vector_norm(x, dim=1)
        torch.linalg.matrix_norm(x); torch.linalg.matrix_rank(x); torch.linalg.cond(x)
        torch.linalg.svdvals(x); torch.linalg.svd(x).S; torch.linalg.qr(x)
        torch.linalg.eigvals(x).abs().sort()[0]; torch.linalg.eigvalsh(x)
        torch.linalg.cholesky(x @ x.dequantize().t() * 0 + torch.eye(160) * 2)
        torch.linalg.solve(x, p); torch.linalg.lstsq(x, p).solution; torch.linalg.inv(x)
        torch.linalg.lu(x); torch.linalg.cross(x[:, :3], y[:, :3])
        torch.trace(x)
        torch.fft.fft(x); torch.fft.rfft(x); torch.fft.fft2(x); torch.fft.fftshift(x)
        torch.stft(x[0], 32, return_complex=True)
    """),
    "Losses, pooling and the rest": _expressions("""
        F.mse_loss(x, p); F.l1_loss(x, y); F.smooth_l1_loss(x, p); F.huber_loss(x, p)
        F.cross_entropy(x, torch.arange(160)); F.nll_loss(x, torch.arange(160)); F.kl_div(x, p)
        F.binary_cross_entropy_with_logits(x, mask.float()); F.cosine_similarity(x, y)
        F.pairwise_distance(x, y); F.cosine_embedding_loss(x, y, torch.ones(160))
        F.triplet_margin_loss(x, y, p); F.hinge_embedding_loss(x, mask.float())
        F.margin_ranking_loss(x, y, mask.float()); F.gaussian_nll_loss(x, p, p.abs() + 1)
        F.poisson_nll_loss(x, p); F.max_pool1d(x.view(1, 160, 160), 2)
        F.max_pool2d(x.view(1, 1, 160, 160), 2); F.avg_pool1d(x.view(1, 160, 160), 2)
        F.avg_pool2d(x.view(1, 1, 160, 160), 2); F.adaptive_avg_pool1d(x.view(1, 160, 160), 4)
        F.adaptive_avg_pool2d(x.view(1, 1, 160, 160), 4)
        F.adaptive_max_pool2d(x.view(1, 1, 160, 160), 4)
        F.lp_pool2d(x.view(1, 1, 160, 160), 2, 2)
        F.interpolate(x.view(1, 1, 160, 160), scale_factor=0.5, mode="bilinear")
        F.interpolate(x.view(1, 1, 160, 160), scale_factor=2)
        F.grid_sample(x.view(1, 1, 160, 160), p[:4, :8].reshape(1, 4, 4, 2), align_corners=False)
        F.gumbel_softmax(x); F.pad(x.view(1, 1, 160, 160), (3, 2, 0, 5), mode="circular")
        torch.func.vmap(torch.sin)(x); torch.func.grad(lambda t: (t * t).sum())(x)
        torch.func.jvp(torch.sin, (x,), (p,))
        torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)
        x.to_sparse().to_dense(); x.to_dense(); x.map_(p, max); x.record_stream(None)
        x.storage_offset(); x.untyped_storage().nbytes()
        format(x[0, 0], ".3f")
    """),
}


@dataclass(frozen=True)
class Outcome:
    """What one op does on one granularity."""

    kind: str
    detail: str = ""


class _Kinds(TorchDispatchMode):
    """Records which aten ops get a Float8Tensor, before it handles them."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = self.requantize = False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = [*args, *(kwargs or {}).values()]
        if any(isinstance(leaf, Float8Tensor) for leaf in tree_leaves(arguments)):
            self.inside |= op in DEQUANTIZE_INSIDE
            for argument, value in zip(op._schema.arguments, arguments, strict=False):
                info = argument.alias_info
                if info is not None and info.is_write:
                    self.requantize |= any(isinstance(t, Float8Tensor) for t in tree_leaves(value))
        return op(*args, **(kwargs or {}))


def _step(optimizer: Any, x: torch.Tensor, grad: torch.Tensor, **options: Any) -> torch.Tensor:
    """Take one optimizer step on a parameter of x's values; return ``x`` with the result."""
    parameter = nn.Parameter(x)
    parameter.grad = grad.clone()
    optimizer([parameter], lr=0.01, **options).step()
    x.copy_(parameter.detach())
    return x


@functools.cache
def _tensors(granularity: str) -> dict[str, torch.Tensor]:
    block, rule = GRANULARITIES[granularity]
    g = torch.Generator().manual_seed(1)
    plain = [torch.randn(SIZE, SIZE, generator=g) for _ in range(3)]
    heads = [torch.randn(2, 2, 40, 64, generator=g) for _ in range(3)]
    x, y = (quantize(t, block=block, scale_rule=rule) for t in plain[:2])
    q, k = (quantize(t, block=block, scale_rule=rule) for t in heads[:2])
    p = plain[2]
    named = {"x": x, "y": y, "q": q, "k": k, "p": p, "v": p[3].clone(), "pq": heads[2]}
    return named | {"i": torch.tensor([3, 130, 0, 77]), "mask": p > 0, "row_mask": p[:, 0] > 0}


@functools.cache
def _plain_tensors(granularity: str) -> dict[str, torch.Tensor]:
    return {name: _plain(t) for name, t in _tensors(granularity).items()}


def operands(expression: str, granularity: str, *, plain: bool = False) -> dict[str, Any]:
    """Return the values of an expression's names: fresh Float8Tensors, plain tensors, modules."""
    tensors = (_plain_tensors if plain else _tensors)(granularity)
    modules = {"torch": torch, "F": F, "nn": nn, "copy": copy, "pickle": pickle, "step": _step}
    words = re.findall(r"\w+", expression)
    return {**{name: t.clone() for name, t in tensors.items() if name in words}, **modules}


def _evaluate(expression: str, names: dict[str, Any]) -> Any:
    torch.default_generator.manual_seed(0)  # only the CPU's generator, in a thousandth of the time
    return eval(expression, names)


def _plain(value: Any) -> Any:
    return tree_map_only(Float8Tensor, lambda t: t.detach().dequantize(), value)


def _is_numbers(value: Any) -> bool:
    """Whether a value is what ``tolist`` returns, which is compared as one value."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, float) or (isinstance(first, list) and _is_numbers(first))


def _disagreement(actual: Any, expected: Any, tolerance: float) -> str:
    """Return why two results differ, or an empty string if they agree."""
    if not isinstance(expected, torch.Tensor):
        is_equal = actual == expected or (actual != actual and expected != expected)
        return "" if is_equal else f"{actual!r} is not {expected!r}"
    if not isinstance(actual, torch.Tensor):
        return f"got a {type(actual).__name__}"
    shapes_and_dtypes = [(t.shape, t.dtype) for t in (actual, expected)]
    if shapes_and_dtypes[0] != shapes_and_dtypes[1]:
        return f"{shapes_and_dtypes[0]} is not {shapes_and_dtypes[1]}"
    if actual.dtype == torch.bool or torch.equal(actual, expected):
        return "" if torch.equal(actual, expected) else "other answers"
    wide = torch.complex128 if actual.is_complex() else torch.float64
    a, b = (t.detach().to(wide).nan_to_num() for t in (actual, expected))
    error = (a - b).norm().item() / max(b.norm().item(), 1e-30)
    return "" if error <= tolerance or math.isnan(error) else f"relative error {error:.2g}"


# FP8 rounds the results of some sections; views and copies change no bit; other results must be
# exact up to the order of summation.
_EXACT, _ROUNDED = 1e-4, 0.1
_ROUNDED_SECTIONS = ("Products", "In place", "Optimizer steps over lists")
_BITWISE_SECTIONS = ("Views", "Copies, moves and allocation")
_FLOAT64_OPS = ("x.to(torch.float64)", "x.double()")  # the scale is float64, too
_ROUNDED_OPS = (
    "F.scaled_dot_product_attention(q, q, q)",  # rounds the probabilities
    "F.scaled_dot_product_attention(q, q, q, is_causal=True)",
    "F.scaled_dot_product_attention(q, k[:, :1], k[:, :1], enable_gqa=True)",
)
# One is documented to differ; the other draws again until all rounded numbers are in range.
_EXEMPT_OPS = ("x.untyped_storage().nbytes()", "nn.init.trunc_normal_(x)")


def try_op(section: str, expression: str, granularity: str) -> Outcome | None:
    """Run one op; return None if it fails on plain tensors, too.

    Raises:
            AssertionError: the result differs from that of the dequantized tensors.
    """
    names, plain_names = (operands(expression, granularity, plain=p) for p in (False, True))
    try:
        expected = _evaluate(expression, plain_names)
    except (RuntimeError, TypeError, AttributeError, NotImplementedError):
        return None
    kinds = _Kinds()
    try:
        with float8lab.fallback("error"), kinds:
            actual = _evaluate(expression, names)
        kind = REQUANTIZE if kinds.requantize else INSIDE if kinds.inside else NATIVE
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as reason:
        if "has no FP8 implementation" not in str(reason):
            return Outcome(ERROR, str(reason).split("\n")[0])
        kind, names = DEQUANTIZE, operands(expression, granularity)
        try:
            with float8lab.fallback("silent"):
                actual = _evaluate(expression, names)
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            return Outcome(ERROR, str(error).split("\n")[0])
    if expression in _EXEMPT_OPS:
        return Outcome(kind)
    is_rounded = section in _ROUNDED_SECTIONS or expression in _ROUNDED_OPS
    is_bitwise = section in _BITWISE_SECTIONS and expression not in _FLOAT64_OPS
    tolerance = _ROUNDED if is_rounded else 0.0 if is_bitwise else _EXACT
    leaves, expected_leaves = (
        tree_leaves(value, is_leaf=_is_numbers) for value in (actual, expected)
    )
    pairs = list(zip(leaves, expected_leaves, strict=True))
    # The op may write these.
    pairs += [(names[n], plain_names[n]) for n in ("x", "y", "p") if n in names]
    for got, want in pairs:
        difference = _disagreement(got if _is_numbers(got) else _plain(got), want, tolerance)
        assert not difference, f"{expression} on {granularity}: {difference}"
    for leaf in leaves:
        if isinstance(leaf, Float8Tensor):
            check_spec(leaf, _tensors(granularity)["x"], f"{expression} on {granularity}")
    return Outcome(kind)


def check_spec(t: Float8Tensor, source: Float8Tensor, label: str) -> None:
    """Assert that the inner tensors fit together, and that format and rule are the source's."""
    assert len(t.spec.block) == t.ndim, label
    assert t.scale.shape == t.amax.shape == t.spec.scale_shape(tuple(t.shape)), label
    assert t.qdata.shape == t.shape, label
    assert t.stride() == t.qdata.stride(), label
    assert t.spec.fp8_dtype == t.qdata.dtype == source.spec.fp8_dtype, label
    assert t.spec.scale_rule == source.spec.scale_rule, label


def outcomes() -> Iterator[tuple[str, str, dict[str, Outcome]]]:
    """Yield section, expression and outcomes by granularity of every op of plain tensors."""
    for section, expressions in OPS.items():
        for expression in expressions:
            row = {name: try_op(section, expression, name) for name in GRANULARITIES}
            if all(outcome is not None for outcome in row.values()):
                yield section, expression, {n: o for n, o in row.items() if o is not None}


_HEAD = """# What each op does on a Float8Tensor

Generated by `python -m tests.tensor.dispatch_table` with torch @TORCH@ on a CPU; a test fails if
this page is out of date. Another torch may split some ops into other parts.
Each line was run on a 160x160 Float8Tensor `x` (and `y`, `q`, `k`) of every granularity and
compared with the same expression on the dequantized tensors. `p`, `v`, `pq` are ordinary tensors.

- **native**: works on FP8 bytes and scales, or on neither; views and copies change no value, and
  products, norms and attention run FP8 kernels.
- **inside**: dequantizes inside by intent (comparisons; attention with a mask or with blocks),
  without a warning.
- **requantize**: computes in high precision and writes the result back in FP8, without a warning.
- **dequantize**: has no FP8 form; the arguments are dequantized with one warning per op, and
  `float8lab.fallback("error")` raises instead.
- **error**: refused, with the reason.

"""


def render(rows: list[tuple[str, str, dict[str, Outcome]]]) -> str:
    """Return the page."""
    kinds = (NATIVE, INSIDE, REQUANTIZE, DEQUANTIZE, ERROR)
    text = _HEAD.replace("@TORCH@", TORCH) + f"{len(rows)} ops. How many do what:\n\n| | "
    text += " | ".join(GRANULARITIES) + " |\n" + "| --- " * (len(GRANULARITIES) + 1) + "|\n"
    for kind in kinds:
        counts = (sum(row[n].kind == kind for _, _, row in rows) for n in GRANULARITIES)
        text += f"| {kind} | " + " | ".join(map(str, counts)) + " |\n"
    for section in OPS:
        text += f"\n## {section}\n\n| op | " + " | ".join(GRANULARITIES) + " |\n"
        text += "| --- " * (len(GRANULARITIES) + 1) + "|\n"
        for row_section, expression, row in rows:
            if row_section == section:
                escaped = expression.replace("|", "\\|")
                cells = " | ".join(row[n].kind for n in GRANULARITIES)
                text += f"| `{escaped}` | {cells} |\n"
    refusals: dict[str, list[str]] = {}
    for _, expression, row in rows:
        for outcome in row.values():
            if outcome.kind == ERROR and expression not in refusals.setdefault(outcome.detail, []):
                refusals[outcome.detail].append(expression)
    text += "\n## Why ops are refused\n\n"
    for reason, expressions in refusals.items():
        text += f"- {', '.join(f'`{e}`' for e in expressions)}: {reason}\n"
    return text


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True, warn_only=True)
    PAGE.write_text(render(list(outcomes())))
