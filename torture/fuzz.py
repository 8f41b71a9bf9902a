"""Coverage-guided fuzzing of everything that reads a stranger's file (needs the extra `fuzz`: atheris, on Linux).

    python torture/fuzz.py --out results/torture/fuzz.json --minutes 10 --jobs 2 [--only idx zip …]

Each target of `fuzz_targets` runs in a process of its own, from miniature valid files on. A finding is any exception
but the project's own, a file written outside the target's folder, a started process, a connection, an unpickled
global, a single input that takes over 20 s or a process that takes over 2 GiB; the fuzzer goes on after exceptions
and is started again after the others. Data out: one JSON file, findings with their input in base64. State: a
temporary folder a target, removed at the end (kept with --keep, to go on from its corpus).
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NAMES = ("idx", "cifar-binary", "cifar-python", "zip", "npz", "images", "tar", "checkpoint", "config", "json")
# Watched for coverage, whole packages only; of torch and numpy, which are too large for that, see `fuzz_one`.
INSTRUMENTED = ["protoseam", "zipfile", "tarfile", "gzip", "pickletools", "PIL", "yaml"]
TIMEOUT_SECONDS, MEMORY_MB, MAX_BYTES = 20, 2048, 32768
MOST_RESTARTS = 20
_FORBIDDEN = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect")
_FORBIDDEN += (
    "pickle.find_class",
    "ctypes.dlopen",
)  # find_class: of Python's own unpickler, not the restricted one
_WRITES = ("os.mkdir", "os.rename", "os.symlink", "os.link", "os.truncate", "os.chmod")


# ------------------------------------------------------------------------------------------ one target, in a child


class Watch:
    """Counts what became of the inputs, writes findings down, and watches what Python asks of the system."""

    def __init__(self, work: Path) -> None:
        self.work, self.box, self.active = work, work / "box", False
        self.counts = {"accepted": 0, "refused": 0}
        self.slowest = 0.0
        self.seen: set[str] = set()
        self.escaped: list[str] = []
        self._reported = time.monotonic()

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event in _FORBIDDEN:
            self.escaped.append(f"{event} {args!r}"[:300])
        elif event == "open" and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self._inside(event, args[0])
        elif event in _WRITES:
            self._inside(event, args[1] if event in ("os.rename", "os.link", "os.symlink") else args[0])
        elif event == "os.remove" and os.path.isabs(
            args[0]
        ):  # relative: rmtree, below a folder it holds open
            self._inside(event, args[0])

    def _inside(self, event: str, path: object) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            real = os.path.realpath(os.fsdecode(path))
            if real != str(self.box) and not real.startswith(f"{self.box}/"):
                self.escaped.append(f"{event} {real}")

    def finding(self, kind: str, where: str, data: bytes, detail: str) -> None:
        key = hashlib.sha256(f"{kind} {where}".encode()).hexdigest()[:16]
        if key not in self.seen:
            self.seen.add(key)
            found = {"kind": kind, "where": where, "input": base64.b64encode(data).decode(), "detail": detail}
            (self.work / "findings" / f"{key}.json").write_text(json.dumps(found))

    def report(self) -> None:
        if time.monotonic() - self._reported > 1:
            self._reported = time.monotonic()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            stats = {**self.counts, "slowest_seconds": round(self.slowest, 3), "peak_memory_mb": peak}
            (self.work / "stats.json").write_text(json.dumps(stats))


def fuzz_one(name: str, seconds: float, work: Path) -> None:
    """Fuzz until the time is up; libFuzzer ends the process."""
    import atheris

    sys.path[:0] = [str(HERE.parent / "tests" / "reference"), str(HERE.parent / "src")]
    with atheris.instrument_imports(include=INSTRUMENTED):
        import fuzz_targets

        from protoseam.errors import ProtoSeamError
    from numpy.lib import _format_impl as npy_format
    from torch import _weights_only_unpickler as torch_pickles

    torch_pickles.Unpickler.load = atheris.instrument_func(torch_pickles.Unpickler.load)  # type: ignore[method-assign]
    npy_format._read_array_header = atheris.instrument_func(npy_format._read_array_header)
    target, seeds = fuzz_targets.TARGETS[name]
    for seed in seeds():
        (work / "corpus" / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
    watch = Watch(work)
    sys.addaudithook(watch.audit)

    def one(data: bytes) -> None:
        begun = time.perf_counter()
        watch.active = True
        try:
            fuzz_targets.attempt(target, data, watch.box)
            watch.counts["accepted"] += 1
        except ProtoSeamError:
            watch.counts["refused"] += 1
        except Exception as error:
            watch.active = False
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
            watch.finding("exception", where, data, "".join(traceback.format_exception(error))[-3000:])
        finally:
            watch.active = False
        if watch.escaped:
            watch.finding("escape", watch.escaped[0].split(" ")[0], data, "\n".join(watch.escaped[:20]))
            watch.escaped.clear()
        watch.slowest = max(watch.slowest, time.perf_counter() - begun)
        watch.report()

    options = {
        "max_total_time": max(1, int(seconds)),
        "timeout": TIMEOUT_SECONDS,
        "rss_limit_mb": MEMORY_MB,
        "max_len": MAX_BYTES,
        "print_final_stats": 1,
        "artifact_prefix": f"{work}/stopped/",
    }
    atheris.Setup([name, str(work / "corpus"), *(f"-{key}={value}" for key, value in options.items())], one)
    atheris.Fuzz()


# ------------------------------------------------------------------------------------------ all targets


def fuzz(name: str, minutes: float, work: Path) -> dict[str, Any]:
    """Run a target for that long, starting it again after what stops it; returns its row of the summary."""
    for folder in ("corpus", "findings", "stopped"):
        (work / folder).mkdir(parents=True, exist_ok=True)
    row: dict[str, Any] = {
        "executions": 0,
        "accepted": 0,
        "refused": 0,
        "slowest_seconds": 0.0,
        "peak_memory_mb": 0,
    }
    begun = time.monotonic()
    for _ in range(MOST_RESTARTS):
        left = 60 * minutes - (time.monotonic() - begun)
        if left < 1:
            break
        (work / "stats.json").unlink(missing_ok=True)
        command = [sys.executable, str(HERE / "fuzz.py"), "--child", name, str(left), str(work)]
        environment = {
            **os.environ,
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(work),
            "OMP_NUM_THREADS": "1",
        }
        child = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
        )
        log = child.stderr.decode("utf-8", "replace")
        _merge(row, log, work)
        if child.returncode == 0:
            break
        artifacts = sorted((work / "stopped").iterdir(), key=lambda path: path.stat().st_mtime)
        data = artifacts[-1].read_bytes() if artifacts else b""
        where = artifacts[-1].name.split("-")[0] if artifacts else f"exit code {child.returncode}"
        Watch(work).finding(f"stopped {len(artifacts)}", where, data, log[-3000:])
        if not artifacts:
            break  # it did not even start: no use in trying again
    row["seconds"] = round(time.monotonic() - begun, 1)
    row["corpus"] = len(list((work / "corpus").iterdir()))
    row["findings"] = [json.loads(path.read_text()) for path in sorted((work / "findings").iterdir())]
    return row


def _merge(row: dict[str, Any], log: str, work: Path) -> None:
    tried = re.findall(r"^#(\d+)\s", log, re.MULTILINE)
    final = re.findall(r"stat::number_of_executed_units:\s*(\d+)", log)
    row["executions"] += int((final or tried or ["0"])[-1])
    coverage = re.findall(r"cov: (\d+) ft: (\d+)", log)
    if coverage:
        row["coverage"], row["features"] = map(int, coverage[-1])
    if (work / "stats.json").exists():
        stats = json.loads((work / "stats.json").read_text())
        for key in ("accepted", "refused"):
            row[key] += stats[key]
        for key in ("slowest_seconds", "peak_memory_mb"):
            row[key] = max(row[key], stats[key])


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        fuzz_one(sys.argv[2], float(sys.argv[3]), Path(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON summary")
    parser.add_argument("--minutes", type=float, default=10, help="a target")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="TARGET")
    parser.add_argument("--jobs", type=int, default=2, help="targets at a time")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep corpus and findings there, and go on from them"
    )
    args = parser.parse_args()
    try:
        atheris = version("atheris")
    except ImportError:
        sys.exit("fuzzing needs atheris: pip install -e '.[vision,dev,fuzz]'")
    root = Path(os.path.realpath(args.keep or tempfile.mkdtemp(prefix="fuzz-")))
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = {name: pool.submit(fuzz, name, args.minutes, root / name) for name in args.only}
        rows = {}
        for name, future in futures.items():
            rows[name] = future.result()
            shown = {key: value for key, value in rows[name].items() if key != "findings"}
            print(f"{name}: {len(rows[name]['findings'])} findings, {json.dumps(shown)}", flush=True)
    summary = {
        "targets": rows,
        "executions": sum(row["executions"] for row in rows.values()),
        "findings": sum(len(row["findings"]) for row in rows.values()),
        "minutes_each": args.minutes,
        "limits": {"seconds_an_input": TIMEOUT_SECONDS, "memory_mb": MEMORY_MB, "input_bytes": MAX_BYTES},
        "python": platform.python_version(),
        "atheris": atheris,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(summary, indent=1) + "\n")
    if args.keep is None:
        shutil.rmtree(root)
    return 1 if summary["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
