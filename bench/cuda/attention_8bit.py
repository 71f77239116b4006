#!/usr/bin/env python3
"""Checks and times 8-bit attention against fp64, the own bf16 kernel and cuDNN in one process.

  bench/cuda/build_sm90.sh build/sm90.so
  python3 bench/cuda/attention_8bit.py build/sm90.so check errors speed time [--json FILE]

`check` holds outputs to fp64 over the quantised operands, so that only the kernel's own rounding
counts; `errors` measures against fp64 over the bf16 inputs; `speed` reads clock and power too.
Timings as in sm90_attention.py.
"""
import argparse
import ctypes
import math
import sys

import torch
from torch.nn.attention import SDPBackend

import sm90_attention as bf16
from sm90_attention import FLOAT, INT, LONG, VOID

D = 128
MODES = {'int8': True, 'int8_bf16': False}  # whether values are s8


class Operands(ctypes.Structure):
    _fields_ = [('q', VOID), ('q_scale', VOID), ('k', VOID), ('k_scale', VOID), ('k_mean', VOID),
                ('partials', VOID), ('v', VOID), ('v_scale', VOID), ('v_stride', LONG)]


class Params(ctypes.Structure):
    _fields_ = [('q', VOID), ('k', VOID), ('v', VOID), ('out', VOID), ('operands', Operands),
                ('sq', LONG), ('skv', LONG), ('hq', INT), ('hkv', INT), ('scale', FLOAT),
                ('int8_values', ctypes.c_bool)]


class Call:
    """One call's buffers and its two launches."""

    def __init__(self, library, q, k, v, int8_values):
        (sq, hq, _), (skv, hkv, _) = q.shape, k.shape
        self.library = library
        new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device='cuda')
        self.stride = -(-skv // 128) * 128
        self.q8, self.q_scale = new(sq, hq, D, dtype=torch.int8), new(hq, sq)
        self.k8, self.k_scale = new(skv, hkv, D, dtype=torch.int8), new(hkv, -(-skv // 64))
        self.k_mean, self.v_scale = new(hkv, D), new(hkv, D)
        self.partials = new(-(-skv // 512), hkv, D)
        self.v8 = new(hkv, D, self.stride, dtype=torch.int8)
        # Poison, and rows past the end that must stay as they are.
        self.out = torch.full((sq + 3, hq, D), math.nan, device='cuda', dtype=torch.bfloat16)
        self.inputs = (q, k, v)
        tensors = (self.q8, self.q_scale, self.k8, self.k_scale, self.k_mean, self.partials,
                   self.v8, self.v_scale)
        self.params = Params(q.data_ptr(), k.data_ptr(), v.data_ptr(), self.out.data_ptr(),
                             Operands(*(t.data_ptr() for t in tensors), self.stride), sq, skv, hq,
                             hkv, D ** -0.5, int8_values)

    def enqueue(self, name):
        stream = VOID(torch.cuda.current_stream().cuda_stream)
        bf16.Kernels.check(getattr(self.library, name)(ctypes.byref(self.params), stream))

    def quantise(self):
        self.enqueue('orrery_quantise_attention')

    def attend(self):
        self.enqueue('orrery_attention_8bit')

    def reference(self, rows, heads):
        """fp64 over the quantised operands [rows, heads, D]."""
        q, k, v = self.inputs
        hq, hkv, skv = q.shape[1], k.shape[1], k.shape[0]
        outs = []
        for h in heads:
            kv = h // (hq // hkv)
            scale = self.k_scale[kv].double().repeat_interleave(64)[:skv]
            s = self.q8[rows, h].double() @ self.k8[:, kv].double().T
            s = s * self.q_scale[h, rows].double()[:, None] * scale
            values = v[:, kv].double()
            if self.params.int8_values:
                at = torch.arange(16, device='cuda')
                place = at % 8 // 2 * 4 + at // 8 * 2 + at % 2  # position of a key among 16
                codes = self.v8[kv].view(D, -1, 16)[..., place].reshape(D, -1)[:, :skv]
                values = (codes.double() * self.v_scale[kv].double()[:, None]).T
            p = torch.exp2(s - s.max(-1, keepdim=True).values)
            outs.append((p @ values) / p.sum(-1, keepdim=True))
        return torch.stack(outs, 1)


def exact(q, k, v, rows, heads):
    group = q.shape[1] // k.shape[1]
    return torch.cat([bf16.reference(q[rows, h:h + 1], k[:, h // group:h // group + 1],
                                     v[:, h // group:h // group + 1], D ** -0.5)[0]
                      for h in heads], 1)


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def inputs(sq, skv, hq=8, hkv=2, std=1.0, offset=0.0, kind='normal', seed=0):
    q, k, v = bf16.make_inputs(sq, skv, hq, hkv, D, seed=seed)
    q = q * std
    key = torch.arange(skv, device='cuda')[:, None, None]
    tile = (skv - 1) // 128 - key // 128  # in the order that the kernel takes them
    towards = torch.ones(D, device='cuda')
    if offset:  # channels of k, and every value
        k[..., ::32] += offset
        v += 1
    if kind == 'last':  # the largest score is in the last tile
        k[5 % skv] = 6 * q[0, 0]
    elif kind in ('rising', 'leaping'):  # 3 or 300 in log2 units a tile
        step = (3 if kind == 'rising' else 300) * math.log(2) / math.sqrt(D)
        q = (towards + 0.05 * q).bfloat16()
        k = (0.1 * k + tile * step * towards).bfloat16()
    elif kind == 'spikes':  # one key of each tile far above its neighbours
        k = torch.where(key % 128 == 37, 5 * q[0, 0], k).bfloat16()
    elif kind == 'equal':
        q = torch.zeros_like(q)
    elif kind == 'constant':
        v = v[:1].expand(skv, -1, -1).contiguous()
    return q.contiguous(), k.contiguous(), v.contiguous()


CASES = [dict(sq=sq, skv=skv) for sq, skv in
         ((1, 1), (64, 64), (63, 65), (65, 127), (128, 129), (129, 175), (300, 193), (130, 1000))]
CASES += [dict(sq=777, skv=1111, hq=32, hkv=8), dict(sq=2500, skv=700, hq=32, hkv=8),
          dict(sq=300, skv=5000, std=2.0), dict(sq=300, skv=5000, std=30.0),
          dict(sq=300, skv=5000, std=2.0, offset=30.0)]
CASES += [dict(sq=300, skv=5000, kind=kind) for kind in
          ('last', 'rising', 'leaping', 'spikes', 'equal', 'constant')]
# bf16: rounding of P and of the result. u8: codes are rounded to 1/255 of the largest of 128.
TOLERANCE = {'int8': 0.016, 'int8_bf16': 4e-3}


def check(library):
    failures = 0
    for mode, int8_values in MODES.items():
        for case in CASES:
            q, k, v = inputs(**case)
            call = Call(library, q, k, v, int8_values)
            call.quantise()
            call.attend()
            torch.cuda.synchronize()
            rows, heads = torch.arange(q.shape[0], device='cuda'), range(q.shape[1])
            out = call.out[:q.shape[0]].clone()
            error = relative(out, call.reference(rows, heads))
            same = True
            for _ in range(200 if case['sq'] == 2500 else 3):
                call.attend()
                same = same and torch.equal(out, call.out[:q.shape[0]])
            # Keys far below one of their tile round to zero: up to 128 / 510 of that key's mass.
            limit = 0.05 if mode == 'int8' and case.get('kind') == 'spikes' else TOLERANCE[mode]
            good = error < limit and same and bool(call.out[q.shape[0]:].isnan().all())
            failures += not good
            print(f'{"ok   " if good else "WRONG"} {mode:9s} {case} {error:.2e}'
                  f'{"" if same else ", runs differ"}', flush=True)
    print(f'{failures} failures')
    return 1 if failures else 0


def errors(library):
    """Relative L2 against fp64 over the bf16 inputs, of sampled rows of the largest shape."""
    sq, skv = 44160, 44672
    rows = torch.arange(0, sq, 1381, device='cuda')
    kinds = {'std 1': dict(), 'std 2': dict(std=2.0), 'std 2, offsets': dict(std=2.0, offset=8.0),
             'std 3, offsets': dict(std=3.0, offset=8.0)}
    for name, kind in kinds.items():
        q, k, v = inputs(sq, skv, 32, 8, **kind)
        heads = (0, 13, 31)
        want = exact(q, k, v, rows, heads)
        line = []
        for mode, int8_values in MODES.items():
            call = Call(library, q, k, v, int8_values)
            call.quantise()
            call.attend()
            got = call.out[rows][:, list(heads)]
            line.append(f'{mode} {relative(got, want):.4f} '
                        f'(kernel {relative(got, call.reference(rows, heads)):.4f})')
        print(f'{name:16s} {", ".join(line)}', flush=True)
    return 0


def speed(library, kernels):
    """With clocks and power."""
    import time as clock

    import pynvml
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    sq, skv = 44160, 44672
    q, k, v = inputs(sq, skv, 32, 8)
    functions = {'bf16': kernels.attention(q, k, v, torch.empty_like(q), D ** -0.5)}
    for mode, int8_values in MODES.items():
        call = Call(library, q, k, v, int8_values)
        call.quantise()
        functions[mode] = call.attend
    for name, function in functions.items():
        for _ in range(20):
            function()
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        for _ in range(16):
            function()
        b.record()
        clocks, watts = [], []
        while not b.query():
            clocks.append(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM))
            watts.append(pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000)
            clock.sleep(0.02)
        ms = a.elapsed_time(b) / 16
        mhz = sum(clocks) / len(clocks)
        tiles = -(-sq // 128) * 32 * (skv // 128) / 132
        print(f'{name:12s} {ms:7.3f} ms at {mhz:.0f} MHz {sum(watts) / len(watts):.0f} W, '
              f'{ms * mhz * 1e3 / tiles:.0f} clocks a tile', flush=True)
    return 0


def time(library, kernels, report):
    for sq, skv in ((44160, 44672), (16384, 16384), (4096, 4608)):
        q, k, v = inputs(sq, skv, 32, 8)
        calls = {mode: Call(library, q, k, v, int8) for mode, int8 in MODES.items()}
        for call in calls.values():
            call.quantise()
        functions = {mode: call.attend for mode, call in calls.items()}
        functions['quantise'] = calls['int8'].quantise
        functions['bf16'] = kernels.attention(q, k, v, torch.empty_like(q), D ** -0.5)
        functions['cudnn'] = bf16.library_attention(q, k, v, D ** -0.5,
                                                    SDPBackend.CUDNN_ATTENTION)
        ms = bf16.compare(functions, rounds=3)
        flops = 4 * sq * skv * D * 32
        # q read and half of that written; k and v read twice and half of that written.
        bytes_moved = 2 * D * (1.5 * sq * 32 + 2.5 * 2 * skv * 8)
        for mode in MODES:
            # Products of 8 bits take half as long.
            floor = flops / bf16.PEAK_TFLOPS / 1e9 * (0.5 if MODES[mode] else 0.75)
            for peer in ('bf16', 'cudnn'):
                report.add('attention_8bit', f'{mode} Sq {sq} Skv {skv} 32/8 heads of 128',
                           ms[mode],
                           flops, 'own bf16' if peer == 'bf16' else bf16.library_name() + ' bf16',
                           ms[peer], 'time', floor)
        report.add('attention_8bit', f'quantise Sq {sq} Skv {skv} 32/8 heads of 128',
                   ms['quantise'], 0, 'own bf16 attention', ms['bf16'], 'time',
                   bytes_moved / 4.2e9)
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('library')
    parser.add_argument('what', nargs='+', choices=['check', 'errors', 'speed', 'time'])
    parser.add_argument('--json', help='append result lines to this file')
    arguments = parser.parse_args()
    kernels = bf16.Kernels(arguments.library)
    for name in ('orrery_quantise_attention', 'orrery_attention_8bit'):
        getattr(kernels.library, name).restype = ctypes.c_char_p
    status = 0
    for what in arguments.what:
        if what == 'time':
            report = bf16.Report(arguments.json, arguments.library)
            report.command = f'python3 bench/cuda/attention_8bit.py {arguments.library} '
            status |= time(kernels.library, kernels, report)
        elif what == 'speed':
            status |= speed(kernels.library, kernels)
        else:
            status |= (check if what == 'check' else errors)(kernels.library)
    return status


if __name__ == '__main__':
    sys.exit(main())
