"""Fixtures of pytest: virtual RDMA NICs on a machine that has no RDMA hardware and no kernel module for it.

`unirdma_host` is a virtual layer, `vrnic` a vRNIC and `vrnic_pair` two of them that reach each other. Under
`unirdma with N -- pytest` they belong to that command's virtual layer; otherwise one is started for the session.
"""

import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time

import pytest

START_S = 20


class UnirdmaError(Exception):
    """The command line refused. The text is its line."""


class Host:
    """A virtual layer, by its directory."""

    def __init__(self, directory):
        self.directory = str(directory)
        self._numbers = itertools.count(1)

    def command(self, *args):
        """The command line of `unirdma` for this virtual layer."""
        return ["unirdma", "--dir", self.directory, *map(str, args)]

    def call(self, *args):
        """Runs `unirdma` with these arguments. Returns what it prints."""
        done = subprocess.run(self.command(*args), capture_output=True, text=True)
        if done.returncode != 0:
            raise UnirdmaError(done.stderr.strip())
        return done.stdout

    def ask(self, *args):
        """Runs `unirdma` with these arguments and `--json`. Returns the value that it prints."""
        return json.loads(self.call(*args, "--json"))

    def add_vrnic(self, *options):
        """Makes a vRNIC with a name of its own. `options`: of `unirdma vrnic add`."""
        name = f"pytest-{os.getpid()}-{next(self._numbers)}"
        self.call("vrnic", "add", name, *options)
        return Vrnic(self, name)


class Vrnic:
    """A vRNIC. Its programs run in a container that has it (`unirdma run`)."""

    def __init__(self, host, name):
        self.host = host
        self.name = name
        self._started = []

    def show(self):
        """What `unirdma vrnic show --json` says: state, objects, counters."""
        return self.host.ask("vrnic", "show", self.name)

    @property
    def address(self):
        """Its first address, without the prefix length."""
        return self.show()["ips"][0]["addr"]

    @property
    def env(self):
        """Variables for a program outside of containers that has UNIRDMA's library already."""
        return {"UNIRDMA_DIR": self.show()["dir"]}

    def command(self, argv, options=()):
        """The command line that runs `argv` in its container. `options`: of `unirdma run`."""
        return self.host.command("run", "--vrnic", self.name, *options, "--", *argv)

    def run(self, argv, options=(), **kwargs):
        """As `subprocess.run`, in its container."""
        return subprocess.run(self.command(argv, options), **kwargs)

    def popen(self, argv, options=(), **kwargs):
        """As `subprocess.Popen`, in its container. What still runs when the vRNIC is removed is killed."""
        process = subprocess.Popen(self.command(argv, options), **kwargs)
        self._started.append(process)
        return process

    def remove(self):
        """Removes it, and kills what `popen` has started. Other programs that use it lose their device."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait()
        self.host.call("vrnic", "rm", self.name, "--force")


def _start(directory):
    process = subprocess.Popen(
        ["unirdma", "--dir", directory, "host"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    host, limit = Host(directory), time.monotonic() + START_S
    while True:
        try:
            host.call("status")
            return host, process
        except UnirdmaError as error:
            if process.poll() is not None:
                raise UnirdmaError(process.stderr.read().strip()) from error
            if time.monotonic() > limit:
                process.kill()
                raise
            time.sleep(0.05)


@pytest.fixture(scope="session")
def unirdma_host():
    """A virtual layer: that of `unirdma with`, or one for this session."""
    if os.environ.get("UNIRDMA_HOST_DIR"):
        yield Host(os.environ["UNIRDMA_HOST_DIR"])
        return
    directory = tempfile.mkdtemp(prefix="unirdma-")
    host, process = _start(directory)
    yield host
    process.terminate()
    process.communicate()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def vrnic(unirdma_host):
    """A vRNIC for this test."""
    made = unirdma_host.add_vrnic()
    yield made
    made.remove()


@pytest.fixture
def vrnic_pair(unirdma_host):
    """Two vRNICs of one group for this test, which reach each other."""
    pair = [unirdma_host.add_vrnic(), unirdma_host.add_vrnic()]
    yield pair
    for made in pair:
        made.remove()
