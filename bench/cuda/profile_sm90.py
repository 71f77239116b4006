#!/usr/bin/env python3
"""Profiles the Hopper kernels with Nsight Compute: one JSON line a kernel.

  bench/cuda/build_sm90.sh build/sm90.so
  python3 bench/cuda/profile_sm90.py build/sm90.so [--json FILE] [--ncu ncu]

Each line says how busy the tensor pipe is (value), what goes through L2 and DRAM, how many issue
slots are used and what warps wait for. Clocks are left alone. The process being profiled is
`sm90_attention.py LIBRARY profile`, which launches each kernel once.
"""
import argparse
import csv
import datetime
import io
import json
import pathlib
import re
import shutil
import subprocess
import sys

BENCH = pathlib.Path(__file__).with_name('sm90_attention.py')
KERNELS = '^(attention|select|pool)_kernel'
SECTIONS = ['SpeedOfLight', 'ComputeWorkloadAnalysis', 'MemoryWorkloadAnalysis', 'SchedulerStats',
            'WarpStateStats']
# Not in every version's sections.
METRICS = ['sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed',
           'smsp__issue_active.avg.pct_of_peak_sustained_elapsed', 'lts__t_bytes.sum',
           'lts__t_sector_hit_rate.pct', 'dram__bytes.sum', 'gpu__time_duration.sum']
STALL = re.compile(r'smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio')
UNITS = {'byte': 1, 'Kbyte': 1e3, 'Mbyte': 1e6, 'Gbyte': 1e9, 'nsecond': 1e-6, 'ns': 1e-6,
         'usecond': 1e-3, 'us': 1e-3, 'msecond': 1.0, 'ms': 1.0, 'second': 1e3, 's': 1e3}


def profile(ncu, library):
    """Rows of metric -> (value, unit), one a launch, and the cases in the same order."""
    command = [ncu, '--csv', '--page', 'raw', '--clock-control', 'none', '--kernel-name',
               f'regex:{KERNELS}', '--metrics', ','.join(METRICS)]
    for section in SECTIONS:
        command += ['--section', section]
    command += [sys.executable, str(BENCH), library, 'profile']
    run = subprocess.run(command, capture_output=True, text=True)
    lines = run.stdout.splitlines()
    header = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if run.returncode != 0 or header is None:
        sys.exit(f'{ncu} failed with status {run.returncode}:\n{run.stdout}\n{run.stderr}')
    cases = [line[len('case '):] for line in lines if line.startswith('case ')]
    names, units, *rows = csv.reader(io.StringIO('\n'.join(lines[header:])))
    rows = [row for row in rows if len(row) == len(names)]
    if len(rows) != len(cases):
        sys.exit(f'{len(rows)} launches were profiled, {len(cases)} were expected')
    return [{n: (v, u) for n, v, u in zip(names, row, units)} for row in rows], cases


def number(row, name, scale=False):
    if name not in row or row[name][0] in ('', 'n/a'):
        return None
    value, unit = row[name]
    return float(value.replace(',', '')) * (UNITS[unit] if scale else 1.0)


def rounded(value, digits=1):
    return None if value is None else round(value, digits)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('library')
    parser.add_argument('--json', help='append the lines to this file')
    parser.add_argument('--ncu', default='ncu')
    arguments = parser.parse_args()

    def first_line(*command):
        if not shutil.which(command[0]):
            return 'unknown'
        run = subprocess.run(command, capture_output=True, text=True)
        return run.stdout.splitlines()[0].strip() if run.returncode == 0 else 'unknown'
    query = ['nvidia-smi', '--format=csv,noheader']
    common = {'device': first_line(*query, '--query-gpu=name'),
              'driver': first_line(*query, '--query-gpu=driver_version'),
              'commit': first_line('git', 'rev-parse', '--short', 'HEAD'),
              'date': datetime.date.today().isoformat(),
              'command': f'python3 bench/cuda/profile_sm90.py {arguments.library}'}
    rows, cases = profile(arguments.ncu, arguments.library)
    for row, case in zip(rows, cases):
        stalls = {}
        for name in row:
            match = STALL.fullmatch(name)
            if match and number(row, name):
                stalls[match[1]] = round(number(row, name), 2)
        l2, dram = (number(row, f'{unit}.sum', True) for unit in ('lts__t_bytes', 'dram__bytes'))
        line = dict(
            bench='profile', case=case, **common,
            value=rounded(number(row, METRICS[0])), unit='% of elapsed cycles, tensor pipe busy',
            floor=None, peer=None, peer_value=None, ratio=None,
            ms=rounded(number(row, 'gpu__time_duration.sum', True), 4),
            issue_slots_pct=rounded(number(row, METRICS[1])),
            l2_pct=rounded(number(row, 'lts__throughput.avg.pct_of_peak_sustained_elapsed')),
            l2_gbytes=rounded(None if l2 is None else l2 / 1e9, 2),
            l2_hit_pct=rounded(number(row, 'lts__t_sector_hit_rate.pct')),
            dram_gbytes=rounded(None if dram is None else dram / 1e9, 3),
            # Warps that wait for each reason while one instruction issues; the largest five.
            stalls=dict(sorted(stalls.items(), key=lambda s: -s[1])[:5]))
        print(json.dumps(line), flush=True)
        if arguments.json:
            with open(arguments.json, 'a') as f:
                f.write(json.dumps(line) + '\n')


if __name__ == '__main__':
    main()
