#!/usr/bin/env python3
"""Checks and times the Hopper attention and selection kernels against PyTorch on the same device.

  bench/cuda/build_sm90.sh build/sm90.so
  python3 bench/cuda/sm90_attention.py build/sm90.so check [--golden DIR]
  python3 bench/cuda/sm90_attention.py build/sm90.so dense select sparse curves [--json FILE]

Timings are of blocks of continuous launches, the variants of a comparison block by block in turn,
so that each is seen at the clock that its own power draw leaves it. Medians. Inputs are N(0, 1).
"""
import argparse
import ctypes
import datetime
import json
import math
import os
import statistics
import struct
import subprocess
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

VOID = ctypes.c_void_p
INT, LONG, FLOAT = ctypes.c_int, ctypes.c_int64, ctypes.c_float


class AttentionParams(ctypes.Structure):
    _fields_ = [('q', VOID), ('k', VOID), ('v', VOID), ('out', VOID), ('lse', VOID), ('sq', LONG),
                ('skv', LONG), ('hq', INT), ('hkv', INT), ('head_dim', INT), ('q_stride', LONG),
                ('k_stride', LONG), ('v_stride', LONG), ('out_stride', LONG), ('scale', FLOAT),
                ('causal', ctypes.c_bool), ('indices', VOID), ('counts', VOID), ('block_q', INT),
                ('block_k', INT), ('capacity', INT), ('heads_per_list', INT)]


class SelectParams(ctypes.Structure):
    _fields_ = [('q', VOID), ('k', VOID), ('sq', LONG), ('skv', LONG), ('hq', INT), ('hkv', INT),
                ('head_dim', INT), ('q_stride', LONG), ('k_stride', LONG), ('scale', FLOAT),
                ('block_q', INT), ('block_k', INT), ('heads_per_list', INT), ('head_end', INT),
                ('tail_begin', INT), ('budget', INT), ('mass', FLOAT),
                ('dense_head_end', INT), ('dense_tail_begin', INT), ('indices', VOID), ('counts', VOID), ('capacity', INT),
                ('scores', VOID), ('workspace', VOID)]


class Lists:
    """Block lists: indices [lists, rows, capacity] and counts [lists, rows]."""

    def __init__(self, indices, counts, block_q, block_k, heads_per_list):
        self.indices, self.counts = indices, counts
        self.block_q, self.block_k, self.heads_per_list = block_q, block_k, heads_per_list

    @staticmethod
    def of_mask(keep, block_q, block_k, heads_per_list, capacity=None):
        blocks = keep.shape[-1]
        ids = torch.where(keep, torch.arange(blocks, device=keep.device), 1 << 20).sort(-1).values
        ids = torch.where(ids < blocks, ids, -7)[..., :capacity or blocks]
        return Lists(ids.int().contiguous(), keep.sum(-1).int().contiguous(), block_q, block_k,
                     heads_per_list)

    def mask(self, sq, skv):
        """The lists as a boolean [heads, sq, skv]."""
        blocks = -(-skv // self.block_k)
        position = torch.arange(self.indices.shape[-1], device=self.indices.device)
        listed = torch.where(position < self.counts[..., None], self.indices, blocks).long()
        keep = torch.zeros(*self.counts.shape, blocks + 1, dtype=torch.bool,
                           device=self.indices.device)
        keep = keep.scatter_(-1, listed, True)[..., :blocks]
        keep = keep.repeat_interleave(self.heads_per_list, 0).repeat_interleave(self.block_q, 1)
        return keep[:, :sq].repeat_interleave(self.block_k, 2)[..., :skv]


class Kernels:
    def __init__(self, path):
        self.library = ctypes.CDLL(os.path.abspath(path))
        for name in ('orrery_attention', 'orrery_attention_supports', 'orrery_select'):
            getattr(self.library, name).restype = ctypes.c_char_p
        self.library.orrery_select_workspace.restype = ctypes.c_uint64

    @staticmethod
    def check(error):
        if error:
            raise RuntimeError(error.decode())

    def attention(self, q, k, v, out, scale, lse=None, causal=False, lists=None):
        """A function that enqueues one call."""
        p = AttentionParams(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(),
                            lse.data_ptr() if lse is not None else None, q.shape[0], k.shape[0],
                            q.shape[1], k.shape[1], q.shape[2], q.stride(0), k.stride(0),
                            v.stride(0), out.stride(0), scale, causal)
        p.block_q = p.block_k = 64
        p.heads_per_list = 1
        if lists is not None:
            p.indices, p.counts = lists.indices.data_ptr(), lists.counts.data_ptr()
            p.block_q, p.block_k = lists.block_q, lists.block_k
            p.capacity, p.heads_per_list = lists.indices.shape[-1], lists.heads_per_list
        keep = (q, k, v, out, lse, lists)

        def enqueue(keep=keep):
            stream = VOID(torch.cuda.current_stream().cuda_stream)
            self.check(self.library.orrery_attention(ctypes.byref(p), stream))
        return enqueue

    def select(self, q, k, scale, block_q, block_k, heads_per_list, budget, head_end=0,
               tail_begin=None, dense_head_end=0, dense_tail_begin=None, want_scores=False,
               mass=0.0):
        """A function that enqueues one selection, and its Lists (and scores)."""
        rows, blocks = -(-q.shape[0] // block_q), -(-k.shape[0] // block_k)
        tail_begin = blocks if tail_begin is None else tail_begin
        dense_tail_begin = rows if dense_tail_begin is None else dense_tail_begin
        lists = q.shape[1] // heads_per_list
        dense = dense_head_end > 0 or dense_tail_begin < rows or mass > 0
        kept = blocks - (tail_begin - head_end) + min(budget, tail_begin - head_end)
        result = Lists(torch.full((lists, rows, blocks if dense else kept), -7, dtype=torch.int32,
                                  device='cuda'),
                       torch.full((lists, rows), -7, dtype=torch.int32, device='cuda'), block_q,
                       block_k, heads_per_list)
        scores = None
        if want_scores:
            scores = torch.full((lists, rows, blocks), math.nan, device='cuda')
        p = SelectParams(q.data_ptr(), k.data_ptr(), q.shape[0], k.shape[0], q.shape[1], k.shape[1],
                         q.shape[2], q.stride(0), k.stride(0), scale, block_q, block_k,
                         heads_per_list, head_end, tail_begin, budget, mass,
                         dense_head_end, dense_tail_begin, result.indices.data_ptr(), result.counts.data_ptr(),
                         result.indices.shape[-1], scores.data_ptr() if want_scores else None)
        size = self.library.orrery_select_workspace(ctypes.byref(p))
        workspace = torch.empty(size, dtype=torch.uint8, device='cuda')
        p.workspace = workspace.data_ptr()
        keep = (q, k, result, scores, workspace)

        def enqueue(keep=keep):
            stream = VOID(torch.cuda.current_stream().cuda_stream)
            self.check(self.library.orrery_select(ctypes.byref(p), stream))
        return enqueue, result, scores


def make_inputs(sq, skv, hq, hkv, d, fused=False, seed=0):
    generator = torch.Generator(device='cuda').manual_seed(seed)

    def normal(rows, heads):
        return torch.randn(rows, heads, d, device='cuda', generator=generator).bfloat16()
    if fused:
        qkv = normal(max(sq, skv), hq + 2 * hkv)
        return qkv[:sq, :hq], qkv[:skv, hq:hq + hkv], qkv[:skv, hq + hkv:]
    return normal(sq, hq), normal(skv, hkv), normal(skv, hkv)


def reference(q, k, v, scale, causal=False, mask=None):
    """fp64 output and LSE."""
    (sq, hq, _), (skv, hkv, _) = q.shape, k.shape
    kd, vd = (t.double().permute(1, 0, 2).repeat_interleave(hq // hkv, 0) for t in (k, v))
    s = q.double().permute(1, 0, 2) @ kd.transpose(1, 2) * scale
    if causal:
        row, column = (torch.arange(n, device='cuda') for n in (sq, skv))
        s.masked_fill_(column[None] > row[:, None] + skv - sq, -math.inf)
    if mask is not None:
        s.masked_fill_(~mask, -math.inf)
    if skv == 0:
        lse = torch.full((hq, sq), -math.inf, device='cuda', dtype=torch.float64)
    else:
        lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse == -math.inf, 0, lse)[..., None])
    return (p @ vd).permute(1, 0, 2), lse


def random_lists(heads, heads_per_list, sq, skv, block_q, block_k, kept=None, protected=0, seed=0):
    """Uniformly random lists: `kept` long, or of any length from 0."""
    generator = torch.Generator(device='cuda').manual_seed(seed)
    rows, blocks = -(-sq // block_q), -(-skv // block_k)
    shape = (heads // heads_per_list, rows, blocks)
    rank = torch.rand(*shape, device='cuda', generator=generator)
    rank[..., :protected] = -1
    order = rank.argsort(-1).argsort(-1)
    if kept is None:
        length = torch.randint(0, blocks + 1, shape[:2], device='cuda', generator=generator)
    else:
        length = torch.full(shape[:2], kept, device='cuda')
    return Lists.of_mask(order < length[..., None], block_q, block_k, heads_per_list, kept)


# ---- Checks ------------------------------------------------------------------------------------


def check_attention(kernels, sq, skv, hq, hkv, d, causal=False, fused=False, lists=None, gain=1.0,
                    gain_row=None, seed=0, repeat=0):
    q, k, v = make_inputs(sq, skv, hq, hkv, d, fused, seed)
    if gain_row is not None:
        q[gain_row] *= gain
    elif gain != 1:
        q = q * gain
    scale = d ** -0.5
    # Poison, and rows past the end that must stay as they are.
    out = torch.full((sq + 3, hq, d), math.nan, device='cuda', dtype=torch.bfloat16)
    lse = torch.full((hq * sq + 8,), 7.5, device='cuda')
    if lists is not None:
        block_q, block_k, sharing = lists
        lists = random_lists(hq, sharing, sq, skv, block_q, block_k, seed=seed)
    kernels.attention(q, k, v, out[:sq], scale, lse, causal, lists)()
    torch.cuda.synchronize()
    mask = lists.mask(sq, skv) if lists is not None else None
    want, want_lse = reference(q, k, v, scale, causal, mask)
    got, got_lse = out[:sq].double(), lse[:hq * sq].view(hq, sq).double()
    if not (out[sq:].isnan().all() and (lse[hq * sq:] == 7.5).all()):
        return 'wrote past the end'
    empty = want_lse == -math.inf
    if not torch.equal(got_lse == -math.inf, empty):
        return 'rows without keys have a finite LSE or others do not'
    if got[empty.T].abs().sum() != 0:
        return 'rows without keys are not zero'
    error = ((got - want).norm() / want.norm()).item() if want.norm() > 0 else got.norm().item()
    lse_error = ((got_lse - want_lse)[~empty].abs() / want_lse[~empty].abs().clamp(min=1))
    lse_error = lse_error.max().item() if lse_error.numel() else 0.0
    if not error < 4e-3 or not lse_error < 1e-4:
        return f'error {error:.2e}, lse {lse_error:.2e}'
    # The same bits every time: a race shows once in hundreds of launches.
    again, again_lse = torch.empty_like(out), torch.empty_like(lse)
    launch = kernels.attention(q, k, v, again[:sq], scale, again_lse, causal, lists)
    for n in range(repeat):
        launch()
        if not (torch.equal(again[:sq], out[:sq]) and torch.equal(again_lse[:hq * sq], lse[:hq * sq])):
            return f'launch {n + 2} differs from the first'
    return None


def check_cases():
    sizes = [(1, 1), (1, 0), (64, 64), (128, 128), (63, 65), (65, 127), (128, 129), (129, 175),
             (200, 177), (256, 640), (300, 193), (130, 1000), (64, 2000)]
    for d in (128, 64):
        for hq, hkv in ((8, 2), (3, 3)):
            for sq, skv in sizes:
                yield dict(sq=sq, skv=skv, hq=hq, hkv=hkv, d=d)
        yield dict(sq=777, skv=1111, hq=32, hkv=8, d=d)
        # Several items a CTA.
        yield dict(sq=2500, skv=700, hq=32, hkv=8, d=d, fused=True, repeat=400)
        # Scores far from the first tile's: the second pass.
        yield dict(sq=500, skv=1500, hq=8, hkv=2, d=d, gain=300.0)
        yield dict(sq=500, skv=1500, hq=8, hkv=2, d=d, gain=40.0)
        yield dict(sq=2500, skv=700, hq=32, hkv=8, d=d, gain=500.0, gain_row=1234)
        for sq, skv in [(n, n) for n in (1, 63, 64, 65, 128, 129, 640, 1000, 2000)] + [
                (100, 300), (300, 100), (128, 1000), (1000, 129)]:
            yield dict(sq=sq, skv=skv, hq=8, hkv=2, d=d, causal=True)
        yield dict(sq=700, skv=700, hq=8, hkv=2, d=d, causal=True, gain=300.0)
        for lists in ((64, 64, 1), (64, 64, 2), (64, 64, 4), (128, 64, 1), (128, 64, 2),
                      (128, 128, 1), (64, 128, 1), (256, 64, 4), (64, 256, 4)):
            for sq, skv in sizes:
                if skv > 0:
                    yield dict(sq=sq, skv=skv, hq=8, hkv=2, d=d, lists=lists, seed=sq)
            yield dict(sq=2500, skv=700, hq=32, hkv=8, d=d, fused=True, lists=lists, repeat=400)
            yield dict(sq=500, skv=1500, hq=8, hkv=2, d=d, gain=300.0, lists=lists)


def pooled(x, factor):
    cells = -(-x.shape[0] // 16)
    padded = F.pad(x.float(), (0, 0, 0, 0, 0, cells * 16 - x.shape[0]))
    sums = padded.view(cells, 16, *x.shape[1:]).sum(1)
    counts = torch.full((cells, 1, 1), 16.0, device=x.device)
    counts[-1] = x.shape[0] - (cells - 1) * 16
    return (sums / counts * factor).bfloat16()


def reference_scores(q, k, scale, block_q, block_k):
    """Natural-log scores [heads, rows, blocks] in fp64 from pooled cells."""
    pq, pk = pooled(q, scale * math.log2(math.e)), pooled(k, 1.0)
    group = q.shape[1] // k.shape[1]
    t = pq.double().permute(1, 0, 2) @ pk.double().permute(1, 2, 0).repeat_interleave(group, 0)
    t = t * math.log(2)
    rows, blocks = -(-q.shape[0] // block_q), -(-k.shape[0] // block_k)
    t = F.pad(t, (0, blocks * block_k // 16 - t.shape[2], 0, rows * block_q // 16 - t.shape[1]),
              value=-math.inf)
    t = t.view(t.shape[0], rows, block_q // 16, blocks, block_k // 16)
    return torch.logsumexp(t.permute(0, 1, 3, 2, 4).flatten(3), -1)


def budget_of(candidates, sparsity):
    if candidates == 0:
        return 0
    wanted = max(1, math.ceil((1 - sparsity) * candidates))
    return min(candidates, 8 * math.ceil(wanted / 8))


def spread(ids):
    return (ids.long() * 2654435769) % (1 << 32)


def choose(ranks, budget, head_end, tail_begin):
    """Boolean [.., blocks]: the contract's choice, ties by spread."""
    blocks = ranks.shape[-1]
    ids = torch.arange(blocks, device=ranks.device)
    keep = ((ids < head_end) | (ids >= tail_begin)).expand(ranks.shape).clone()
    inner = ranks[..., head_end:tail_begin]
    inner = torch.where(inner.isfinite().all(-1, keepdim=True), inner, 0)
    finite = ranks[..., head_end:tail_begin].isfinite().all(-1, keepdim=True)
    by_spread = spread(ids[head_end:tail_begin]).argsort()
    order = by_spread[inner[..., by_spread].argsort(dim=-1, descending=True, stable=True)]
    order = torch.where(finite, order, torch.arange(inner.shape[-1], device=ranks.device))
    chosen = torch.zeros_like(inner, dtype=torch.bool).scatter_(-1, order[..., :budget], True)
    keep[..., head_end:tail_begin] = chosen
    return keep


def choose_mass(ranks, mass, head_end, tail_begin):
    """Boolean [.., blocks]: the fewest that hold `mass` of the ranks, ties by spread."""
    blocks = ranks.shape[-1]
    ids = torch.arange(blocks, device=ranks.device)
    given = (ids < head_end) | (ids >= tail_begin)
    held = ranks.double().where(given, 0).sum(-1, keepdim=True)
    by_spread = spread(ids[head_end:tail_begin]).argsort()
    inner = ranks[..., head_end:tail_begin]
    order = by_spread[inner[..., by_spread].argsort(dim=-1, descending=True, stable=True)]
    ranked = inner.gather(-1, order).double()
    before = held + ranked.cumsum(-1) - ranked
    chosen = torch.zeros_like(inner, dtype=torch.bool).scatter_(-1, order, before < mass)
    chosen |= ~inner.isfinite().all(-1, keepdim=True)
    keep = given.expand(ranks.shape).clone()
    keep[..., head_end:tail_begin] = chosen
    return keep


def check_select(kernels, sq, skv, hq, hkv, d, block_q=64, block_k=64, sharing=1, prefix=0, tail=0,
                 dense_head=0, dense_tail=0, sparsity=0.75, mass=0.0, poison=None, seed=0):
    q, k, _ = make_inputs(sq, skv, hq, hkv, d, seed=seed)
    if poison == 'ties':
        q, k = torch.ones_like(q), torch.ones_like(k)
    elif poison is not None:
        k[skv // 2, 0] = poison
    rows, blocks = -(-sq // block_q), -(-skv // block_k)
    head_end = min(blocks, -(-prefix // block_k))
    tail_begin = blocks if tail == 0 else max(head_end, (skv - tail) // block_k)
    budget = budget_of(tail_begin - head_end, sparsity)
    scale = d ** -0.5
    run, lists, scores = kernels.select(q, k, scale, block_q, block_k, sharing, budget, head_end,
                                        tail_begin, dense_head, rows - dense_tail, True,
                                        mass * sharing)
    run()
    torch.cuda.synchronize()
    want = reference_scores(q, k, scale, block_q, block_k)
    if sharing > 1 or mass > 0:
        want = torch.softmax(want, -1).view(hq // sharing, sharing, rows, blocks).sum(1)
    finite = want.isfinite()
    if not torch.equal(scores.isfinite(), finite):
        return 'scores are finite where the reference is not, or the reverse'
    gap = (scores.double() - want)[finite].abs().max().item()
    if not gap < 2e-5 * max(1.0, want[finite].abs().max().item()):
        return f'scores differ by {gap:.2e}'
    # From the kernel's own ranks: exact, but for a mass that is reached to within rounding.
    if mass > 0:
        keep = choose_mass(scores, mass * sharing, head_end, tail_begin)
    else:
        keep = choose(scores, budget, head_end, tail_begin)
    dense = torch.zeros(rows, dtype=torch.bool, device='cuda')
    dense[:dense_head] = True
    dense[rows - dense_tail:] = True
    keep[:, dense] = True
    expected = Lists.of_mask(keep, block_q, block_k, sharing, lists.indices.shape[-1])
    if mass > 0:
        off = expected.counts != lists.counts
        if off.sum() > 0.001 * off.numel() + 1 or (expected.counts - lists.counts).abs().max() > 1:
            return f'{off.sum()} wrong counts of {off.numel()}'
        expected.indices[off], expected.counts[off] = lists.indices[off], lists.counts[off]
    if not torch.equal(expected.counts, lists.counts):
        return 'wrong counts'
    valid = torch.arange(lists.indices.shape[-1], device='cuda') < lists.counts[..., None]
    if not torch.equal(expected.indices[valid], lists.indices[valid]):
        return 'wrong blocks'
    return None


def select_cases():
    for d in (128, 64):
        yield dict(sq=2000, skv=2070, hq=8, hkv=2, d=d, prefix=70)
        yield dict(sq=1111, skv=1311, hq=8, hkv=2, d=d, prefix=200, block_k=128)
        yield dict(sq=2304, skv=2400, hq=4, hkv=4, d=d, prefix=96, block_q=128, sparsity=0.9)
        yield dict(sq=1000, skv=5000, hq=8, hkv=2, d=d, sharing=2)
        yield dict(sq=1000, skv=5001, hq=8, hkv=2, d=d, sharing=4, prefix=1, block_q=128)
        yield dict(sq=1000, skv=5015, hq=8, hkv=2, d=d, prefix=64, tail=100, dense_tail=2)
        yield dict(sq=1000, skv=5015, hq=8, hkv=2, d=d, prefix=70, tail=9, mass=0.6)
        yield dict(sq=1000, skv=5015, hq=8, hkv=2, d=d, mass=0.3, sharing=4, dense_head=1)
        yield dict(sq=700, skv=4000, hq=4, hkv=2, d=d, mass=0.9, block_q=128, poison=math.nan)
        yield dict(sq=700, skv=4000, hq=4, hkv=2, d=d, mass=0.5, poison='ties')
        yield dict(sq=300, skv=44672, hq=8, hkv=2, d=d, sharing=4, prefix=512)  # 3 warpgroups
        yield dict(sq=300, skv=70000, hq=8, hkv=2, d=d, sharing=4)              # 2
        yield dict(sq=300, skv=88832, hq=8, hkv=2, d=d, sharing=4)              # 1
        yield dict(sq=300, skv=88832, hq=2, hkv=1, d=d, mass=0.5)
        yield dict(sq=1000, skv=5016, hq=8, hkv=2, d=d, prefix=64, tail=10, dense_head=3)
        yield dict(sq=700, skv=4000, hq=4, hkv=2, d=d, poison='ties')
        yield dict(sq=700, skv=4000, hq=4, hkv=2, d=d, poison=math.inf)
        yield dict(sq=700, skv=4000, hq=4, hkv=2, d=d, poison=math.nan)
        yield dict(sq=100, skv=140, hq=2, hkv=1, d=d, prefix=140)
        yield dict(sq=17, skv=16, hq=2, hkv=1, d=d)
        yield dict(sq=3000, skv=20000, hq=2, hkv=1, d=d, block_q=256, block_k=256, sparsity=0.9)


def read_safetensors(path):
    with open(path, 'rb') as f:
        header = json.loads(f.read(struct.unpack('<Q', f.read(8))[0]))
        data = bytearray(f.read())
    types = {'BF16': torch.bfloat16, 'F32': torch.float32, 'I32': torch.int32, 'I64': torch.int64}
    return {name: torch.frombuffer(data, dtype=types[e['dtype']], offset=e['data_offsets'][0],
                                   count=math.prod(e['shape'])).view(e['shape'])
            for name, e in header.items()}


def check_golden(kernels, folder):
    """The selector and the sparse kernel on the golden cases, head dimensions padded with zeros."""
    folder = os.path.join(folder, 'block_selection')
    tensors = read_safetensors(os.path.join(folder, 'tensors.safetensors'))
    with open(os.path.join(folder, 'case.json')) as f:
        cases = json.load(f)['cases']
    for c in cases:
        get = lambda name: tensors[f'{c["case"]}.{name}'][0].cuda()
        pad = lambda x: F.pad(x, (0, 64 - c['D'])).contiguous()
        q, k, v = (pad(get(n)) for n in 'qkv')
        head_end = -(-c['protected_prefix'] // c['block_k'])
        budget = budget_of(c['blocks'] - head_end, c['target_sparsity'])
        run, lists, scores = kernels.select(q, k, c['D'] ** -0.5, c['block_q'], c['block_k'], 1,
                                            budget, head_end, want_scores=True)
        run()
        out = torch.full_like(q, math.nan)
        kernels.attention(q, k, v, out, c['D'] ** -0.5, lists=lists)()
        torch.cuda.synchronize()
        if not torch.equal(lists.indices, get('indices')):
            yield f'golden {c["case"]}: wrong blocks'
        gap = (scores - get('scores')).abs().max().item()
        if not gap < 1e-4:
            yield f'golden {c["case"]}: scores differ by {gap:.2e}'
        rows, want = tensors[f'{c["case"]}.rows'].cuda(), get('sparse_rows')
        error = ((out[rows][..., :c['D']] - want).norm() / want.norm()).item()
        if not error < 6e-3:
            yield f'golden {c["case"]}: output error {error:.2e}'


def check_large(kernels):
    """Sampled rows of the largest shape against fp64, and that runs are bit-equal."""
    sq, skv = 44160, 44672
    q, k, v = make_inputs(sq, skv, 32, 8, 128)
    rows = torch.tensor([0, 1, 63, 64, 127, 128, sq // 2, sq - 65, sq - 1], device='cuda')
    for lists in (None, (64, 64, 1), (64, 64, 4), (128, 64, 2)):
        if lists is not None:
            block_q, block_k, sharing = lists
            lists = random_lists(32, sharing, sq, skv, block_q, block_k, 184, 8)
        outs = []
        for _ in range(2):
            outs.append(torch.full_like(q, math.nan))
            kernels.attention(q, k, v, outs[-1], 128 ** -0.5, lists=lists)()
        torch.cuda.synchronize()
        name = 'dense' if lists is None else f'{lists.block_q} x 64, {lists.heads_per_list} heads'
        if outs[0].isnan().any():
            yield f'large {name}: unwritten output'
        if not torch.equal(outs[0], outs[1]):
            yield f'large {name}: two runs differ'
        for head in (0, 13, 31):
            mask = None
            if lists is not None:
                at = head // lists.heads_per_list
                one = Lists(lists.indices[at:at + 1, rows // lists.block_q],
                            lists.counts[at:at + 1, rows // lists.block_q], 1, 64, 1)
                mask = one.mask(len(rows), skv)
            one_head = slice(head // 4, head // 4 + 1)
            want, _ = reference(q[rows, head:head + 1], k[:, one_head], v[:, one_head], 128 ** -0.5,
                                mask=mask)
            got = outs[0][rows, head:head + 1].double()
            error = ((got - want).norm() / want.norm()).item()
            if not error < 4e-3:
                yield f'large {name}, head {head}: error {error:.2e}'


def run_checks(kernels, golden):
    failures, count = [], 0
    for cases, check in ((check_cases(), check_attention), (select_cases(), check_select)):
        for case in cases:
            count += 1
            problem = check(kernels, **case)
            if problem:
                failures.append(f'{case}: {problem}')
    if golden:
        failures += check_golden(kernels, golden)
    failures += check_large(kernels)
    for failure in failures[:40]:
        print(failure)
    print(f'{count} cases, golden cases {"checked" if golden else "not given"}, '
          f'{len(failures)} failures')
    return 1 if failures else 0


# ---- Timing ------------------------------------------------------------------------------------


def compare(functions, rounds=5, block_ms=200.0):
    """Median milliseconds of each function."""
    def event():
        return torch.cuda.Event(enable_timing=True)
    estimate, times = {}, {name: [] for name in functions}
    for name, function in functions.items():
        function()
        begin, end = event(), event()
        begin.record()
        function()
        function()
        end.record()
        end.synchronize()
        estimate[name] = begin.elapsed_time(end) / 2
    names = list(functions)
    for r in range(rounds):
        for name in names if r % 2 == 0 else reversed(names):
            inner = max(1, round(4 / estimate[name]))
            count = max(8, int(block_ms / estimate[name] / inner))
            events = [event() for _ in range(count + 1)]
            events[0].record()
            for e in events[1:]:
                for _ in range(inner):
                    functions[name]()
                e.record()
            events[-1].synchronize()
            for i in range(count * 2 // 5, count):  # the clock has settled
                times[name].append(events[i].elapsed_time(events[i + 1]) / inner)
    return {name: statistics.median(t) for name, t in times.items()}


def library_attention(q, k, v, scale, backend):
    q, k, v = (t.permute(1, 0, 2)[None] for t in (q, k, v))

    def run():
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
    return run


def flex_attention_call(q, k, v, scale, lists):
    """PyTorch's compiled flex-attention over square blocks and lists of one length, one a head."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention
    counts = lists.counts[None]
    blocks = -(-k.shape[0] // lists.block_k)
    indices = F.pad(lists.indices, (0, blocks - lists.indices.shape[-1]))[None].contiguous()
    mask = BlockMask.from_kv_blocks(torch.zeros_like(counts), torch.zeros_like(indices), counts,
                                    indices, BLOCK_SIZE=lists.block_k,
                                    seq_lengths=(q.shape[0], k.shape[0]))
    compiled = torch.compile(flex_attention)
    q, k, v = (t.permute(1, 0, 2)[None] for t in (q, k, v))
    return lambda: compiled(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)


PEAK_TFLOPS = 989.5  # dense bf16, data sheet


class Report:
    def __init__(self, path, library):
        self.path, self.lines = path, []
        query = ['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader']
        self.common = {
            'device': torch.cuda.get_device_name(),
            'driver': subprocess.run(query, capture_output=True, text=True).stdout.strip(),
            'commit': git_commit(),
            'date': datetime.date.today().isoformat(),
        }
        self.command = f'python3 bench/cuda/sm90_attention.py {library} '
        # What cuBLAS makes of a large product, for scale: the board's power limit binds both.
        a, b = (torch.randn(8192, 8192, device='cuda').bfloat16() for _ in range(2))
        ms = compare({'matmul': lambda: a @ b}, rounds=2)['matmul']
        print(f'torch.matmul 8192^3 bf16: {2 * 8192 ** 3 / ms / 1e9:.0f} TFLOP/s')

    def add(self, bench, case, value, flops, peer, peer_value, command):
        line = dict(bench=bench, case=case, **self.common, command=self.command + command,
                    value=round(value, 4), unit='ms', floor=round(flops / PEAK_TFLOPS / 1e9, 4),
                    peer=peer, peer_value=round(peer_value, 4), ratio=round(peer_value / value, 3))
        self.lines.append(line)
        print(f'{bench:18s} {case:58s} {value:9.4f} ms {flops / value / 1e9:5.0f} TFLOP/s  '
              f'floor {line["floor"]:9.4f}  {peer} {peer_value:.4f}  ratio {line["ratio"]}',
              flush=True)
        if self.path:
            with open(self.path, 'a') as f:
                f.write(json.dumps(line) + '\n')


def git_commit():
    run = subprocess.run(['git', 'rev-parse', '--short', 'HEAD'], capture_output=True, text=True)
    return run.stdout.strip() if run.returncode == 0 else 'initial'


def library_name():
    version = torch.backends.cudnn.version()
    return f'cuDNN {version // 10000}.{version // 100 % 100}.{version % 100}'


def time_dense(kernels, report):
    for sq, skv in ((44160, 44672), (16384, 16384), (4096, 4096), (88320, 88832)):
        q, k, v = make_inputs(sq, skv, 32, 8, 128)
        scale = 128 ** -0.5
        functions = {
            'own': kernels.attention(q, k, v, torch.empty_like(q), scale),
            'cudnn': library_attention(q, k, v, scale, SDPBackend.CUDNN_ATTENTION),
        }
        if sq == 44160:
            functions['flash2'] = library_attention(q, k, v, scale, SDPBackend.FLASH_ATTENTION)
        ms = compare(functions)
        case = f'dense Sq {sq} Skv {skv} 32/8 heads of 128'
        flops = 4 * sq * skv * 128 * 32
        report.add('attention', case, ms['own'], flops, library_name(), ms['cudnn'], 'dense')
        if 'flash2' in ms:
            report.add('attention', case, ms['own'], flops, 'FlashAttention-2 (PyTorch)',
                       ms['flash2'], 'dense')
    q, k, v = make_inputs(16384, 16384, 32, 8, 64)
    ms = compare({'own': kernels.attention(q, k, v, torch.empty_like(q), 0.125),
                  'cudnn': library_attention(q, k, v, 0.125, SDPBackend.CUDNN_ATTENTION)})
    report.add('attention', 'dense Sq 16384 Skv 16384 32/8 heads of 64', ms['own'],
               4 * 16384 * 16384 * 64 * 32, library_name(), ms['cudnn'], 'dense')
    for n in (512, 2048, 16384):
        q, k, v = make_inputs(n, n, 32, 8, 128)
        qc, kc, vc = (t.permute(1, 0, 2)[None] for t in (q, k, v))

        def cudnn_causal():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(qc, kc, vc, is_causal=True, enable_gqa=True)
        ms = compare({'own': kernels.attention(q, k, v, torch.empty_like(q), 128 ** -0.5,
                                               causal=True), 'cudnn': cudnn_causal}, rounds=4,
                     block_ms=60)
        report.add('attention', f'causal Sq {n} Skv {n} 32/8 heads of 128', ms['own'],
                   2 * n * n * 128 * 32, library_name(), ms['cudnn'], 'dense')


SHARINGS = {
    'per head, 64 x 64': (64, 1),
    'per head, 128 x 64': (128, 1),
    '2 heads share, 64 x 64': (64, 2),
    '4 heads share, 64 x 64': (64, 4),
    '2 heads share, 128 x 64': (128, 2),
}


def time_sparse_at(kernels, report, sq, skv, sparsity, sharings, flex, command):
    """Own kernels over random lists, and the selector of such lists, against the own dense kernel
    in the same comparison. With `flex`, flex-attention and the own kernel over the same lists of
    128 x 128 blocks too."""
    q, k, v = make_inputs(sq, skv, 32, 8, 128)
    scale, out = 128 ** -0.5, torch.empty_like(q)
    blocks, protected = -(-skv // 64), (skv - sq) // 64
    kept = protected + budget_of(blocks - protected, sparsity)
    functions = {'dense': kernels.attention(q, k, v, out, scale)}
    for name in sharings:
        block_q, sharing = SHARINGS[name]
        lists = random_lists(32, sharing, sq, skv, block_q, 64, kept, protected)
        functions[name] = kernels.attention(q, k, v, out, scale, lists=lists)
        if not flex and sparsity > 0:  # `select` has those of the shape that flex is run at
            functions['select ' + name] = kernels.select(q, k, scale, block_q, 64, sharing,
                                                         kept - protected, protected)[0]
    if flex:
        large = -(-skv // 128)
        lists = random_lists(32, 1, sq, skv, 128, 128, round(kept / 2), protected // 2)
        functions['128 x 128'] = kernels.attention(q, k, v, out, scale, lists=lists)
        functions['flex'] = flex_attention_call(q, k, v, scale, lists)
    ms = compare(functions)
    flops = 4 * sq * skv * 128 * 32
    for name in sharings:
        case = f'Sq {sq} Skv {skv} 32/8 heads of 128, kept {kept}/{blocks}, {name}'
        report.add('attention_sparse', case, ms[name], flops * kept / blocks, 'own dense',
                   ms['dense'], command)
        if flex:
            report.add('attention_sparse', case, ms[name], flops * kept / blocks,
                       f'flex-attention 128 x 128, kept {round(kept / 2)}/{large}', ms['flex'],
                       command)
        if 'select ' + name in ms:
            report.add('select', case, ms['select ' + name],
                       2 * (sq / 16) * (skv / 16) * 128 * 32, 'own dense attention', ms['dense'],
                       command)
    if flex:
        case = (f'Sq {sq} Skv {skv} 32/8 heads of 128, kept {round(kept / 2)}/{large}, per head, '
                '128 x 128')
        report.add('attention_sparse', case, ms['128 x 128'], flops * round(kept / 2) / large,
                   'flex-attention, the same lists', ms['flex'], command)
    for name in sharings:
        share = ms[name] / ms['dense']
        print(f'  {name}: {share:.4f} of dense, {share / (kept / blocks):.3f} x kept fraction')


def time_curves(kernels, report):
    some = ['per head, 64 x 64', '4 heads share, 64 x 64']
    for sparsity in (0.0, 0.5, 0.75, 0.9):
        time_sparse_at(kernels, report, 44160, 44672, sparsity, some, False, 'curves')
    for sq in (4096, 16384, 88320):
        time_sparse_at(kernels, report, sq, sq + 512, 0.75, some, False, 'curves')


def time_select(kernels, report):
    sq, skv = 44160, 44672
    q, k, v = make_inputs(sq, skv, 32, 8, 128)
    scale = 128 ** -0.5
    functions = {'dense': kernels.attention(q, k, v, torch.empty_like(q), scale)}
    names = {'per head, 64 x 64': (64, 1), 'per head, 128 x 64': (128, 1),
             '4 heads share, 64 x 64': (64, 4)}
    for name, (block_q, sharing) in names.items():
        functions[name] = kernels.select(q, k, scale, block_q, 64, sharing, 176, 8)[0]
    run, lists, _ = kernels.select(q, k, scale, 64, 64, 1, 176, 8)
    attend = kernels.attention(q, k, v, torch.empty_like(q), scale, lists=lists)
    run()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
        attend()
    functions['per head, then attention'] = graph.replay
    ms = compare(functions, rounds=4)
    flops = 2 * (sq / 16) * (skv / 16) * 128 * 32
    for name in names:
        report.add('select', f'Sq {sq} Skv {skv} 32/8 heads of 128, {name}', ms[name], flops,
                   'own dense attention', ms['dense'], 'select')
        print(f'  {name}: {ms[name] / ms["dense"]:.4f} of dense attention')
    report.add('select', f'Sq {sq} Skv {skv} 32/8 heads of 128, per head 64 x 64 and attention, '
               'one graph', ms['per head, then attention'],
               4 * sq * skv * 128 * 32 * 184 / 698, 'own dense attention', ms['dense'], 'select')


def launch_for_profile(kernels):
    """Each kernel once, announced by a line: what profile_sm90.py runs under the profiler."""
    sq, skv, kept, protected = 16384, 16896, 72, 8
    q, k, v = make_inputs(sq, skv, 32, 8, 128)
    scale, out = 128 ** -0.5, torch.empty_like(q)
    size = f'Sq {sq} Skv {skv} 32/8 heads of 128'

    def launch(call, *cases):
        torch.cuda.synchronize()
        for case in cases:
            print(f'case {size}, {case}', flush=True)
        call()
        torch.cuda.synchronize()
    launch(kernels.attention(q, k, v, out, scale), 'dense')
    for name, (block_q, sharing) in SHARINGS.items():
        lists = random_lists(32, sharing, sq, skv, block_q, 64, kept, protected)
        launch(kernels.attention(q, k, v, out, scale, lists=lists), f'kept {kept}/264, {name}')
    for name in ('per head, 64 x 64', '4 heads share, 64 x 64'):
        block_q, sharing = SHARINGS[name]
        select = kernels.select(q, k, scale, block_q, 64, sharing, kept - protected, protected)[0]
        launch(select, f'selector pools q, {name}', f'selector pools k, {name}',
               f'selector, {name}')


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('library')
    parser.add_argument('what', nargs='+',
                        choices=['check', 'dense', 'sparse', 'curves', 'select', 'profile'])
    parser.add_argument('--golden', help='golden data; the folder that holds block_selection/')
    parser.add_argument('--json', help='append result lines to this file')
    arguments = parser.parse_args()
    kernels = Kernels(arguments.library)
    status, report = 0, None
    for what in arguments.what:
        if what == 'check':
            status |= run_checks(kernels, arguments.golden)
            continue
        if what == 'profile':
            launch_for_profile(kernels)
            continue
        report = report or Report(arguments.json, arguments.library)
        if what == 'dense':
            time_dense(kernels, report)
        elif what == 'sparse':
            time_sparse_at(kernels, report, 44160, 44672, 0.75, list(SHARINGS), True, 'sparse')
        elif what == 'curves':
            time_curves(kernels, report)
        else:
            time_select(kernels, report)
    return status


if __name__ == '__main__':
    sys.exit(main())
