"""Two hosts on one machine, joined by a link of a given rate: two network namespaces and a veth pair under tc's tbf.

sudo .venv/bin/python benchmarks/link.py --rate 200mbit -- .venv/bin/python script_that_calls_init_process_group.py

runs the command once on each host with the variables that torch.distributed asks for. Rates are tc's, as 10gbit or
100mbit; without --rate both processes run on plain loopback, and no root is needed. Needs root and iproute2 otherwise.
"""

import argparse
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

BURST = "1mb"
"""tbf's bucket: so many bytes pass at full speed after a pause. Also 10 Gbit/s needs it (1 ms at that rate)."""
LATENCY = "50ms"
"""Longest time in tbf's queue before it drops a packet."""
PREFIX = "hf-edgc"
PORT = 29500
_numbers = itertools.count()


class LinkRefusedError(RuntimeError):
    """This machine can't make such a link; the message is one sentence that says why."""


class Link:
    """``with Link("200mbit") as link``: two hosts; all of it is removed at the end, also at SIGINT and SIGTERM.

    Args:
        rate: of each direction, as tc writes it; None: no namespaces, both processes on loopback.

    Raises:
        LinkRefusedError: on entering, without root, iproute2 or tbf, or with a rate that tc does not take.
    """

    def __init__(self, rate: str | None) -> None:
        """See the class."""
        self.rate = rate
        number = next(_numbers)
        self.namespaces = [f"{PREFIX}-{os.getpid()}-{number}-{host}" for host in (0, 1)]
        self.devices = [f"e{os.getpid()}n{number}h{host}" for host in (0, 1)]  # at most 15 characters
        self._processes: list[subprocess.Popen[bytes]] = []
        self._handler: signal.Handlers | None = None

    def __enter__(self) -> Self:
        """Make the hosts."""
        if self.rate is None:
            self._port = _free_port()
            return self
        _require_tools()
        remove_stale()
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGTERM, _exit)  # else it would leave the namespaces behind
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        """Remove them."""
        self.close()

    def start(
        self, host: int, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen:
        """Start ``command`` on ``host`` (0 or 1) as one of two workers; it ends with the link at the latest."""
        local = self.rate is None
        variables = {
            "GLOO_SOCKET_IFNAME": "lo" if local else self.devices[host],
            "MASTER_ADDR": "127.0.0.1" if local else _address(0),
            "MASTER_PORT": str(self._port if local else PORT),
            "RANK": str(host),
            "LOCAL_RANK": str(host if local else 0),
            "WORLD_SIZE": "2",
        }
        inside = [] if local else ["ip", "netns", "exec", self.namespaces[host]]
        process = subprocess.Popen([*inside, *command], env={**os.environ, **(environment or {}), **variables})
        self._processes.append(process)
        return process

    def wait(self) -> list[int]:
        """Wait until both processes have ended; one that fails takes the other along. Exit codes by host."""
        while any(process.poll() is None for process in self._processes):
            if any(process.poll() for process in self._processes):
                time.sleep(1.0)  # the other may be about to say why
                self._kill()
            time.sleep(0.05)
        codes = [process.returncode for process in self._processes]
        self._processes.clear()
        return codes

    def close(self) -> None:
        """End the processes and remove the namespaces, and with them the devices."""
        self._kill()
        if self.rate is not None:
            for name in self.namespaces:
                _remove(name)
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)
            self._handler = None

    def _make(self) -> None:
        first, second = self.devices
        for name in self.namespaces:
            _ip("netns", "add", name)
        _ip("link", "add", first, "netns", self.namespaces[0], "type", "veth", "peer", second, "netns",
            self.namespaces[1])  # fmt: skip
        for host, (name, device) in enumerate(zip(self.namespaces, self.devices, strict=True)):
            _ip("-n", name, "addr", "add", f"{_address(host)}/24", "dev", device)
            _ip("-n", name, "link", "set", device, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _run("tc", "-n", name, *shaping(device, self.rate or ""))

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def shaping(device: str, rate: str) -> list[str]:
    """Arguments of tc that limit what ``device`` sends to ``rate``."""
    return ["qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, "burst", BURST, "latency", LATENCY]


def set_rate(device: str, rate: str | None) -> None:
    """From a process on a host: limit its ``device`` to ``rate``, or lift the limit. Nothing happens on loopback."""
    if device != "lo":
        _run(
            "tc", *(shaping(device, rate) if rate is not None else ["qdisc", "replace", "dev", device, "root", "pfifo"])
        )


def bits_per_second(rate: str) -> float:
    """``200mbit`` is 2e8.

    Raises:
        ValueError: not a whole or decimal number followed by kbit, mbit or gbit.
    """
    found = re.fullmatch(r"([0-9.]+)([kmg])bit", rate)
    if found is None:
        raise ValueError(f"rate {rate!r} is not allowed: use a number followed by kbit, mbit or gbit, as 200mbit.")
    return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]]


def remove_stale() -> None:
    """Remove what a run left behind that was killed by SIGKILL: namespaces named after a process that is gone."""
    for name in _ip("netns", "list").split():
        found = re.fullmatch(rf"{PREFIX}-(\d+)-\d+-[01]", name)
        if found and not Path("/proc", found[1]).exists():
            _remove(name)


def _remove(name: str) -> None:
    inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
    for process in inside:  # they would keep the namespace and its devices alive
        try:
            os.kill(int(process), signal.SIGKILL)
        except ProcessLookupError:
            continue
    subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _require_tools() -> None:
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LinkRefusedError(f"A link of a given rate needs the program {tool!r}: install iproute2.")
    if os.geteuid() != 0:
        raise LinkRefusedError("A link of a given rate needs network namespaces: run this as root, or use loopback.")


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise LinkRefusedError(f"This machine can't make the link: '{' '.join(command)}' says: {said}")
    return done.stdout


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _exit(number: int, frame: object) -> None:
    sys.exit(128 + number)


def main() -> int:
    """Run a command on both hosts; returns the larger exit code, or 2 if there can be no such link."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", help="as 200mbit; without it: loopback")
    parser.add_argument("command", nargs="+", help="what each host runs")
    arguments = parser.parse_args()
    try:
        with Link(arguments.rate) as link:
            for host in (0, 1):
                link.start(host, arguments.command)
            return max(abs(code) for code in link.wait())
    except LinkRefusedError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
