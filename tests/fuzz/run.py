"""Long runs: python tests/fuzz/run.py --parser template --executions 200000 --out findings

Every input is read in a process of its own kind, which is ended by a signal after HANG seconds of CPU time, whatever
language it hangs in. A finding is an exception other than OmniDraftError, a hang, a crash of the process, or an
allocation over ALLOCATION bytes; its input is written to a file, and the run goes on. The exit status is 1 if there
were findings. An input is made from parser, seed and number alone: --begin N --executions 1 repeats it.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from mutations import mutated
from parsers import CONTROLS, PARSERS, corpus

HANG = 2.0  # seconds of CPU time
ALLOCATION = 64 << 20  # bytes of address space beyond what reading the corpus took
LIMIT = 1 << 30  # bytes of address space beyond that, which the system refuses
CHUNK = 20_000  # executions of one process, so that what a library keeps does not add up
MOST_FINDINGS = 20


def main() -> int:
    """Run parsers, one line of counts for each."""
    parsed = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parsed.add_argument("--parser", action="append", choices=[*PARSERS, *CONTROLS], help="which; all by default")
    parsed.add_argument("--executions", type=int, default=200_000)
    parsed.add_argument("--begin", type=int, default=0)
    parsed.add_argument("--seed", type=int, default=0)
    parsed.add_argument("--out", type=Path, help="folder for the inputs of findings")
    parsed.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parsed.parse_args()
    if given.worker:
        return worker(given.parser[0], given.seed, given.begin, given.begin + given.executions, given.worker)
    found = 0
    for name in given.parser or PARSERS:
        found += fuzz(name, given.seed, given.begin, given.executions, given.out)
    return int(found > 0)


def fuzz(name: str, seed: int, begin: int, executions: int, out: Path | None) -> int:
    """Findings of one parser, each told on standard output and kept in `out`."""
    started, at, findings, taken = time.perf_counter(), begin, 0, 0
    while at < begin + executions and findings < MOST_FINDINGS:
        count = min(CHUNK, begin + executions - at)
        with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
            command = [sys.executable, __file__, "--worker", folder, "--parser", name, "--seed", str(seed)]
            quiet = {**os.environ, "RUST_BACKTRACE": "0"}  # a backtrace alone takes 60 MB
            command += ["--begin", str(at), "--executions", str(count)]
            done = subprocess.run(command, capture_output=True, env=quiet)
            number, kept = (Path(folder) / part for part in ("number", "input"))
            reached = int(number.read_text() or at) if number.is_file() else at
            taken += int((Path(folder) / "taken").read_text()) if done.returncode == 0 else 0
            if done.returncode == 0:
                at += count
                continue
            findings += 1
            what = {-signal.SIGPROF: f"hangs for {HANG} s", 3: "raises or allocates"}.get(done.returncode, "crashes")
            print(f"{name}: input {reached} of seed {seed} {what}: {done.stderr.decode(errors='replace')[-2000:]}")
            if out is not None and kept.is_file():
                out.mkdir(parents=True, exist_ok=True)
                (out / f"{name}-{seed}-{reached}").write_bytes(kept.read_bytes())
            at = reached + 1
    seconds = time.perf_counter() - started
    print(f"{name}: {at - begin} executions in {seconds:.0f} s, {taken} inputs taken, {findings} findings", flush=True)
    return findings


def worker(name: str, seed: int, begin: int, end: int, folder: Path) -> int:
    """Read inputs until one is a finding (exit status 3). The input at hand is in a file before it is read."""
    parser, seeds, place = {**PARSERS, **CONTROLS}[name], corpus(name), folder / "work"
    place.mkdir()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for seed_input in seeds:
        parser.run(seed_input, place)
    base, taken = _address_space(), 0
    resource.setrlimit(resource.RLIMIT_AS, (base + LIMIT, resource.RLIM_INFINITY))
    number, kept = (open(folder / part, "wb", buffering=0) for part in ("number", "input"))  # noqa: PTH123, SIM115
    for index in range(begin, end):
        data = mutated(random.Random(f"{name} {seed} {index}"), seeds, parser.kind)
        for file, content in ((number, b"%d" % index), (kept, data)):
            file.seek(0)
            file.truncate()
            file.write(content)
        signal.setitimer(signal.ITIMER_PROF, HANG)
        try:
            taken += parser.run(data, place)
        except BaseException:
            signal.setitimer(signal.ITIMER_PROF, 0)
            traceback.print_exc(limit=-6)
            return 3
        signal.setitimer(signal.ITIMER_PROF, 0)
        if _address_space() > base + ALLOCATION:
            print(f"allocates {(_address_space() - base) >> 20} MiB", file=sys.stderr)
            return 3
    (folder / "taken").write_text(str(taken))
    return 0


def _address_space() -> int:
    """The most address space that this process has had, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmPeak:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmPeak in /proc/self/status; fuzz on Linux")


if __name__ == "__main__":
    sys.exit(main())
